"""Every experiment's rule can come out either way, fed with synthetic rows; what it says can be read in every language.

A test class per experiment: rows of a world where the claim is true, of one where it is false, and of one where an
interval straddles a limit.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from lab_worlds import judged, world

from poise import op
from poise.lab import plots
from poise.lab.experiment import Cell, Row, Rows, find
from poise.lab.experiments import cost, early_warning, order, overflow, saturation, trained
from poise.lab.texts import texts
from poise.monitor.alarms import Alarms, Limits


class TestVariance:
    experiment = find("variance")

    def test_it_holds_if_when_only_some_entries_break_it(self) -> None:
        broken = {"mean": 1.5, "alike": 1.25}
        rows = world(self.experiment, lambda cell: {"ratio": broken.get(str(cell["entries"]), 1.0)}, 0.002)
        assert judged(self.experiment, rows) == "holds_if"

    def test_it_holds_when_nothing_breaks_it(self) -> None:
        assert judged(self.experiment, world(self.experiment, lambda cell: {"ratio": 1.0}, 0.002)) == "holds"

    def test_it_does_not_hold_when_independent_entries_break_it(self) -> None:
        rows = world(self.experiment, lambda cell: {"ratio": 2.0}, 0.002)
        assert judged(self.experiment, rows) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, world(self.experiment, lambda cell: {"ratio": 1.09}, 0.1)) == "inconclusive"


class TestScaling:
    experiment = find("scaling")

    @staticmethod
    def promised(cell: Cell) -> float:
        return float(cell["d"]) ** {"unscaled": 1, "root": 0, "full": -1}[str(cell["scale"])]

    def test_it_holds_in_a_world_that_keeps_the_promise(self) -> None:
        rows = world(self.experiment, lambda cell: {"variance": self.promised(cell)}, 0.02)
        assert judged(self.experiment, rows) == "holds"

    def test_it_does_not_hold_where_nothing_scales(self) -> None:
        assert judged(self.experiment, world(self.experiment, lambda cell: {"variance": 5.0}, 0.02)) == "does_not_hold"

    def test_it_holds_if_for_one_scaling_alone(self) -> None:
        rows = world(self.experiment, lambda cell: {"variance": 1.0}, 0.02)
        assert judged(self.experiment, rows) == "holds_if"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        rows = world(self.experiment, lambda cell: {"variance": 1.1 * self.promised(cell)}, 0.1)
        assert judged(self.experiment, rows) == "inconclusive"


class TestSaturation:
    experiment = find("saturation")

    def rows(self, entropy: dict[str, float], spread: float = 0.005) -> Rows:
        """The same entropy at every n and d."""
        return world(
            self.experiment,
            lambda cell: {"entropy": entropy[str(cell["scale"])], "largest": 0.5, "keys": 2.0},
            spread,
        )

    def test_it_holds_when_each_scaling_does_as_claimed(self) -> None:
        assert judged(self.experiment, self.rows({"unscaled": 0.05, "root": 0.9, "full": 1.0}, 1e-4)) == "holds"

    def test_it_holds_if_when_only_some_do(self) -> None:
        assert judged(self.experiment, self.rows({"unscaled": 0.5, "root": 0.9, "full": 1.0}, 1e-4)) == "holds_if"

    def test_it_does_not_hold_when_none_does(self) -> None:
        def values(cell: Cell) -> dict[str, float]:
            entropy = 0.9 - int(cell["d"]) / 2048 if cell["scale"] == "root" else 0.5
            return {"entropy": entropy, "largest": 0.5, "keys": 2.0}

        assert judged(self.experiment, world(self.experiment, values, 0.001)) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        rows = self.rows({"unscaled": 0.1, "root": 0.9, "full": 1.0}, 0.02)
        assert judged(self.experiment, rows) == "inconclusive"

    @pytest.mark.parametrize("variance", [0.25, 4.0, 16.0, 300.0])
    def test_the_theory_is_what_normal_scores_give(self, variance: float) -> None:
        generator = torch.Generator().manual_seed(0)
        p = (variance**0.5 * torch.randn(2000, 256, generator=generator, dtype=torch.float64)).softmax(-1)
        entropy = float(torch.special.entr(p).sum(-1).mean()) / math.log(256)
        found = saturation.theory(variance, 256)
        assert found["entropy"] == pytest.approx(entropy, abs=0.005)
        assert found["keys"] == pytest.approx(float(1 / p.square().sum(-1).mean()), rel=0.03)


class TestGradients:
    experiment = find("gradients")

    def rows(self, left: dict[str, float], spread: float = 0.01) -> Rows:
        """What passes unscaled; 1 otherwise."""
        names = ("trace", "norm", "w_q", "w_k")

        def values(cell: Cell) -> dict[str, float]:
            own = left if cell["scale"] == "unscaled" else {}
            return {"median": own.get("median", 1.0), **{name: own.get(name, 1.0) for name in names}}

        return world(self.experiment, values, spread)

    def test_it_holds_when_everything_vanishes(self) -> None:
        gone = {"trace": 0.01, "norm": 0.01, "w_q": 0.01, "w_k": 0.01, "median": 0.001}
        assert judged(self.experiment, self.rows(gone)) == "holds"

    def test_it_holds_if_when_only_the_softmax_lets_nothing_through(self) -> None:
        assert judged(self.experiment, self.rows({"trace": 0.1, "median": 0.001, "w_q": 50.0})) == "holds_if"

    def test_it_does_not_hold_when_all_passes(self) -> None:
        assert judged(self.experiment, self.rows({})) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, self.rows({"trace": 0.25}, 0.2)) == "inconclusive"


class TestFlat:
    experiment = find("flat")

    def rows(self, full: dict[str, float], errors: float, spread: float = 0.01) -> Rows:
        kinds = [f"{kind}_{dtype}" for kind in ("error", "beyond") for dtype in ("float32", "bfloat16", "float16")]

        def values(cell: Cell) -> dict[str, float]:
            own = {"distance": 0.4, "weight": 0.9, "found": 1.0} | (full if cell["scale"] == "full" else {})
            return own | dict.fromkeys(kinds, errors if cell["scale"] == "full" else 1.0)

        return world(self.experiment, values, spread)

    def test_it_holds_when_attention_is_flat_blind_and_imprecise(self) -> None:
        rows = self.rows({"distance": 0.01, "weight": 0.01, "found": 0.1}, errors=5.0)
        assert judged(self.experiment, rows) == "holds"

    def test_it_holds_if_when_only_flat(self) -> None:
        assert judged(self.experiment, self.rows({"distance": 0.01, "weight": 0.01}, errors=1.0)) == "holds_if"

    def test_it_does_not_hold_when_nothing_suffers(self) -> None:
        assert judged(self.experiment, self.rows({}, errors=1.0)) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        rows = self.rows({"distance": 0.05, "weight": 0.01, "found": 0.1}, errors=5.0, spread=0.05)
        assert judged(self.experiment, rows) == "inconclusive"


class TestOverflow:
    experiment = find("overflow")

    def rows(self, overflowed: dict[str, int]) -> Rows:
        def values(cell: Cell) -> dict[str, float]:
            own = overflowed.get(f"{cell['scale']} {cell['size']}", 0)
            return {"rows": 2048, "written": own, "shifted": 0, "poise": 0, "limit": 88.7}

        return world(self.experiment, values)

    def test_it_holds_when_scaled_rows_never_overflow(self) -> None:
        assert judged(self.experiment, self.rows({"unscaled 1": 2048})) == "holds"

    def test_it_holds_if_when_only_large_entries_overflow(self) -> None:
        assert judged(self.experiment, self.rows({"root 8": 2048})) == "holds_if"

    def test_it_does_not_hold_when_small_ones_overflow_too(self) -> None:
        assert judged(self.experiment, self.rows({"root 1": 2048, "root 8": 2048})) == "does_not_hold"

    def test_a_share_too_near_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, self.rows({"root 1": 2})) == "inconclusive"

    @pytest.mark.parametrize("dtype", overflow.DTYPES.values(), ids=str)
    def test_the_limit_is_the_last_number_whose_exp_is_finite(self, dtype: torch.dtype) -> None:
        found = torch.tensor(overflow.limit(dtype), dtype=dtype)
        assert found.exp().isfinite()
        assert found.nextafter(torch.tensor(1e4, dtype=dtype)).exp().isinf()


class TestTypical:
    experiment = find("typical")

    def rows(self, typical: float, spread: float = 0.01) -> Rows:
        beside = {"before": 22.6, "bound": 22.6, "largest": 5.0}
        return world(self.experiment, lambda cell: {"typical": typical, **beside}, spread)

    def test_it_holds_where_scores_are_about_22(self) -> None:
        assert judged(self.experiment, self.rows(22.6)) == "holds"

    def test_it_does_not_hold_where_they_are_about_1(self) -> None:
        assert judged(self.experiment, self.rows(1.0)) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, self.rows(20.0, 0.1)) == "inconclusive"


class TestOrder:
    experiment = find("order")

    def rows(self, moved: float, beyond: dict[str, float], spread: float = 0.002) -> Rows:
        """moved: by a permutation where positions are told. beyond: the loss there, 1 within; 2 unless given."""

        def values(cell: Cell) -> dict[str, float]:
            name = str(cell["positions"])
            if cell["part"] == "permutation":
                return {"change": 1e-7 if name == "none" else moved}
            return {"within": 1.0} if name == "learned" else {"within": 1.0, "beyond": beyond.get(name, 2.0)}

        return world(self.experiment, values, spread)

    def test_it_holds_when_positions_break_order_and_two_schemes_last(self) -> None:
        assert judged(self.experiment, self.rows(0.5, {"alibi": 1.0, "t5": 1.0})) == "holds"

    def test_it_holds_if_when_only_one_lasts(self) -> None:
        assert judged(self.experiment, self.rows(0.5, {"alibi": 1.0})) == "holds_if"

    def test_it_does_not_hold_when_all_is_the_other_way_round(self) -> None:
        def values(cell: Cell) -> dict[str, float]:
            name = str(cell["positions"])
            if cell["part"] == "permutation":
                return {"change": 0.5 if name == "none" else 1e-7}
            return {"within": 1.0, "beyond": 2.0 if name in ("alibi", "t5") else 1.0}

        assert judged(self.experiment, world(self.experiment, values, 0.001)) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, self.rows(0.5, {"alibi": 1.05, "t5": 1.0}, 0.05)) == "inconclusive"


class TestRoles:
    experiment = find("roles")

    def rows(self, right: float, wrong: float, leak: float = 0.0, spread: float = 0.01) -> Rows:
        solvers = {"gap": "bidirectional", "write": "causal", "translate": "cross"}

        def values(cell: Cell) -> dict[str, float]:
            if cell["part"] == "future":
                return {"weight": leak, "change": leak}
            return {"accuracy": right if solvers[str(cell["task"])] == cell["role"] else wrong}

        return world(self.experiment, values, spread)

    def test_it_holds_when_only_the_right_role_solves_each(self) -> None:
        assert judged(self.experiment, self.rows(0.98, 0.12)) == "holds"

    def test_it_holds_if_when_every_role_solves_all(self) -> None:
        assert judged(self.experiment, self.rows(0.98, 0.98)) == "holds_if"

    def test_a_leak_however_small_counts(self) -> None:
        assert judged(self.experiment, self.rows(0.98, 0.12, leak=1e-30)) == "holds_if"

    def test_it_does_not_hold_when_the_wrong_roles_solve_them_and_the_future_leaks(self) -> None:
        assert judged(self.experiment, self.rows(0.12, 0.98, leak=0.1)) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, self.rows(0.9, 0.12, spread=0.1)) == "inconclusive"


class TestCost:
    experiment = find("cost")

    def rows(self, exponents: dict[str, float], spread: float = 0.01) -> Rows:
        """Keys FORM.time and FORM.memory; 1 where not given."""

        def values(cell: Cell) -> dict[str, float]:
            return {what: exponents.get(f"{cell['form']}.{what}", 1.0) for what in ("time", "memory")}

        return world(self.experiment, values, spread)

    def test_it_holds_when_only_dense_memory_and_exact_time_are_quadratic(self) -> None:
        assert judged(self.experiment, self.rows({"exact.time": 2.0, "dense.memory": 2.0})) == "holds"

    def test_it_holds_if_when_an_efficient_form_is_not_linear(self) -> None:
        rows = self.rows({"exact.time": 2.0, "dense.memory": 2.0, "bigbird.time": 1.9})
        assert judged(self.experiment, rows) == "holds_if"

    def test_it_does_not_hold_when_all_exponents_are_otherwise(self) -> None:
        others = [f"{form}.{what}" for form in cost.EFFICIENT for what in ("time", "memory")]
        rows = self.rows({"exact.memory": 2.0, **dict.fromkeys(others, 2.0)})
        assert judged(self.experiment, rows) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, self.rows({"exact.time": 1.7, "dense.memory": 2.0}, 0.05)) == "inconclusive"

    def test_an_exponent_is_the_slope_of_the_logarithms(self) -> None:
        lengths = [512, 1024, 2048, 4096]
        assert cost.exponent(lengths, [3 * n**1.5 for n in lengths]) == pytest.approx(1.5)

    @pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from Linux's /proc")
    def test_memory_is_what_is_held_meanwhile_without_what_is_returned(self) -> None:
        def call() -> torch.Tensor:
            work = torch.ones(1 << 24)  # 64 MiB
            return work[: 1 << 20].clone()

        assert cost.growth(call) == pytest.approx(64 * 2**20, rel=0.15)


class TestTrained:
    experiment = find("trained")

    def rows(self, deviation: float, spread: float = 0.01) -> Rows:
        noise = random.Random(0)

        def values(cell: Cell) -> dict[str, Any]:
            shift = 1 + spread * noise.gauss(0, 1)
            around = 1.0 if 0.5 <= deviation <= 2 else 0.0
            layers = [[deviation, deviation], [deviation, deviation]]
            flat = dict.fromkeys(("std", "normalized_entropy", "sink_mass", "max_logit"), layers)
            return {"median": deviation * shift, "around": around, **flat}

        return Rows(Row(cell, seed, values(cell)) for cell, seed in self.experiment.tasks("default", 0))

    def test_it_holds_when_every_head_is_near_1(self) -> None:
        assert judged(self.experiment, self.rows(1.0)) == "holds"

    def test_it_holds_if_when_heads_are_around_1_but_the_median_is_not(self) -> None:
        assert judged(self.experiment, self.rows(1.6)) == "holds_if"

    def test_it_does_not_hold_when_they_are_far_from_it(self) -> None:
        assert judged(self.experiment, self.rows(5.0)) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert judged(self.experiment, self.rows(1.25, 0.1)) == "inconclusive"

    def test_without_weights_it_says_what_to_run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("poise.testing.weights.SMOLLM2", tmp_path / "nowhere")
        assert "make weights" in str(trained.needs())


class TestMeasurements:
    """One small cell of each, for real: that the rules are fed with what they expect."""

    @pytest.mark.parametrize(
        ("name", "cell"),
        [
            ("variance", {"entries": "correlated", "d": 8}),
            ("scaling", {"scale": "full", "d": 8}),
            ("saturation", {"scale": "unscaled", "n": 16, "d": 16}),
            ("gradients", {"scale": "root", "d": 16}),
            ("flat", {"scale": "full", "d": 16}),
            ("overflow", {"dtype": "float16", "scale": "root", "size": 8}),
            ("typical", {"d": 64}),
            ("order", {"part": "permutation", "positions": "alibi"}),
            ("order", {"part": "extrapolation", "positions": "learned", "steps": 2}),
            ("roles", {"part": "task", "task": "gap", "role": "cross", "steps": 2}),
        ],
    )
    def test_the_same_seed_gives_the_same_numbers(self, name: str, cell: Cell) -> None:
        own = find(name)
        first = own.measure(cell, 1)
        assert first == own.measure(cell, 1)
        assert first != own.measure(cell, 2) or name == "overflow"
        json.dumps(first)

    def test_the_masked_future_weighs_nothing(self) -> None:
        assert find("roles").measure({"part": "future"}, 0) == {"weight": 0.0, "change": 0.0}

    def test_without_positions_attention_is_permutation_equivariant_and_with_them_not(self) -> None:
        assert order.permuted("none", 0) < 1e-6
        assert all(order.permuted(name, 0) > 0.01 for name in order.SCHEMES)

    def test_a_passage_of_a_trained_model_gives_a_number_per_head(self) -> None:
        missing = trained.needs()
        if missing is not None:
            assert not os.environ.get("POISE_REQUIRE_WEIGHTS"), missing
            pytest.skip(missing)
        values = trained.measure({"model": "minilm"}, 0)
        assert [len(layer) for layer in values["std"]] == [12] * 6
        assert 0 <= values["around"] <= 1


class TestEarlyWarning:
    experiment = find("early_warning")

    def rows(self, leads: dict[str, int], warned: dict[str, bool] | None = None) -> Rows:
        """Runs that diverge at step 300, warned of so many steps ahead (0: never); healthy ones, warned of or not."""
        made = []
        for cell, seed in self.experiment.tasks("default", 0):
            run = str(cell["run"])
            at = 300 if run in leads and cell["remedy"] == "none" else None
            alarms = [[300 - leads[run], "logit_growth", "layer", 0]] if leads.get(run) else []
            if (warned or {}).get(run):
                alarms = [[200, "max_logit", "layer", 0]]
            made.append(Row(cell, seed, {"diverged_at": at, "alarms": alarms}))
        return Rows(made)

    def test_it_holds_when_all_are_warned_of_early_and_healthy_runs_are_silent(self) -> None:
        assert judged(self.experiment, self.rows({"slow": 150, "fast": 101})) == "holds"

    def test_it_holds_if_when_one_kind_comes_late_or_a_healthy_one_is_warned_of(self) -> None:
        assert judged(self.experiment, self.rows({"slow": 150, "fast": 40})) == "holds_if"
        assert judged(self.experiment, self.rows({"slow": 150, "fast": 150}, {"hot": True})) == "holds_if"

    def test_it_does_not_hold_when_all_are_late_or_missed(self) -> None:
        assert judged(self.experiment, self.rows({"slow": 90, "fast": 0})) == "does_not_hold"

    def test_runs_that_never_diverged_decide_nothing(self) -> None:
        assert judged(self.experiment, self.rows({})) == "inconclusive"

    def test_a_warning_after_the_divergence_is_a_missed_one(self) -> None:
        late = Row({}, 0, {"diverged_at": 300, "alarms": [[310, "max_logit", "layer", 0]]})
        other = Row({}, 0, {"diverged_at": 300, "alarms": [[100, "flat", "layer", 0]]})
        assert early_warning.warned_at(late) is early_warning.lead(late) is early_warning.lead(other) is None

    @pytest.mark.parametrize(
        ("losses", "expected"),
        [
            ([2.0] * 100, None),
            ([2.0] * 50 + [4.0] * 50, 55),  # the mean of 20 is 0.5 above when more than five of them are 4
            ([2.0] * 50 + [4.0] * 30 + [2.0] * 30, None),  # it recovered
            ([5.0] * 50 + [5.4] * 50, None),  # never learned much, never lost it
        ],
    )
    def test_a_divergence_is_a_rise_that_stays(self, losses: list[float], expected: int | None) -> None:
        assert early_warning.diverged_at(losses) == expected

    def test_a_loss_that_is_not_finite_diverges_there_at_the_latest(self) -> None:
        assert early_warning.diverged_at([2.0] * 40, broken=40) == 40
        assert early_warning.diverged_at([2.0] * 40 + [9.0] * 10, broken=50) == 41

    @pytest.mark.parametrize("remedy", early_warning.REMEDIES)
    def test_a_short_run_with_a_remedy_gives_what_is_judged(self, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(early_warning.KINDS, "fast", early_warning.Kind(25, most=0.2))
        values = early_warning.measure({"run": "fast", "remedy": remedy, "when": "start"}, 0)
        assert values["applied"] == 0
        assert values["diverged_at"] is None
        assert values["best"] < 4.5
        assert len(values["largest"]) == 3
        assert op._observer is None  # qk-clip listens: it must not go on after the run

    def test_a_remedy_waits_for_the_first_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(early_warning.KINDS, "fast", early_warning.Kind(12, most=0.2))
        given = Alarms(Limits(max_logit=0.0, patience=1))
        monkeypatch.setattr(early_warning, "Alarms", lambda: given)
        assert early_warning.measure({"run": "fast", "remedy": "qk-clip", "when": "warning"}, 0)["applied"] == 1
        assert early_warning.measure({"run": "fast", **early_warning.NEVER}, 0)["applied"] is None

    def test_the_document_says_what_the_rows_say(self) -> None:
        source = Path(__file__).parents[1] / "benchmarks" / "early_warning.py"
        spec = importlib.util.spec_from_file_location("benchmark_early_warning", source)
        assert spec is not None
        assert spec.loader is not None
        benchmark: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(benchmark)
        rows = []
        for row in self.rows({"slow": 150, "fast": 40}, {"hot": True}):
            failed = row.cell["remedy"] == "soft-cap" and row.cell["run"] == "slow"
            end = 290 if failed else row.values["diverged_at"]
            values = {**row.values, "diverged_at": end, "largest": [[0, 7.0]], "end": 2.5 if end is None else math.inf}
            rows.append(Row(row.cell, row.seed, values))
        text = "\n".join(benchmark.document(Rows(rows), "somewhere"))
        assert "the median lead is 95 steps (goal 100" in text
        assert "| hot | 0 of 5 | 7 | 5 |" in text
        assert "| none | – | 0 of 5, ∞ |" in text
        assert "| soft-cap | start | 0 of 5, ∞ |" in text
        assert "in none: soft-cap (start), soft-cap (warning)." in text


_DTYPES = ("float32", "bfloat16", "float16")
_LAYERS = [[1.0, 1.2], [0.9, 2.0]]
# Any values that measure could have returned: what a plot is drawn of.
DRAWN: dict[str, dict[str, Any]] = {
    "variance": {"ratio": 1.0},
    "scaling": {"variance": 1.0},
    "saturation": {"entropy": 0.5, "largest": 0.5, "keys": 3.0},
    "gradients": {"trace": 0.5, "median": 0.5, "norm": 0.5, "w_q": 3.0, "w_k": 3.0},
    "flat": {"distance": 0.1, "weight": 0.1, "found": 1.0}
    | {f"{kind}_{dtype}": 0.1 for kind in ("error", "beyond") for dtype in _DTYPES},
    "overflow": {"rows": 10, "written": 3, "shifted": 0, "poise": 0, "limit": 88.7},
    "typical": {"typical": 1.0, "before": 22.6, "largest": 4.0, "bound": 22.6},
    "order": {"change": 0.1, "within": 2.0, "beyond": 2.5, "curve": [2.0, 2.0, 2.5, 2.5]},
    "roles": {"accuracy": 0.5, "weight": 0.0, "change": 0.0},
    "cost": {"lengths": [1024, 2048], "seconds": [0.1, 0.2], "bytes": [1e6, 2e6], "time": 1.0, "memory": 1.0},
    "early_warning": {
        "diverged_at": 300,
        "alarms": [[150, "logit_growth", "layer", 0]],
        "largest": [[0, 5.0], [150, 60.0], [300, 1e4]],
    },
    "trained": {"std": _LAYERS, "normalized_entropy": _LAYERS, "sink_mass": _LAYERS, "max_logit": _LAYERS}
    | {"median": 1.0, "around": 1.0},
}


@pytest.mark.parametrize("name", DRAWN)
def test_its_plot_names_what_it_shows(name: str) -> None:
    own = find(name)
    drawn = plots.svg(own, Rows(Row(cell, seed, DRAWN[name]) for cell, seed in own.tasks("quick", 0)), "de")
    tree = ElementTree.fromstring(drawn)
    shown = {text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")}
    own_words = {
        text["de"] for key, text in texts(name).items() if key.split(".")[0] in ("plot", "scale", "entries", "form")
    }
    assert shown & own_words
    assert not re.search(r"(href|src)=\"(?!#|data:)", drawn)
