"""Alarms: each raised by a planted cause and by nothing near it, once, with everything it promises to name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import poise
from poise.monitor.alarms import Alarm, Alarms, Limits
from poise.monitor.record import make_record

HEADS, LENGTH, DIM = 3, 32, 8


def record_of(q: Tensor, k: Tensor, step: int, **options: Any) -> dict[str, Any]:
    """The record of one layer that attends with these queries and keys, [B, H, N, D]."""
    stats = poise.observe(q, k, k, mask=poise.causal(), **options)[1]
    return make_record(step, {"layer": stats.reduce("head")}, {})


def healthy(step: int, scale: float = 1.0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    q, k = (torch.randn(2, HEADS, LENGTH, DIM, generator=generator) * scale for _ in range(2))
    return record_of(q, k, step)


def run(records: list[dict[str, Any]], **limits: Any) -> list[Alarm]:
    alarms = Alarms(Limits(**limits))
    return [alarm for record in records for alarm in alarms(record)]


def kinds(found: list[Alarm]) -> set[tuple[str, int | None]]:
    return {(alarm.kind, alarm.head) for alarm in found}


def planted(change: Any, steps: range = range(600, 610)) -> list[Alarm]:
    """Healthy records, then ones whose head 1 was changed by change(q, k)."""
    records = [healthy(step) for step in range(590, 600)]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        q, k = (torch.randn(2, HEADS, LENGTH, DIM, generator=generator) for _ in range(2))
        change(q, k)
        records.append(record_of(q, k, step))
    return run(records)


def test_healthy_attention_raises_none() -> None:
    assert run([healthy(step) for step in range(0, 1500, 25)]) == []


def test_a_large_logit_names_layer_head_step_value_and_limit() -> None:
    (alarm,) = planted(lambda q, k: q[:, 1].mul_(300), range(600, 605))[:1]
    assert (alarm.kind, alarm.layer, alarm.head, alarm.step, alarm.limit) == ("max_logit", "layer", 1, 600, 1000.0)
    assert alarm.value > 1000
    for part in ("layer head 1", "step 600", "limit 1000", "QK-Clip", "2309.14322"):
        assert part in str(alarm)
    json.dumps(alarm.to_dict(), allow_nan=False)


def test_beyond_ten_thousand_no_run_recovered() -> None:
    found = planted(lambda q, k: q[:, 1].mul_(1e5))
    assert ("diverged_logit", 1) in kinds(found)
    assert ("max_logit", 1) not in kinds(found)


class TestGrowth:
    @staticmethod
    def records(logits: list[float], every: int = 10) -> list[dict[str, Any]]:
        base = healthy(0)
        made = []
        for index, largest in enumerate(logits):
            values = json.loads(json.dumps(base["layers"]["layer"]))
            values["max_logit"]["max"] = [3.0, largest, 3.0]
            made.append({**base, "step": index * every, "layers": {"layer": values}})
        return made

    @staticmethod
    def noise(count: int, size: float) -> list[float]:
        return (torch.randn(count, generator=torch.Generator().manual_seed(0)) * size).tolist()

    def test_exponential_growth_is_foreseen_with_its_step_and_uncertainty(self) -> None:
        # Crosses 1e4 at step 100 ln(1e4 / 20) / 0.6 = 1036.
        logits = [20 * math.exp(0.06 * i + e) for i, e in enumerate(self.noise(80, 0.05))]
        found = [alarm for alarm in run(self.records(logits)) if alarm.kind == "logit_growth"]
        (alarm,) = found
        assert alarm.head == 1
        assert alarm.step < 600  # hundreds of steps ahead
        assert alarm.crossing is not None
        expected, soonest, latest = alarm.crossing
        assert soonest < expected < latest
        assert soonest <= 1036 <= latest
        assert f"step {expected:.0f}" in str(alarm)

    def test_growth_that_flattens_out_is_none(self) -> None:
        logits = [40 * (1 - math.exp(-i / 8)) * math.exp(e) for i, e in enumerate(self.noise(120, 0.05), 1)]
        assert run(self.records(logits)) == []

    def test_a_large_but_steady_logit_is_none(self) -> None:
        assert run(self.records([200 * math.exp(e) for e in self.noise(120, 0.2)])) == []

    def test_growth_from_a_small_start_is_none(self) -> None:
        assert run(self.records([0.2 * math.exp(0.1 * i) for i in range(50)])) == []  # reaches 30

    def test_a_crossing_far_ahead_is_none(self) -> None:
        assert run(self.records([40 * math.exp(0.002 * i) for i in range(120)])) == []


class TestWhatAHeadCanSuffer:
    def test_entropy_collapse(self) -> None:
        # Each query finds one key, its own: not the first, where resting is usual.
        def collapse(q: Tensor, k: Tensor) -> None:
            q[:, 1] = k[:, 1] * 30

        found = kinds(planted(collapse))
        assert ("entropy_collapse", 1) in found
        assert {head for _, head in found} == {1}

    def test_a_head_that_rests_on_the_first_key_has_not_collapsed(self) -> None:
        def rest(q: Tensor, k: Tensor) -> None:
            q[:, 1] = 10.0
            k[:, 1] = 0.0
            k[:, 1, 0] = 5.0

        assert planted(rest) == []

    def test_saturation(self) -> None:
        def saturate(q: Tensor, k: Tensor) -> None:
            q[:, 1] = k[:, 1] * 3000

        assert ("saturation", 1) in kinds(planted(saturate))

    def test_flat_only_after_training_has_settled(self) -> None:
        def flatten(q: Tensor, k: Tensor) -> None:
            q[:, 1] *= 0.02

        assert kinds(planted(flatten)) == {("flat", 1)}
        assert run([healthy(step, 0.1) for step in range(0, 400, 20)]) == []

    def test_dead(self) -> None:
        assert kinds(planted(lambda q, k: q[:, 1].zero_())) == {("dead", 1)}

    def test_duplicate(self) -> None:
        def copy(q: Tensor, k: Tensor) -> None:
            q[:, 2], k[:, 2] = q[:, 0], k[:, 0]

        assert kinds(planted(copy)) == {("duplicate", 2)}

    def test_heads_that_share_keys_are_no_duplicates(self) -> None:
        assert planted(lambda q, k: k[:, 2].copy_(k[:, 0])) == []

    def test_sink_takeover_needs_the_whole_layer(self) -> None:
        def rest(q: Tensor, k: Tensor) -> None:
            q[:], k[:] = 10.0, 0.0
            k[:, :, 0] = 5.0

        found = kinds(planted(rest))
        assert ("sink_takeover", None) in found

    def test_nan_is_told_at_once(self) -> None:
        def spoil(q: Tensor, k: Tensor) -> None:
            q[0, 1, 3, 0] = math.nan

        found = planted(spoil, range(600, 601))
        assert kinds(found) == {("nonfinite", None)}

    def test_infinite_scores_are_told_at_once(self) -> None:
        found = planted(lambda q, k: q[:, 1].mul_(1e30).add_(k[:, 1] * 1e30), range(600, 601))
        assert "nonfinite" in {alarm.kind for alarm in found} | {"nonfinite" for a in found if a.value > 1e30}


class TestHowOften:
    def test_once_while_it_lasts_and_again_after_it_has_gone(self) -> None:
        def at(step: int, bad: bool) -> dict[str, Any]:
            return healthy(step, 30.0 if bad else 1.0)

        pattern = [True] * 5 + [False] * 3 + [True] * 5
        found = run([at(step, bad) for step, bad in enumerate(pattern)], max_logit=500.0, diverged_logit=None)
        steps = [alarm.step for alarm in found if (alarm.kind, alarm.head) == ("max_logit", 0)]
        assert steps == [0, 8]

    def test_patience_passes_over_a_single_bad_record(self) -> None:
        def saturate(q: Tensor, k: Tensor) -> None:
            q[:, 1] = k[:, 1] * 300

        assert ("saturation", 1) not in kinds(planted(saturate, range(600, 602)))

    def test_limits_can_be_moved_and_switched_off(self) -> None:
        assert run([healthy(0)], max_logit=1.0) != []
        assert run([healthy(0, 1e4)], max_logit=None, diverged_logit=None, responsiveness=None) == []


def test_a_watch_raises_keeps_and_records_them(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.MultiheadAttention(8, 2)
    x = torch.full((3, 1, 8), 1e4)
    handled: list[Alarm] = []
    with poise.watch(net, alarms=Alarms(handler=handled.append)) as w:
        net(x, x, x)
    assert {alarm.kind for alarm in w.alarms} == {"diverged_logit"}
    assert handled == list(w.alarms)
    assert w.record is not None
    assert w.record["alarms"] == [alarm.to_dict() for alarm in w.alarms]
    with poise.watch(net):
        net(x, x, x)
    assert "diverged_logit" in caplog.text  # without a handler they are logged
    with poise.watch(net, alarms=False) as w:
        net(x, x, x)
    assert not w.alarms


def test_a_window_too_short_for_a_trend_is_an_error() -> None:
    with pytest.raises(ValueError, match="window must be at least 16 records"):
        Alarms(window=4)
