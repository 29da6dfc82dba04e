"""One validated call: what every implementation receives.

`prepare` turns what a user wrote (any accepted rank, layout, scale form, offset word) into a `Problem` in one normal
form, or raises (arguments.py). It computes nothing, draws no seed, and chooses no implementation (dispatch.py does).

Letters: B batch, H query heads, G key/value heads, N queries, M keys, Dk and Dv head dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from poise.arguments import (
    BiasLike,
    MaskLike,
    OffsetLike,
    ScaleLike,
    check_bias,
    check_dropout,
    check_mask,
    check_offset,
    check_scale,
    check_sink,
    check_sink_keys,
    check_softcap,
    check_tensors,
    check_view,
)
from poise.dropout import UNDRAWN, Seed, draw_seed
from poise.kvview import KVView
from poise.mask import Lowered, Mask, lengths
from poise.score import Alibi, Bias, Dense, Relative

# Asked once: torch 2.11 cannot trace the question.
_AUTOCASTING = frozenset(device for device in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(device))


@dataclass(frozen=True, slots=True)
class Problem:
    """A valid attention call in normal form; every field may be trusted by implementations."""

    q: Tensor  # [B, H, N, Dk]
    k: Tensor  # [B, G, M, Dk]; query head h reads key/value head h // (H // G)
    v: Tensor  # [B, G, M, Dv]
    mask: Mask | None
    bias: tuple[Bias, ...]
    scale: float | Tensor  # tensor: [B|1, H|1, N|1], fp32 (fp64 for fp64 q)
    softcap: float | None
    sink: Tensor | None  # [H], fp32 (fp64 for fp64 q)
    dropout: float
    seed: Seed  # 0 without dropout; UNDRAWN until the call runs (`seeded`)
    offset: int | Tensor  # int, or int64 [B]: query i stands at key position i + offset
    sink_keys: tuple[int, ...]  # sorted, unique, 0 <= key < M
    # Set where k and v are a cache's storage that ordinary tensors can't say everything about: pages, int8 with scales,
    # or another dtype than q's. Its lengths are part of the mask. Never with gradients.
    view: KVView | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2] if self.view is None else self.view.keys

    def dense(self) -> Problem:
        """The same call for implementations that read ordinary tensors: k, v gathered, all in the widest dtype."""
        if self.view is None:
            return self
        dtype = torch.promote_types(self.q.dtype, self.view.dtype)
        k, v = self.view.dense(dtype)
        return replace(self, q=self.q.to(dtype), k=k, v=v, view=None)

    def differentiable(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor a gradient may flow to, with the name of the argument it came in by."""
        yield "q", self.q
        yield "k", self.k
        yield "v", self.v
        for term in self.bias:
            if isinstance(term, Dense):
                yield "bias", term.tensor
            elif isinstance(term, Alibi):
                yield "bias", term.slopes
            elif isinstance(term, Relative):
                yield "bias", term.table
        if isinstance(self.scale, Tensor):
            yield "scale", self.scale
        if self.sink is not None:
            yield "sink", self.sink


def seeded(problem: Problem) -> Problem:
    """With the seed of its dropout: drawn last, for a call that raises must not advance the generator."""
    undrawn = isinstance(problem.seed, int) and problem.seed == UNDRAWN
    return replace(problem, seed=draw_seed()) if undrawn else problem


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """What torch's autocast does to its own attention: float tensors, but for float64, take the autocast dtype."""
    device = next((tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)), "")
    if device not in _AUTOCASTING or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64 else x
        for x in tensors
    )


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """For products in torch ops, which autocast would run in half precision."""
    if device.type in _AUTOCASTING and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def prepare(
    q: Tensor,
    k: Tensor | KVView,
    v: Tensor | None = None,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    scale: ScaleLike | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    q_offset: OffsetLike | None = None,
    layout: str = "bhsd",
    sink_keys: Iterable[int] = (),
) -> Problem:
    """Validate one call and bring it to normal form; raises TypeError or ValueError naming the argument."""
    q, k, v = autocast(q, k, v)
    view: KVView | None
    if isinstance(k, KVView):
        q, view = check_view(q, k, v, layout)
        k, v = view.k, view.v
    else:
        view = None
        q, k, v = check_tensors(q, k, v, layout)
    batch, heads, queries, dim = q.shape
    shape = (batch, heads, queries, k.shape[2] if view is None else view.keys)  # B, H, N, M
    checked_mask = check_mask(mask, shape, q.device)
    checked_bias = check_bias(bias, shape, q)
    by_default = q_offset is None and not isinstance(checked_mask, Lowered)
    if view is not None and (by_default or (isinstance(q_offset, str) and q_offset == "end")):
        q_offset = "end" if view.even else view.lengths.long() - queries
    offset = check_offset(q_offset, shape, q.device, checked_mask, checked_bias)
    if isinstance(checked_mask, Lowered):
        checked_mask.check_offset(offset)
    if view is not None and not view.even:
        present = lengths(view.lengths)
        checked_mask = present if checked_mask is None else checked_mask & present
    p = check_dropout(dropout)
    problem = Problem(
        q=q,
        k=k,
        v=v,
        mask=checked_mask,
        bias=checked_bias,
        scale=check_scale(scale, shape, q, dim),
        softcap=check_softcap(softcap),
        sink=check_sink(sink, heads, q),
        dropout=p,
        offset=offset,
        sink_keys=check_sink_keys(sink_keys, shape[3]),
        seed=UNDRAWN if p else 0,
        view=view if view is not None and (view.pages is not None or view.k.dtype != q.dtype) else None,
    )
    if view is not None and torch.is_grad_enabled():
        for name, tensor in problem.differentiable():
            if tensor.requires_grad:
                raise ValueError(
                    f"{name} requires a gradient, and none passes through a cache: call under torch.no_grad(), or pass "
                    "tensors k and v for training"
                )
    return problem
