"""Claim 2: what the three scalings make of the scores' variance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, saying, weigh, worst
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = {"quick": (4, 64, 1024), "default": (4, 8, 16, 32, 64, 128, 256, 512, 1024)}
POWERS = {"unscaled": 0.0, "root": -0.5, "full": -1.0}  # the score times d to this power
HEADS, LENGTH = 8, 128
TOLERANCE = 0.1


def cells(level: Level) -> Iterator[Cell]:
    dims = DIMS["quick" if level == "quick" else "default"]
    return ({"scale": scale, "d": d} for scale in POWERS for d in dims)


def measure(cell: Cell, seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    d = int(cell["d"])
    q, k = torch.randn(2, 1, HEADS, LENGTH, d, generator=generator)
    _, stats = poise.observe(q, k, k[..., :1], scale=d ** POWERS[str(cell["scale"])])
    # Over all pairs, not within rows: the expected score is 0, so the mean square is the variance.
    return {"variance": float((stats.std.double().square() + stats.mean.double().square()).mean())}


def promised(scale: str, d: int) -> float:
    return float(d ** (1 + 2 * POWERS[scale]))


def judge(rows: Rows) -> Verdict:
    dims = rows.parameter("d")
    count = len(POWERS) * len(dims)
    checks = []
    for scale in POWERS:
        found = []
        for d in dims:
            measured = rows.where(scale=scale, d=d).interval("variance", count) / promised(scale, d)
            found.append(Check(f"ratio.{scale}", measured, 1 - TOLERANCE, 1 + TOLERANCE))
        checks.append(worst(found))
    said: Said = {
        **{scale: str(check.measured) for scale, check in zip(POWERS, checks, strict=True)},
        "kept": saying("yes", checks),
        "broken": saying("no", checks),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    axes = figure.subplots()
    dims = rows.parameter("d")
    for scale in POWERS:
        found = [rows.where(scale=scale, d=d).interval("variance") for d in dims]
        colour = plots.curve(axes, dims, found, say(f"scale.{scale}"), fmt="o")
        axes.plot(dims, [promised(scale, d) for d in dims], color=colour, linewidth=1)
    plots.ticks(axes, dims)
    axes.set(yscale="log", xlabel="d", ylabel=say("plot.variance"), title=say("plot.theory"))
    axes.legend()


EXPERIMENT = Experiment(
    number=2,
    name="scaling",
    source="Vaswani et al. 2017, Attention Is All You Need, §3.2.1",
    version=1,
    cells=cells,
    seeds={"quick": 16, "default": 32, "full": 128},
    measure=measure,
    judge=judge,
    draw=draw,
)
