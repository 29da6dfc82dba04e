"""Claim 1: the variance of q·k is d. Independent entries first, then what breaks or does not break it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, saying, weigh, worst
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMS = {"quick": (4, 32, 256), "default": (4, 8, 16, 32, 64, 128, 256, 512, 1024)}
ENTRIES = ("independent", "heavy", "mean", "correlated", "alike")
PAIRS = 4000  # per seed: the ratio then deviates by 2 %, by 5 % where tails are heavy
MEAN, WITHIN, BETWEEN = 0.5, 0.3, 0.5
TOLERANCE = 0.1  # how far Var / d may be from 1


def cells(level: Level) -> Iterator[Cell]:
    dims = DIMS["quick" if level == "quick" else "default"]
    return ({"entries": entries, "d": d} for entries in ENTRIES for d in dims)


def measure(cell: Cell, seed: int) -> Values:
    """Scores of independent pairs: each is an attention of its own, with one query and one key."""
    generator = torch.Generator().manual_seed(seed)
    q, k = pairs(str(cell["entries"]), PAIRS, int(cell["d"]), generator)
    _, stats = poise.observe(q[:, None, None], k[:, None, None], k[:, None, None, :1], scale=1.0)
    return {"ratio": float(stats.mean.double().var()) / int(cell["d"])}


def pairs(entries: str, count: int, d: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two tensors [count, d] whose entries have variance 1, in one of the ways of ENTRIES."""

    def normal() -> Tensor:
        return torch.randn(count, d, generator=generator)

    q, k = normal(), normal()
    if entries == "heavy":
        return _laplace(q, generator), _laplace(k, generator)
    if entries == "mean":
        return q + MEAN, k + MEAN
    if entries == "correlated":  # any two entries of one vector share a part
        shared = (torch.randn(count, 1, generator=generator) for _ in range(2))
        q, k = ((1 - WITHIN) ** 0.5 * x + WITHIN**0.5 * own for x, own in zip((q, k), shared, strict=True))
    if entries == "alike":  # an entry of q goes with the same entry of k
        k = BETWEEN * q + (1 - BETWEEN**2) ** 0.5 * k
    return q, k


def _laplace(like: Tensor, generator: torch.Generator) -> Tensor:
    size = torch.empty_like(like).exponential_(2**0.5, generator=generator)
    return size.copysign(like)


def theory(entries: str, d: int) -> float:
    """Var(q·k) / d."""
    gains = {"mean": 2 * MEAN**2, "correlated": WITHIN**2 * (d - 1), "alike": BETWEEN**2}
    return 1 + gains.get(entries, 0.0)


def judge(rows: Rows) -> Verdict:
    count = len(ENTRIES) * len(rows.parameter("d"))
    checks = [
        worst(
            Check(
                f"entries.{entries}",
                own.where(d=d).interval("ratio", count),
                1 - TOLERANCE,
                1 + TOLERANCE,
                {"d": str(d)},
            )
            for d in own.parameter("d")
        )
        for entries in ENTRIES
        for own in [rows.where(entries=entries)]
    ]
    said: Said = {"core": str(checks[0].measured), "kept": saying("yes", checks), "broken": saying("no", checks)}
    return Verdict(weigh(checks[:1], checks[1:]), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    axes = figure.subplots()
    for entries in ENTRIES:
        own = rows.where(entries=entries)
        dims = own.parameter("d")
        found = [own.where(d=d).interval("ratio") for d in dims]
        colour = plots.curve(axes, dims, found, say(f"entries.{entries}"), fmt="o")
        axes.plot(dims, [theory(entries, d) for d in dims], color=colour, linewidth=1)
    plots.ticks(axes, rows.parameter("d"))
    axes.set(yscale="log", xlabel="d", ylabel="Var(q·k) / d", title=say("plot.theory"))
    axes.legend()


EXPERIMENT = Experiment(
    number=1,
    name="variance",
    source="Vaswani et al. 2017, Attention Is All You Need, §3.2.1, footnote 4",
    version=1,
    cells=cells,
    seeds={"quick": 16, "default": 16, "full": 64},
    measure=measure,
    judge=judge,
    draw=draw,
)
