"""Claim 7: at d = 512 a scaled score is typically about 22. That is a bound, or the deviation before scaling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = {"quick": (64, 512), "default": (64, 128, 256, 512, 1024), "full": (16, 32, 64, 128, 256, 512, 1024, 2048)}
DIM = 512
LENGTH = 512
LOW, HIGH = 20.0, 25.0  # what "about 22" allows


def cells(level: Level) -> Iterator[Cell]:
    return ({"d": d} for d in DIMS[level])


def measure(cell: Cell, seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    d = int(cell["d"])
    q, k = torch.randn(2, 1, 1, LENGTH, d, generator=generator)
    _, scaled = poise.observe(q, k, k[..., :1])
    _, raw = poise.observe(q, k, k[..., :1], scale=1.0)
    # A query that points exactly along its key, both with all entries ±1: no pair of that norm scores higher.
    signs = torch.randn(1, 1, 1, d, generator=generator).sign()
    _, bound = poise.observe(signs, signs, signs[..., :1])
    return {
        "typical": float((scaled.std.square() + scaled.mean.square()).mean().sqrt()),
        "before": float((raw.std.square() + raw.mean.square()).mean().sqrt()),
        "largest": float(scaled.max_score.max()),
        "bound": float(bound.max_score.max()),
    }


def judge(rows: Rows) -> Verdict:
    own = rows.where(d=DIM)
    typical = Check("check.typical", own.interval("typical", 3), LOW, HIGH)
    beside = (
        Check("check.bound", own.interval("bound", 3), LOW, HIGH),
        Check("check.before", own.interval("before", 3), LOW, HIGH),
    )
    said: Said = {
        "typical": str(typical.measured),
        "largest": str(own.interval("largest")),
        "bound": f"{own.interval('bound').mean:.3g}",
        "before": str(own.interval("before")),
    }
    return Verdict(weigh([typical]), (typical, *beside), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    axes = figure.subplots()
    dims = rows.parameter("d")
    for name in ("bound", "before", "largest", "typical"):
        found = [rows.where(d=d).interval(name) for d in dims]
        style = {"bound": "s", "before": "x", "largest": "^-", "typical": "o-"}[name]
        plots.curve(axes, dims, found, say(f"check.{name}"), fmt=style, markersize=7)
    axes.plot(dims, [math.sqrt(d) for d in dims], ":", color="#4d4d4d", label="√d")
    axes.axhspan(LOW, HIGH, color="#d55e00", alpha=0.12, label=say("plot.about"))
    plots.ticks(axes, dims)
    axes.set(xlabel="d", ylabel=say("plot.score"), yscale="log")
    figure.legend(loc="outside lower center", ncols=2)


EXPERIMENT = Experiment(
    number=7,
    name="typical",
    source='popular explanations of §3.2.1 of Vaswani et al. 2017: "512 / √512 ≈ 22"',
    version=1,
    cells=cells,
    seeds={"quick": 8, "default": 16, "full": 64},
    measure=measure,
    judge=judge,
    draw=draw,
)
