"""What the benchmarks time: poise and torch are given the same problem, and flops count what is visible."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "benchmarks" / "cases.py"
spec = importlib.util.spec_from_file_location("benchmark_cases", SOURCE)
assert spec is not None
assert spec.loader is not None
cases: Any = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = cases  # its dataclasses look themselves up
spec.loader.exec_module(cases)


def shrunk(case: Any) -> Any:
    """The same problem, small, but long enough for a window and for relative distances beyond the table's ends."""
    group = case.heads // (case.kv_heads or case.heads)
    return replace(case, batch=1, heads=2 * group, length=280, dim=4, kv_heads=2 if case.kv_heads else None)


def kinds(table: tuple[Any, ...]) -> list[Any]:
    """One case of every kind, with names for pytest."""
    first = {(case.kind, case.kv_heads, case.dropout): case for case in reversed(table)}
    return [pytest.param(case, id=case.name) for case in first.values()]


@pytest.mark.parametrize("case", kinds(cases.CASES))
def test_forward_contestants_compute_the_same(case: Any) -> None:
    calls = cases.calls(shrunk(case), torch.float64)
    for ours in (calls.poise(), calls.observed()[0], calls.blockwise()):
        torch.testing.assert_close(ours, calls.torch())


@pytest.mark.parametrize("case", kinds(cases.TRAINING))
def test_training_contestants_compute_the_same_gradients(case: Any) -> None:
    steps = cases.steps(replace(shrunk(case), dropout=0.0), torch.float64)  # dropout draws its own masks
    for ours in (steps.poise(), steps.blockwise()):
        torch.testing.assert_close(ours, steps.torch())


def test_the_observed_step_adds_the_gradient_of_the_penalty() -> None:
    steps = cases.steps(shrunk(cases.TRAINING[0]), torch.float64)
    moved = [float((a - b).abs().max()) for a, b in zip(steps.observed(), steps.poise(), strict=True)]
    assert moved[0] > 0
    assert moved[1] > 0
    assert moved[2] == 0  # entropy knows no values


@pytest.mark.parametrize("case", [case for case in kinds(cases.CASES) if case.values[0].kind in ("causal", "window")])
def test_flops_count_visible_pairs(case: Any) -> None:
    small = replace(case, length=300)
    distance = torch.arange(300)[:, None] - torch.arange(300)[None, :]
    reach = cases.WINDOW if case.kind == "window" else 300
    visible = ((distance >= 0) & (distance < reach)).sum()
    expected = 4e-9 * small.batch * small.heads * small.dim * float(visible)
    assert small.gigaflops == pytest.approx(expected)


def test_buckets_are_t5s() -> None:
    """The values of the original's relative_position_bucket at 32 buckets, distance at most 128, both directions."""
    got = cases._bucket(torch.tensor([-1000, -128, -100, -20, -8, -7, -1, 0, 1, 7, 8, 20, 100, 128, 1000]))
    assert got.tolist() == [15, 15, 15, 10, 8, 7, 1, 0, 17, 23, 24, 26, 31, 31, 31]
