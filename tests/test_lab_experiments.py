"""Every experiment's rule can come out either way, fed with synthetic rows; what it says can be read in every language.

A test class per experiment: rows of a world where the claim is true, of one where it is false, and of one where an
interval straddles a limit.
"""

from __future__ import annotations

import pytest
import torch
from lab_worlds import judged, world

from poise.lab.experiment import Cell, Rows, find
from poise.lab.experiments import overflow, saturation


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

    @pytest.mark.parametrize("variance", [0.25, 1.0, 4.0, 300.0])
    def test_the_theory_is_near_what_normal_scores_give(self, variance: float) -> None:
        generator = torch.Generator().manual_seed(0)
        p = (variance**0.5 * torch.randn(400, 4096, generator=generator, dtype=torch.float64)).softmax(-1)
        entropy = float(torch.special.entr(p).sum(-1).mean() / torch.tensor(4096.0).log())
        assert saturation.theory(variance, 4096)["entropy"] == pytest.approx(entropy, abs=0.02)


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
