"""Claim 4: unscaled scores make gradients vanish. In the softmax, row by row, and at the weights W_q and W_k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Interval, Said, Verdict, interval, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POWERS = {"unscaled": 0.0, "root": -0.5, "full": -1.0}
DIMS = {"quick": (16, 1024), "default": (4, 16, 64, 256, 1024), "full": (4, 8, 16, 32, 64, 128, 256, 512, 1024)}
LARGE = 1024
LENGTH, WIDTH, VALUES = 256, 256, 64
VANISHED = 0.25  # of what passes with 1/√d
DEAD = 0.01  # the trace of a row that lets nothing through


def cells(level: Level) -> Iterator[Cell]:
    return ({"scale": scale, "d": d} for scale in POWERS for d in DIMS[level])


def measure(cell: Cell, seed: int) -> Values:
    """Tokens, weights that keep unit variance, and a random gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    d = int(cell["d"])
    scale = d ** POWERS[str(cell["scale"])]
    x = torch.randn(LENGTH, WIDTH, generator=generator)
    w_q, w_k = ((torch.randn(WIDTH, d, generator=generator) / WIDTH**0.5).requires_grad_() for _ in range(2))
    v, arriving = torch.randn(2, 1, 1, LENGTH, VALUES, generator=generator)
    q, k = ((x @ w)[None, None] for w in (w_q, w_k))
    out, stats = poise.observe(q, k, v, scale=scale)
    for_q, for_k = torch.autograd.grad(out, (w_q, w_k), arriving)
    p = poise.scores(q.detach(), k.detach(), scale=scale, stage="prob")[0, 0]
    traces = stats.responsiveness.detach().flatten()
    return {
        "trace": float(traces.mean()),
        "median": float(traces.median()),
        "norm": float(_jacobian_norm(p).mean()),
        "w_q": float(for_q.norm()),
        "w_k": float(for_k.norm()),
    }


def _jacobian_norm(p: torch.Tensor) -> torch.Tensor:
    """Of diag(p) - p pᵀ, per row: the squares add up to Σp² - 2 Σp³ + (Σp²)²."""
    two, three = p.square().sum(-1), p.pow(3).sum(-1)
    return (two - 2 * three + two.square()).clamp_min(0).sqrt()


def judge(rows: Rows) -> Verdict:
    count = 5
    large = {scale: rows.where(scale=scale, d=LARGE) for scale in POWERS}

    def passing(name: str) -> Interval:
        """Unscaled over scaled by 1/√d, seed by seed."""
        pairs = zip(large["unscaled"].numbers(name), large["root"].numbers(name), strict=True)
        return interval([mine / other for mine, other in pairs], comparisons=count)

    checks = [
        Check("check.trace", passing("trace"), high=VANISHED),
        Check("check.norm", passing("norm"), high=VANISHED),
        Check("check.median", large["unscaled"].interval("median", count), high=DEAD),
        Check("check.w_q", passing("w_q"), high=VANISHED),
        Check("check.w_k", passing("w_k"), high=VANISHED),
    ]
    said: Said = {
        **{check.label.split(".")[1]: str(check.measured) for check in checks},
        "kept": saying("yes", checks),
        "broken": saying("no", checks),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    dims = rows.parameter("d")
    shown = (
        ("trace", say("plot.trace")),
        ("median", say("plot.median")),
        ("norm", say("plot.norm")),
        ("w_q", "‖∂L/∂W_q‖"),
    )
    for axes, (name, label) in zip(figure.subplots(1, 4), shown, strict=True):
        for scale in POWERS:
            found = [rows.where(scale=scale, d=d).interval(name) for d in dims]
            plots.curve(axes, dims, found, say(f"scale.{scale}"))
        plots.ticks(axes, dims, narrow=True)
        axes.set(xlabel="d", title=label)
        if name == "w_q":
            axes.set_yscale("log")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


EXPERIMENT = Experiment(
    number=4,
    name="gradients",
    source='Vaswani et al. 2017, §3.2.1: "regions where it has extremely small gradients"',
    version=1,
    cells=cells,
    seeds={"quick": 8, "default": 16, "full": 32},
    measure=measure,
    judge=judge,
    draw=draw,
)
