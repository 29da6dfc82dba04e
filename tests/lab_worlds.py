"""Synthetic rows for the rules of the lab: worlds where a claim is true, is false, or cannot be told."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from poise.lab.evidence import Kind, Verdict
from poise.lab.experiment import Cell, Experiment, Row, Rows
from poise.lab.texts import fill, speaker
from poise.report.texts import LANGUAGES


def world(experiment: Experiment, values: Callable[[Cell], Mapping[str, float]], spread: float = 0.0) -> Rows:
    """Rows of the default level whose numbers are given, times noise of that relative size."""
    noise = random.Random(0)
    return Rows(
        Row(cell, seed, {name: value * (1 + spread * noise.gauss(0, 1)) for name, value in values(cell).items()})
        for cell, seed in experiment.tasks("default", 0)
    )


def judged(experiment: Experiment, rows: Rows) -> Kind:
    """The verdict's kind, once its text and labels have been said in all languages."""
    verdict: Verdict = experiment.judge(rows)
    for language in LANGUAGES:
        say = speaker(experiment.name, language)
        assert fill(say, verdict.finding, verdict.values)
        assert all(fill(say, check.label, check.values) for check in verdict.checks)
    return verdict.kind
