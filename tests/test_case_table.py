"""The case table on every implementation, instruction set and dtype, against the exact answer with the error budget."""

import os
import subprocess
import sys
from functools import lru_cache

import pytest
import torch

import poise
from poise import dispatch
from poise.kernels import ops
from poise.testing import CASES, arguments, check_out, check_stats, isas, truth

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SUPPORTED = {"reference": tuple(DTYPES), "blockwise": tuple(DTYPES), "cpu": ("fp32", "bf16", "fp16")}
TABLE = [(name, dtype, impl) for name in CASES for dtype in DTYPES for impl in SUPPORTED if dtype in SUPPORTED[impl]]


@lru_cache(maxsize=4)  # neighbours in TABLE share their case
def exact(name: str, dtype: str):
    given = {"sink_keys": (0,), **arguments(name, DTYPES[dtype])}
    return given, truth(**given)


@pytest.mark.parametrize(("name", "dtype", "impl"), TABLE)
def test_result_is_within_its_error_budget(name, dtype, impl, request):
    if impl == "cpu":
        request.getfixturevalue("native")
    given, expected = exact(name, dtype)
    out, stats = poise.observe(**given, impl=impl)
    check_out(out, expected)
    check_stats(stats.packed, expected)
    given = {key: value for key, value in given.items() if key != "sink_keys"}
    check_out(poise.attention(**given, impl=impl), expected)


@pytest.mark.parametrize("isa", isas())
def test_every_instruction_set_of_this_machine_passes_the_table(isa, native):
    # The library chooses once per process, so each set needs its own.
    if isa == ops.isa():
        pytest.skip(f"the table of this process runs on {isa} already")
    command = [sys.executable, "-m", "pytest", __file__, "-x", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-k", "(within_its_error_budget and cpu) or forced_instruction_set"]
    done = subprocess.run(command, env={**os.environ, "POISE_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_forced_instruction_set_is_the_one_in_use(native):
    forced = os.environ.get("POISE_ISA")
    assert ops.isa() == forced if forced else ops.isa() in isas()


@pytest.mark.parametrize(("dtype", "impl"), [(dtype, impl) for impl in SUPPORTED for dtype in SUPPORTED[impl]])
@pytest.mark.parametrize("name", ["mask-everything", "bias-everything", "grouped-6-over-2", "sink", "layout-bshd"])
def test_dropout_within_its_error_budget_drops_the_same_weights_everywhere(name, dtype, impl, request):
    if impl == "cpu":
        request.getfixturevalue("native")
    given = arguments(name, DTYPES[dtype])
    torch.manual_seed(11)
    expected = truth(**given, dropout=0.3)
    torch.manual_seed(11)
    out, stats = poise.observe(**given, dropout=0.3, impl=impl, sink_keys=())
    check_out(out, expected)
    check_stats(stats.packed, expected)  # statistics are those before dropout


class TestTheBudget:
    """The measure itself: it must reject what is wrong."""

    @pytest.fixture
    def answer(self):
        given, expected = exact("mask-some-rows-empty", "fp32")
        out, stats = poise.observe(**given, impl="reference")
        return out.clone(), stats.packed.clone(), expected

    def test_rejects_an_output_off_by_a_hundred_thousandth(self, answer):
        out, _, expected = answer
        out[1, 1, out[1, 1].abs().sum(-1).argmax(), 3] += 1e-5
        with pytest.raises(AssertionError, match="out: off by"):
            check_out(out, expected)

    def test_rejects_a_nan_in_one_place(self, answer):
        out, _, expected = answer
        out[0, 0, 0, 0] = float("nan")
        with pytest.raises(AssertionError, match="out: 1 of"):
            check_out(out, expected)

    @pytest.mark.parametrize("field", range(11))
    def test_rejects_each_field_off_by_one_in_ten_thousand(self, answer, field):
        _, packed, expected = answer
        packed[field] = packed[field] * 1.0001 + 1e-30
        with pytest.raises(AssertionError, match=poise.stats.FIELDS[field]):
            check_stats(packed, expected)

    def test_rejects_a_finite_value_where_an_infinity_belongs(self, answer):
        _, packed, expected = answer
        packed[1].masked_fill_(packed[1] == -float("inf"), -1e30)
        with pytest.raises(AssertionError, match="max_score"):
            check_stats(packed, expected)

    def test_rejects_the_wrong_dtype(self, answer):
        out, _, expected = answer
        with pytest.raises(AssertionError, match="float64"):
            check_out(out.double(), expected)

    def test_names_no_instruction_set_twice_and_the_plainest_first(self):
        assert len(set(isas())) == len(isas())
        assert isas()[0] == "base"


def test_dispatch_knows_the_implementations_of_this_table():
    assert set(dispatch.IMPLS) == set(SUPPORTED)
