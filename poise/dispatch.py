"""Which implementation runs a validated call, and running it.

The choice is never silent: what is asked for by name runs or raises, and every choice carries its reason. Also here:
what op.py must know to spare plain calls both validation and choice. No arguments are checked here (arguments.py does).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from poise import reference, traced, transformed
from poise.arguments import MAX_OFFSET
from poise.kernels import blockwise, ops, training
from poise.mask import UNBOUNDED, Window
from poise.plan import Plan, lower
from poise.problem import Problem, seeded

Impl: TypeAlias = Literal["cpu", "blockwise", "reference"]
IMPLS = ("cpu", "blockwise", "reference")
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The native ops for plain calls, (q, k, v, scale, left, right, offset, bshd), or None without the native library.
attend: Callable[..., Tensor] | None = ops.attend if ops.available() else None
attend_observed: Callable[..., tuple[Tensor, Tensor]] | None = ops.attend_observed if ops.available() else None
EVERYTHING = (UNBOUNDED, UNBOUNDED, 0)  # left, right, offset
# What an odd argument may raise on the way to these; the validated way then words it, or handles it.
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)

_FLOAT64 = torch.float64
_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_autocasting = torch._C._is_any_autocast_enabled
_transforming = torch._C._are_functorch_transforms_active
_layers = torch._C._functorch.get_interpreter_stack
_Layer = torch._C._functorch.TransformType


class Choice(NamedTuple):
    """The implementation that a call runs on, and why."""

    impl: Impl
    why: str


def choose(problem: Problem, impl: Impl | None) -> Choice:
    """Honours what is asked for, or raises; None takes the native kernels if they can, else torch ops."""
    if impl is None:
        obstacle = _obstacle(problem)
        if obstacle is None:
            return Choice("cpu", "the native kernels can run this call")
        return Choice("blockwise", f"the native kernels cannot run this call: {obstacle.what}")
    if impl not in IMPLS:
        raise ValueError(f"impl must be None or one of {', '.join(map(repr, IMPLS))}; got {impl!r}")
    if impl == "cpu" and (obstacle := _obstacle(problem)) is not None:
        raise obstacle.error(f'impl="cpu" cannot run this call: {obstacle.what}. {obstacle.way_out}')
    return Choice(impl, f'asked for by impl="{impl}"')


class _Obstacle(NamedTuple):
    """What keeps a call from the native kernels, and what to do about it."""

    what: str
    way_out: str
    error: type[Exception] = ValueError


_LEAVE_IMPL = 'leave impl=None or pass impl="blockwise"'


def _obstacle(problem: Problem) -> _Obstacle | None:
    q = problem.q
    if q.device.type != "cpu":
        return _Obstacle(f"q is on {q.device}", f"Move q, k and v with .cpu(), or {_LEAVE_IMPL}")
    if q.dtype not in NATIVE_DTYPES:
        return _Obstacle(
            f"q is {str(q.dtype).removeprefix('torch.')}, they take float32, bfloat16 and float16",
            f"Convert q, k and v, or {_LEAVE_IMPL}",
        )
    differentiable = tuple(problem.differentiable())
    if _under_transform(differentiable):
        return _Obstacle("torch differentiates it twice or in forward mode", f"For this call {_LEAVE_IMPL}")
    if not ops.available():
        return _Obstacle(ops.why_missing().rstrip("."), f"Until then {_LEAVE_IMPL}", RuntimeError)
    return None


def _under_transform(differentiable: tuple[tuple[str, Tensor], ...]) -> bool:
    """Whether torch must see every step: in forward mode, or to differentiate twice. A compiler does neither."""
    if _compiling():
        return False
    if _transforming():
        layers = [layer.key() for layer in _layers() or ()]
        return _Layer.Jvp in layers or layers.count(_Layer.Grad) > 1
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for _, tensor in differentiable
    )


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the native ops may take these tensors as they are: nobody transforms or traces.

    They check for themselves what they read. What is looked at here as well is common, and costs more to refuse there.
    """
    return (
        q.dim() == 4
        and q.dtype is not _FLOAT64
        and q.is_cpu
        and k.is_cpu
        and v.is_cpu
        and not _compiling()
        and not _autocasting()
        and forward_ad._current_level < 0
        and not _transforming()
    )


def wants_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a gradient is to be had, so that a plain call must be `training`'s."""
    return _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def band_of(mask: object, q_offset: object, q: Tensor, k: Tensor, layout: str) -> tuple[int, int, int] | None:
    """(left, right, offset) for a mask that is a band at a known offset, None for anything else."""
    if mask is None:
        left = right = UNBOUNDED
    elif type(mask) is Window:
        left, right = mask.left, mask.right
    else:
        return None
    if type(q_offset) is int:
        return (left, right, q_offset) if -MAX_OFFSET <= q_offset <= MAX_OFFSET else None
    axis = 1 if layout == "bshd" else 2
    queries, keys = q.size(axis), k.size(axis)
    if q_offset is None:
        return (left, right, 0) if queries == keys or mask is None else None
    if not isinstance(q_offset, str):
        return None
    offset = {"start": 0, "end": keys - queries}.get(q_offset)
    return None if offset is None else (left, right, offset)


def run(problem: Problem, impl: Impl | None, stats: bool, layout: str) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, Dv], as a transposed view of [B, N, H, Dv] for layout "bshd", and packed statistics."""
    chosen = choose(problem, impl).impl
    problem = seeded(problem)
    if impl is None and chosen == "blockwise":
        _warn_if_missing(problem)
    return _computed(problem, chosen, stats, layout)


def _computed(problem: Problem, chosen: Impl, stats: bool, layout: str) -> tuple[Tensor, Tensor | None]:
    bshd = layout == "bshd"
    if _compiling():
        save = _grad_enabled() and any(tensor.requires_grad for _, tensor in problem.differentiable())
        return traced.run(problem, chosen, stats, save, bshd)
    if chosen == "cpu" and _transforming():
        return transformed.run(problem, chosen, stats, bshd)
    if problem.view is not None and chosen != "cpu":
        out, packed = _computed(problem.dense(), chosen, stats, layout)
        return out.to(problem.q.dtype), packed
    if chosen == "cpu":
        if _grad_enabled() and any(tensor.requires_grad for _, tensor in problem.differentiable()):
            mask_plan = lower(problem.mask, (), problem.shape, problem.offset, problem.q.device)
            return training.run(problem, mask_plan, stats, bshd)
        return ops.run(problem, lowered(problem), stats, bshd)
    if chosen == "blockwise":
        out, packed = blockwise.run(problem, stats)
    else:
        out, packed = reference.run(problem, stats)
    if bshd:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, packed


def lowered(problem: Problem) -> Plan:
    """The problem's mask and bias as the plain data that kernels read."""
    mask, bias, shape, offset, device = problem.mask, problem.bias, problem.shape, problem.offset, problem.q.device
    return lower(mask, bias, shape, offset, device)


_warned = False


def _warn_if_missing(problem: Problem) -> None:
    """Once per process, where the native kernels would have run if only they were installed."""
    global _warned
    if _warned or ops.available() or problem.q.device.type != "cpu" or _compiling():
        return
    _warned = True
    warnings.warn(
        f"poise computes by torch ops, many times slower than by its CPU kernels: {ops.why_missing()}",
        RuntimeWarning,
        stacklevel=4,
    )
