"""What is timed: the forward cases, each with poise's call, torch's call for the same result, and the target ratios.

Both calls do the same work on the same tensors; torch gets what a user would pass it (is_causal, a bool mask, a dense
bias). Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import poise

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    heads: int
    length: int
    dim: int
    kind: str = "full"  # or causal, window, dense bias, relative, alibi
    kv_heads: int | None = None
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


@dataclass(frozen=True)
class Calls:
    poise: Call
    observed: Callable[[], object]
    torch: Call
    blockwise: Call


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh q, k, v."""
    kv = case.kv_heads or case.heads
    shapes = ((case.batch, heads, case.length, case.dim) for heads in (case.heads, kv, kv))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


def calls(case: Case, dtype: torch.dtype) -> Calls:
    """The contestants, on fresh random tensors."""
    q, k, v = inputs(case, dtype)
    n, h = case.length, case.heads
    ours: dict[str, object] = {}
    theirs: dict[str, object] = {"enable_gqa": True} if case.kv_heads else {}
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]  # j - i
    if case.kind == "causal":
        ours["mask"], theirs["is_causal"] = poise.causal(), True
    elif case.kind == "window":
        ours["mask"], theirs["attn_mask"] = poise.window(WINDOW - 1), (distance <= 0) & (distance > -WINDOW)
    elif case.kind == "dense bias":
        ours["bias"] = theirs["attn_mask"] = torch.randn(1, h, n, n).to(dtype)
    elif case.kind == "relative":
        table = torch.randn(h, 2 * 128 + 1)
        ours["bias"] = poise.relative(table)
        theirs["attn_mask"] = table[:, distance.clamp(-128, 128) + 128][None].to(dtype)
    elif case.kind == "alibi":
        slopes = poise.alibi_slopes(h)
        ours["bias"] = poise.alibi(slopes)
        theirs["attn_mask"] = (-slopes[:, None, None] * distance.abs())[None].to(dtype)
    return Calls(
        lambda: poise.attention(q, k, v, **ours),  # type: ignore[arg-type]
        lambda: poise.observe(q, k, v, **ours),  # type: ignore[arg-type]
        lambda: F.scaled_dot_product_attention(q, k, v, **theirs),  # type: ignore[arg-type]
        lambda: poise.attention(q, k, v, impl="blockwise", **ours),  # type: ignore[arg-type]
    )
