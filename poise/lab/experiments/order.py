"""Claim 13: attention has no order of its own, positions give it one, and some last beyond the trained length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise import nn as blocks
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, exact, interval, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.lab.gpt import Recipe
from poise.lab.tasks import Batch, text
from poise.lab.training import train
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMES = ("sinusoidal", "learned", "rotary", "alibi", "t5")
LASTING = ("alibi", "t5")  # said to keep their loss; the others are said to lose it
STEPS = {"quick": 100, "default": 400, "full": 4000}
TRAINED, TESTED = 64, 256  # lengths
EQUIVARIANT, BROKEN = 1e-5, 0.01  # relative change by a permutation
KEPT = 1.05  # loss beyond the trained length over loss within it
STRETCH = 32  # positions whose losses are averaged for the plot


def cells(level: Level) -> Iterator[Cell]:
    for positions in ("none", *SCHEMES):
        yield {"part": "permutation", "positions": positions}
    for positions in ("none", *SCHEMES) if level != "quick" else SCHEMES:
        yield {"part": "extrapolation", "positions": positions, "steps": STEPS[level]}


def measure(cell: Cell, seed: int) -> Values:
    positions = str(cell["positions"])
    if cell["part"] == "permutation":
        return {"change": permuted(positions, seed)}
    return extrapolated(positions, int(cell["steps"]), seed)


def permuted(positions: str, seed: int) -> float:
    """How much an encoder's output changes beyond being permuted, when its input is: relative."""
    torch.manual_seed(seed)
    n, width, heads = 48, 64, 4
    config = blocks.BlockConfig(width, heads, 4 * width)
    schemes = {
        "rotary": blocks.Rotary(width // heads),
        "alibi": blocks.Alibi(heads),
        "t5": blocks.RelativeBuckets(heads),
    }
    nn.init.normal_(schemes["t5"].weight)  # type: ignore[arg-type]  # as large as trained ones
    encoder = blocks.Encoder(config, 2, positions=schemes.get(positions))
    places = torch.arange(n)
    added: Tensor | float = 0.0
    if positions in ("sinusoidal", "learned"):
        module = blocks.Sinusoidal(width) if positions == "sinusoidal" else blocks.Learned(n, width)
        added = module(places)
    x, order = torch.randn(1, n, width), torch.randperm(n)
    with torch.no_grad():
        before, after = encoder(x + added)[:, order], encoder(x[:, order] + added)
    return float((after - before).norm() / before.norm())


def extrapolated(positions: str, steps: int, seed: int) -> Values:
    """A small language model trained at one length, examined at another on text it has not seen."""
    named = {"learned": "waves"}.get(positions, positions)
    recipe = Recipe(seed=seed, steps=steps, length=TRAINED, batch=16, positions=named)  # type: ignore[arg-type]
    _, model = train(recipe)
    generator = torch.Generator().manual_seed(seed)
    far, near = [], []
    with torch.no_grad():
        for _ in range(8):
            batch = text().examine(16, TESTED, generator)
            near.append(_stretches(model, batch))
            if positions != "learned":  # a table of vectors has none for more
                far.append(_losses(model, batch.ids, batch.targets))
    # The same bytes, asked with at most the trained length before them, and with all of the sequence.
    within, values = torch.cat(near), {}
    if far:
        whole = torch.cat(far)
        curve = torch.split(whole.mean(0), STRETCH)
        values = {"beyond": float(whole[:, TRAINED:].mean()), "curve": [round(float(part.mean()), 4) for part in curve]}
    return {"within": float(within.mean())} | values


def _losses(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    flat = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
    return flat.view(targets.shape)


def _stretches(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of all targets from the trained length on, each in the second half of a window of that length."""
    windows = [each[:, TRAINED // 2 :].unfold(1, TRAINED, TRAINED // 2).flatten(0, 1) for each in batch]
    return _losses(model, *windows)[:, TRAINED // 2 :]


def judge(rows: Rows) -> Verdict:
    order, lasting = rows.where(part="permutation"), rows.where(part="extrapolation")
    count = 1 + len(SCHEMES) + len(SCHEMES)
    checks = [
        Check("none", order.where(positions="none").interval("change", count), high=EQUIVARIANT),
        *(
            Check(f"order.{name}", order.where(positions=name).interval("change", count), low=BROKEN)
            for name in SCHEMES
        ),
    ]
    ratios = {}
    for name in SCHEMES:
        own = lasting.where(positions=name)
        if any("beyond" not in row.values for row in own):
            ratios[name] = exact(float("inf"))  # not even an answer
        else:
            pairs = zip(own.numbers("beyond"), own.numbers("within"), strict=True)
            ratios[name] = interval([beyond / within for beyond, within in pairs], comparisons=count)
        kept = name in LASTING
        checks.append(
            Check(f"length.{name}", ratios[name], high=KEPT)
            if kept
            else Check(f"length.{name}", ratios[name], low=KEPT)
        )
    said: Said = {
        **{name: str(ratios[name]) for name in SCHEMES if name != "learned"},
        "none": f"{checks[0].measured.mean:.1e}",
        "kept": saying("yes", checks),
        "broken": saying("no", checks),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    order, lasting = rows.where(part="permutation"), rows.where(part="extrapolation")
    names = order.parameter("positions")
    found = [order.where(positions=name).interval("change").mean for name in names]
    left.barh([say(f"plot.{name}") for name in names], found, color=plots.COLOURS[0])
    left.set(xscale="log", title=say("plot.change"))
    left.invert_yaxis()
    for name in lasting.parameter("positions"):
        own = lasting.where(positions=name)
        curves = [row.values["curve"] for row in own if "curve" in row.values]
        if curves:
            means = [sum(point) / len(point) for point in zip(*curves, strict=True)]
            right.plot([STRETCH * (i + 0.5) for i in range(len(means))], means, "o-", label=say(f"plot.{name}"))
        else:  # it has no answer beyond
            right.plot([0.75 * TRAINED], [own.interval("within").mean], "D", label=say(f"plot.{name}"))
    right.axvline(TRAINED, color="#4d4d4d", linestyle=":", label=say("plot.trained"))
    right.set(xlabel=say("plot.position"), title=say("plot.loss"))
    right.legend()


EXPERIMENT = Experiment(
    number=13,
    name="order",
    source="Vaswani et al. 2017, §3.5; Press et al. 2022, Train Short, Test Long (ALiBi)",
    version=1,
    cells=cells,
    seeds={"quick": 4, "default": 8, "full": 10},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
