"""The twin of torch.nn.MultiheadAttention: parity over its arguments."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poise.nn import from_torch

MAKES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "key and value rows added": {"add_bias_kv": True},
    "a row of zeros added": {"add_zero_attn": True},
    "both added": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "widths of their own": {"kdim": 12, "vdim": 20},
}
N, M, B, H, C = 6, 9, 3, 4, 16


def module(options: dict[str, Any]) -> nn.MultiheadAttention:
    made = nn.MultiheadAttention(C, H, **options).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def inputs(made: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    parts = torch.randn(N, B, C), torch.randn(M, B, made.kdim), torch.randn(M, B, made.vdim)
    return tuple(x.transpose(0, 1) if made.batch_first else x for x in parts)  # type: ignore[return-value]


def hidden(rows: int, keys: int) -> Tensor:
    """Random pairs that may not attend; every query sees the first key."""
    chosen = torch.rand(rows, keys) < 0.4
    chosen[:, 0] = False
    return chosen


PADDING = torch.arange(M) >= torch.tensor([[M], [4], [7]])
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(B, M).masked_fill(PADDING, -torch.inf)},
    "bool": {"attn_mask": hidden(N, M)},
    "float": {"attn_mask": torch.randn(N, M)},
    "per head": {"attn_mask": hidden(B * H * N, M).view(B * H, N, M)},
    "per head and padding": {"attn_mask": hidden(B * H * N, M).view(B * H, N, M), "key_padding_mask": PADDING},
}


def close(got: Tensor | None, want: Tensor | None) -> None:
    assert (got is None) == (want is None)
    if got is not None:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("make", "mask"), list(product(MAKES, MASKS)))
def test_outputs_and_weights_are_torchs(make: str, mask: str) -> None:
    made = module(MAKES[make])
    twin, qkv = from_torch(made), inputs(made)
    for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        for got, want in zip(twin(*qkv, **MASKS[mask], **weights), made(*qkv, **MASKS[mask], **weights), strict=True):
            close(got, want)


@pytest.mark.parametrize("weights", [False, True])
def test_self_attention_under_a_causal_mask_is_torchs(weights: bool) -> None:
    made = module({"batch_first": True})
    x = torch.randn(B, N, C)
    mask = nn.Transformer.generate_square_subsequent_mask(N)
    how = {"attn_mask": mask, "is_causal": True, "need_weights": weights}
    close(from_torch(made)(x, x, x, **how)[0], made(x, x, x, **how)[0])


def test_an_input_without_batch_is_torchs() -> None:
    made = module({})
    q, k, v = (x[:, 0] for x in inputs(made))
    for got, want in zip(from_torch(made)(q, k, v), made(q, k, v), strict=True):
        close(got, want)


@pytest.mark.parametrize("make", MAKES)
def test_the_state_dict_is_torchs_and_shared(make: str) -> None:
    made = module(MAKES[make])
    twin = from_torch(made)
    assert twin.state_dict().keys() == made.state_dict().keys()
    assert twin.out_proj.weight is made.out_proj.weight
    twin.load_state_dict(module(MAKES[make]).state_dict())
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in twin.state_dict().items())


@pytest.mark.parametrize("make", MAKES)
def test_gradients_are_torchs(make: str) -> None:
    made = module(MAKES[make])
    qkv = inputs(made)
    grads = []
    for attend in (made, from_torch(made)):
        out, _ = attend(*qkv, need_weights=False, attn_mask=MASKS["float"]["attn_mask"])
        grads.append(torch.autograd.grad(out.square().sum(), list(made.parameters())))
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_training_drops_weights_out_and_evaluation_does_not() -> None:
    made = module({"dropout": 0.5, "batch_first": True})
    twin, x = from_torch(made), torch.randn(B, N, C)
    whole = twin(x, x, x, need_weights=False)[0]
    close(twin(x, x, x, need_weights=False)[0], whole)
    made.train()
    twin.train()
    assert not torch.allclose(twin(x, x, x, need_weights=False)[0], whole)


def test_a_query_that_sees_nothing_gives_the_bias_alone() -> None:
    made = module({"batch_first": True})
    x = torch.randn(B, N, C)
    out, weights = from_torch(made)(x, x, x, key_padding_mask=torch.ones(B, N, dtype=torch.bool))
    close(out, made.out_proj.bias.expand_as(out))
    assert (weights == 0).all()


def test_something_else_than_torchs_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.MultiheadAttention; got Linear"):
        from_torch(nn.Linear(2, 2))


def test_a_hint_of_causality_needs_the_mask() -> None:
    made = module({"batch_first": True})
    x = torch.randn(B, N, C)
    with pytest.raises(ValueError, match="attn_mask is needed with is_causal"):
        from_torch(made)(x, x, x, is_causal=True)
