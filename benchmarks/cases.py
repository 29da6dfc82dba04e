"""What is timed: cases of forward and of training, each with poise's call, torch's for the same result, and targets.

Both calls do the same work on the same tensors; torch gets what a user would pass it (is_causal, a bool mask, a dense
bias). Nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import poise

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads: int
    length: int
    dim: int
    kind: str = "full"  # or causal, window, dense bias, relative, learned relative, alibi
    kv_heads: int | None = None
    dropout: float = 0.0
    targets: tuple[float, float] | None = None  # ratio to torch: fp32, bf16

    @property
    def visible(self) -> float:
        """Share of all pairs that are visible: flops count only those."""
        if self.kind == "causal":
            return (self.length + 1) / (2 * self.length)
        if self.kind == "window":
            pairs = WINDOW * self.length - WINDOW * (WINDOW - 1) // 2
            return pairs / self.length**2
        return 1.0

    @property
    def gigaflops(self) -> float:
        """Of the forward pass."""
        return 4e-9 * self.batch * self.heads * self.length**2 * self.dim * self.visible


WINDOW = 256  # keys a query sees, itself included

CASES = (
    Case("(1,12,2048,64)", 1, 12, 2048, 64, targets=(2.3, 4.5)),
    Case("(1,12,2048,64) causal", 1, 12, 2048, 64, "causal", targets=(2.8, 5.3)),
    Case("(1,16,2048,128)", 1, 16, 2048, 128),
    Case("(1,16,2048,128) causal", 1, 16, 2048, 128, "causal", targets=(2.7, 5.3)),
    Case("(1,12,8192,64) causal", 1, 12, 8192, 64, "causal", targets=(2.5, 5.0)),
    Case("(8,12,128,64)", 8, 12, 128, 64, targets=(2.5, 5.0)),
    Case("(32,12,64,64)", 32, 12, 64, 64, targets=(2.2, 5.0)),
    Case("(4,12,197,64)", 4, 12, 197, 64, targets=(2.3, 4.5)),
    Case("(4,12,77,64)", 4, 12, 77, 64, targets=(2.3, 4.5)),
    Case("(1,12,2048,64) dense bias", 1, 12, 2048, 64, "dense bias", targets=(2.0, 3.5)),
    Case("(1,12,2048,64) relative", 1, 12, 2048, 64, "relative", targets=(2.3, 4.5)),
    Case("(1,12,2048,64) alibi", 1, 12, 2048, 64, "alibi", targets=(2.3, 4.5)),
    Case("(1,12,8192,64) window 256", 1, 12, 8192, 64, "window", targets=(40.0, 60.0)),
    Case("(1,32/8,2048,128) causal", 1, 32, 2048, 128, "causal", kv_heads=8, targets=(2.7, 5.0)),
    Case("(1,1,8192,64)", 1, 1, 8192, 64, targets=(2.3, 4.5)),
)

TRAINING = (
    Case("(1,12,2048,64)", 1, 12, 2048, 64, targets=(2.3, 3.2)),
    Case("(1,12,2048,64) causal", 1, 12, 2048, 64, "causal", targets=(2.8, 4.0)),
    Case("(1,16,2048,128)", 1, 16, 2048, 128),
    Case("(1,16,2048,128) causal", 1, 16, 2048, 128, "causal", targets=(2.7, 3.7)),
    Case("(8,12,128,64)", 8, 12, 128, 64, targets=(2.5, 6.0)),
    Case("(1,12,1024,64) dropout 0.1", 1, 12, 1024, 64, dropout=0.1, targets=(5.0, 6.0)),
    Case("(1,12,2048,64) learned relative", 1, 12, 2048, 64, "learned relative", targets=(4.0, 5.0)),
    Case("(1,12,8192,64) window 256", 1, 12, 8192, 64, "window", targets=(35.0, 40.0)),
)

DISTANCE = 128  # beyond it a relative bias no longer changes
BUCKETS = 32  # of distances, each with a learned bias per head
PENALTY = 0.01  # of a row's mean entropy, in the observed step


@dataclass(frozen=True)
class Calls:
    poise: Call
    observed: Call
    torch: Call
    blockwise: Call


@dataclass(frozen=True)
class Arguments:
    """Keyword arguments beside q, k, v, made anew for each call: what is learned enters the graph then."""

    ours: Callable[[], dict[str, Any]]
    theirs: Callable[[], dict[str, Any]]
    learned: tuple[Tensor, ...] = ()


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh q, k, v."""
    kv = case.kv_heads or case.heads
    shapes = ((case.batch, heads, case.length, case.dim) for heads in (case.heads, kv, kv))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


def calls(case: Case, dtype: torch.dtype) -> Calls:
    """The forward pass by each contestant, on fresh random tensors."""
    q, k, v = inputs(case, dtype)
    arguments = _arguments(case, dtype)
    return Calls(
        lambda: poise.attention(q, k, v, **arguments.ours()),
        lambda: poise.observe(q, k, v, **arguments.ours()),
        lambda: F.scaled_dot_product_attention(q, k, v, **arguments.theirs()),
        lambda: poise.attention(q, k, v, impl="blockwise", **arguments.ours()),
    )


def steps(case: Case, dtype: torch.dtype) -> Calls:
    """Forward and backward by each contestant; the observed one also penalises its entropy."""
    q, k, v = (x.requires_grad_() for x in inputs(case, dtype))
    d_out = torch.randn(q.shape).to(dtype)
    arguments = _arguments(case, dtype)
    wanted = (q, k, v, *arguments.learned)

    def plain(impl: str | None) -> object:
        return torch.autograd.grad(poise.attention(q, k, v, impl=impl, **arguments.ours()), wanted, d_out)

    def observed() -> object:
        out, stats = poise.observe(q, k, v, **arguments.ours())
        return torch.autograd.grad((out, PENALTY * stats.entropy.mean()), wanted, (d_out, None))

    def theirs() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, **arguments.theirs()), wanted, d_out)

    return Calls(lambda: plain(None), observed, theirs, lambda: plain("blockwise"))


def _arguments(case: Case, dtype: torch.dtype) -> Arguments:
    n, h = case.length, case.heads
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {"enable_gqa": True} if case.kv_heads else {}
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]  # j - i
    if case.kind == "causal":
        ours["mask"], theirs["is_causal"] = poise.causal(), True
    elif case.kind == "window":
        ours["mask"], theirs["attn_mask"] = poise.window(WINDOW - 1), (distance <= 0) & (distance > -WINDOW)
    elif case.kind == "dense bias":
        ours["bias"] = theirs["attn_mask"] = torch.randn(1, h, n, n).to(dtype)
    elif case.kind == "relative":
        table = torch.randn(h, 2 * DISTANCE + 1)
        ours["bias"] = poise.relative(table)
        theirs["attn_mask"] = table[:, distance.clamp(-DISTANCE, DISTANCE) + DISTANCE][None].to(dtype)
    elif case.kind == "learned relative":
        return _learned_relative(distance, h, dtype)
    elif case.kind == "alibi":
        slopes = poise.alibi_slopes(h)
        ours["bias"] = poise.alibi(slopes)
        theirs["attn_mask"] = (-slopes[:, None, None] * distance.abs())[None].to(dtype)
    if case.dropout:
        ours["dropout"] = theirs["dropout_p"] = case.dropout
    return Arguments(lambda: ours, lambda: theirs)


def _learned_relative(distance: Tensor, heads: int, dtype: torch.dtype) -> Arguments:
    """T5's bias: a learned value per head and bucket of distances, gathered in every call. T5 does not scale."""
    weight = torch.randn(BUCKETS, heads).to(dtype).requires_grad_()
    near, everywhere = _bucket(torch.arange(-DISTANCE, DISTANCE + 1)), _bucket(distance)
    return Arguments(
        lambda: {"scale": 1.0, "bias": poise.relative(F.embedding(near, weight).T)},
        lambda: {"scale": 1.0, "attn_mask": F.embedding(everywhere, weight).permute(2, 0, 1)[None]},
        (weight,),
    )


def _bucket(distance: Tensor) -> Tensor:
    """T5's bidirectional buckets (Raffel et al., 2020): half for each side, exact near, logarithmic up to DISTANCE."""
    side = BUCKETS // 2
    exact, far = side // 2, distance.abs().clamp_min(1)
    steps = (far / exact).log() / math.log(DISTANCE / exact) * (side - exact)
    bucket = torch.where(distance.abs() < exact, distance.abs(), (exact + steps.long()).clamp_max(side - 1))
    return bucket + side * (distance > 0)
