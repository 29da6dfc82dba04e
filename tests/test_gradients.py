"""Gradients of every implementation, instruction set and dtype against the exact ones, within the error budget.

The case table, features and pairs of features, random calls, poison, empty rows, determinism, finite differences.
Derivatives of higher order are blockwise's, in test_blockwise.py.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

import poise
from poise import dispatch, reference
from poise.kernels import ops
from poise.problem import Problem, prepare, seeded
from poise.score import Dense
from poise.stats import FIELDS, ScoreStats
from poise.testing import (
    CASES,
    STATISTICS,
    GradientTruth,
    Incoming,
    Inputs,
    arguments,
    check_gradients,
    differentiate,
    gradient_truth,
    isas,
    random_incoming,
)
from poise.testing.budget import converted, with_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSSES = {"plain": (), "watched": STATISTICS}  # of the output alone, and of the statistics as well
IMPLS = ("cpu", "blockwise")
# Blockwise is autograd's: dtypes differ in the reading of tensors, which forward tests see.
RUNS = [("fp32", "cpu"), ("fp32", "blockwise"), ("bf16", "cpu"), ("fp16", "cpu")]
TABLE = [(name, *run) for name in CASES for run in RUNS]


def of(truth: GradientTruth, impl: str) -> dict[str, Tensor]:
    """The gradients that an implementation computes."""
    return computed(impl, truth.problem, truth.incoming, truth.layout)


def computed(impl: str, problem: Problem, incoming: Incoming, layout: str) -> dict[str, Tensor]:
    def run(problem: Problem, stats: bool) -> tuple[Tensor, Tensor | None]:
        return dispatch.run(problem, impl, stats, layout)

    return differentiate(run, problem, incoming)


def check(impl: str, statistics: tuple[str, ...] = STATISTICS, **call: Any) -> None:
    truth = gradient_truth(statistics, **call)
    check_gradients(of(truth, impl), truth)


def losses(dtype: str) -> list[str]:
    """float16 differs from bfloat16 and float32 in how numbers are read and written, whatever the loss."""
    return ["watched"] if dtype == "fp16" else [*LOSSES]


def table_call(name: str, dtype: str) -> dict[str, Any]:
    torch.manual_seed(0)  # a call draws dropout's seed
    return {"sink_keys": (0,), **arguments(name, DTYPES[dtype])}


@lru_cache(maxsize=3)  # neighbours in TABLE share their case
def exact(name: str, dtype: str, loss: str) -> GradientTruth:
    return gradient_truth(LOSSES[loss], **table_call(name, dtype))


@pytest.fixture(scope="session")
def on_other_isas(tmp_path_factory) -> dict[str, dict[tuple[str, str, str], dict[str, Tensor]]]:
    """By instruction set, gradients of the whole table. The library chooses once per process: each has its own."""
    results = {}
    for isa in isas():
        if isa == ops.isa():
            continue
        path = tmp_path_factory.mktemp("gradients") / isa
        env = {**os.environ, "POISE_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, __file__, str(path)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{isa}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
        results[isa] = torch.load(path, mmap=True)
        path.unlink()  # a hundred MB; what is mapped stays
    return results


def write_table(path: str) -> None:
    results = {}
    for name, dtype, impl in TABLE:
        for loss in losses(dtype) if impl == "cpu" else ():
            call = table_call(name, dtype)
            problem = prepare(**call)
            incoming = random_incoming(problem, LOSSES[loss])
            results[name, dtype, loss] = computed("cpu", problem, incoming, call.get("layout", "bhsd"))
    torch.save(results, path)


@pytest.mark.parametrize(("name", "dtype", "impl"), TABLE)
def test_gradients_are_within_their_error_budget(name, dtype, impl, request):
    if impl == "blockwise":
        truth = exact(name, dtype, "watched")
        check_gradients(of(truth, impl), truth)
        return
    request.getfixturevalue("native")
    for loss in losses(dtype):
        truth = exact(name, dtype, loss)
        check_gradients(of(truth, impl), truth)
        for isa, gradients in request.getfixturevalue("on_other_isas").items():
            try:
                check_gradients(gradients[name, dtype, loss], truth)
            except AssertionError as error:
                raise AssertionError(f"{isa}, {loss}: {error}") from None


# What a call may have; odd sizes throughout, several blocks of queries and of keys.
FEATURES = {
    "causal": lambda make: {"mask": poise.causal()},
    "tile-map": lambda make: {"mask": poise.window(9, 9) | poise.global_tokens([0, 50])},
    "bool-mask": lambda make: {"mask": poise.keep(make.bools(2, 1, 67, 131))},
    "empty-rows": lambda make: {"mask": poise.keep(make.bools(67, 1))},
    "bias": lambda make: {"bias": make.normal(2, 67, 131)},
    "bias-of-keys": lambda make: {"bias": make.normal(2, 1, 1, 131)},
    "bias-of-rows": lambda make: {"bias": make.normal(1, 1, 67, 1)},
    "bias-of-heads": lambda make: {"bias": make.normal(2, 1, 1)},
    "hiding-bias": lambda make: {"bias": make.normal(67, 131).masked_fill(make.bools(67, 131, p=0.3), -math.inf)},
    "relative": lambda make: {"bias": poise.relative(make.normal(2, 9))},
    "relative-shared": lambda make: {"bias": poise.relative(make.normal(41, dtype=torch.float32))},
    "alibi": lambda make: {"bias": poise.alibi(make.normal(2))},
    "softcap": lambda make: {"softcap": 2.0},
    "sink": lambda make: {"sink": make.normal(2, dtype=torch.float32)},
    "scale-0-d": lambda make: {"scale": torch.tensor(-0.4)},
    "scale-per-head": lambda make: {"scale": make.normal(2, dtype=torch.float32)},
    "scale-per-row": lambda make: {"scale": make.normal(2, 2, 67, dtype=torch.float32)},
    "grouped": lambda make: make.qkv(67, 131, 24, 24, g=1),
    "other-dim-of-values": lambda make: make.qkv(67, 131, 24, 9),
    "odd-dims": lambda make: make.qkv(67, 131, 13, 21),
    "bshd": lambda make: {"layout": "bshd"},
    "dropout": lambda make: {"dropout": 0.3},
    "offset-per-sequence": lambda make: {"q_offset": torch.tensor([-5, 40])},
}
PAIRS = [pair for pair in combinations(FEATURES, 2) if not {*pair} <= {"grouped", "other-dim-of-values", "odd-dims"}]


def call_of(names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    """One call with these features: masks intersect, biases add up."""
    make = Inputs("-".join(names), dtype)
    call: dict[str, Any] = {**make.qkv(67, 131, 24), "q_offset": "end", "sink_keys": (0, 130)}
    for name in names:
        for key, value in FEATURES[name](make).items():
            if key == "mask":
                value = call["mask"] & value if "mask" in call else value
            elif key == "bias":
                value = call["bias"] + value if "bias" in call else value
            call[key] = value
    if call.get("layout") == "bshd":
        call |= {name: call[name].transpose(1, 2).contiguous() for name in "qkv"}
    return call


@pytest.mark.parametrize("names", [(name,) for name in FEATURES] + PAIRS, ids="-and-".join)
def test_a_pair_of_features_is_within_the_budget(names, native):
    for dtype in (torch.float32, torch.bfloat16):
        check("cpu", **call_of(names, dtype))


@pytest.mark.usefixtures("native")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_call_is_within_the_budget(data):
    draw = data.draw
    make = Inputs(str(draw(st.integers(0, 2**31))), draw(st.sampled_from([*DTYPES.values()])))
    groups, ratio = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n, m = (draw(st.sampled_from((1, 2, 15, 17, 31, 33, 63, 64, 65, 129, 300))) for _ in "nm")
    d, dv = (draw(st.sampled_from((1, 3, 8, 15, 16, 33, 64))) for _ in "dv")
    h = groups * ratio
    call = make.qkv(n, m, d, dv, h=h, g=groups)
    masks = [None, poise.causal(), poise.window(20, 3), ~poise.window(9), poise.dilated(4, 3)]
    masks.append(poise.keep(make.bools(n, m)))
    call["mask"] = draw(st.sampled_from(masks))
    biases = [None, poise.alibi(make.normal(h)), poise.relative(make.normal(h, 7)), make.normal(h, n, m)]
    biases.append(make.normal(2, 1, 1, m) + poise.relative(make.normal(33)))
    call["bias"] = draw(st.sampled_from(biases))
    call["scale"] = draw(st.sampled_from([None, torch.tensor(0.3), make.normal(h, dtype=torch.float32)]))
    call["softcap"] = draw(st.sampled_from([None, 3.0]))
    call["sink"] = draw(st.sampled_from([None, make.normal(h, dtype=torch.float32)]))
    call["dropout"] = draw(st.sampled_from([0.0, 0.25]))
    statistics = draw(st.sampled_from([(), STATISTICS, ("lse",), ("entropy",), ("std",)]))
    check("cpu", statistics, **call, q_offset="end", sink_keys=(0,))


class TestPoison:
    """NaN and infinities in what is masked reach no gradient; in what is attended they show, and nowhere else."""

    OPTIONS = ("bias", "bias-of-keys", "relative", "alibi", "softcap", "sink", "scale-per-row", "grouped", "dropout")
    HIDDEN = slice(50, 80)

    def call(self, option: str, dtype: torch.dtype) -> dict[str, Any]:
        """One call with an option and a dense bias of zeros, in which the keys of HIDDEN are hidden from all."""
        call = call_of((option,), dtype)
        dense = torch.zeros(67, 131, dtype=dtype)
        mask = torch.ones(67, 131, dtype=torch.bool)
        mask[:, self.HIDDEN] = False
        bias = call["bias"] + Dense(dense) if "bias" in call else Dense(dense)
        return {**call, "dense": dense, "bias": bias, "mask": poise.keep(mask) & poise.causal()}

    @staticmethod
    @lru_cache(maxsize=2)  # neighbours share it
    def clean(option: str, dtype: torch.dtype) -> GradientTruth:
        call = TestPoison().call(option, dtype)
        del call["dense"]
        torch.manual_seed(0)  # dropout's seed
        return gradient_truth(**call)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("where", ["k", "v", "bias"])
    @pytest.mark.parametrize("option", OPTIONS)
    def test_of_hidden_keys_changes_no_gradient(self, option, where, value, native):
        for dtype in (torch.float32, torch.bfloat16):
            clean = self.clean(option, dtype)
            call = self.call(option, dtype)
            dense = call.pop("dense")
            if where == "bias":
                dense[:, self.HIDDEN] = value  # the call's own tensor: a dense bias is read where it lies
            else:
                call[where] = call[where].clone()
                call[where][:, :, self.HIDDEN] = value
            torch.manual_seed(0)
            check_gradients(of(replace(clean, problem=seeded(prepare(**call))), "cpu"), clean)

    @pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
    @pytest.mark.parametrize("option", OPTIONS)  # a dropped NaN value is in the output, but no weight's gradient
    def test_of_one_attended_number_shows_where_the_definition_has_it(self, option, where, native):
        for dtype in (torch.float32, torch.bfloat16):
            call = self.call(option, dtype)
            dense = call.pop("dense")
            if where == "bias":
                dense[30, 20] = math.nan
            else:
                call[where][0, 0, 30, 2] = math.nan
            truth = gradient_truth(**call)
            got = of(truth, "cpu")
            check_gradients(got, truth)
            assert any(bool(gradient.isnan().any()) for gradient in got.values())

    def test_of_one_incoming_gradient_stays_with_what_its_row_sees(self, native):
        q, k, v = (torch.randn(1, 2, 40, 8).requires_grad_() for _ in range(3))
        incoming = torch.ones(1, 2, 40, 8)
        incoming[:, :, 20] = math.nan
        out = poise.attention(q, k, v, mask=poise.causal(), impl="cpu")
        d_q, d_k, d_v = torch.autograd.grad(out, (q, k, v), incoming)
        assert d_q[:, :, torch.arange(40) != 20].isfinite().all()
        assert d_q[:, :, 20].isnan().all()
        for gradient in (d_k, d_v):
            assert gradient[:, :, :21].isnan().all()
            assert gradient[:, :, 21:].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_have_no_gradient(impl, dtype, native):
    call = call_of(("bias", "sink"), DTYPES[dtype])
    mask = torch.rand(67, 131) < 0.5
    mask[::5] = False
    mask[:, ::7] = False
    truth = gradient_truth(**{**call, "mask": mask})
    got = of(truth, impl)
    check_gradients(got, truth)
    assert not got["q"][:, :, ::5].any()
    assert not got["k"][:, :, ::7].any()
    assert not got["v"][:, :, ::7].any()
    assert not got["bias0"][:, :, ~mask].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sink", [1e4, 60.0, 0.5])
def test_the_fields_have_the_gradients_of_a_call_without_the_sink(sink, impl, native):
    q, k, v = (torch.randn(1, 2, n, 24) for n in (33, 70, 70))
    weights = torch.randn(len(FIELDS), 1, 2, 33)

    def gradients(sink: Tensor | None) -> tuple[Tensor, ...]:
        leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
        _, stats = poise.observe(*leaves, v, sink=sink, sink_keys=(0, 3), impl=impl)
        return torch.autograd.grad((torch.stack(list(stats.fields().values())) * weights).sum(), leaves)

    for got, alone in zip(gradients(torch.tensor([sink, sink])), gradients(None), strict=True):
        assert alone.abs().max() > 0.1
        assert (got - alone).abs().max() <= 1e-5 * alone.abs().max()


@pytest.mark.parametrize(("dtype", "heads"), [("fp32", 1), ("bf16", 4)])
def test_gradients_are_the_same_bits_on_any_number_of_threads(dtype, heads, native):
    make = Inputs("threads", DTYPES[dtype])
    call = make.qkv(700, 900, 32, b=1, h=heads, g=1)
    bias = make.normal(heads, 1, 900) + poise.relative(make.normal(heads, 33)) + poise.alibi([0.1] * heads)
    call |= {"mask": poise.causal(), "q_offset": "end", "bias": bias, "sink": torch.zeros(heads), "dropout": 0.1}
    truth = gradient_truth(("lse", "var_p"), **call, scale=torch.full((1, heads, 700), 0.2))
    draw, before = random.Random(0), torch.get_num_threads()
    expected = of(truth, "cpu")
    try:
        for _ in range(20):
            torch.set_num_threads(draw.randint(1, 16))
            for name, gradient in of(truth, "cpu").items():
                assert torch.equal(gradient, expected[name]), f"{name} on {torch.get_num_threads()} threads"
    finally:
        torch.set_num_threads(before)


# Independent of autograd: the derivative along a random direction, from values of the definition in float64.


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("names", [("causal",), ("sink", "softcap"), ("relative", "scale-per-row", "sink")], ids=str)
def test_a_statistic_moves_as_its_gradient_says(statistic, names, impl, native):
    call = call_of(names, torch.float32)
    truth = gradient_truth((statistic,), **call)
    incoming = type(truth.incoming)(torch.zeros_like(truth.incoming.out), truth.incoming.stats)

    def run(problem: Problem, stats: bool) -> tuple[Tensor, Tensor | None]:
        return dispatch.run(problem, impl, stats, "bhsd")

    gradients = differentiate(run, truth.problem, incoming)
    double = converted(truth.problem, torch.float64)
    direction = [torch.randn(x.shape, dtype=torch.float64) for _, x in double.differentiable()]

    def value(step: float) -> float:
        moves = iter(direction)
        moved = with_tensors(double, lambda x: x + step * next(moves))
        packed = reference.run(moved, True)[1]
        assert packed is not None
        values = getattr(ScoreStats(packed, moved.sink, moved.sink_keys), statistic)
        return float((values * incoming.stats[statistic].double()).sum())

    step = 1e-4  # the error of central differences is in its square
    measured = (value(step) - value(-step)) / (2 * step)
    terms = [(gradients[name].double() * d).flatten() for name, d in zip(gradients, direction, strict=True)]
    slope = float(torch.cat(terms).sum())
    assert abs(slope - measured) <= 1e-4 * float(torch.cat(terms).norm()) + 1e-6


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_statistic_passes_gradcheck_in_both_modes(statistic):
    torch.manual_seed(1)
    leaves = [torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4)]
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(q: Tensor, k: Tensor, sink: Tensor) -> Tensor:
        _, stats = poise.observe(q, k, k, sink=sink, mask=poise.causal(), q_offset="end", impl="blockwise")
        return getattr(stats, statistic)

    assert gradcheck(call, (*leaves, sink), check_forward_ad=True)


class TestTheBudget:
    """The measure itself: it must reject what is wrong."""

    @pytest.fixture
    def answer(self) -> tuple[dict[str, Tensor], GradientTruth]:
        truth = gradient_truth(**call_of(("relative", "scale-per-row"), torch.float32), sink=torch.zeros(2))
        return of(truth, "reference"), truth

    def test_accepts_what_is_right(self, answer):
        check_gradients(*answer)

    @pytest.mark.parametrize("name", ["q", "k", "v", "bias0", "scale", "sink"])
    def test_rejects_a_gradient_that_is_slightly_off(self, answer, name):
        got, truth = answer
        got[name] = got[name] * 1.0001
        with pytest.raises(AssertionError, match=f"d_{name}: off by"):
            check_gradients(got, truth)

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_rejects_half_precision_off_by_a_tenth_in_one_place(self, name):
        truth = gradient_truth(**call_of(("causal",), torch.bfloat16))
        got = of(truth, "reference")
        got[name].view(-1)[got[name].abs().argmax()] *= 1.1
        with pytest.raises(AssertionError, match=f"d_{name}: off by"):
            check_gradients(got, truth)

    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_rejects_a_statistic_that_passes_nothing_back(self, statistic):
        truth = gradient_truth((statistic,), **call_of(("causal",), torch.float32))
        silent = type(truth.incoming)(truth.incoming.out, {})
        with pytest.raises(AssertionError, match="d_q: off by"):
            check_gradients(differentiate(reference.run, truth.problem, silent), truth)

    def test_rejects_a_nan_in_one_place(self, answer):
        got, truth = answer
        got["k"][1, 0, 3, 2] = math.nan
        with pytest.raises(AssertionError, match="d_k: 1 of"):
            check_gradients(got, truth)

    def test_rejects_the_wrong_dtype(self, answer):
        got, truth = answer
        got["v"] = got["v"].double()
        with pytest.raises(AssertionError, match=r"d_v is torch\.float64"):
            check_gradients(got, truth)

    def test_rejects_a_gradient_that_is_missing(self, answer):
        got, truth = answer
        del got["sink"]
        with pytest.raises(AssertionError, match="gradients of"):
            check_gradients(got, truth)


if __name__ == "__main__":
    write_table(sys.argv[1])
