"""Linformer: exact where it projects nothing away, padding, the four sharings, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import poise
from poise.nn import CAUSAL, Call, Visible
from poise.testing import check_out, truth
from poise.variants import Linformer
from poise.variants.linformer import SHARINGS


def qkv(n: int = 40, *, m: int | None = None, h: int = 4, g: int = 4) -> tuple[Tensor, ...]:
    m = n if m is None else m
    return torch.randn(2, h, n, 16), torch.randn(2, g, m, 16), torch.randn(2, g, m, 24)


def identity(sharing: str, n: int = 40) -> Linformer:
    linformer = Linformer(n, n, heads=4, sharing=sharing)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in linformer.parameters():
            parameter.copy_(torch.eye(n))
    return linformer


@pytest.mark.parametrize("sharing", SHARINGS)
def test_projecting_by_the_identity_is_exact_attention(sharing: str) -> None:
    q, k, v = qkv()
    check_out(identity(sharing)(q, k, v).detach(), truth(q=q, k=k, v=v))


def test_it_attends_to_the_projected_keys_and_values() -> None:
    q, k, v = qkv(g=2)
    linformer = Linformer(50, 8, heads=2, sharing="none")
    assert linformer.f is not None
    with torch.no_grad():
        out = linformer(q, k, v)
        keys = torch.einsum("grn,bgnd->bgrd", linformer.e[..., :40].double(), k.double())
        values = torch.einsum("grn,bgnd->bgrd", linformer.f[..., :40].double(), v.double())
    exact = poise.attention(q.double(), keys, values, impl="reference")
    # Projections of 40 terms rounded to float32, then attention: some tens of eps.
    assert (out - exact).abs().max() <= 64 * torch.finfo(torch.float32).eps * exact.abs().max()


@pytest.mark.parametrize(
    ("sharing", "matrices", "per_matrix"),
    [("none", 2, 4), ("headwise", 2, 1), ("key-value", 1, 1), ("layerwise", 1, 1)],
)
def test_a_sharing_has_as_many_matrices_as_it_says(sharing: str, matrices: int, per_matrix: int) -> None:
    parameters = list(Linformer(40, 8, heads=4, sharing=sharing).parameters())  # type: ignore[arg-type]
    assert [tuple(p.shape) for p in parameters] == [(per_matrix, 8, 40)] * matrices


def test_layers_that_share_hold_one_parameter() -> None:
    first = Linformer(40, 8, heads=4, sharing="layerwise")
    second = Linformer(40, 8, heads=2, sharing="layerwise", like=first)
    assert len(list(torch.nn.ModuleList([first, second]).parameters())) == 1
    tensors = qkv(g=2)
    second(*tensors).sum().backward()
    assert first.e.grad is not None


@pytest.mark.parametrize("sharing", SHARINGS)
def test_padding_is_zeroed_before_it_is_projected(sharing: str) -> None:
    q, k, v = qkv()
    linformer = Linformer(40, 8, heads=4, sharing=sharing)  # type: ignore[arg-type]
    padding = torch.arange(40) < torch.tensor([[30], [40]])
    real = padding[:, None, :, None]
    out = linformer(q, k.where(real, math.nan), v.where(real, math.nan), Call(visible=Visible(padding=padding)))
    assert torch.equal(out, linformer(q, k.where(real, 0.0), v.where(real, 0.0)))


def test_padding_at_the_end_is_as_good_as_a_shorter_sequence() -> None:
    q, k, v = qkv()
    linformer = Linformer(40, 8, heads=4)
    padding = (torch.arange(40) < 30).expand(2, -1)
    padded = linformer(q, k, v, Call(visible=Visible(padding=padding)))
    torch.testing.assert_close(padded, linformer(q, k[:, :, :30], v[:, :, :30]))


def test_gradients_reach_everything() -> None:
    linformer, tensors = Linformer(40, 8, heads=4), [x.requires_grad_() for x in qkv()]
    linformer(*tensors).square().sum().backward()
    assert all(x.grad is not None and bool((x.grad != 0).any()) for x in (*tensors, *linformer.parameters()))


def test_a_causal_call_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="mixes all positions, later ones too"):
        Linformer(40, 8, heads=4)(*qkv(), Call(visible=CAUSAL))


def test_what_it_cannot_honour_it_refuses() -> None:
    linformer = Linformer(40, 8, heads=4)
    with pytest.raises(ValueError, match="cannot honour mask"):
        linformer(*qkv(), Call(visible=Visible(mask=poise.window(3))))
    with pytest.raises(ValueError, match="at most 40 positions; k has 41"):
        linformer(*qkv(41))
    with pytest.raises(ValueError, match="made for 4 key/value heads; k has 2"):
        linformer(*qkv(g=2))
    with pytest.raises(ValueError, match="sharing must be one of"):
        Linformer(40, 8, heads=4, sharing="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='both with sharing="layerwise"'):
        Linformer(40, 8, heads=4, like=linformer)
