"""A whole call as one operator, for torch.compile and torch.export; torch.func adds to it in transformed.py.

What looks on there can't follow the lowering of a mask, which is numpy, nor a kernel. So poise::attention takes a call
in pieces (kernels/program.py), lowers inside, where sizes are numbers, and runs the implementation it is told; the
gradients are one more operator, poise::attention_backward. Shapes may stay symbolic outside. First derivatives only.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poise import reference
from poise.kernels import blockwise, ops, training
from poise.kernels.program import Program, read, written
from poise.kernels.tiles import operands, with_operands
from poise.plan import lower
from poise.problem import Problem

_PORTABLE = {"blockwise": blockwise.run, "reference": reference.run}

_PIECES = (
    "Tensor[] operands, Tensor[] tensors, SymInt[] numbers, float scale, float softcap, float dropout, str text, "
    "str impl, bool bshd"
)
_library: Any = torch.library.Library("poise", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"attention({_PIECES}, bool stats, bool save) -> (Tensor out, Tensor packed, Tensor saved)")
_library.define(
    f"attention_backward({_PIECES}, bool[] wanted, Tensor out, Tensor packed, Tensor saved, "
    "Tensor? d_out, Tensor? d_packed) -> Tensor[]"
)


def run(problem: Problem, impl: str, stats: bool, save: bool, bshd: bool) -> tuple[Tensor, Tensor | None]:
    """Output and packed statistics by the named implementation; `save` what a backward pass needs."""
    out, packed, _ = attention(*written(problem), impl, bshd, stats, save)
    return out, packed if stats else None


# What the operators compute.


def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *pieces, impl, bshd, stats, save = arguments
    problem = read(Program(*pieces))
    with torch.no_grad():
        if impl != "cpu":
            problem = problem.dense()
        if impl == "cpu":
            plan = lower(problem.mask, problem.bias, problem.shape, problem.offset, problem.q.device)
            out, packed, saved = ops.forward(problem, plan, stats, save, bshd)
        else:
            computed, packed = _PORTABLE[impl](problem, stats)
            out = ops.empty_out(problem.q, problem.v, bshd).copy_(computed)
            saved = out.new_empty(0, dtype=torch.float32)
        out = out.to(pieces[0][0].dtype)  # a cache may be in another
        return out, out.new_empty(0, dtype=_packed_dtype(out)) if packed is None else packed, saved


def _attention_backward(*arguments: Any) -> list[Tensor]:
    *pieces, impl, _, wanted, out, packed, saved, d_out, d_packed = arguments
    problem = read(Program(*pieces))
    if impl != "cpu":
        gradients = _recorded_gradients(problem, _PORTABLE[impl], wanted, d_out, d_packed)
        laid_out = (_empty_gradient(position, x) for position, x in enumerate(pieces[0]))
        return [x.copy_(gradient) for x, gradient in zip(laid_out, gradients, strict=True) if gradient is not None]
    with torch.no_grad():
        plan = lower(problem.mask, (), problem.shape, problem.offset, problem.q.device)
        if d_out is None:
            d_out = torch.zeros_like(out)
        found = training.gradients_of(problem, plan, wanted, out, saved, packed, d_out, d_packed)
        return [x for x in found if x is not None]


def _recorded_gradients(
    problem: Problem, implementation: Any, wanted: Sequence[bool], d_out: Tensor | None, d_packed: Tensor | None
) -> list[Tensor | None]:
    """By torch's own differentiation of an implementation in torch ops, which is switched off inside operators."""
    leaves = [x.detach().requires_grad_(want) for x, want in zip(operands(problem), wanted, strict=True)]
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        results = implementation(with_operands(problem, leaves), d_packed is not None)
        pairs = [(x, g) for x, g in zip(results, (d_out, d_packed), strict=True) if g is not None]
        outputs, incoming = zip(*pairs, strict=True)
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(outputs, sources, incoming, allow_unused=True, materialize_grads=True))
    return [next(found) if want else None for want in wanted]


def _empty_gradient(position: int, like: Tensor) -> Tensor:
    """Memory for the gradient of an operand; q, k and v are the first."""
    return ops.empty_rows(like) if position < 3 else like.new_empty(like.shape)


def _packed_dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype is torch.float64 else torch.float32


# What they return: shapes, dtypes and strides only.


def _fake_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    operands, *_, impl, bshd, stats, save = arguments
    q, v = operands[0], operands[2]
    rows = q.shape[:3]
    packed = q.new_empty((ops.FIELDS, *rows) if stats else 0, dtype=_packed_dtype(q))
    saved = q.new_empty((ops.SAVED, *rows) if save and impl == "cpu" else 0, dtype=torch.float32)
    return ops.empty_out(q, v, bshd), packed, saved


def _fake_attention_backward(*arguments: Any) -> list[Tensor]:
    operands, wanted = arguments[0], arguments[9]
    return [
        _empty_gradient(position, like)
        for position, (like, want) in enumerate(zip(operands, wanted, strict=True))
        if want
    ]


# Derivatives.


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, tensors, *ctx.rest, ctx.stats, ctx.saved = inputs
    ctx.count = len(operands)
    ctx.save_for_backward(*operands, *tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, d_out: Tensor | None, d_packed: Tensor | None, _: None) -> tuple[Any, ...]:
    *tensors, out, packed, saved = ctx.saved_tensors
    operands, tensors = tensors[: ctx.count], tensors[ctx.count :]
    wanted = list(ctx.needs_input_grad[0])
    incoming = d_out, d_packed if ctx.stats else None
    gradients: list[Tensor | None] = [None] * len(operands)
    if any(x is not None for x in incoming):
        found = iter(attention_backward(operands, tensors, *ctx.rest, wanted, out, packed, saved, *incoming))
        gradients = [next(found) if want else None for want in wanted]
    return gradients, [None] * len(tensors), *(None,) * 9


def _not_twice(ctx: Any, *_: Any) -> None:
    raise RuntimeError(training.ONCE)


for _name, _compute, _fake in (
    ("attention", _attention, _fake_attention),
    ("attention_backward", _attention_backward, _fake_attention_backward),
):
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"poise::{_name}", _fake, lib=_library)
torch.library.register_autograd("poise::attention", _differentiated, setup_context=_save, lib=_library)
torch.library.register_autograd("poise::attention_backward", _not_twice, lib=_library)

attention: Any = torch.ops.poise.attention.default
attention_backward: Any = torch.ops.poise.attention_backward.default
