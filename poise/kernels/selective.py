"""Products over visible pairs only, for operands that hold a NaN or an infinity.

A masked pair has weight 0, and in an ordinary product 0 * NaN leaks, forward and backward. `pair` and `mix` select
instead, and the derivative of each is made of the two, so that they are right to any order and in both modes. They cost
several ordinary products each: `needs_care` tells when they are needed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from poise.problem import Problem


def needs_care(problem: Problem, *tensors: Tensor) -> bool:
    """Whether a NaN or an infinity could leak out of a masked pair. Asks the device once; yes if it can't be asked."""
    if problem.mask is None and not problem.bias:
        return False
    if torch.compiler.is_compiling() or (problem.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    try:
        with torch.no_grad():
            extremes = [x for tensor in tensors if tensor.numel() for x in torch.aminmax(tensor)]
            return bool(extremes) and not bool(torch.stack(extremes).isfinite().all())
    except RuntimeError:  # under vmap there is no single answer
        return True


def pair(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    """a [.., n, d], b [.., m, d], visible [.., n, m] -> a . b where visible, 0 elsewhere: [.., n, m]."""
    product: Tensor = _Pair.apply(a, b, visible)  # type: ignore[no-untyped-call]
    return product


def mix(w: Tensor, x: Tensor, visible: Tensor) -> Tensor:
    """w [.., n, m], x [.., m, d], visible [.., n, m] -> sum of w x over visible pairs, per IEEE: [.., n, d]."""
    product: Tensor = _Mix.apply(w, x, visible)  # type: ignore[no-untyped-call]
    return product


class _Pair(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
        return torch.where(visible, a @ b.mT, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b, visible = ctx.saved_tensors
        d_a = mix(grad, b, visible) if ctx.needs_input_grad[0] else None
        d_b = mix(grad.mT, a, visible.mT) if ctx.needs_input_grad[1] else None
        return d_a, d_b, None

    @staticmethod
    def jvp(ctx: Any, a_t: Tensor | None, b_t: Tensor | None, _: None) -> Tensor:
        a, b, visible = ctx.saved_tensors
        parts = ([] if a_t is None else [pair(a_t, b, visible)]) + ([] if b_t is None else [pair(a, b_t, visible)])
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class _Mix(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, x: Tensor, visible: Tensor) -> Tensor:
        w = torch.where(visible, w, 0.0)
        finite = torch.where(x.isfinite(), x, 0.0)
        high, low, gone = (y.to(x.dtype) for y in (x == math.inf, x == -math.inf, x.isnan()))
        up, down, still = (y.to(x.dtype) for y in (w > 0, w < 0, visible & (w == 0)))
        # How many visible terms are NaN, +inf and -inf. A count can't cancel, underflow or depend on the order.
        nans = visible.to(x.dtype) @ gone + still @ (high + low)
        ups, downs = up @ high + down @ low, up @ low + down @ high
        out = w @ finite
        out = torch.where(ups > 0, out + math.inf, out)
        out = torch.where(downs > 0, out - math.inf, out)
        return torch.where(nans > 0, math.nan, out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        w, x, visible = ctx.saved_tensors
        d_w = pair(grad, x, visible) if ctx.needs_input_grad[0] else None
        d_x = mix(w.mT, grad, visible.mT) if ctx.needs_input_grad[1] else None
        return d_w, d_x, None

    @staticmethod
    def jvp(ctx: Any, w_t: Tensor | None, x_t: Tensor | None, _: None) -> Tensor:
        w, x, visible = ctx.saved_tensors
        parts = ([] if w_t is None else [mix(w_t, x, visible)]) + ([] if x_t is None else [mix(w, x_t, visible)])
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]
