"""The operators of traced.py under torch.func: vmap, and first derivatives by grad, vjp and jacrev.

Each operator is an autograd function here, for torch.func sees through no other; at the bottom it is the operator
again. What is vmapped joins the batch, the first dim of every operand and tensor, in one call. Calls take turns instead
where more than q, k and v has a gradient (it might have to be summed), with a cache (it may be paged) and with dropout
(it counts batch elements). Second derivatives and forward mode are not for kernels: dispatch.py sees to that.

Letters: B batch, V the size of the vmapped dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from poise import traced
from poise.kernels.program import written
from poise.kernels.training import ONCE
from poise.problem import Problem


def run(problem: Problem, impl: str, stats: bool, bshd: bool) -> tuple[Tensor, Tensor | None]:
    """Output and packed statistics by the named implementation."""
    out, packed, _ = _attention(*written(problem), impl, bshd, stats, True)
    return out, packed if stats else None


@dataclass(frozen=True)
class _Rest:
    """What an operator is given beside its tensors, and how many of these there are of either kind."""

    operands: int
    tensors: int
    arguments: tuple[Any, ...]

    def split(self, flat: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...]]:
        whole = self.operands + self.tensors
        return list(flat[: self.operands]), list(flat[self.operands : whole]), tuple(flat[whole:])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(rest: _Rest, *flat: Tensor) -> tuple[Tensor, ...]:
        operands, tensors, _ = rest.split(flat)
        result: tuple[Tensor, ...] = traced.attention(operands, tensors, *rest.arguments)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.rest, *flat = inputs
        ctx.save_for_backward(*flat, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_packed: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        rest: _Rest = ctx.rest
        operands, tensors, results = rest.split(ctx.saved_tensors)
        wanted = list(ctx.needs_input_grad[1 : 1 + len(operands)])
        *call, stats, _ = rest.arguments
        gradients: list[Tensor | None] = [None] * len(operands)
        incoming = d_out, d_packed if stats else None
        if any(wanted) and any(x is not None for x in incoming):
            found = iter(_attention_backward(operands, tensors, *call, wanted, *results, *incoming))
            gradients = [next(found) if want else None for want in wanted]
        return None, *gradients, *(None,) * len(tensors)

    @staticmethod
    def vmap(info: Any, in_dims: Any, rest: _Rest, *flat: Tensor) -> tuple[Any, Any]:
        operands, tensors, _ = rest.split(flat)
        dims = *rest.split(in_dims[1:])[:2], *(None,) * len(rest.arguments)
        return _vmapped_attention(_attention, info, dims, operands, tensors, *rest.arguments)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(rest: _Rest, *flat: Tensor) -> tuple[Tensor, ...]:
        operands, tensors, results = rest.split(flat)
        return tuple(traced.attention_backward(operands, tensors, *rest.arguments, *results))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(ONCE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, rest: _Rest, *flat: Tensor) -> tuple[Any, Any]:
        operands, tensors, results = rest.split(flat)
        *dims, of_results = rest.split(in_dims[1:])
        whole_dims = *dims, *(None,) * len(rest.arguments), *of_results
        return _vmapped_backward(_attention_backward, info, whole_dims, operands, tensors, *rest.arguments, *results)


def _attention(operands: Sequence[Tensor], tensors: Sequence[Tensor], *arguments: Any) -> Any:
    return _Attention.apply(_Rest(len(operands), len(tensors), arguments), *operands, *tensors)  # type: ignore[no-untyped-call]


def _attention_backward(operands: Sequence[Tensor], tensors: Sequence[Tensor], *arguments: Any) -> Any:
    *others, out, packed, saved, d_out, d_packed = arguments
    flat = *operands, *tensors, out, packed, saved, d_out, d_packed
    return _AttentionBackward.apply(_Rest(len(operands), len(tensors), tuple(others)), *flat)  # type: ignore[no-untyped-call]


# The rules for vmap: `operator` is what to call with the arguments of an operator of traced.py.


def _folds(operands: Sequence[Tensor], dropout: float, text: str) -> bool:
    return len(operands) == 3 and not dropout and "view:" not in text


def _vmapped_attention(operator: Any, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    operands, tensors, *rest = arguments
    if not _folds(operands, dropout=arguments[5], text=arguments[6]):
        return _in_turns(operator, info.batch_size, in_dims, arguments)
    operands, tensors, split = _joined(info.batch_size, in_dims[:2], operands, tensors)
    out, packed, saved = operator(operands, tensors, *rest)
    packed, saved = (x.unflatten(1, split) if x.dim() > 1 else x for x in (packed, saved))
    return (out.unflatten(0, split), packed, saved), (0, *(1 if x.dim() > 1 else None for x in (packed, saved)))


def _vmapped_backward(operator: Any, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    operands, tensors, *rest, out, packed, saved, d_out, d_packed = arguments
    if not _folds(operands, dropout=arguments[5], text=arguments[6]):
        return _in_turns(operator, info.batch_size, in_dims, arguments)
    operands, tensors, split = _joined(info.batch_size, in_dims[:2], operands, tensors)
    results = [
        x if x is None or x.dim() == 1 else _fold(x, dim, info.batch_size, axis)
        for x, dim, axis in zip((out, packed, saved, d_out, d_packed), in_dims[-5:], (0, 1, 1, 0, 1), strict=True)
    ]
    gradients = operator(operands, tensors, *rest, *results)
    return [x.unflatten(0, split) for x in gradients], [0] * len(gradients)


def _joined(
    size: int, in_dims: Any, operands: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    """Operands and tensors with V * B for B, and (V, B)."""
    whole = [_fold(x, dim, size, 0) for x, dim in zip(operands, in_dims[0], strict=True)]
    batch = whole[0].shape[0] // size

    def of_batch(x: Tensor, dim: int | None) -> Tensor:
        if dim is None and x.dim() > 1 and x.shape[0] == 1:
            return x  # one for all, and possibly large
        each = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return each.expand(-1, batch, *each.shape[2:]).flatten(0, 1)

    return whole, [of_batch(x, dim) for x, dim in zip(tensors, in_dims[1], strict=True)], (size, batch)


def _fold(x: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """The vmapped dim, or copies where there is none, joined to `axis`."""
    whole = x.unsqueeze(axis).expand(*x.shape[:axis], size, *x.shape[axis:]) if dim is None else x.movedim(dim, axis)
    return whole.flatten(axis, axis + 1)


def _in_turns(operator: Any, size: int, in_dims: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call for each element of the vmapped dim."""

    def part(value: Any, dim: Any, index: int) -> Any:
        if isinstance(value, list | tuple) and isinstance(dim, list | tuple):
            return [part(each, where, index) for each, where in zip(value, dim, strict=True)]
        return value if dim is None else value.select(dim, index)

    results = [
        operator(*(part(value, dim, index) for value, dim in zip(arguments, in_dims, strict=True)))
        for index in range(size)
    ]
    stacked = type(results[0])(torch.stack(each) for each in zip(*results, strict=True))
    return stacked, type(stacked)(0 for _ in stacked)


# For a vmap within a compiled function, where the operators themselves are met.
torch.library.register_vmap("poise::attention", partial(_vmapped_attention, traced.attention))
torch.library.register_vmap("poise::attention_backward", partial(_vmapped_backward, traced.attention_backward))
