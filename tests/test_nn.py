"""Blocks: each option of attention against its formula, and stacks against what they promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import poise
from poise.nn import (
    ACTIVATIONS,
    CAUSAL,
    Block,
    BlockConfig,
    Call,
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LearnedScale,
    LogLength,
    MultiHeadAttention,
    Projection,
    RelativeBuckets,
    RMSNorm,
    Rotary,
    Visible,
    linear,
)
from poise.nn.attention import real_keys

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def plainly(
    module: MultiHeadAttention, x: Tensor, context: Tensor | None = None, visible: Tensor | None = None
) -> Tensor:
    """The module's formula, one step after the other, on the full score matrix."""
    p = module.projection
    wq, wk, wv = torch.split(p.weight, p.rows)
    bq, bk, bv = (0, 0, 0) if p.bias is None else torch.split(p.bias, p.rows)
    source = x if context is None else context
    q = (x @ wq.t() + bq).unflatten(-1, (p.heads, -1))
    k = (source @ wk.t() + bk).unflatten(-1, (p.kv_heads, -1))
    v = (source @ wv.t() + bv).unflatten(-1, (p.kv_heads, -1))
    if module.query_norm is not None and module.key_norm is not None:
        q = q * (q.pow(2).mean(-1, keepdim=True) + module.query_norm.eps).rsqrt() * module.query_norm.weight
        k = k * (k.pow(2).mean(-1, keepdim=True) + module.key_norm.eps).rsqrt() * module.key_norm.weight
    k, v = (part.repeat_interleave(p.heads // p.kv_heads, 2) for part in (k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
    scores = scores / math.sqrt(p.head_dim) if module.scale is None else scores * module.scale
    if module.softcap is not None:
        scores = module.softcap * torch.tanh(scores / module.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if module.sinks is not None:
        sink = module.sinks[:, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2)
    if module.gate is not None:
        out = out * torch.sigmoid(module.gate(x))
    return module.out(out)


OPTIONS = {
    "plain": {},
    "grouped heads": {"kv_heads": 2},
    "head dims of their own": {"head_dim": 24, "value_dim": 40},
    "no bias": {"bias": False},
    "bias only back": {"bias": False, "out_bias": True},
    "normed": {"qk_norm": 1e-6},
    "gated": {"gate": True},
    "sinks": {"sinks": True},
    "capped": {"softcap": 0.5},
    "own scale": {"scale": 1.0},
    "everything": {
        "kv_heads": 1, "value_dim": 8, "bias": False, "qk_norm": 1e-5, "gate": True, "sinks": True, "softcap": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_is_its_formula(options: dict, grad: bool) -> None:
    module = MultiHeadAttention(32, 4, **options)
    if module.sinks is not None:
        torch.nn.init.normal_(module.sinks)
    x, context = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(module(x), plainly(module, x), **CLOSE)
        torch.testing.assert_close(module(x, context), plainly(module, x, context), **CLOSE)
        lower = torch.ones(7, 7, dtype=torch.bool).tril()
        torch.testing.assert_close(module(x, visible=CAUSAL), plainly(module, x, visible=lower), **CLOSE)


def test_gradients_of_attention_are_its_formulas() -> None:
    module = MultiHeadAttention(32, 4, kv_heads=2, qk_norm=1e-6, gate=True, sinks=True)
    x = torch.randn(2, 7, 32)
    ours = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    theirs = torch.autograd.grad(plainly(module, x).square().sum(), list(module.parameters()))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_a_projection_loads_one_matrix_or_three() -> None:
    fused, from_three = Projection(32, 4, kv_heads=2), Projection(32, 4, kv_heads=2)
    three = {
        f"{name}.{kind}": part
        for kind, tensor in fused.state_dict().items()
        for name, part in zip(("query", "key", "value"), torch.split(tensor, fused.rows), strict=True)
    }
    from_three.load_state_dict(three)
    assert torch.equal(from_three.weight, fused.weight)
    from_three.load_state_dict(fused.state_dict())
    assert torch.equal(from_three.bias, fused.bias)


def test_a_missing_bias_among_three_is_zeros() -> None:
    projection = Projection(8, 2)
    three = {f"{name}.weight": torch.ones(8, 8) for name in ("query", "key", "value")}
    projection.load_state_dict({**three, "query.bias": torch.ones(8), "value.bias": torch.ones(8)})
    assert projection.bias is not None
    assert projection.bias.tolist() == [1] * 8 + [0] * 8 + [1] * 8


def test_a_context_projected_before_gives_the_same() -> None:
    module = MultiHeadAttention(32, 4, kv_heads=2, qk_norm=1e-6)
    x, context = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    torch.testing.assert_close(module(x, module.keys_values(context)), module(x, context))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_is_the_same_with_and_without_gradients(activation: str, gated: bool) -> None:
    module, x = FeedForward(16, 24, activation=activation, gated=gated), torch.randn(3, 5, 16)
    with torch.no_grad():
        out = module(x)
    torch.testing.assert_close(out, module(x), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_linear_is_torchs(activation: str | None, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 5, 16, dtype=dtype), torch.randn(24, 16, dtype=dtype), torch.randn(24, dtype=dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    exact = exact if activation is None else ACTIVATIONS[activation](exact)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    with torch.no_grad():
        out = linear(x, weight, bias, activation)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_rms_norm_is_its_formula() -> None:
    norm, x = RMSNorm(16, 1e-5), torch.randn(3, 16)
    torch.nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight)


def test_a_learned_scale_starts_at_the_usual_one() -> None:
    module = MultiHeadAttention(32, 4, scale=LearnedScale(4, 8))
    x = torch.randn(2, 7, 32)
    out = module(x)
    out.sum().backward()
    assert module.scale.log_scale.grad.abs().sum() > 0
    module.scale = None
    torch.testing.assert_close(out, module(x))


def test_log_length_scales_each_row_by_the_keys_it_sees() -> None:
    policy = LogLength(4, 16)
    scale = policy(torch.arange(5))
    assert scale.shape == (1, 4, 5)
    torch.testing.assert_close(scale[0, 2], torch.arange(1, 6).log() / 4)


CONFIGS = {
    "bert": BlockConfig(32, 4, 48, pre_norm=False),
    "llama": BlockConfig(32, 4, 48, kv_heads=2, norm="rms", activation="silu", gated=True, bias=False),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_decoder_sees_nothing_of_later_positions(config: BlockConfig) -> None:
    decoder, x = Decoder(config, 2, positions=Rotary(8)), torch.randn(2, 9, 32)
    whole, part = decoder(x), decoder(x[:, :6])
    torch.testing.assert_close(whole[:, :6], part, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right", "scattered"])
def test_padding_changes_nothing_for_real_tokens(side: str) -> None:
    encoder, x = Encoder(CONFIGS["bert"], 2), torch.randn(2, 9, 32)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1] = {"left": torch.arange(9) >= 4, "right": torch.arange(9) < 5, "scattered": torch.arange(9) % 2 == 0}[side]
    out = encoder(x, visible=Visible(padding=real))
    torch.testing.assert_close(out[1][real[1]], encoder(x[1:, real[1]])[0], **CLOSE)


def test_padding_at_one_side_becomes_lengths() -> None:
    assert "lengths" in repr(real_keys(torch.arange(9)[None] < torch.tensor([[9], [5]]))).lower()
    with pytest.raises(TypeError, match="padding must be bool"):
        real_keys(torch.ones(2, 9))


def test_remembering_a_context_gives_the_same() -> None:
    decoder = Decoder(CONFIGS["llama"], 2, cross=True)
    y, context = torch.randn(2, 4, 32), torch.randn(2, 7, 32)
    torch.testing.assert_close(decoder(y, decoder.remember(context)), decoder(y, context))


def test_an_encoder_and_a_decoder_hide_padding_from_both() -> None:
    config = CONFIGS["llama"]
    both = EncoderDecoder(Encoder(config, 2), Decoder(config, 2, cross=True))
    x, y = torch.randn(1, 7, 32), torch.randn(1, 4, 32)
    padded = torch.cat((x, torch.randn(1, 3, 32)), 1)
    torch.testing.assert_close(both(padded, y, padding=torch.arange(10)[None] < 7), both(x, y), **CLOSE)


def test_gradients_reach_every_parameter_of_a_stack() -> None:
    decoder = Decoder(CONFIGS["llama"], 2, cross=True, positions=RelativeBuckets(4, bidirectional=False))
    decoder(torch.randn(2, 4, 32), torch.randn(2, 7, 32)).square().sum().backward()
    assert [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_choice_replaces_the_attention_of_a_block() -> None:
    seen: list[Call] = []

    def uniform(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        seen.append(call)
        return v.mean(2, keepdim=True).expand(-1, -1, q.shape[2], -1)

    block, x = Block(BlockConfig(32, 4, 48, choice=lambda: uniform)), torch.randn(2, 7, 32)
    visible = Visible(padding=torch.ones(2, 7, dtype=torch.bool))
    out = block(x, visible=visible)
    assert out.shape == x.shape
    assert seen[0].visible is visible
    assert seen[0].hidden is not None
    assert seen[0].hidden.shape == x.shape


def test_all_parts_of_what_is_visible_count() -> None:
    real, q = torch.tensor([[False, True, True, True]]), torch.randn(1, 1, 4, 8)
    visible = Visible(causal=True, padding=real, mask=poise.window(1, 1))
    seen = poise.scores(q, q, mask=visible.for_call(q, q), stage="prob") > 0
    expected = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen[0, 0].int().tolist() == expected


def test_places_are_needed_with_a_cache() -> None:
    with pytest.raises(ValueError, match="places is needed with a cache"):
        Decoder(CONFIGS["llama"], 1)(torch.randn(1, 1, 32), cache=object())
