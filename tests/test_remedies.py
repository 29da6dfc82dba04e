"""Remedies on every family: what each computes, by a dense oracle; what it refuses; and that undoing leaves nothing.

The oracle is attention written by hand in the test, with the remedy's formula in it, which transformers runs as another
implementation of the same model: remedied poise must give its logits.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import FAMILIES, Family, build, model_of
from test_hf import logits_of, scale_of
from torch import Tensor, nn

import poise
import poise.models
import poise.nn
from poise import hf
from poise.monitor.alarms import _TEXTS
from poise.monitor.remedies import NAMES
from poise.monitor.remedies.anatomy import Anatomy, anatomy, attention_modules

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install poise[test]")
transformers.logging.set_verbosity_error()

BY_NAME = {family.name: family for family in FAMILIES}
EVERY_FAMILY = [pytest.param(family, id=family.name) for family in FAMILIES]

# Case -> (remedy, options), each with options under which it does something to small random models.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft-cap": ("soft-cap", {"cap": 0.7}),
    "qk-norm": ("qk-norm", {"gain": 1.5}),
    "1/sqrt(d)": ("scale", {"policy": "1/sqrt(d)"}),
    "1/d": ("scale", {"policy": "1/d"}),
    "log-n": ("scale", {"policy": "log-n", "length": 5}),
    "log-n learned": ("scale", {"policy": "log-n", "learned": True}),
    "yarn": ("scale", {"policy": "yarn", "factor": 8.0}),
    "learned": ("scale", {"policy": "learned"}),
    "sink": ("sink", {"logit": 0.5}),
    "off-by-one": ("off-by-one", {}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qk-clip": ("qk-clip", {"tau": 0.5}),
    "sigma-reparam": ("sigma-reparam", {"gamma": 2.0, "parts": "qkv"}),
    "clip-qkv": ("clip-qkv", {"limit": 0.1}),
    "z-loss": ("z-loss", {"weight": 0.1}),
    "entropy-floor": ("entropy-floor", {"weight": 0.1}),
}
CASES = {**CALLS, **OTHERS}
# What a family cannot take, and a word of why.
REFUSED = {
    **{(family, case): "normalises" for family in ("qwen3", "gemma3") for case in ("qk-clip", "qk-norm")},
    **{(family, case): "norm of queries" for family in ("qwen3", "gemma3") for case in ("1/sqrt(d)", "1/d")},
    **{("gpt_oss", case): "sinks of its own" for case in ("sink", "off-by-one")},
    ("gpt_oss", "yarn"): "YaRN",
}
UNCHANGED_OUTPUT = {"qk-clip", "z-loss", "entropy-floor", "learned"}  # before any training


@pytest.fixture(autouse=True)
def _registered() -> None:
    hf.register()


def attentions(model: nn.Module) -> list[Anatomy]:
    return [anatomy(name, module) for name, module in attention_modules(model).items()]


def apply(model: nn.Module, case: str, **extra: Any) -> Any:
    name, options = CASES[case]
    return poise.remedy(model, name, **options, **extra)


def anatomy_of(model: nn.Module) -> list[Any]:
    """All that undoing must leave as it was: classes, tables, hooks, attributes, in order."""
    return [
        (
            path,
            type(module),
            list(module._parameters),
            list(module._buffers),
            list(module._modules),
            sorted(module._non_persistent_buffers_set),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            sorted(key for key in module.__dict__ if key != "_is_hf_initialized"),
        )
        for path, module in model.named_modules()
    ]


def assert_same_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_undo_gives_bitwise_the_old_model(family: Family, case: str) -> None:
    model = model_of(family, "poise")
    state, anatomy = {k: v.clone() for k, v in model.state_dict().items()}, anatomy_of(model)
    parameters = list(model.parameters())
    with torch.no_grad():
        before = logits_of(family, model, "left padding")
        if why := REFUSED.get((family.name, case)):
            with pytest.raises(ValueError, match=why):
                apply(model, case)
        else:
            with apply(model, case) as remedy:
                assert remedy.layers
                changed = not torch.equal(logits_of(family, model, "left padding"), before)
                assert changed == (case not in UNCHANGED_OUTPUT) or (family.name, case) in SAME_SCALE
        assert torch.equal(logits_of(family, model, "left padding"), before)
    assert anatomy_of(model) == anatomy
    assert_same_state(model, state)
    assert all(mine is old for mine, old in zip(model.parameters(), parameters, strict=True))


# Families whose scale is 1/sqrt(d) already, up to rounding.
SAME_SCALE = {(family.name, "1/sqrt(d)") for family in FAMILIES} - {
    (name, "1/sqrt(d)") for name in ("gpt2", "granite", "gemma2", "t5", "umt5")
}


class Oracle:
    """Dense attention by hand, as one of transformers' implementations."""

    case: str = ""

    @classmethod
    def forward(cls, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kw: Any) -> Any:
        case, options = cls.case, CASES[cls.case][1]
        heads, rows, dim = query.shape[1:]
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        keys = key.shape[2]
        scale = kw.get("scaling")
        scale = dim**-0.5 if scale is None else scale
        causal = kw.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        visible = torch.ones(rows, keys, dtype=torch.bool)
        if attention_mask is not None:
            visible = attention_mask
        elif causal and rows > 1:
            visible = visible.tril()
        if case == "qk-norm":
            query, key = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
            scale = 1.5 * dim**-0.5
        elif case in ("1/sqrt(d)", "1/d"):
            if type(module).__name__ in ("OPTAttention", "WhisperAttention"):
                query = query / module.scaling
            scale = dim**-0.5 if case == "1/sqrt(d)" else 1 / dim
        elif case == "yarn":
            scale = scale * (0.1 * math.log(8.0) + 1) ** 2
        z = query @ key.mT * scale
        if case.startswith("log-n"):
            n = visible.sum(-1, keepdim=True).clamp(min=1)
            z = z * n.log() / (math.log(options["length"]) if "length" in options else 1.0)
        cap = options.get("cap", kw.get("softcap"))
        if cap is not None:
            z = cap * torch.tanh(z / cap)
        if kw.get("position_bias") is not None:
            z = z + kw["position_bias"]
        z = z.masked_fill(~visible, -math.inf)
        sink = {"sink": 0.5, "off-by-one": 0.0}.get(case)
        if kw.get("s_aux") is not None:
            sink = kw["s_aux"][:, None, None]
        extra = torch.full((*z.shape[:3], 1), -math.inf)
        if sink is not None:
            extra = extra.fill_(0.0) + sink
        p = torch.cat((z, extra), -1).softmax(-1).nan_to_num()[..., :-1]
        return (p @ value).transpose(1, 2).contiguous(), None


@cache
def oracle_model(family: Family) -> nn.Module:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("oracle", Oracle.forward)
    AttentionMaskInterface.register("oracle", sdpa_mask)
    return build(family, "oracle")


@pytest.mark.parametrize(
    ("family", "case", "mask"),
    [
        pytest.param(family, case, mask, id=f"{family.name}-{case}-{mask}")
        for family in FAMILIES
        for case in CALLS
        for mask in (("no mask",) if family.kind == "vision" else ("no mask", "left padding"))
        if (family.name, case) not in REFUSED
    ],
)
def test_a_remedied_call_is_the_formula_computed_densely(family: Family, case: str, mask: str) -> None:
    model = model_of(family, "poise")
    Oracle.case = case
    with torch.no_grad(), apply(model, case):
        want = logits_of(family, oracle_model(family), mask)
        got = logits_of(family, model, mask)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_the_modules_found_are_those_whose_attention_a_watch_sees(family: Family) -> None:
    model = model_of(family, "poise")
    with torch.no_grad(), poise.watch(model, alarms=False) as w:
        logits_of(family, model, "no mask")
    assert {one.name: one.heads for one in attentions(model)} == {
        name: layer["heads"] for name, layer in w.record["layers"].items()
    }


def test_what_a_remedy_learns_is_part_of_the_model_and_gets_gradients() -> None:
    family = BY_NAME["llama"]
    for case in ("qk-norm", "learned", "log-n learned", "sink"):
        model = build(family, "poise")
        with apply(model, case) as remedy:
            mine = {id(p) for p in model.parameters()}
            assert len(remedy.parameters()) == 2
            assert all(id(p) in mine for p in remedy.parameters())
            assert len(model.state_dict()) == len(model_of(family, "poise").state_dict()) + 2
            logits_of(family, model, "no mask").square().sum().backward()
            assert all(p.grad is not None and p.grad.abs().min() > 0 for p in remedy.parameters()), case


CLIPPED = [family for family in FAMILIES if (family.name, "qk-clip") not in REFUSED]


def largest(clip: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in clip.seen.items()}


@pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in CLIPPED])
def test_qk_clip_brings_exactly_the_heads_above_tau_down_to_it(family: Family) -> None:
    """Each layer alone: what comes before it stays as it is, so that its scores are those of before, times gamma."""
    names = [one.name for one in attentions(model_of(family, "poise"))]
    for name in names:
        model = build(family, "poise")
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        with poise.remedy(model, "qk-clip", layers=name, tau=1e9) as clip, torch.no_grad():
            logits_of(family, model, "left padding")
            before = largest(clip)[name]
            clip.tau = before.clamp(min=1e-3).sort().values[:-1].mean().item()
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            still.step()
            assert not clip.seen
            logits_of(family, model, "left padding")
            after = largest(clip)[name]
        above = before > clip.tau
        assert 0 < above.sum() == clip.clipped[name]
        want = torch.where(above, clip.tau, before)
        assert (after - want).abs().max() <= 2e-6 * before.abs().max().clamp(min=1), name
        untouched = model_of(family, "poise").state_dict()
        changed = [key for key, value in model.state_dict().items() if not torch.equal(value, untouched[key])]
        assert changed
        assert all(key.startswith(name) for key in changed)


def test_qk_clip_leaves_a_head_whose_largest_score_is_negative_alone() -> None:
    layer = poise.nn.MultiHeadAttention(16, 2, bias=True)
    with torch.no_grad():
        layer.projection.weight[:16] = 0
        layer.projection.bias[:16] = torch.tensor([1.0] * 8 + [-1.0] * 8)  # the queries of the two heads
        layer.projection.weight[16:32] = 0
        layer.projection.bias[16:32] = 1.0
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    still = torch.optim.SGD(layer.parameters(), lr=0.0)
    with poise.remedy(layer, "qk-clip", tau=1.0) as clip:
        layer(torch.randn(1, 5, 16)).sum().backward()
        assert clip.seen["MultiHeadAttention"].tolist() == pytest.approx([8**0.5, -(8**0.5)])
        still.step()
    after = layer.projection.bias
    gamma = 8**-0.25  # the square root of 1 / sqrt(8)
    assert after[:8].tolist() == pytest.approx([gamma] * 8)
    assert after[16:24].tolist() == pytest.approx([gamma] * 8)
    assert torch.equal(after[8:16], before["projection.bias"][8:16])
    assert torch.equal(after[24:], before["projection.bias"][24:])


def test_qk_clip_scales_the_gain_of_an_inserted_norm() -> None:
    family = BY_NAME["llama"]
    model = build(family, "poise")
    with poise.remedy(model, "qk-norm", gain=20.0) as norm, poise.remedy(model, "qk-clip", tau=10.0) as clip:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        logits_of(family, model, "no mask").sum().backward()
        before = largest(clip)
        optimizer.step()
        logits_of(family, model, "no mask")
        first = clip.layers[0]
        assert before[first].max() > 10
        assert clip.seen[first].max() <= 10 * (1 + 1e-6)
        assert norm.parameters()[0].tolist() == pytest.approx((20 * (10 / before[first]).clamp(max=1)).tolist())
    untouched = model_of(family, "poise").state_dict()
    assert all(torch.equal(value, untouched[name]) for name, value in model.state_dict().items())


def test_qk_clip_scales_a_models_own_gain_where_heads_share_none_of_it() -> None:
    config = transformers.Olmo2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Olmo2ForCausalLM(config)
    model.set_attn_implementation("poise")
    ids = torch.arange(1, 13)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with poise.remedy(model, "qk-clip", tau=1e9) as clip:
        model(ids).logits.sum().backward()
        before = clip.seen[clip.layers[0]].clone()
        clip.tau = before.median().item()
        optimizer.step()
        model(ids)
        after = clip.seen[clip.layers[0]]
    assert torch.allclose(after, before.clamp(max=clip.tau), rtol=1e-5)


def test_qk_clip_sees_sdpa_and_torchs_own_module() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, need_weights=False)[0]
            return out

    torch.manual_seed(0)
    for model, call in ((Plain(), torch.randn(2, 6, 16)), (build(BY_NAME["llama"], "sdpa"), torch.arange(1, 9)[None])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with poise.remedy(model, "qk-clip", tau=0.05) as clip:
            out = model(call)
            (out if isinstance(out, Tensor) else out.logits).sum().backward()
            optimizer.step()
            assert clip.clipped[clip.layers[0]] > 0
            model(call)
            assert clip.seen[clip.layers[0]].max() <= 0.05 * (1 + 1e-5)


def test_qk_clip_counts_a_checkpointed_forward_once_and_acts_after_accumulation() -> None:
    family = BY_NAME["llama"]
    model = build(family, "poise").train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with poise.remedy(model, "qk-clip", tau=1e-3) as clip:
        for _ in range(2):
            logits_of(family, model, "no mask").sum().backward()
        assert not clip.clipped
        optimizer.step()
        assert set(clip.clipped) == set(clip.layers)
        assert all(count == 4 for count in clip.clipped.values())


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_clip_qkv_bounds_what_the_projections_give(family: Family) -> None:
    model, limit, seen = model_of(family, "poise"), 0.1, []
    original = hf.attention_forward

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kw: Any) -> Any:
        seen.append((query, key, value))
        return original(module, query, key, value, *rest, **kw)

    from transformers import AttentionInterface

    AttentionInterface.register("poise", spy)
    with torch.no_grad(), poise.remedy(model, "clip-qkv", limit=limit):
        logits_of(family, model, "no mask")
    assert seen
    normed = family.name in ("qwen3", "gemma3")
    for q, k, v in seen:
        assert v.abs().max() <= limit
        if not normed:  # a rotation turns two components into one of up to sqrt(2) times their bound
            stretch = 1.35 if family.name == "gpt_oss" else 1.0  # YaRN's temperature
            assert max(q.abs().max(), k.abs().max()) <= limit * 2**0.5 * stretch * (1 + 1e-6)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_sigma_reparam_keeps_the_function_at_first_and_the_spectral_norm_at_gamma(family: Family) -> None:
    model = build(family, "poise")
    with torch.no_grad():
        before = logits_of(family, model, "no mask")
        with poise.remedy(model, "sigma-reparam") as remedy:
            after = logits_of(family, model, "no mask")
            assert (after - before).abs().max() <= 2e-5 * before.abs().max()
            for gamma in remedy.parameters():
                gamma.fill_(0.25)
            for one in attentions(model):
                for part in (one.query, one.key):
                    rows = getattr(part.owner, part.weight).index_select(part.axis, part.rows.flatten())
                    assert torch.linalg.matrix_norm(rows, 2).item() == pytest.approx(0.25, rel=1e-4)


def test_sigma_reparam_follows_the_weights_while_they_train() -> None:
    model = build(BY_NAME["gpt_neox"], "poise").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with poise.remedy(model, "sigma-reparam", optimizer=optimizer) as remedy:
        for _ in range(30):
            optimizer.zero_grad()
            logits_of(BY_NAME["gpt_neox"], model, "no mask").square().mean().backward()
            optimizer.step()
        gammas = iter(remedy.parameters())
        with torch.no_grad():
            for one in attentions(model):
                gamma = next(gammas)
                for size, part in zip(gamma, (one.query, one.key), strict=True):
                    rows = part.owner.weight.index_select(part.axis, part.rows.flatten())
                    assert torch.linalg.matrix_norm(rows, 2).item() == pytest.approx(size.item(), rel=0.02)
    assert not hasattr(attentions(model)[0].query.owner, "parametrizations")
    assert not any("parametrizations" in name for name, _ in model.named_parameters())
    logits_of(BY_NAME["gpt_neox"], model, "no mask").sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_qk_lr_moves_queries_and_keys_by_a_share_of_their_update(family: Family, kind: Any) -> None:
    start = {name: p.detach().clone() for name, p in model_of(family, "poise").named_parameters()}

    def stepped(factor: float | None) -> nn.Module:
        model = build(family, "poise")
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
        if factor is not None:
            poise.remedy(model, "qk-lr", factor=factor, optimizer=optimizer)
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        return model

    full, less = stepped(None), stepped(0.25)
    share = {name: torch.ones_like(p) for name, p in start.items()}
    paths = {id(p): name for name, p in less.named_parameters()}
    for one in attentions(less):
        for part in (one.query, one.key):
            for tensor, axis, rows in part.tensors():
                share[paths[id(tensor)]].index_fill_(axis, rows.flatten(), 0.25)
    assert sum((x != 1).sum() for x in share.values()) > 0
    mine = dict(less.named_parameters())
    for name, parameter in full.named_parameters():
        want = start[name] + share[name] * (parameter - start[name])
        assert torch.allclose(mine[name], want, rtol=1e-5, atol=1e-6), name


def test_qk_lr_gives_the_optimizer_its_groups_back_and_keeps_its_state() -> None:
    model = build(BY_NAME["llama"], "poise")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = {id(p): state["exp_avg"].clone() for p, state in optimizer.state.items()}
    with poise.remedy(model, "qk-lr", factor=0.5, optimizer=optimizer):
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 5e-4]
        assert all(torch.equal(optimizer.state[p]["exp_avg"], moments[id(p)]) for p in model.parameters())
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, decayed)),
        list(map(id, plain)),
    ]
    optimizer.step()
    assert all(state["step"] == 2 for state in optimizer.state.values())


class TestPenalties:
    @staticmethod
    def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        loss(model).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    @pytest.mark.parametrize("case", ["z-loss", "entropy-floor"])
    @pytest.mark.parametrize("family", [pytest.param(BY_NAME[name], id=name) for name in ("llama", "bert", "t5")])
    def test_its_gradient_is_that_of_the_loss_plus_the_penalty(self, family: Family, case: str) -> None:
        from transformers import AttentionInterface

        model, floor, found = build(family, "poise"), 2.0, []

        def dense(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any) -> Any:
            """The penalty by the whole matrix of scores."""
            heads, rows = query.shape[1:3]
            key = key.repeat_interleave(heads // key.shape[1], 1)
            s = query @ key.mT * kw["scaling"]
            if kw.get("position_bias") is not None:
                s = s + kw["position_bias"]
            visible = torch.ones(rows, key.shape[2], dtype=torch.bool)
            visible = mask if mask is not None else visible.tril() if module.is_causal and rows > 1 else visible
            s = s.masked_fill(~visible, -math.inf)
            if case == "z-loss":
                found.append(s.logsumexp(-1).square().mean())
            else:
                p = s.softmax(-1)
                entropy = -(p * torch.where(p > 0, p, 1.0).log()).sum(-1)
                able = (visible.sum(-1) > math.exp(floor)).expand(entropy.shape)
                found.append((floor - entropy).clamp(min=0)[able].mean())
            return original(module, query, key[:, :: heads // value.shape[1]], value, mask, **kw)

        original = hf.attention_forward
        weigh = torch.randn(logits_of(family, model, "no mask").shape, generator=torch.Generator().manual_seed(3))

        def plain(net: nn.Module) -> Tensor:
            return (logits_of(family, net, "no mask") * weigh).sum()

        AttentionInterface.register("poise", dense)
        want = self.gradients(model, lambda net: plain(net) + 0.3 * torch.stack(found).sum())
        assert torch.stack(found).max() > 0
        AttentionInterface.register("poise", original)
        without = self.gradients(model, plain)
        options = {"floor": floor} if case == "entropy-floor" else {}
        with poise.remedy(model, case, weight=0.3, **options):
            got = self.gradients(model, plain)
        moved = [name for name in want if not torch.allclose(want[name], without[name], rtol=1e-3, atol=1e-5)]
        assert moved
        for name, value in want.items():
            assert (got[name] - value).abs().max() <= 1e-5 * scale_of(name, want), name

    def test_a_checkpoint_changes_nothing(self) -> None:
        family = BY_NAME["llama"]
        plain, checkpointed = build(family, "poise").train(), build(family, "poise").train()
        checkpointed.activation_checkpointing_enable()
        grads = []
        for model in (plain, checkpointed):
            with poise.remedy(model, "z-loss", weight=0.5), poise.watch(model, alarms=False):
                grads.append(self.gradients(model, lambda net: logits_of(family, net, "no mask").sum()))
        assert all(torch.equal(value, grads[1][name]) for name, value in grads[0].items())


class TestPoisesOwnModels:
    """Their places for a remedy, against transformers' model with the same weights and the same remedy."""

    PAIRS = ("gpt2", "llama", "bert", "t5")

    @staticmethod
    @cache
    def pair(name: str) -> tuple[nn.Module, nn.Module]:
        theirs = build(BY_NAME[name], "poise")
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            return theirs, poise.models.load(folder).eval()

    @staticmethod
    def logits(name: str, model: nn.Module) -> Tensor:
        ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
        if isinstance(model, transformers.PreTrainedModel):
            call = {"input_ids": ids, **({"decoder_input_ids": ids.flip(1)} if name == "t5" else {"use_cache": False})}
            if name == "bert":
                call.pop("use_cache")
            return model(**call).logits
        return model(ids, target=ids.flip(1)) if name == "t5" else model(ids)

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("name", PAIRS)
    def test_a_remedied_model_gives_the_remedied_twins_logits_and_undo_restores_it(self, name: str, case: str) -> None:
        theirs, ours = self.pair(name)
        state, anatomy = {k: v.clone() for k, v in ours.state_dict().items()}, anatomy_of(ours)
        with torch.no_grad():
            before = self.logits(name, ours)
            if name in ("bert", "t5") and case.startswith("log-n"):
                with pytest.raises(ValueError, match="must be causal"):
                    apply(ours, case)
            else:
                with apply(theirs, case), apply(ours, case):
                    want, got = self.logits(name, theirs), self.logits(name, ours)
                assert (got - want).abs().max() <= 2e-5 * want.abs().max()
            assert torch.equal(self.logits(name, ours), before)
        assert anatomy_of(ours) == anatomy
        assert_same_state(ours, state)

    @pytest.mark.parametrize("case", ["z-loss", "entropy-floor"])
    def test_penalties_give_the_twins_gradients(self, case: str) -> None:
        theirs, ours = self.pair("llama")
        grads = []
        for model in (theirs, ours):
            model.zero_grad()
            with apply(model, case):
                self.logits("llama", model).square().sum().backward()
            grads.append([one.query.tensors().__next__()[0].grad for one in attentions(model)])
        for one, other in zip(attentions(theirs), grads[1], strict=True):
            want = next(one.query.tensors())[0].grad
            assert (other[: len(want)] - want).abs().max() <= 1e-5 * want.abs().max()

    @pytest.mark.parametrize("case", [case for case in CALLS if case != "log-n learned"])
    def test_generation_with_a_cache_agrees_with_the_whole_sequence(self, case: str) -> None:
        from poise.nn.cache import GrowingCache

        ids = torch.randint(3, 64, (1, 10), generator=torch.Generator().manual_seed(5))
        theirs, ours = self.pair("llama")
        with torch.no_grad(), apply(ours, case), apply(theirs, case):
            whole, cache = ours(ids), GrowingCache()
            pieces = torch.cat([ours(part, cache=cache) for part in ids.split([6, 1, 3], 1)], 1)
            assert (pieces - whole).abs().max() <= 1e-5 * whole.abs().max()
            first = theirs(ids[:, :6], use_cache=True)
            rest = theirs(ids[:, 6:], use_cache=True, past_key_values=first.past_key_values)
            assert (torch.cat((first.logits, rest.logits), 1) - whole).abs().max() <= 2e-5 * whole.abs().max()

    def test_attention_that_is_not_exact_is_refused(self) -> None:
        from poise.variants import Performer

        layer = poise.nn.MultiHeadAttention(16, 2, choice=Performer(8, 4))
        with pytest.raises(ValueError, match="not the exact one"):
            poise.remedy(layer, "soft-cap")

    def test_yarns_temperature_is_refused_where_positions_hold_it(self) -> None:
        config = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                  "num_attention_heads": 2, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}  # fmt: skip
        with pytest.raises(ValueError, match="YaRN"):
            poise.remedy(poise.models.Llama(config), "scale", policy="yarn", factor=4.0)


class TestHandles:
    @pytest.fixture
    def model(self) -> nn.Module:
        return build(BY_NAME["llama"], "poise")

    def test_remedies_combine_and_go_in_any_order(self, model: nn.Module) -> None:
        family, anatomy = BY_NAME["llama"], anatomy_of(model)
        with torch.no_grad():
            plain = logits_of(family, model, "no mask")
            names = ("qk-norm", "soft-cap", "sink", "learned", "z-loss", "entropy-floor", "clip-qkv", "sigma-reparam")
            for order in (names, names[::-1], names[3:] + names[:3]):
                handles = {name: apply(model, name) for name in names}
                logits_of(family, model, "no mask")
                for name in order:
                    handles[name].undo()
            assert torch.equal(logits_of(family, model, "no mask"), plain)
        assert anatomy_of(model) == anatomy

    def test_one_that_fails_half_way_leaves_nothing(self) -> None:
        model = nn.ModuleList([poise.nn.MultiHeadAttention(16, 2), nn.MultiheadAttention(16, 2)])
        anatomy = anatomy_of(model)
        with pytest.raises(ValueError, match="no place for this"):
            poise.remedy(model, "clip-qkv")
        assert anatomy_of(model) == anatomy
        poise.remedy(model, "clip-qkv", layers="0").undo()

    def test_only_chosen_layers_are_treated(self, model: nn.Module) -> None:
        with poise.remedy(model, "soft-cap", layers="*.1.*") as remedy:
            assert remedy.layers == ("model.layers.1.self_attn",)
        with pytest.raises(ValueError, match="the path of no attention module"):
            poise.remedy(model, "soft-cap", layers="nowhere")

    def test_undo_twice_changes_nothing(self, model: nn.Module) -> None:
        remedy = poise.remedy(model, "soft-cap")
        remedy.undo()
        remedy.undo()
        assert not remedy.active
        assert "undone" in repr(remedy)

    def test_the_same_twice_is_refused(self, model: nn.Module) -> None:
        with poise.remedy(model, "soft-cap"), pytest.raises(ValueError, match="at work on"):
            poise.remedy(model, "soft-cap", cap=10)
        with poise.remedy(model, "sink"), pytest.raises(ValueError, match='"sink" gives it a sink'):
            poise.remedy(model, "off-by-one")
        poise.remedy(model, "off-by-one").undo()

    def test_qk_clip_and_sigma_reparam_exclude_each_other(self, model: nn.Module) -> None:
        for first, second in (("qk-clip", "sigma-reparam"), ("sigma-reparam", "qk-clip")):
            with apply(model, first), pytest.raises(ValueError, match="Undo that first"):
                apply(model, second)

    def test_an_implementation_that_cannot_be_reached_is_refused_with_the_way_out(self) -> None:
        model = build(BY_NAME["llama"], "sdpa")
        with pytest.raises(ValueError, match=r'set_attn_implementation\("poise"\)'):
            poise.remedy(model, "soft-cap")
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="not seen"):
            poise.remedy(model, "qk-clip")

    def test_switching_the_implementation_under_a_remedy_raises_rather_than_losing_it(self, model: nn.Module) -> None:
        with poise.remedy(model, "soft-cap"):
            model.set_attn_implementation("sdpa")
            with pytest.raises(RuntimeError, match="soft-cap"):
                logits_of(BY_NAME["llama"], model, "no mask")
        logits_of(BY_NAME["llama"], model, "no mask")

    def test_what_it_adds_joins_the_optimizer_and_leaves_it(self, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        groups = [list(map(id, group["params"])) for group in optimizer.param_groups]

        def step() -> None:
            optimizer.zero_grad()
            logits_of(BY_NAME["llama"], model, "no mask").square().sum().backward()
            optimizer.step()

        step()
        with poise.remedy(model, "qk-norm", optimizer=optimizer) as remedy:
            step()
            assert all(not torch.equal(gain, torch.ones_like(gain)) for gain in remedy.parameters())
            assert all(state["step"] == 2 for p, state in optimizer.state.items() if p not in set(remedy.parameters()))
        assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups
        assert set(map(id, optimizer.state)) == set(groups[0])
        step()

    def test_an_optimizer_with_a_scheduler_is_refused(self, model: nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        for name in ("qk-lr", "qk-norm"):
            with pytest.raises(ValueError, match="scheduler"):
                poise.remedy(model, name, optimizer=optimizer)
        poise.remedy(model, "qk-norm").undo()

    def test_an_optimizer_where_none_is_needed_is_refused(self, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="adds nothing that learns"):
            poise.remedy(model, "soft-cap", optimizer=torch.optim.SGD(model.parameters()))
        with pytest.raises(ValueError, match="optimizer is needed"):
            poise.remedy(model, "qk-lr")
        with pytest.raises(ValueError, match="none of the model's"):
            poise.remedy(model, "qk-lr", optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)]))

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("qk-clamp", {}, "name must be one of 'qk-clip'"),
            ("qk-clip", {"tau": 0}, "tau"),
            ("qk-clip", {"alpha": 2}, "alpha"),
            ("soft-cap", {"cap": -1}, "cap"),
            ("scale", {"policy": "sqrt"}, "policy must be one of"),
            ("scale", {"policy": "yarn"}, "factor"),
            ("scale", {"policy": "1/d", "length": 5}, "length"),
            ("scale", {"policy": "log-n", "length": 1}, "length"),
            ("sigma-reparam", {"parts": "qx"}, "parts"),
            ("sigma-reparam", {"gamma": 0}, "gamma"),
            ("clip-qkv", {"limit": 0}, "limit"),
            ("z-loss", {"weight": 0}, "weight"),
        ],
    )
    def test_a_bad_argument_is_named(self, model: nn.Module, name: str, options: dict[str, Any], message: str) -> None:
        anatomy = anatomy_of(model)
        with pytest.raises(ValueError, match=message):
            poise.remedy(model, name, **options)
        assert anatomy_of(model) == anatomy

    def test_an_unknown_option_names_the_known_ones(self, model: nn.Module) -> None:
        with pytest.raises(TypeError, match="takes tau, alpha"):
            poise.remedy(model, "qk-clip", threshold=3)

    def test_a_model_without_known_attention_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no attention that remedies know"):
            poise.remedy(nn.Linear(2, 2), "qk-clip")

    def test_a_fused_layout_that_is_not_known_is_refused_not_guessed(self, model: nn.Module) -> None:
        attention = attentions(model)[0].module
        for name in ("q_proj", "k_proj"):
            delattr(attention, name)
        with pytest.raises(ValueError, match="not known here"):
            poise.remedy(model, "qk-clip")
        poise.remedy(model, "qk-clip", layers="*.1.*").undo()

    def test_a_remedied_model_copies_and_pickles(self, model: nn.Module) -> None:
        family = BY_NAME["llama"]
        with poise.remedy(model, "qk-norm"), poise.remedy(model, "z-loss"), torch.no_grad():
            want = logits_of(family, model, "no mask")
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(logits_of(family, other, "no mask"), want)

    def test_the_remedies_of_a_copy_stay(self, model: nn.Module) -> None:
        with poise.remedy(model, "soft-cap"):
            other = copy.deepcopy(model)
        anatomy = anatomy_of(other)
        poise.remedy(other, "sink").undo()
        assert anatomy_of(other) == anatomy
        with pytest.raises(ValueError, match="a copy of one"):
            poise.remedy(other, "soft-cap")
        assert anatomy_of(other) == anatomy

    def test_a_watch_sees_the_remedied_scores(self, model: nn.Module) -> None:
        with poise.remedy(model, "qk-norm", gain=1.0), poise.watch(model, alarms=False) as w, torch.no_grad():
            logits_of(BY_NAME["llama"], model, "no mask")
        for layer in w.record["layers"].values():
            assert max(layer["max_logit"]["max"]) <= 8**0.5 * (1 + 1e-6)  # cos times the root of the head dim


def test_every_remedy_is_tested_on_every_family() -> None:
    assert {name for name, _ in CASES.values()} | {"qk-lr"} == set(NAMES)


def test_alarms_name_remedies_that_there_are() -> None:
    named = {name for *_, names in _TEXTS.values() for name in names}
    assert {"qk-clip", "qk-norm", "soft-cap", "sigma-reparam", "sink", "qk-lr"} <= named <= set(NAMES)


RANK = """
import sys, torch, torch.distributed as dist
import poise, poise.nn
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
net = poise.nn.MultiHeadAttention(16, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
with poise.remedy(net, "qk-clip", tau=0.1) as clip:
    x = torch.randn(1, 6, 16) * (1 + 3 * rank)
    net(x).sum().backward()
    mine = clip.seen["MultiHeadAttention"].clone()
    optimizer.step()
every = [torch.zeros_like(net.projection.weight) for _ in range(2)]
dist.all_gather(every, net.projection.weight.detach())
assert torch.equal(*every)
largest = mine.clone()
dist.all_reduce(largest, dist.ReduceOp.MAX)
with poise.remedy(net, "qk-clip", tau=0.1) as clip:
    net(x)
    assert torch.allclose(clip.seen["MultiHeadAttention"], mine * (0.1 / largest).clamp(max=1), rtol=1e-5)
dist.destroy_process_group()
"""


def test_ranks_clip_by_the_largest_score_of_all(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(poise.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
