"""Claim 3: how far the softmax saturates as d grows, for three scalings and many lengths, beside the theory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Interval, Said, Verdict, interval, saying, weigh, worst
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POWERS = {"unscaled": 0.0, "root": -0.5, "full": -1.0}
DIMS = {"quick": (16, 64, 512), "default": (4, 16, 64, 256, 512, 1024), "full": (4, 8, 16, 32, 64, 128, 256, 512, 1024)}
LENGTHS = {
    "quick": (16, 256),
    "default": (16, 64, 256, 1024, 4096),
    "full": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
}
QUERIES = 256
SMALL, LARGE = 16, 512  # the head dims that the rule compares
SATURATED, UNIFORM, CHANGE = 0.1, 0.99, 0.02  # of the entropy as a share of log n


def cells(level: Level) -> Iterator[Cell]:
    return ({"scale": scale, "n": n, "d": d} for scale in POWERS for n in LENGTHS[level] for d in DIMS[level])


def measure(cell: Cell, seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    n, d = int(cell["n"]), int(cell["d"])
    q = torch.randn(1, 1, QUERIES, d, generator=generator)
    k = torch.randn(1, 1, n, d, generator=generator)
    _, stats = poise.observe(q, k, k[..., :1], scale=d ** POWERS[str(cell["scale"])])
    return {
        "entropy": float(stats.normalized_entropy.mean()),
        "largest": float(stats.max_prob.mean()),
        "keys": float(1 / stats.collision.mean()),
    }


@cache
def theory(variance: float, n: int, points: int = 1001) -> dict[str, float]:
    """Expectations over n independent normal scores, without approximation but for the grid.

    Powers of Z = Σ e^s become integrals of e^(-tZ), which is a product over the scores: with φ(t) = E exp(-t e^s),
    E log Z = ∫ (e^-t - φ^n) dt/t, E Σ p s = n ∫ E[s e^s e^(-t e^s)] φ^(n-1) dt and
    E Σ p² = n ∫ t E[e^2s e^(-t e^s)] φ^(n-1) dt.
    """
    deviation = math.sqrt(variance)
    x = torch.linspace(-9, 9, points, dtype=torch.float64)
    weights = torch.softmax(-x.square() / 2, 0)
    s = deviation * x
    u = torch.linspace(-math.log(n) - 9 * deviation - 8, 9 * deviation + 4, 2 * points, dtype=torch.float64)  # log t
    g = (u[:, None] + s).clamp_max(50).exp()
    passing = (-g).exp() * weights
    phi = passing.sum(-1)
    others = n * phi ** (n - 1)
    log_z = torch.trapezoid((-u.clamp_max(50).exp()).exp() - phi**n, u)
    mean = torch.trapezoid((s * g * passing).sum(-1) * others, u)
    collision = torch.trapezoid((g.square() * passing).sum(-1) * others, u)
    return {"entropy": float(log_z - mean) / math.log(n), "keys": float(1 / collision)}


def judge(rows: Rows) -> Verdict:
    lengths = rows.parameter("n")
    count = len(POWERS) * len(lengths)
    own = {scale: rows.where(scale=scale, d=LARGE) for scale in POWERS}
    saturated = worst(
        Check(
            "check.unscaled",
            own["unscaled"].where(n=n).interval("entropy", count),
            high=SATURATED,
            values={"n": str(n)},
        )
        for n in lengths
    )
    kept = worst(
        Check("check.root", _change(rows.where(scale="root", n=n), count), -CHANGE, CHANGE, {"n": str(n)})
        for n in lengths
    )
    flat = worst(
        Check("check.full", own["full"].where(n=n).interval("entropy", count), low=UNIFORM, values={"n": str(n)})
        for n in lengths
    )
    checks = [saturated, kept, flat]
    longest = own["unscaled"].where(n=lengths[-1])
    said: Said = {
        "n": str(lengths[-1]),
        "unscaled": str(longest.interval("largest")),
        "root": str(own["root"].where(n=lengths[-1]).interval("largest")),
        "unscaled_keys": str(longest.interval("keys")),
        "root_keys": str(own["root"].where(n=lengths[-1]).interval("keys")),
        "kept": tuple(f"short.{label.split('.')[1]}" for label in saying("yes", checks)),
        "broken": tuple(f"short.{label.split('.')[1]}" for label in saying("no", checks)),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def _change(rows: Rows, comparisons: int) -> Interval:
    """Of the entropy between the two head dims, seed by seed."""
    pairs = zip(rows.where(d=LARGE).numbers("entropy"), rows.where(d=SMALL).numbers("entropy"), strict=True)
    return interval([large - small for large, small in pairs], comparisons=comparisons)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    lengths, dims = rows.parameter("n"), rows.parameter("d")
    panels = figure.subplots(1, 3)
    shown = (("entropy", say("plot.entropy")), ("largest", say("plot.largest")), ("keys", say("plot.keys")))
    for axes, (name, label) in zip(panels, shown, strict=True):
        for scale, colour in zip(POWERS, plots.COLOURS, strict=False):
            for n in {lengths[0]: "--", lengths[-1]: "-"}:
                found = [rows.where(scale=scale, n=n, d=d).interval(name) for d in dims]
                style = "o-" if n == lengths[-1] else "o--"
                plots.curve(axes, dims, found, f"{say(f'scale.{scale}')}, n = {n}", fmt=style, color=colour)
                if name != "largest":
                    expected = [theory(d ** (1 + 2 * POWERS[scale]), n)[name] for d in dims]
                    axes.plot(dims, expected, ":", color=colour, linewidth=1)
        plots.ticks(axes, dims, narrow=True)
        axes.set(xlabel="d", title=label)
    panels[2].set_yscale("log")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, title=say("plot.theory"))


EXPERIMENT = Experiment(
    number=3,
    name="saturation",
    source="Vaswani et al. 2017, §3.2.1",
    version=2,
    cells=cells,
    seeds={"quick": 6, "default": 8, "full": 16},
    measure=measure,
    judge=judge,
    draw=draw,
)
