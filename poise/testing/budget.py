"""How close is close enough: the exact answer in float64, a naive one, and budgets made from the two.

Output: max|x - x64| <= 2 max|naive - x64| + 4 eps max|x64|, where naive is one matmul, a float32 softmax, one matmul,
rounding only inputs, weights and output. Statistics: the same with the reference in float32 as the naive one, plus, row
by row, what an error of 4 eps in the row's scores does to the statistic to first order; else equal scores, where the
naive answer happens to be exact, would demand exactness. NaN must stand where the truth has NaN, infinities where it
has them. float64 gets the float32 budget times the ratio of their eps, and again what the truth itself may be off by.

No case is judged by a hand-tuned tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from poise import dropout, reference
from poise.problem import Problem, prepare, seeded
from poise.score import Alibi, Bias, Dense, Relative
from poise.stats import FIELDS

_ORDINARY_ROWS = 4  # from which on torch's matmul sums in one chain


@dataclass(frozen=True)
class Truth:
    """What results of one call are compared with; float64, and [B, H, N, Dv] and [11, B, H, N] whatever the layout."""

    problem: Problem
    layout: str
    out: Tensor
    packed: Tensor
    naive_out: Tensor
    naive_packed: Tensor
    largest_score: Tensor  # [B, H, N], the size of what is rounded
    amplify: float  # from the naive's precision to the call's: 1, or eps64 / eps32


def truth(**arguments: Any) -> Truth:
    """The exact and the naive answer to one call of `observe`."""
    problem = seeded(prepare(**arguments))
    exact = double(problem)
    out, packed = reference.run(exact, True)
    single = problem if problem.q.dtype != torch.float64 else converted(problem, torch.float32)
    _, naive_packed = reference.run(single, True)
    assert packed is not None
    assert naive_packed is not None
    amplify = 1.0 if single is problem else torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    layout = arguments.get("layout", "bhsd")
    naive_out, size = _naive(single).double(), largest_score(exact, packed)
    return Truth(problem, layout, out, packed, naive_out, naive_packed.double(), size, amplify)


def double(problem: Problem) -> Problem:
    """The same call with every tensor in float64: what it means exactly."""
    return converted(problem, torch.float64)


def check_out(out: Tensor, truth: Truth) -> None:
    """Raises AssertionError unless the output is within its budget, of q's dtype, and NaN just where it must be."""
    problem = truth.problem
    assert out.dtype == problem.q.dtype, f"out is {out.dtype}, q is {problem.q.dtype}"
    if truth.layout == "bshd":
        out = out.transpose(-3, -2)
    assert math.prod(out.shape) == truth.out.numel(), f"out is {list(out.shape)}, not {list(truth.out.shape)}"
    got = out.reshape(truth.out.shape).double()
    slack = torch.zeros(())
    if problem.q.dtype == torch.float64:  # the truth is rounded to the same precision: its scores are off as well
        largest = max([0.0, *problem.v[problem.v.isfinite()].abs().tolist()])
        slack = 2 * largest * 4 * torch.finfo(torch.float64).eps * truth.largest_score[..., None]
    eps = torch.finfo(problem.q.dtype).eps
    check_within("out", got, truth.out, truth.naive_out, problem.q.dtype, eps, truth.amplify, slack)


def check_stats(packed: Tensor, truth: Truth) -> None:
    """Raises AssertionError unless each packed field is within its budget, NaN or infinite just where it must be."""
    dtype = torch.float64 if truth.problem.q.dtype == torch.float64 else torch.float32
    assert packed.dtype == dtype, f"packed is {packed.dtype}, not {dtype}"
    assert packed.shape[0] == len(FIELDS), f"packed is {list(packed.shape)}"
    assert packed.numel() == truth.packed.numel(), f"packed is {list(packed.shape)}, not {list(truth.packed.shape)}"
    got = packed.reshape(truth.packed.shape).double()
    eps = torch.finfo(dtype).eps
    slack = field_slack(truth.packed, truth.largest_score, 4 * eps)
    problems = []
    for index, name in enumerate(FIELDS):
        exact, naive = truth.packed[index], truth.naive_packed[index]
        try:
            check_within(name, got[index], exact, naive, dtype, eps, truth.amplify, slack[name])
        except AssertionError as error:
            problems.append(str(error))
    assert not problems, "; ".join(problems)


def relative_l2(out: Tensor, truth: Truth) -> float:
    """|out - x64| / |x64| over finite entries."""
    got = (out.transpose(-3, -2) if truth.layout == "bshd" else out).reshape(truth.out.shape).double()
    finite = truth.out.isfinite()
    return float((got - truth.out)[finite].norm() / truth.out[finite].norm().clamp_min(1e-300))


def check_within(
    name: str,
    got: Tensor,
    exact: Tensor,
    naive: Tensor,
    dtype: torch.dtype,
    eps: float,
    amplify: float = 1.0,
    slack: Tensor | None = None,
) -> None:
    """Raises AssertionError unless |got - exact| - slack <= 2 amplify max|naive - exact| + 4 eps max|exact|.

    What is too small to be a normal number may be 0: the kernels flush it. All are float64; `dtype` is that of the
    result: the exact value rounded to it says what must be NaN or infinite.
    """
    rounded = exact.to(dtype).double()
    # Where the naive computation leaves the range of its numbers on the way to a finite value, nothing can be asked.
    asked = ~(exact.isfinite() & (naive.isnan() | (naive.isinf() & rounded.isfinite())))
    nan = asked & (got.isnan() != rounded.isnan())
    assert not bool(nan.any()), _where(name, nan, got, exact)
    infinite = asked & rounded.isinf() & (got != rounded)
    assert not bool(infinite.any()), _where(name, infinite, got, exact)
    compared = asked & rounded.isfinite()
    if not bool(compared.any()):
        return
    size = exact[compared].abs().amax()
    allowed = 2 * amplify * (naive - exact)[compared].abs().amax() + 4 * eps * size + torch.finfo(dtype).tiny
    excess = (got - exact).abs() - (0.0 if slack is None else slack.to(exact.dtype))
    wrong = compared & ~(excess <= allowed)
    assert not bool(wrong.any()), (
        f"{name}: off by {float((got - exact).abs()[wrong].amax()):.3g}, budget {float(allowed):.3g}; "
        + _where(name, wrong, got, exact)
    )


def _where(name: str, wrong: Tensor, got: Tensor, exact: Tensor) -> str:
    first = tuple(int(i) for i in wrong.nonzero()[0]) if bool(wrong.any()) else ()
    values = f"got {float(got[first]):.9g}, exact {float(exact[first]):.9g}" if first else ""
    return f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {list(first)}: {values}"


def field_slack(packed: Tensor, largest_score: Tensor, eps: float) -> dict[str, Tensor]:
    """Per row, what an error of eps times the size of its scores makes of each field, to first order."""
    exact = dict(zip(FIELDS, packed, strict=True))
    delta = eps * largest_score
    spread, spread_p = exact["var"].sqrt(), exact["var_p"].sqrt()
    slack = {
        "log_sum": 2 * delta,
        "count": torch.zeros_like(delta),
        "var": 2 * spread * delta + delta.square(),
        "shift": (2 + spread_p) * delta,
        "var_p": 2 * (exact["var_p"] + spread_p) * delta + delta.square(),
        "collision": 4 * exact["collision"] * delta,
        "sink_mass": 2 * exact["sink_mass"] * delta,
    }
    return {name: slack.get(name, delta).nan_to_num(0.0) for name in FIELDS}


def largest_score(exact: Problem, packed: Tensor) -> Tensor:
    """The size of a row's scores that rounding sees, [B, H, N]: max |scale| sum |q||k|, or |s|, over visible keys."""
    rows, cols = (torch.arange(length) for length in exact.shape[2:])
    visible = ~torch.isneginf(reference.score_tile(exact, rows, cols, "biased"))
    scale = exact.scale.abs() if isinstance(exact.scale, Tensor) else abs(exact.scale)
    sizes = replace(exact, q=exact.q.abs(), k=exact.k.abs(), scale=scale)
    dots = torch.where(visible, reference.score_tile(sizes, rows, cols, "raw"), 0.0)  # [B, H, N, M]
    fields = dict(zip(FIELDS, packed.abs(), strict=True))
    whole = torch.cat([dots, fields["max_score"][..., None], fields["min_score"][..., None]], -1)
    return torch.where(whole.isfinite(), whole, 0.0).amax(-1)


def _naive(problem: Problem) -> Tensor:
    """Two matmuls and a softmax, without care for anything but rounding; the sink is one more column of scores."""
    batch, heads, queries, keys = problem.shape
    rows, cols = torch.arange(queries), torch.arange(keys)
    # Few rows repeated: torch sums products of up to three rows in several chains, two thirds as wrong as others, which
    # a computation that takes query heads or blocks together can't be asked to match.
    repeated = rows.repeat(-(-_ORDINARY_ROWS // max(queries, 1)))
    scores = reference.score_tile(problem, repeated, cols, "biased")[:, :, :queries]  # [B, H, N, M] float32
    visible = ~torch.isneginf(scores)
    if problem.sink is not None:
        scores = torch.cat([scores, problem.sink[:, None, None].expand(batch, heads, queries, 1)], -1)
    p = torch.softmax(scores, -1)[..., :keys]
    p = torch.where(visible, p, 0.0)
    if problem.dropout:
        kept = dropout.all_heads(problem.seed, batch, heads, rows, cols, problem.dropout)
        p = torch.where(kept, p / (1 - problem.dropout), 0.0)
    p = p.to(problem.q.dtype).float()
    v = problem.v.float().repeat_interleave(heads // max(problem.v.shape[1], 1), 1)
    if bool(v.isfinite().all()):
        return (p @ v).to(problem.q.dtype)
    return (p[..., None] * torch.where(visible[..., None], v[..., None, :, :], 0.0)).sum(-2).to(problem.q.dtype)


def converted(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same call with every tensor in another dtype."""
    return with_tensors(problem, lambda tensor: tensor.to(dtype))


def with_tensors(problem: Problem, change: Callable[[Tensor], Tensor]) -> Problem:
    """The same call with every tensor of `problem.differentiable()` changed, one after the other in its order."""

    def changed(term: Bias) -> Bias:
        if isinstance(term, Dense):
            return Dense(change(term.tensor))
        if isinstance(term, Alibi):
            return Alibi(change(term.slopes))
        assert isinstance(term, Relative), type(term)
        return Relative(change(term.table))

    return replace(
        problem,
        q=change(problem.q),
        k=change(problem.k),
        v=change(problem.v),
        bias=tuple(changed(term) for term in problem.bias),
        scale=change(problem.scale) if isinstance(problem.scale, Tensor) else problem.scale,
        sink=None if problem.sink is None else change(problem.sink),
    )
