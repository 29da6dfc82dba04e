"""The CPU kernels as torch operators: finds and loads the library, and turns a lowered problem into one call.

Loading happens once, on import. Where there is no library (no compiler at install time, or another platform) the import
succeeds, `why_missing` tells, and `run` refuses; everything else in poise keeps working. Chooses nothing and validates
nothing that register.cpp checks itself; who asks for gradients, and what becomes of them, is training.py's.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from poise.plan import Plan
    from poise.problem import Problem

LIBRARY = "libpoise.so"
FIELDS = 11  # rows of the packed statistics, as in stats.FIELDS and forward.h
SAVED = 2  # numbers a row that a backward call needs
_TABLE = 23  # where the table stands among the arguments of a call
UNBOUNDED = 1 << 40  # forward.h's kUnbounded: no limit on that side


def available() -> bool:
    """Whether the native kernels are loaded."""
    return _missing == ""


def why_missing() -> str:
    """Why the native kernels are not loaded, and what to do; empty when they are."""
    return _missing


def isa() -> str:
    """The instruction set the kernels use here: base, avx2, avx512, avx512bf16 or neon (POISE_ISA overrides)."""
    _require()
    name = cast("ctypes.CDLL", _library).poise_isa()
    return cast(bytes, name).decode()


def run(problem: Problem, plan: Plan, stats: bool, bshd: bool = False) -> tuple[Tensor, Tensor | None]:
    """The output [B, H, N, Dv] in q's dtype, and the packed statistics [11, B, H, N] or None.

    With `bshd` the output's memory is [B, N, H, Dv].
    """
    out, packed, _ = forward(problem, plan, stats, False, bshd)
    return out, packed


def forward(problem: Problem, plan: Plan, stats: bool, save: bool, bshd: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """`run`, and what a backward call needs of each row's softmax, [2, B, H, N] (empty without `save`)."""
    _require()
    out, packed, saved = torch.ops.poise.forward.default(*arguments(problem, plan, stats), stats, save, bshd)
    return out, packed if stats else None, saved


def arguments(problem: Problem, plan: Plan, stats: bool) -> tuple[Any, ...]:
    """What poise::forward, backward and bias_gradient are told of a call, in the order of their schemas."""
    per_row = isinstance(problem.scale, Tensor)
    offset, offsets = (0, problem.offset) if isinstance(problem.offset, Tensor) else (problem.offset, None)
    sink_keys = (
        torch.tensor(problem.sink_keys, dtype=torch.int32, device="cpu") if stats and problem.sink_keys else None
    )
    assert isinstance(problem.seed, int)
    return (
        rows(problem.q),
        rows(problem.k),
        rows(problem.v),
        1.0 if per_row else problem.scale,
        _float32(problem.scale) if per_row else None,
        problem.softcap or 0.0,
        _float32(problem.sink),
        problem.dropout,
        problem.seed - (problem.seed >> 63 << 64),  # the same 64 bits, signed
        plan.left,
        plan.right,
        offset,
        None if offsets is None else offsets.contiguous(),
        plan.start,
        plan.end,
        plan.rows,
        plan.tile_ptr,
        plan.tile_runs,
        plan.patterns,
        *_pair(plan.masks),
        *_pair([_narrow(bias) for bias in plan.biases]),
        _float32(plan.table),
        _float32(plan.slopes),
        sink_keys,
        *_cache(problem),
    )


def _cache(problem: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None, int | None]:
    """pages, k_scale, v_scale and keys: what k and v do not say where they are a cache's storage."""
    view = problem.view
    return (None, None, None, None) if view is None else (view.pages, view.k_scale, view.v_scale, view.keys)


def rows(tensor: Tensor) -> Tensor:
    """The tensor itself where its last dim is contiguous, as kernels need it, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _float32(tensor: Any) -> Any:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _narrow(bias: Tensor) -> Tensor:
    """A bias kernels can read: float64 becomes float32, converted before it is broadcast, never after."""
    if bias.dtype != torch.float64:
        return bias
    own = bias[tuple(slice(0, 1) if step == 0 else slice(None) for step in bias.stride())]
    return own.to(torch.float32).expand(bias.shape)


def _pair(tensors: Any) -> tuple[Tensor | None, Tensor | None]:
    first, second = (*tensors, None, None)[:2]
    return first, second


def _require() -> None:
    if _missing:
        raise RuntimeError(_missing)


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The library and "", or None and why there is none. An editable install has the package in two folders."""
    folders = [Path(folder) for folder in sys.modules["poise.kernels"].__path__]
    named = os.environ.get("POISE_LIBRARY")  # another build of the library, for sanitizer runs
    found = [Path(named)] if named else [folder / LIBRARY for folder in folders if (folder / LIBRARY).is_file()]
    if not found:
        return None, (
            f"the native library {LIBRARY} is not installed: there was no C++ compiler when poise was, or the "
            "platform is not supported. Install one (such as g++) and reinstall poise"
        )
    try:
        torch.ops.load_library(found[0])  # type: ignore[no-untyped-call]
        library = ctypes.CDLL(str(found[0]))
        library.poise_registration_failure.restype = ctypes.c_char_p
        library.poise_isa.restype = ctypes.c_char_p
        failure = library.poise_registration_failure()
    except (OSError, AttributeError) as error:
        failure = str(error).encode()
    if failure:
        return None, (
            f"{found[0]} does not load with torch {torch.__version__}: {failure.decode()}. poise needs torch >= 2.10; "
            "reinstall poise"
        )
    return library, ""


def empty_out(q: Tensor, v: Tensor, bshd: bool) -> Tensor:
    """Memory for an output."""
    batch, heads, queries, _ = q.shape
    if bshd:
        return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
    return q.new_empty(batch, heads, queries, v.shape[3])


def _fake_stats(q: Tensor, stats: bool) -> Tensor:
    return q.new_empty((FIELDS if stats else 0, *q.shape[:3]), dtype=torch.float32)


def empty_rows(like: Tensor, wanted: bool = True) -> Tensor:
    """Memory for a gradient of q, k or v: in the same order as kernels read it, empty if not wanted."""
    like = rows(like)
    batch, heads, length, dim = like.shape
    batch = batch if wanted else 0
    if like.stride(1) < like.stride(2):
        return like.new_empty(batch, length, heads, dim).transpose(1, 2)
    return like.new_empty(batch, heads, length, dim)


def _register_fakes() -> None:
    """What the operators return, for torch.compile and export: shapes, dtypes and strides only."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        stats, save, bshd = rest[-3:]
        saved = q.new_empty((SAVED if save else 0, *q.shape[:3]), dtype=torch.float32)
        return empty_out(q, v, bshd), _fake_stats(q, stats), saved

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return empty_out(q, v, rest[-1])

    def attend_observed(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return empty_out(q, v, rest[-1]), _fake_stats(q, True)

    def attend_saved(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return empty_out(q, v, rest[-1]), q.new_empty((SAVED, *q.shape[:3]), dtype=torch.float32)

    def attend_backward(d_out: Tensor, out: Tensor, saved: Tensor, *call: Any) -> tuple[Tensor, ...]:
        wanted = call[-1]
        return tuple(empty_rows(x, bool(wanted & bit)) for x, bit in zip(call[:3], (1, 2, 4), strict=True))

    def backward(d_out: Tensor, out: Tensor, saved: Tensor, stats: Any, d_stats: Any, *call: Any) -> tuple[Tensor, ...]:
        *_, wanted = call
        q, k, v = call[:3]
        table = call[_TABLE]
        batch, heads, queries, _ = q.shape
        shapes = ((heads, 1 if table is None else table.shape[1]), (heads,), (batch, heads, queries))

        def packed(bit: int, first: Any, *rest: Any) -> Tensor:
            made: Tensor = q.new_empty((first if wanted & bit else 0, *rest), dtype=torch.float32)
            return made

        rows = [empty_rows(x, bool(wanted & bit)) for x, bit in ((q, 1), (k, 2), (v, 4))]
        return (*rows, *(packed(bit, *shape) for bit, shape in zip((8, 16, 32, 64), (*shapes, shapes[2]), strict=True)))

    def bias_gradient(d_out: Tensor, *rest: Any) -> Tensor:
        return d_out.new_empty(rest[-4:], dtype=torch.float32)

    fakes: tuple[Callable[..., Any], ...] = (
        forward,
        backward,
        bias_gradient,
        attend,
        attend_observed,
        attend_saved,
        attend_backward,
    )
    for fake in fakes:
        torch.library.register_fake(f"poise::{fake.__name__}", fake)


def _absent(*_: Any) -> Any:
    raise RuntimeError(_missing)


_library, _missing = _load()
if not _missing:
    _register_fakes()

# (q, k, v, scale | None, left, right, offset, bshd): a band and nothing else, 4-D inputs, least overhead. Anything
# irregular raises. attend_observed also returns the packed statistics, with key 0 as the only sink key; attend_saved
# what attend_backward(d_out, out, saved, q, k, v, scale, left, right, offset, wanted) needs, the bits 1, 2 and 4 of
# `wanted` asking for the gradients of q, k and v.
_plain = torch.ops.poise
attend: Callable[..., Tensor] = _absent if _missing else _plain.attend.default
attend_observed: Callable[..., tuple[Tensor, Tensor]] = _absent if _missing else _plain.attend_observed.default
attend_saved: Callable[..., tuple[Tensor, Tensor]] = _absent if _missing else _plain.attend_saved.default
attend_backward: Callable[..., tuple[Tensor, ...]] = _absent if _missing else _plain.attend_backward.default
