"""Claim 5: dividing by d makes attention uniform, blind and numerically unstable. Each part is asked by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Interval, Said, Verdict, interval, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POWERS = {"root": -0.5, "full": -1.0}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DIMS = {"quick": (16, 512), "default": (16, 64, 256, 512), "full": (8, 16, 32, 64, 128, 256, 512, 1024)}
LARGE = 512
LENGTH, VALUES = 256, 64
NEAR_UNIFORM = 0.05  # total variation distance
BLIND = 0.5  # share of queries that no longer find their key
WEAK = 0.1  # weight on the planted key
UNSTABLE = 2.0  # times the error with 1/√d


def cells(level: Level) -> Iterator[Cell]:
    return ({"scale": scale, "d": d} for scale in POWERS for d in DIMS[level])


def measure(cell: Cell, seed: int) -> Values:
    """Random keys for the distance from uniform; then every query has its own key planted among them."""
    generator = torch.Generator().manual_seed(seed)
    d = int(cell["d"])
    scale = d ** POWERS[str(cell["scale"])]
    q, k = torch.randn(2, 1, 1, LENGTH, d, generator=generator)
    v = torch.randn(1, 1, LENGTH, VALUES, generator=generator)
    p = poise.scores(q, k, scale=scale, stage="prob")
    planted = poise.scores(q, q, scale=scale, stage="prob")[0, 0]
    values: dict[str, float] = {
        "distance": float((p - 1 / LENGTH).abs().sum(-1).mean() / 2),
        "found": float((planted.argmax(-1) == torch.arange(LENGTH)).float().mean()),
        "weight": float(planted.diagonal().mean()),
    }
    for name, dtype in DTYPES.items():
        values |= {f"{kind}_{name}": value for kind, value in _errors(q, k, v, scale, dtype).items()}
    return values


def _errors(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype) -> dict[str, float]:
    """Against float64 on the same rounded inputs: of the output, and of what it says beyond the plain mean of v."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    exact = poise.attention(q.double(), k.double(), v.double(), scale=scale)
    out = poise.attention(q, k, v, scale=scale).double()
    error, beyond = (out - exact).norm(), (exact - v.double().mean(-2, keepdim=True)).norm()
    return {
        "error": float(error / exact.norm()),
        "beyond": float(error / beyond),
        "bad": float((~out.isfinite()).float().mean()),
    }


def judge(rows: Rows) -> Verdict:
    full, root = (rows.where(scale=scale, d=LARGE) for scale in ("full", "root"))
    count = 3 + 2 * len(DTYPES)

    def times(name: str) -> Interval:
        pairs = zip(full.numbers(name), root.numbers(name), strict=True)
        return interval([mine / other for mine, other in pairs], comparisons=count)

    checks = [
        Check("check.distance", full.interval("distance", count), high=NEAR_UNIFORM),
        Check("check.weight", full.interval("weight", count), high=WEAK),
        Check("check.lost", interval([1 - found for found in full.numbers("found")], comparisons=count), low=BLIND),
        *(Check(f"error.{name}", times(f"error_{name}"), low=UNSTABLE) for name in DTYPES),
        *(Check(f"beyond.{name}", times(f"beyond_{name}"), low=UNSTABLE) for name in DTYPES),
    ]
    said: Said = {
        "distance": str(full.interval("distance")),
        "weight": str(full.interval("weight")),
        "found": str(full.interval("found")),
        "kept": saying("yes", checks, ("error", "beyond")),
        "broken": saying("no", checks, ("error", "beyond")),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    dims = rows.parameter("d")
    shown = (
        ("distance", say("plot.distance"), "-"),
        ("weight", say("plot.weight"), "-"),
        ("error", say("plot.error"), "-"),
        ("beyond", say("plot.beyond"), "-"),
    )
    for axes, (kind, label, _) in zip(figure.subplots(1, 4), shown, strict=True):
        for scale, name in (("root", "1/√d"), ("full", "1/d")):
            own = rows.where(scale=scale)
            if kind in ("distance", "weight"):
                plots.curve(axes, dims, [own.where(d=d).interval(kind) for d in dims], name)
                continue
            for dtype, style in zip(DTYPES, ("o-", "s--", "^:"), strict=True):
                found = [own.where(d=d).interval(f"{kind}_{dtype}") for d in dims]
                colour = plots.COLOURS[0 if scale == "root" else 1]
                plots.curve(axes, dims, found, f"{name}, {dtype}", fmt=style, color=colour)
        plots.ticks(axes, dims, narrow=True)
        axes.set(xlabel="d", title=label)
        if kind in ("error", "beyond"):
            axes.set_yscale("log")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


EXPERIMENT = Experiment(
    number=5,
    name="flat",
    source='common in courses and answers to "why not divide by d?"; no primary source',
    version=1,
    cells=cells,
    seeds={"quick": 8, "default": 16, "full": 32},
    measure=measure,
    judge=judge,
    draw=draw,
)
