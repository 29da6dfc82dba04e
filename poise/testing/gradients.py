"""How close gradients must be: exact ones in float64, naive ones, and a budget made from the two, as in budget.py.

Per operand max|g - g64| <= 2 max|naive - g64| + 4 eps max|g64|, where g64 is autograd in float64 through the reference.
Naive is autograd in float32 through the reference, as eager attention with a float32 softmax is commonly written:

- Matrix products are in the call's own dtype: operands in that dtype, forward and backward, sums in float32, and what
  goes back to an operand in that dtype again. So inputs, P, dP, dS and results are rounded, and nothing else.
- The softmax's derivative p (dP - delta) takes delta from the rounded output, as the sum of d_out out over the head
  dim: who does not keep P has nothing else to take it from. Where a row is saturated, dP - delta is only rounding.

What float32 scores make of the exact gradients comes on top, as budget.py grants it to statistics: every score of a row
is off by 4 eps of the row's largest. And what a backward call is told of a row is packed float32 statistics, off by as
much: a standard deviation's gradient, g (s - mean) / (n std), is made of a mean and a std that are, so that where a
row's scores are nearly equal it is off by the error over std, however exact the scores in it. Weights are made again
from scores and a stored lse: all of a row's are off by the error of that, and with them what the row passes on.

Errors are measured by what they come to in random draws. One draw says little of an operand of few numbers, such as a
scale for all: each is one sum over all rows, in which errors may happen to cancel. So there are as many draws as give
every operand 8 numbers: of the scores' errors by their signs, of the naive rounding by whether it rounds up or down, at
random where it has the choice.

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
from poise.problem import Problem, prepare, seeded
from poise.score import Dense
from poise.stats import FIELDS, ScoreStats
from poise.testing.budget import check_within, converted, field_slack, largest_score, with_tensors

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
    """One call, what comes in, and for every operand, in float64, the exact gradient and how far off others may be."""

    problem: Problem
    layout: str
    incoming: Incoming
    exact: dict[str, Tensor]
    naive: dict[str, Tensor]  # of several draws what is furthest off
    slack: dict[str, Tensor]  # 0-D


def gradient_truth(
    statistics: Sequence[str] = STATISTICS, incoming: Incoming | None = None, **arguments: Any
) -> GradientTruth:
    """The exact and the naive gradients of one call of `observe`, for seeded random incoming ones unless given."""
    problem = seeded(prepare(**arguments))
    generator = torch.Generator().manual_seed(sum(problem.shape))
    incoming = incoming or random_incoming(problem, statistics)
    double = converted(problem, torch.float64)
    exact = differentiate(reference.run, double, incoming)
    # Errors of an operand are measured by so many draws; a gradient that is 0 by definition has none.
    draws = {name: max(1, -(-8 // max(int(x.count_nonzero()), 1))) for name, x in exact.items()}
    naive: dict[str, Tensor] = {}
    for draw in range(max(draws.values())):
        products = _ProductsIn(problem.q.dtype, generator if draw else None)
        to_lse = _error_of_delta(problem, double, incoming.out, generator, products.rounded if draw else None)
        with products:
            for name, x in differentiate(reference.run, problem, incoming, to_lse).items():
                if draw < draws[name]:
                    naive[name] = _further(naive.get(name), x.double(), exact[name])
    slack = {name: torch.zeros((), dtype=torch.float64) for name in exact}
    for draw, call in enumerate(_shaken(double, incoming, generator, max(2, *draws.values()))):
        shaken = differentiate(reference.run, *call)
        for name, x in exact.items():
            if draw < max(2, draws[name]):
                slack[name] = torch.maximum(slack[name], _largest(shaken[name] - x))
    return GradientTruth(problem, arguments.get("layout", "bhsd"), incoming, exact, naive, slack)


def random_incoming(problem: Problem, statistics: Sequence[str] = STATISTICS) -> Incoming:
    """To the output and to some statistics: always the same for calls of a shape."""
    generator = torch.Generator().manual_seed(1 + sum(problem.shape))

    def normal(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = problem.shape[:3]
    out = normal(problem.q.dtype, *rows, problem.v.shape[-1])
    return Incoming(out, {name: normal(torch.float32, *rows) for name in statistics})


def differentiate(
    run: Run, problem: Problem, incoming: Incoming, to_lse: Tensor | None = None, off: Tensor | None = None
) -> dict[str, Tensor]:
    """The gradient of every operand by its name (q, k, v, bias0, bias1, ..., scale, sink), zeros for one without.

    `to_lse` [B, H, N] is one more gradient that comes in, to the lse; by `off` [11, B, H, N] statistics are off.
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
        stats = ScoreStats(packed if off is None else packed + off, call.sink, call.sink_keys)
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
            check_within(
                f"d_{name}", got.double(), exact, truth.naive[name], operand.dtype, eps, slack=truth.slack[name]
            )
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "; ".join(problems)


def _error_of_delta(
    problem: Problem,
    double: Problem,
    d_out: Tensor,
    generator: torch.Generator,
    rounded_by_chance: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """By how much delta is too small when it is made of the naive output, [B, H, N], or of one rounded by chance.

    An error e of delta changes dS by p e, and the sink's gradient likewise: it is a gradient e to the lse. The sum over
    the head dim, and dP's like it, may be off by an eps each of the terms' sizes.
    """
    exact = reference.run(double, False)[0]
    out = rounded_by_chance(exact.float()) if rounded_by_chance else reference.run(problem, False)[0]
    out = out.double()
    rounded = d_out.double() * (exact - out)
    signs = _signs(rounded.shape[:3], generator)
    summed = 2 * torch.finfo(torch.float32).eps * (d_out.double() * out).abs().sum(-1)
    return (rounded.sum(-1) + signs * summed).nan_to_num(0.0, 0.0, 0.0)


def _shaken(
    double: Problem, incoming: Incoming, generator: torch.Generator, draws: int
) -> Iterator[tuple[Problem, Incoming, None, Tensor | None]]:
    """Arguments of `differentiate`, with every score off by random signs, the second time by alternating ones, which no
    pair of neighbours shares; and with packed statistics off."""
    packed = reference.run(double, True)[1]
    assert packed is not None
    size = largest_score(double, packed)
    stored = _stored(double, packed, incoming, size)
    if double.sink is not None:
        size = torch.maximum(size, double.sink.abs().nan_to_num(0.0, 0.0, 0.0)[:, None])
    alternating = 1 - 2.0 * (torch.arange(double.shape[3]) % 2).expand(double.shape)
    for draw in range(draws):
        signs = alternating if draw == 1 else _signs(double.shape, generator)
        noise = Dense(signs * 4 * torch.finfo(torch.float32).eps * size[..., None])
        said, none, off = stored(_signs(size.shape, generator))
        weights = 1 + _signs(size.shape, generator) * 4 * torch.finfo(torch.float32).eps * size
        scaled = Incoming(
            said.out.double() * weights[..., None],
            {name: x.double() * weights for name, x in said.stats.items()},
            None if said.packed is None else said.packed.double() * weights,
        )
        yield replace(double, bias=(*double.bias, noise)), scaled, none, off


def _stored(
    double: Problem, packed: Tensor, incoming: Incoming, size: Tensor
) -> Callable[[Tensor], tuple[Incoming, None, Tensor | None]]:
    """What comes in when a row's mean and var are off by what they may be, times a sign per row.

    Var's gradient 2 (s - mean) / n with a mean e too small is 2 e / n more for every key: a gradient of 2 e g_var that
    comes to the mean.
    """
    if "std" not in incoming.stats and incoming.packed is None:
        return lambda signs: (incoming, None, None)
    grants = field_slack(packed, size, 4 * torch.finfo(torch.float32).eps)
    var, mean = FIELDS.index("var"), FIELDS.index("mean")

    def draw(signs: Tensor) -> tuple[Incoming, None, Tensor | None]:
        off = torch.zeros_like(packed)
        off[var] = torch.maximum(signs * grants["var"], -packed[var]).nan_to_num(0.0, 0.0, 0.0)
        leaf = (packed + off).requires_grad_()
        std = ScoreStats(leaf, double.sink, double.sink_keys).std
        passed = torch.zeros_like(packed) if incoming.packed is None else incoming.packed.double()
        to_var = passed[var]
        if "std" in incoming.stats:
            to_var = to_var + torch.autograd.grad(std, leaf, incoming.stats["std"].double())[0][var]
        passed = passed.clone()
        passed[mean] += (2 * signs * grants["mean"] * to_var).nan_to_num(0.0, 0.0, 0.0)
        return replace(incoming, packed=passed), None, off

    return draw


def _signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, tuple(shape), generator=generator).double() * 2 - 1


def _further(x: Tensor | None, y: Tensor, exact: Tensor) -> Tensor:
    """Of two approximations what is further off."""
    return y if x is None else torch.where((y - exact).abs() > (x - exact).abs(), y, x)


def _largest(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0).abs().amax() if x.numel() else torch.zeros(())


class _ProductsIn(TorchFunctionMode):
    """Matrix products in a dtype: they alone, forward and backward. With a generator, what is rounded to the dtype goes
    up or down by chance, the likelier way the nearer it is."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator | None) -> None:
        super().__init__()
        self.dtype, self.generator = dtype, generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__matmul__, Tensor.matmul, torch.matmul):
            return _Product.apply(*args, self.rounded)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def rounded(self, x: Tensor) -> Tensor:
        if self.generator is None or self.dtype == x.dtype:
            return x.to(self.dtype).to(x.dtype)
        # Half of the numbers' distance here up or down; by less there is only one way to round.
        _, exponent = x.frexp()
        chance = torch.rand(x.shape, generator=self.generator, dtype=x.dtype) - 0.5
        moved = x + torch.ldexp(chance * torch.finfo(self.dtype).eps, exponent - 1)
        return torch.where(x.isfinite(), moved, x).to(self.dtype).to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.rounded = rounded
        x, y = rounded(x), rounded(y)
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        grad = ctx.rounded(grad)
        return ctx.rounded(grad @ y.mT), ctx.rounded(x.mT @ grad), None
