"""The rules of the experiments that train small models can come out either way, and their tasks are what they say.

A class per experiment: rows of a world where the claim is true, of one where it is false, and of one where an interval
straddles a limit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lab_worlds import judged, world

from poise.lab import plots
from poise.lab.experiment import Cell, Row, Rows, find
from poise.lab.experiments import growth, heads, length, sinks
from poise.lab.gpt import GPT, Recipe
from poise.lab.results import Results
from poise.lab.tasks import BYTES, IGNORED, text
from poise.lab.training import rows_of

NOISE = 0.001
TRAINING = ("scales", "growth", "collapse", "sinks", "length", "heads")


@pytest.mark.parametrize("name", TRAINING)
def test_what_is_measured_can_be_stored_judged_and_drawn(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "EXAMINED", 8)
    own, results = find(name), Results(tmp_path)
    for cell in own.cells("quick"):
        few = {**cell, "steps": 2}
        results.store(own, Row(few, 0, own.measure(few, 0)))
    rows = Rows(results.finished(own).values())
    assert len(rows) == len(list(own.cells("quick")))
    assert judged(own, rows) == "inconclusive"  # one seed tells nothing
    for language in ("en", "zh"):
        assert plots.svg(own, rows, language).startswith("<svg")


@pytest.mark.parametrize("name", TRAINING)
def test_the_same_seed_measures_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "EXAMINED", 8)
    own = find(name)
    cell = {**list(own.cells("quick"))[-1], "steps": 2}
    assert own.measure(cell, 3) == own.measure(cell, 3) != own.measure(cell, 4)


class TestScales:
    experiment = find("scales")

    def ends(self, spread: float = NOISE, **losses: float) -> str:
        names = {"1/sqrt(d)": "root", "1": "one", "1/d": "inverse", "learned": "learned", "log n": "log"}
        return judged(
            self.experiment,
            world(self.experiment, lambda cell: {"final": losses.get(names[str(cell["scale"])], 2.0)}, spread),
        )

    def test_it_holds_when_no_rival_is_better(self) -> None:
        assert self.ends(one=2.4, inverse=2.05) == "holds"

    def test_it_holds_if_when_only_a_variation_is_better(self) -> None:
        assert self.ends(one=2.4, learned=1.8) == "holds_if"

    def test_it_does_not_hold_when_both_fixed_rivals_are_better(self) -> None:
        assert self.ends(one=1.8, inverse=1.8) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert self.ends(spread=0.05) == "inconclusive"

    def test_one_head_dim_where_a_rival_is_better_decides(self) -> None:
        def values(cell: Cell) -> dict[str, float]:
            return {"final": 1.8 if cell["scale"] == "1/d" and cell["head_dim"] == 256 else 2.0}

        assert judged(self.experiment, world(self.experiment, values, NOISE)) == "holds_if"

    def test_each_scale_is_judged_at_its_own_best_rate(self) -> None:
        def values(cell: Cell) -> dict[str, float]:
            good = 2e-3 if cell["scale"] == "1" else 6e-3
            return {"final": 2.0 if cell["lr"] == good else 3.0}

        assert judged(self.experiment, world(self.experiment, values, NOISE)) == "holds"


class TestGrowth:
    experiment = find("growth")

    def rows(self, *, helped: float, moved: float, diverged: float, spread: float = NOISE) -> Rows:
        def values(cell: Cell) -> dict[str, float]:
            if cell["part"] == "transplant":
                steps = {f"{name}.{kappa}": moved for kappa in growth.KAPPAS for name in ("loss", "after")}
                return {"before": 2.1, "bigram": 2.4, **steps}
            high = float(cell["lr"]) >= 0.03
            final = 2.0 + high * (1.0 if cell["remedy"] == growth.PLAIN else 1.0 - helped)
            return {"final": final, "max_logit": 1e5 if high else 20.0, "diverged": diverged}

        few = world(self.experiment, values, spread)
        return Rows(Row(row.cell, row.seed + 10 * i, row.values) for i in range(3) for row in few)

    def test_it_holds_when_all_is_as_claimed(self) -> None:
        assert judged(self.experiment, self.rows(helped=0.9, moved=2.6, diverged=1.0)) == "holds"

    def test_it_holds_if_when_remedies_help_and_nothing_diverges(self) -> None:
        assert judged(self.experiment, self.rows(helped=0.9, moved=2.3, diverged=0.0)) == "holds_if"

    def test_it_does_not_hold_when_nothing_is_as_claimed(self) -> None:
        assert judged(self.experiment, self.rows(helped=0.0, moved=2.1, diverged=0.0)) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        rows = self.rows(helped=0.05, moved=2.6, diverged=1.0, spread=0.05)
        assert judged(self.experiment, rows) == "inconclusive"

    def test_without_a_run_above_the_threshold_nothing_is_said_of_it(self) -> None:
        rows = Rows(
            Row(row.cell, row.seed, {**row.values, "max_logit": 50.0})
            for row in self.rows(helped=0.9, moved=2.6, diverged=1.0)
        )
        assert judged(self.experiment, rows) == "inconclusive"

    def test_a_transplant_sets_the_largest_logit_of_each_layer(self) -> None:
        torch.manual_seed(0)
        recipe = Recipe()
        model = GPT(recipe, BYTES)
        growth.transplant(model, 1000.0, recipe)
        ids = text().examine(16, recipe.length, torch.Generator().manual_seed(recipe.seed)).ids
        assert [float(stats.max_logit.max()) for stats in rows_of(model, ids)] == pytest.approx([1000.0] * 2, rel=1e-3)


class TestCollapse:
    experiment = find("collapse")

    def ends(self, during: float, after: float, diverged: float, spread: float = NOISE) -> str:
        finals = {"never": 2.0, "during": 2.0 + during, "after": 2.0 + after}
        return judged(
            self.experiment,
            world(
                self.experiment,
                lambda cell: {"final": finals[str(cell["moment"])], "diverged": diverged},
                spread,
            ),
        )

    def test_it_holds_when_early_runs_diverge_and_late_ones_recover(self) -> None:
        assert self.ends(1.2, 0.0, 1.0) == "holds"

    def test_it_holds_if_when_late_ones_recover_but_early_ones_do_not_diverge(self) -> None:
        assert self.ends(0.3, 0.0, 0.0) == "holds_if"

    def test_it_does_not_hold_when_neither_is_so(self) -> None:
        assert self.ends(0.3, 0.2, 0.0) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert self.ends(0.3, 0.05, 0.0, spread=0.02) == "inconclusive"


class TestSinks:
    experiment = find("sinks")

    def ends(self, plain: float, relieved: float, spread: float = NOISE) -> str:
        def values(cell: Cell) -> dict[str, float]:
            mass = plain if cell["variant"] == "softmax" else relieved
            return {"resting": mass, "copying": 0.05, "times_uniform": mass / 0.04}

        return judged(self.experiment, world(self.experiment, values, spread))

    def test_it_holds_when_a_sink_forms_and_every_outlet_relieves_it(self) -> None:
        assert self.ends(0.6, 0.1) == "holds"

    def test_it_holds_if_when_the_preference_is_short_of_a_sink(self) -> None:
        assert self.ends(0.2, 0.1) == "holds_if"

    def test_it_does_not_hold_when_nothing_rests_there(self) -> None:
        assert self.ends(0.04, 0.04) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert self.ends(0.3, 0.1, spread=0.2) == "inconclusive"

    def test_after_a_trigger_comes_the_token_before_it(self) -> None:
        batch = sinks.task().draw(64, sinks.LENGTH, torch.Generator().manual_seed(0))
        rows, places = torch.nonzero(batch.ids[:, 1:] < sinks.TRIGGERS, as_tuple=True)
        assert len(rows) > 100
        assert torch.equal(batch.targets[rows, places + 1], batch.ids[rows, places])

    def test_elsewhere_comes_what_the_chain_says(self) -> None:
        batch = sinks.task().draw(4096, sinks.LENGTH, torch.Generator().manual_seed(0))
        token = sinks.TRIGGERS
        following = torch.bincount(batch.targets[batch.ids == token], minlength=sinks.TOKENS)
        found = following.double() / following.sum()
        assert torch.allclose(found, sinks.task().chain[token].double(), atol=5 / following.sum().sqrt())


class TestLength:
    experiment = find("length")

    def ends(self, fallen: float, plain: float, helped: float, spread: float = NOISE) -> str:
        far, near = length.FAR, length.TRAINED

        def values(cell: Cell) -> dict[str, float]:
            own = plain if cell["scaling"] == "softmax" else helped
            return {
                f"weight.{near}": 0.9,
                f"weight.{far}": 0.9 * fallen,
                f"accuracy.{near}": 0.97,
                f"accuracy.{far}": own,
                f"adaptive.accuracy.{near}": 0.97,
                f"adaptive.accuracy.{far}": helped,
            }

        return judged(self.experiment, world(self.experiment, values, spread))

    def test_it_holds_when_softmax_disperses_and_the_others_keep_what_they_knew(self) -> None:
        assert self.ends(0.1, 0.3, 0.96) == "holds"

    def test_it_holds_if_when_the_others_help_without_keeping_it(self) -> None:
        assert self.ends(0.1, 0.3, 0.5) == "holds_if"

    def test_it_does_not_hold_when_nothing_disperses_and_nothing_helps(self) -> None:
        assert self.ends(0.95, 0.96, 0.96) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert self.ends(0.1, 0.3, 0.34, spread=0.1) == "inconclusive"

    def test_the_answer_is_the_class_of_the_highest_priority(self) -> None:
        items, target = length.draw_sets(7, 32, torch.Generator().manual_seed(0))
        winners = items[torch.arange(32), items[..., 0].argmax(1)]
        assert torch.equal(winners[:, 1:].argmax(-1), target)

    def test_the_adaptive_temperature_only_sharpens_and_only_above_half_a_nat(self) -> None:
        found = length.inverse_temperature(torch.linspace(0.0, 4.0, 41))
        assert float(found.min()) == 1.0
        assert (found[:5] == 1).all()
        assert float(found.max()) > 1.3

    @pytest.mark.parametrize("scaling", length.SCALINGS)
    def test_an_observed_model_answers_as_an_unobserved_one(self, scaling: str) -> None:
        model = length.Retriever(scaling)
        items, _ = length.draw_sets(16, 8, torch.Generator().manual_seed(0))
        assert torch.allclose(model.observed(items, adaptive=False)[0], model(items), atol=1e-5)


class TestHeads:
    experiment = find("heads")

    def ends(self, several: float, single: float, spread: float = NOISE) -> str:
        def values(cell: Cell) -> dict[str, float]:
            worse = (single if cell["relations"] == 1 else several) if cell["heads"] == 1 else 0.0
            return {"final": 0.5 + worse}

        return judged(self.experiment, world(self.experiment, values, spread))

    def test_it_holds_when_the_wide_head_is_worse_at_several_relations_only(self) -> None:
        assert self.ends(0.7, 0.0) == "holds"

    def test_it_holds_if_when_it_is_worse_at_one_relation_too(self) -> None:
        assert self.ends(0.7, 0.7) == "holds_if"

    def test_it_does_not_hold_when_it_is_worse_only_where_one_head_should_do(self) -> None:
        assert self.ends(0.0, 0.7) == "does_not_hold"

    def test_an_interval_over_the_limit_is_inconclusive(self) -> None:
        assert self.ends(0.1, 0.0, spread=0.05) == "inconclusive"

    def test_the_answers_are_the_tokens_before(self) -> None:
        batch = heads.Lookback(3).draw(4, 16, torch.Generator().manual_seed(0))
        assert (batch.targets[:, :3] == IGNORED).all()
        for back in (1, 2, 3):
            assert torch.equal(batch.targets[:, 3:, back - 1], batch.ids[:, 3 - back : 16 - back])

    def test_parameters_do_not_depend_on_the_number_of_heads(self) -> None:
        counts = [
            sum(one.numel() for one in heads.Answering(Recipe(heads=number, layers=1), 4).parameters())
            for number in (1, 4, 8)
        ]
        assert len(set(counts)) == 1
