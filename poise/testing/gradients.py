"""How close gradients must be: exact ones in float64, naive ones, and a budget made from the two, as in budget.py.

Per operand max|g - g64| <= 2 max|naive - g64| + 4 eps max|g64|, where g64 is autograd in float64 through the reference.
Naive is autograd in float32 through the reference, as eager attention with a float32 softmax is commonly written:

- Matrix products are in the call's own dtype: operands in that dtype, forward and backward, sums in float32, and what
  goes back to an operand in that dtype again. So inputs, P, dP, dS and results are rounded, and nothing else.
- The softmax's derivative p (dP - delta) takes delta from the rounded output, as the sum of d_out out over the head
  dim: who does not keep P has nothing else to take it from. Where a row is saturated, dP - delta is only rounding.

What an error of 4 eps of float32 in every score of a row, relative to its largest, makes of the exact gradients comes
on top, twice, as budget.py grants it to statistics: gradients are made of them, and of weights as sensitive. An operand
of less than 16 numbers, as a scale for all, gets four times the whole: its few errors, each a sum over all rows, are no
measure of how large they may be.

A float32 call rounds nothing more than float32 does. Where an input is not finite the reference multiplies pair by
pair, and so does the naive computation: nothing is excused there.

eps is that of the coarser of the call and the operand: a float32 sink's gradient in a bfloat16 call is made of bfloat16
outputs. Knows no implementation but the reference: `differentiate` is handed the one to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from poise import reference
from poise.problem import Problem, prepare
from poise.score import Dense
from poise.stats import ScoreStats
from poise.testing.budget import check_within, converted, largest_score, with_tensors

# What has a derivative, by its name in ScoreStats.
STATISTICS = ("lse", "entropy", "var_p", "collision", "mean", "std", "sink_mass")

Run: TypeAlias = Callable[[Problem, bool], tuple[Tensor, Tensor | None]]  # of a call, and whether statistics are wanted


@dataclass(frozen=True)
class Incoming:
    """What a loss passes back to a call: to its output, to some statistics by name, and to the packed ones."""

    out: Tensor  # [B, H, N, Dv]
    stats: dict[str, Tensor]  # [B, H, N] each
    packed: Tensor | None = None  # [11, B, H, N]


@dataclass(frozen=True)
class GradientTruth:
    """One call, what comes in, and for every operand the exact and the naive gradient, in float64."""

    problem: Problem
    layout: str
    incoming: Incoming
    exact: dict[str, Tensor]
    naive: dict[str, Tensor]
    slack: dict[str, Tensor]  # 0-D


def gradient_truth(
    statistics: Sequence[str] = STATISTICS, incoming: Incoming | None = None, **arguments: Any
) -> GradientTruth:
    """The exact and the naive gradients of one call of `observe`, for seeded random incoming ones unless given."""
    problem = prepare(**arguments)
    generator = torch.Generator().manual_seed(sum(problem.shape))
    incoming = incoming or _random(problem, statistics, generator)
    double = converted(problem, torch.float64)
    exact = differentiate(reference.run, double, incoming)
    to_lse = _error_of_delta(problem, double, incoming.out, generator)
    with _ProductsIn(problem.q.dtype):
        naive = differentiate(reference.run, problem, incoming, to_lse)
    shaken = [differentiate(reference.run, call, incoming) for call in _shaken(double, generator)]
    slack = {name: max(_largest(each[name] - x) for each in shaken) for name, x in exact.items()}
    naive = {name: x.double() for name, x in naive.items()}
    return GradientTruth(problem, arguments.get("layout", "bhsd"), incoming, exact, naive, slack)


def differentiate(run: Run, problem: Problem, incoming: Incoming, to_lse: Tensor | None = None) -> dict[str, Tensor]:
    """The gradient of every operand by its name (q, k, v, bias0, bias1, ..., scale, sink), zeros for one without.

    `to_lse` [B, H, N] is one more gradient that comes in, to the lse.
    """
    names: list[str] = []
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        leaves.append(tensor.detach().requires_grad_())  # where it lies: its strides are part of the call
        return leaves[-1]

    call = with_tensors(problem, leaf)
    for name, _ in problem.differentiable():
        names.append(f"bias{sum(each.startswith('bias') for each in names)}" if name == "bias" else name)
    watched = bool(incoming.stats) or incoming.packed is not None or to_lse is not None
    out, packed = run(call, watched)
    outputs, weights = [out], [incoming.out.to(out.dtype)]
    if packed is not None:
        stats = ScoreStats(packed, call.sink, call.sink_keys)
        outputs += [getattr(stats, name) for name in incoming.stats]
        weights += [weight.to(packed.dtype) for weight in incoming.stats.values()]
        if incoming.packed is not None:
            outputs.append(packed)
            weights.append(incoming.packed.to(packed.dtype))
        if to_lse is not None:
            outputs.append(stats.lse)
            weights.append(to_lse.to(packed.dtype))
    gradients = torch.autograd.grad(outputs, leaves, weights, allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True))


def check_gradients(gradients: dict[str, Tensor], truth: GradientTruth) -> None:
    """Raises AssertionError unless each is within its budget, of its operand's dtype, and NaN just where it must be."""
    assert gradients.keys() == truth.exact.keys(), f"gradients of {[*gradients]}, not of {[*truth.exact]}"
    call, problems = truth.problem.q.dtype, []
    for (name, exact), (_, operand) in zip(truth.exact.items(), truth.problem.differentiable(), strict=True):
        got = gradients[name]
        try:
            assert got.dtype == operand.dtype, f"d_{name} is {got.dtype}, {name} is {operand.dtype}"
            assert got.shape == exact.shape, f"d_{name} is {list(got.shape)}, {name} is {list(exact.shape)}"
            eps = max(torch.finfo(call).eps, torch.finfo(operand.dtype).eps)
            few = 4.0 if operand.numel() < 16 else 1.0
            slack = 2 * few * truth.slack[name]
            naive = truth.naive[name]
            check_within(f"d_{name}", got.double(), exact, naive, operand.dtype, few * eps, few, slack)
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "; ".join(problems)


def _random(problem: Problem, statistics: Sequence[str], generator: torch.Generator) -> Incoming:
    def normal(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = problem.shape[:3]
    out = normal(problem.q.dtype, *rows, problem.v.shape[-1])
    return Incoming(out, {name: normal(torch.float32, *rows) for name in statistics})


def _error_of_delta(problem: Problem, double: Problem, d_out: Tensor, generator: torch.Generator) -> Tensor:
    """By how much delta is too small when it is made of the naive output, [B, H, N].

    An error e of delta changes dS by p e, and the sink's gradient likewise: it is a gradient e to the lse. The sum over
    the head dim, and dP's like it, may be off by an eps each of the terms' sizes.
    """
    out, exact = reference.run(problem, False)[0].double(), reference.run(double, False)[0]
    rounded = d_out.double() * (exact - out)
    signs = torch.randint(0, 2, rounded.shape[:3], generator=generator).double() * 2 - 1
    summed = 2 * torch.finfo(torch.float32).eps * (d_out.double() * out).abs().sum(-1)
    return (rounded.sum(-1) + signs * summed).nan_to_num(0.0, 0.0, 0.0)


def _shaken(double: Problem, generator: torch.Generator) -> Iterator[Problem]:
    """The call with every score off, by random signs and by alternating ones, which no pair of neighbours shares."""
    packed = reference.run(double, True)[1]
    assert packed is not None
    size = largest_score(double, packed)
    if double.sink is not None:
        size = torch.maximum(size, double.sink.abs().nan_to_num(0.0, 0.0, 0.0)[:, None])
    random = torch.randint(0, 2, double.shape, generator=generator).double() * 2 - 1
    alternating = 1 - 2.0 * (torch.arange(double.shape[3]) % 2).expand(double.shape)
    for signs in (random, alternating):
        noise = signs * 4 * torch.finfo(torch.float32).eps * size[..., None]
        yield replace(double, bias=(*double.bias, Dense(noise)))


def _largest(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0).abs().amax() if x.numel() else torch.zeros(())


class _ProductsIn(TorchFunctionMode):
    """Matrix products in a dtype: they alone, forward and backward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__matmul__, Tensor.matmul, torch.matmul):
            return _Product.apply(*args, self.dtype)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        x, y = (each.to(dtype).to(each.dtype) for each in (x, y))
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        grad = grad.to(ctx.dtype).to(grad.dtype)
        d_x, d_y = grad @ y.mT, x.mT @ grad
        return d_x.to(ctx.dtype).to(x.dtype), d_y.to(ctx.dtype).to(y.dtype), None
