"""The lab's small training runs: the same from the same seed, what a recipe chooses, and what is recorded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from poise.lab import gpt, tasks, training
from poise.lab.gpt import Recipe
from poise.lab.training import Run, sensitivity, train

SMALL = Recipe(steps=12, batch=2, length=16, width=16, layers=1, warmup=2, observe_every=5)


def test_the_same_seed_trains_the_same_and_another_does_not() -> None:
    (one, _), (same, _), (other, _) = train(SMALL), train(SMALL), train(SMALL.but(seed=1))
    assert one.losses == same.losses
    assert one.looks == same.looks
    assert one.losses != other.losses


def test_looking_changes_no_loss_beyond_rounding() -> None:
    often, never = train(SMALL.but(observe_every=1))[0], train(SMALL.but(observe_every=10**6))[0]
    assert often.losses == pytest.approx(never.losses, abs=1e-4)


def test_a_model_learns() -> None:
    run, _ = train(SMALL.but(steps=120, batch=8, lr=1e-2))
    assert run.held_out < run.losses[0] - 1
    assert not run.diverged


@pytest.mark.parametrize(
    "changes",
    [
        *({"scale": scale} for scale in ("1", "1/d", "learned", "log n")),
        *({"positions": positions} for positions in ("waves", "sinusoidal", "alibi", "t5", "none")),
        *({"sink": sink} for sink in ("learned", "off-by-one")),
        {"softcap": 5.0},
        {"qk_norm": True},
        {"gate": True},
        {"head_dim": 32, "value_dim": 8},
    ],
    ids=str,
)
def test_every_choice_of_a_recipe_reaches_the_model(changes: dict[str, Any]) -> None:
    chosen, plain = train(SMALL.but(**changes))[0], train(SMALL)[0]
    assert chosen.losses[-1] != plain.losses[-1]
    assert math.isfinite(chosen.losses[-1])


def test_the_off_by_one_sink_stays_at_zero_and_the_learned_one_does_not() -> None:
    for sink, moved in (("off-by-one", False), ("learned", True)):
        _, model = train(SMALL.but(sink=sink))
        assert bool(model.attentions()[0].sinks.abs().sum() > 0) is moved  # type: ignore[operator]


def test_an_unknown_scale_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"scale must be one of '1', .*'log n'; got 'd'"):
        train(SMALL.but(scale="d"))


def test_queries_and_keys_begin_with_unit_variance() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(Recipe(head_dim=128), tasks.BYTES)
    x = torch.nn.functional.layer_norm(torch.randn(4, 64, 64), (64,))
    both, _ = model.attentions()[0].projection(x)
    assert float(both.detach().var()) == pytest.approx(1.0, rel=0.05)


def test_the_first_look_tells_what_scores_are_like_before_training() -> None:
    run, _ = train(Recipe(steps=1, layers=1))
    (look,) = run.looks
    assert look.step == 0
    assert 0 < look.entropy[0] < math.log(64)
    assert look.gradient_q[0] > 0
    assert look.gradient_k[0] > 0


def test_a_run_that_leaves_the_finite_numbers_stops_and_has_diverged() -> None:
    def poison(step: int, model: torch.nn.Module) -> None:
        if step == 4:
            next(model.parameters()).data.fill_(math.inf)

    run, _ = train(SMALL, change=poison)
    assert (run.stopped_at, len(run.losses)) == (4, 5)
    assert run.diverged
    assert run.final == run.ceiling


def test_a_run_that_ends_worse_than_frequencies_has_diverged() -> None:
    assert Run(SMALL, held_out=3.3, ceiling=3.2).diverged
    assert not Run(SMALL, held_out=3.1, ceiling=3.2).diverged


def test_values_are_short_and_say_how_it_ended() -> None:
    run, _ = train(SMALL.but(steps=40))
    values = run.values(points=4)
    assert values["held_out"] == pytest.approx(run.held_out, rel=1e-4)
    assert values["final"] == pytest.approx(run.ceiling, rel=1e-4)  # worse than frequencies after so few steps
    assert values["looks"]["step"][-1] == 39
    assert len(values["losses"]) <= 8
    assert {len(curve) for curve in values["looks"].values()} == {len(values["looks"]["step"])}


def test_a_bigram_knows_more_than_frequencies_and_less_than_nothing_unknown() -> None:
    text = tasks.text()
    assert 1 < text.bigram < text.ceiling < math.log(tasks.BYTES)


def test_sensitivity_is_the_mean_loss_above_the_best() -> None:
    assert sensitivity({1e-3: 2.0, 1e-2: 2.2, 1e-1: math.nan}, ceiling=3.2) == pytest.approx((0 + 0.2 + 1.2) / 3)


def test_rows_of_a_pass_are_told_query_by_query() -> None:
    _, model = train(SMALL.but(steps=1))
    ids = torch.randint(tasks.BYTES, (2, 16))
    (stats,) = training.rows_of(model, ids)
    assert stats.entropy.shape == (2, 2, 16)
    assert float(stats.entropy[..., 0].abs().max()) < 1e-6  # the first row sees itself alone
    assert float(stats.count[..., -1].min()) == 16
