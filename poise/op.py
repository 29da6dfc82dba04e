"""The public operator: attention, and the same call observed, tile by tile, or seen from the keys.

No arithmetic here. A call that is plain data already (a band or no mask, no bias, cap, sink or dropout) goes straight
to the native op, which checks what it reads; every other, and whatever that op refuses, is validated
(problem.py) and run by the implementation that dispatch.py chooses. Keys and values may lie in a cache (kvview.py).

Here is the one slot through which a watch sees attention (`set_observer`, torch_hook.py); empty, it costs nothing.

Letters: B batch, H query heads, G key/value heads, N queries, M keys, Dk and Dv head dims.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from poise import reference
from poise.arguments import BiasLike, Layout, MaskLike, OffsetLike, ScaleLike
from poise.dispatch import EVERYTHING, REFUSALS, Impl, attend, attend_observed, band_of, is_plain, run, wants_grad
from poise.kernels import blockwise, training
from poise.kvview import KVView
from poise.problem import Problem, prepare
from poise.stats import ScoreStats

_LARGEST = sys.float_info.max
_FIRST_KEY = (0,)


class Scored(NamedTuple):
    """What a call's statistics are of: `scores(q, k, **options)` are its scores. Valid during the call only."""

    q: Tensor
    k: Tensor | KVView
    options: dict[str, Any]


# Asked at each call; answers what to do with the statistics of this one, or None if nobody wants them.
Observer: TypeAlias = Callable[[], Callable[[ScoreStats, Scored], None] | None]
_observer: Observer | None = None


class _Here(threading.local):
    unobserved = False  # whether this thread's next call is to run as if nobody watched


_here = _Here()


def set_observer(observer: Observer | None) -> None:
    """Fills or empties the slot; whoever fills it shares it out among the watches (torch_hook.py)."""
    global _observer
    _observer = observer


def attention(
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
    layout: Layout = "bhsd",
    impl: Impl | None = None,
) -> Tensor:
    """Exact attention: softmax(scale · q kᵀ + bias) v over the keys that the mask leaves.

    With z = scale · q·k, c = softcap · tanh(z / softcap), s = c + bias: p = softmax(s) over visible keys and the sink,
    out = Σ p v. A query that sees no key returns 0. Masked keys never matter, even if they hold NaN.

    q, k, v: [B, H, N, Dk], [B, G, M, Dk], [B, G, M, Dv] with H a multiple of G (query head h reads key/value head
        h // (H // G)); [H, N, D] and [N, D] are accepted too. float32, bfloat16, float16 or float64. No copy is made
        of strided tensors whose last dim is contiguous. Under torch.autocast they take its dtype. k may be a cache's
        view (`cache.view(layer)`, a `KVView`), v is then left out: B sequences of different lengths, in any of the
        cache's dtypes; no gradients.
    mask: who may attend to whom: `causal()`, `window(...)`, ... joined by `&`, `|`, `~`, or a bool tensor that
        broadcasts to [B, H, N, M], True = may attend. Only masks let work be skipped.
    bias: added to the scores: a tensor that broadcasts to [B, H, N, M], `alibi(...)`, `relative(...)`, or a sum.
    scale: None for 1/√Dk, a number, or a tensor: 0-D, [H] or [B|1, H|1, N|1].
    softcap: a positive number, or None for no cap.
    sink: a logit per query head [H], neither scaled nor capped, that takes probability and has no value.
    dropout: the probability to drop a weight; the seed comes from torch's CPU generator, once per call.
    q_offset: key position of the first query: an int, a tensor [B], "start" (0) or "end" (M - N). Needed when N != M
        and the mask or bias depends on positions. With a view the default is "end", for each sequence its own.
    layout: "bhsd", or "bshd" for tensors [B, N, H, D], the output included; never a copy. A view is as it is.
    impl: "cpu" (native kernels), "blockwise" (torch ops, any device) or "reference" (dense). What is asked for runs
        or raises; None takes the best that can, and `explain` tells which.

    Returns [B, H, N, Dv] in the dtype of q.

    >>> q, k, v = (torch.randn(1, 8, 128, 64) for _ in range(3))
    >>> poise.attention(q, k, v, mask=poise.causal()).shape
    torch.Size([1, 8, 128, 64])
    """
    if _observer is not None and not _here.unobserved and _observer() is not None:
        return _watched(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout=dropout,
            q_offset=q_offset,
            layout=layout,
            impl=impl,
        )
    keys: Any
    values: Any
    try:
        if (
            attend is not None
            and bias is None
            and softcap is None
            and sink is None
            and dropout == 0
            and (scale is None or (type(scale) is float and -_LARGEST <= scale <= _LARGEST))
            and (impl is None or impl == "cpu")
        ):
            keys, values, at = (k, v, q_offset) if type(k) is not KVView else _opened(q, k, v, q_offset, layout)
            band = EVERYTHING if mask is None and q_offset is None else band_of(mask, at, q, keys, layout)
            if band is not None and is_plain(q, keys, values):
                attending = training.attend if wants_grad(q, keys, values) else attend
                if layout == "bhsd":
                    return attending(q, keys, values, scale, *band, False)
                if layout == "bshd":
                    return attending(*_swapped(q, keys, values), scale, *band, True).transpose(1, 2)
    except REFUSALS:
        pass
    problem = prepare(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        dropout=dropout,
        q_offset=q_offset,
        layout=layout,
    )
    out, _ = run(problem, impl, False, layout)
    return _as_given(out, q.dim(), layout)


def observe(
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
    layout: Layout = "bhsd",
    impl: Impl | None = None,
    sink_keys: Iterable[int] = _FIRST_KEY,
) -> tuple[Tensor, ScoreStats]:
    """`attention` that also returns what its scores were like, from the same pass: (out, stats).

    Arguments as in `attention`. sink_keys: the keys whose joint probability `stats.sink_mass` tells, by default the
    first, where attention sinks form; keys beyond the last are ignored.

    The statistics are one value per query row, [B, H, N] for either layout: lse, max_logit, entropy, ... (see
    `ScoreStats`), before dropout, differentiable; `stats.reduce("head")` summarises them.

    >>> q, k, v = (torch.randn(1, 8, 128, 64) for _ in range(3))
    >>> out, stats = poise.observe(q, k, v, mask=poise.causal())
    >>> stats.entropy.shape
    torch.Size([1, 8, 128])
    """
    made: tuple[Tensor, ScoreStats] | None = None
    keys: Any
    values: Any
    try:
        if (
            attend_observed is not None
            and bias is None
            and softcap is None
            and sink is None
            and dropout == 0
            and (scale is None or (type(scale) is float and -_LARGEST <= scale <= _LARGEST))
            and (impl is None or impl == "cpu")
            and sink_keys == _FIRST_KEY
        ):
            keys, values, at = (k, v, q_offset) if type(k) is not KVView else _opened(q, k, v, q_offset, layout)
            band = EVERYTHING if mask is None and q_offset is None else band_of(mask, at, q, keys, layout)
            if band is not None and is_plain(q, keys, values) and not wants_grad(q, keys, values):
                if layout == "bhsd":
                    out, packed = attend_observed(q, keys, values, scale, *band, False)
                    made = out, ScoreStats(packed, None, _FIRST_KEY)
                elif layout == "bshd":
                    out, packed = attend_observed(*_swapped(q, keys, values), scale, *band, True)
                    made = out.transpose(1, 2), ScoreStats(packed, None, _FIRST_KEY, "bshd")
    except REFUSALS:
        pass
    if made is None:
        problem = prepare(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sink=sink,
            dropout=dropout,
            q_offset=q_offset,
            layout=layout,
            sink_keys=sink_keys,
        )
        out, rows = run(problem, impl, True, layout)
        assert rows is not None
        packed = rows[(slice(None),) + (0,) * (4 - q.dim())]  # [11, B, H, N], [11, H, N] or [11, N]
        made = _as_given(out, q.dim(), layout), ScoreStats(packed, problem.sink, problem.sink_keys, layout)
    if _observer is not None and (receive := _observer()) is not None:
        options = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sink": sink}
        receive(made[1], Scored(q, k, {**options, "q_offset": q_offset, "layout": layout}))
    return made


def scores(
    q: Tensor,
    k: Tensor | KVView,
    *,
    rows: slice = slice(None),
    keys: slice = slice(None),
    stage: reference.Stage = "biased",
    lse: Tensor | None = None,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    scale: ScaleLike | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    q_offset: OffsetLike | None = None,
    layout: Layout = "bhsd",
) -> Tensor:
    """A tile of the score matrix, for looking at: [B, H, rows, keys] (less the dims that q left out), float32 or 64.

    stage: "raw", z = scale · q·k, and "capped", softcap · tanh(z / softcap), show every pair, masked or not; "biased"
        adds the bias and holds -inf where masked; "prob" is the attention weight, before dropout, 0 where masked.
    rows, keys: slices of queries and keys; the default is all, N × M values per head.
    lse: for "prob", the normaliser [B, H, N] that `observe` gave (`stats.lse`): without it all keys are computed.

    The other arguments are those of `attention`. Dense, in plain torch, differentiable.

    >>> q, k = torch.randn(1, 8, 128, 64), torch.randn(1, 8, 128, 64)
    >>> poise.scores(q, k, mask=poise.causal(), rows=slice(-1, None), stage="prob").sum(-1)  # 1 for every head
    """
    if stage not in reference.STAGES:
        raise ValueError(f"stage must be one of {', '.join(map(repr, reference.STAGES))}; got {stage!r}")
    problem = prepare(
        q,
        *_keys_alone(k),
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink=sink,
        q_offset=q_offset,
        layout=layout,
    ).dense()
    if lse is not None:
        if stage != "prob":
            raise ValueError(f'lse normalises stage="prob"; got stage={stage!r}. Leave lse out')
        lse = _check_lse(lse, problem, q.dim())
    length, width = problem.shape[2:]
    chosen_rows, chosen_keys = _indices("rows", rows, length, q), _indices("keys", keys, width, q)
    tile = reference.score_tile(problem, chosen_rows, chosen_keys, stage, lse)
    return tile[(0,) * (4 - q.dim())]


def received(
    q: Tensor,
    k: Tensor | KVView,
    lse: Tensor,
    *,
    mask: MaskLike | None = None,
    bias: BiasLike | None = None,
    scale: ScaleLike | None = None,
    softcap: float | None = None,
    q_offset: OffsetLike | None = None,
    layout: Layout = "bhsd",
) -> Tensor:
    """The attention each key receives, summed over queries: [B, H, M] (less the dims that q left out), float32 or 64.

    One more pass over q kᵀ in O(N · block + M) memory, for ranking keys of a cache and for finding sinks. lse [B, H, N]
    is `stats.lse` of `observe` on the same q and k with the same mask, bias, scale, softcap and q_offset; if that call
    had a sink, lse knows of it, and the sums are smaller by what the sink took.

    >>> out, stats = poise.observe(q, k, v, mask=poise.causal())
    >>> poise.received(q, k, stats.lse, mask=poise.causal()).sum(-1)  # N for every head
    """
    problem = prepare(
        q, *_keys_alone(k), mask=mask, bias=bias, scale=scale, softcap=softcap, q_offset=q_offset, layout=layout
    ).dense()
    return blockwise.received(problem, _check_lse(lse, problem, q.dim()))[(0,) * (4 - q.dim())]


def _opened(q: Tensor, view: KVView, v: object, q_offset: object, layout: str) -> tuple[Any, Any, object]:
    """A view's keys, values and default offset; refused where these do not say everything, or a gradient is wanted."""
    if v is not None or not view.plain or layout != "bhsd" or wants_grad(q, view.k, view.v):
        raise ValueError
    return view.k, view.v, "end" if q_offset is None else q_offset


def _watched(q: Tensor, k: Tensor | KVView, v: Tensor | None, **options: Any) -> Tensor:
    """`attention`, whose statistics the observer wants."""
    if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return observe(q, k, v, **options)[0]
    # A checkpoint will run this call again, unobserved, and must find the same tensors saved: statistics come apart.
    _here.unobserved = True
    try:
        out = attention(q, k, v, **options)
    finally:
        _here.unobserved = False
    with torch.no_grad():
        observe(q, k, v, **{**options, "dropout": 0.0})
    return out


def _swapped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, N, D] views of [B, N, H, D] tensors."""
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _keys_alone(k: Tensor | KVView) -> tuple[Tensor | KVView, Tensor | None]:
    """k and v for a call that reads no values."""
    return (k, None) if isinstance(k, KVView) else (k, k)


def _as_given(out: Tensor, rank: int, layout: Layout) -> Tensor:
    """[B, H, N, Dv] in the caller's layout, without the dims that q left out."""
    if layout == "bshd":
        out = out.transpose(1, 2)
        return out if rank == 4 else out[0] if rank == 3 else out[0, :, 0]
    return out if rank == 4 else out[0] if rank == 3 else out[0, 0]


def _check_lse(lse: Tensor, problem: Problem, rank: int) -> Tensor:
    """[B, H, N] from the form that a call with q of this rank returns."""
    if not isinstance(lse, Tensor):
        raise TypeError(f"lse must be a tensor such as stats.lse; got {type(lse).__name__}")
    rows = problem.shape[4 - rank : 3]
    if tuple(lse.shape) != rows:
        raise ValueError(
            f"lse must hold one value per query row, {list(rows)}; got {list(lse.shape)}. "
            "Pass the stats.lse that observe returned for these queries"
        )
    if lse.device != problem.q.device:
        raise ValueError(f"lse must be on the device of q, {problem.q.device}; got {lse.device}")
    return lse.reshape(problem.shape[:3])


def _indices(name: str, part: slice, length: int, like: Tensor) -> Tensor:
    """The positions that a slice selects."""
    if not isinstance(part, slice):
        raise TypeError(f"{name} must be a slice such as slice(0, 16); got {type(part).__name__}")
    start, stop, step = part.indices(length)
    return torch.arange(start, max(start, stop) if step > 0 else min(start, stop), step, device=like.device)
