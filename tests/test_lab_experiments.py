"""Every experiment's rule can come out either way, fed with synthetic rows; what it says can be read in every language.

A test class per experiment: rows of a world where the claim is true, of one where it is false, and of one where an
interval straddles a limit.
"""

from __future__ import annotations

from lab_worlds import judged, world

from poise.lab.experiment import find


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
