"""Gradients on the CPU kernels: one call as an autograd function, and its backward pass as calls of the native ops.

The forward pass saves its inputs, its output and two numbers a row; the backward pass computes every score again. First
derivatives only: a second one raises and names blockwise. Validates nothing and chooses nothing (dispatch.py does).

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poise.kernels import ops
from poise.kernels.program import constants
from poise.kernels.tiles import hollow, kinds, operands, with_operands
from poise.plan import Plan, with_biases
from poise.problem import Problem

# Bits of what poise::backward is asked for, as in register.cpp.
_WANTED = {"q": 1, "k": 2, "v": 4, "table": 8, "slopes": 16, "scale": 32, "sink": 64}
ONCE = (
    "the CPU kernels compute first derivatives only, and a second one is being taken. "
    'Pass impl="blockwise" to poise.attention for derivatives of any order'
)
_RESULTS = ("q", "k", "v", "table", "slopes", "scale", "sink")


def run(problem: Problem, mask_plan: Plan, stats: bool, bshd: bool) -> tuple[Tensor, Tensor | None]:
    """`ops.run`, differentiable in every operand. `mask_plan` is the plan of the mask alone."""
    tensors = operands(problem)
    out, packed = _Attention.apply(problem, mask_plan, stats, bshd, *tensors)  # type: ignore[no-untyped-call]
    return out, packed


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int, right: int, offset: int, bshd: bool
) -> Tensor:
    """`ops.attend`, differentiable."""
    out: Tensor = _Plain.apply(q, k, v, scale, left, right, offset, bshd)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, mask_plan: Plan, stats: bool, bshd: bool, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        out, packed, saved = ops.forward(problem, _plan(problem, mask_plan), stats, True, bshd)
        # The graph holds the operands as saved tensors, where in-place checks and offloading hooks see them.
        ctx.shell, ctx.mask_plan = hollow(problem), mask_plan
        ctx.save_for_backward(out, saved, packed, *tensors, *constants(problem))
        ctx.set_materialize_grads(False)
        return out, packed

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_packed: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_packed is None:
            return (None,) * (4 + len(ctx.needs_input_grad[4:]))
        wanted = ctx.needs_input_grad[4:]
        out, saved, packed, *tensors = ctx.saved_tensors[: 3 + len(wanted)]
        problem = with_operands(ctx.shell, tensors)
        if d_out is None:
            d_out = torch.zeros_like(out)

        def gradients() -> list[Tensor | None]:
            return gradients_of(problem, ctx.mask_plan, wanted, out, saved, packed, d_out, d_packed)

        if torch.is_grad_enabled():  # create_graph=True: whoever differentiates again must be told
            passed = [x for x in (d_out, d_packed) if x is not None]
            return None, None, None, None, *_Once.apply(gradients, *passed, *tensors)  # type: ignore[no-untyped-call]
        return None, None, None, None, *gradients()


class _Plain(torch.autograd.Function):
    """The same for a band or no mask, and nothing else: as little as can be between the caller and the kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None,
        left: int,
        right: int,
        offset: int,
        bshd: bool,
    ) -> Tensor:
        out, saved = ops.attend_saved(q, k, v, scale, left, right, offset, bshd)
        ctx.save_for_backward(out, saved, q, k, v)
        ctx.band = scale, left, right, offset
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad
        if torch.is_grad_enabled():

            def gradients() -> tuple[Tensor | None, ...]:
                return _of_plain(wanted, d_out, ctx.saved_tensors, ctx.band)

            return (*_Once.apply(gradients, d_out, *ctx.saved_tensors[2:]), *_NO_BAND)  # type: ignore[no-untyped-call]
        return (*_of_plain(wanted, d_out, ctx.saved_tensors, ctx.band), *_NO_BAND)


_NO_BAND = (None,) * 5


def _of_plain(
    wanted: Sequence[bool], d_out: Tensor, saved: tuple[Tensor, ...], band: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    bits = wanted[0] + 2 * wanted[1] + 4 * wanted[2]
    found = ops.attend_backward(ops.rows(d_out), *saved, *band, bits)
    return found if bits == 7 else tuple(x if want else None for x, want in zip(found, wanted, strict=False))


class _Once(torch.autograd.Function):
    """Gradients, as something that cannot be differentiated; the tensors are what they depend on."""

    @staticmethod
    def forward(ctx: Any, gradients: Callable[[], Sequence[Tensor | None]], *_: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(gradients())

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(ONCE)


def gradients_of(
    problem: Problem,
    mask_plan: Plan,
    wanted: Sequence[bool],
    out: Tensor,
    saved: Tensor,
    packed: Tensor | None,
    d_out: Tensor,
    d_packed: Tensor | None,
) -> list[Tensor | None]:
    """The gradient of each operand that is wanted, in the order of `operands`."""
    names, tensors = kinds(problem), operands(problem)
    plan = _plan(problem, mask_plan)
    asked = {name for name, want in zip(names, wanted, strict=True) if want}
    watched = d_packed is not None
    call = (
        ops.rows(d_out),
        out,
        saved,
        packed if watched else None,
        d_packed.contiguous() if d_packed is not None else None,
        *ops.arguments(problem, plan, watched),
    )
    results: dict[str, Tensor] = {}
    bits = sum(bit for name, bit in _WANTED.items() if name in asked)
    if bits:
        results = dict(zip(_RESULTS, torch.ops.poise.backward.default(*call, bits), strict=True))

    def gradient(name: str, tensor: Tensor) -> Tensor:
        if name == "tensor":
            return _of_dense(call, tensor, problem)
        if name == "table":
            return _of_table(results[name], tensor)
        if name == "slopes":
            return results[name]
        if name == "sink":
            return results[name].sum((0, 2))
        if name == "scale":
            return results[name].sum_to_size(tensor.shape)
        return results[name]

    return [
        gradient(name, tensor).to(tensor.dtype) if want else None
        for name, tensor, want in zip(names, tensors, wanted, strict=True)
    ]


def _plan(problem: Problem, mask_plan: Plan) -> Plan:
    return with_biases(mask_plan, problem.bias, problem.shape)


def _of_dense(call: tuple[Any, ...], tensor: Tensor, problem: Problem) -> Tensor:
    if 0 in problem.shape:
        return torch.zeros_like(tensor)
    gradient: Tensor = torch.ops.poise.bias_gradient.default(*call, *tensor.shape)
    return gradient


def _of_table(gradient: Tensor, table: Tensor) -> Tensor:
    """From the plan's table [H, 2R + 1] to one of the tables it was added up from, shorter or shared by the heads."""
    if table.shape[0] == 1:
        gradient = gradient.sum(0, keepdim=True)
    pad = (gradient.shape[1] - table.shape[1]) // 2
    if pad == 0:
        return gradient
    inner = gradient[:, pad:-pad].clone()  # the plan repeats a shorter table's ends
    inner[:, 0] += gradient[:, :pad].sum(1)
    inner[:, -1] += gradient[:, -pad:].sum(1)
    return inner
