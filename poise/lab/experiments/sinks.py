"""Claim 11: attention sinks on the Bigram-Backcopy task: does a head with nothing to say rest on the first token?

The task of Guo et al. (2024): a Markov chain whose next token, after a trigger token, is the one before the trigger. So
one head must look back one token after triggers, and has nothing to add elsewhere. Compared are plain softmax, a
learned sink logit, a sink logit of 0 ("softmax off by one", Miller 2023) and a gate on the output (Qiu et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, interval, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.lab.gpt import Recipe
from poise.lab.tasks import IGNORED, Batch, entropy
from poise.lab.training import loss_of, rows_of, train
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, TRIGGERS = 32, 3  # the first TRIGGERS tokens are triggers; the token after the last is the first of a sequence
START = TOKENS
POOL = 4096  # sequences drawn once
LENGTH = 64
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {},
    "learned": {"sink": "learned"},
    "off": {"sink": "off-by-one"},
    "gate": {"gate": True},
}
OUTLETS = ("learned", "off", "gate")
STEPS = {"quick": 60, "default": 1000, "full": 5000}
FIRST_ROWS = 8  # rows of few keys give the first of them much in any case
PREFERRED, SINK = 3.0, 0.3  # times a uniform share; the mass from which Gu et al. (2024) speak of a sink
RELIEVED = 0.8  # of the plain softmax's mass


class Backcopy:
    """Sequences of the task, and how surprising they are to one who knows it."""

    vocabulary = TOKENS + 1

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.chain = torch.softmax(2 * torch.randn(TOKENS, TOKENS, generator=generator), -1)  # row: the token before
        self.learnt, self.kept = (self._sequences(generator) for _ in range(2))
        self.ceiling = entropy(torch.bincount(self.learnt[:, 1:].flatten()))

    def _sequences(self, generator: torch.Generator) -> Tensor:
        """[POOL, LENGTH + 1]"""
        cumulative = self.chain.cumsum(-1)
        columns = [torch.full((POOL,), START), torch.randint(TRIGGERS, TOKENS, (POOL,), generator=generator)]
        while len(columns) <= LENGTH:
            chances = torch.rand(POOL, 1, generator=generator)
            following = torch.searchsorted(cumulative[columns[-1]], chances).squeeze(1).clamp(max=TOKENS - 1)
            columns.append(torch.where(columns[-1] < TRIGGERS, columns[-2], following))
        return torch.stack(columns, 1)

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Batch:
        return self._some(self.learnt, batch, length, generator)

    def examine(self, batch: int, length: int, generator: torch.Generator) -> Batch:
        return self._some(self.kept, batch, length, generator)

    @staticmethod
    def _some(pool: Tensor, batch: int, length: int, generator: torch.Generator) -> Batch:
        taken = pool[torch.randint(POOL, (batch,), generator=generator), : length + 1]
        return Batch(taken[:, :-1], taken[:, 1:])


@cache
def task() -> Backcopy:
    return Backcopy()


def cells(level: Level) -> Iterator[Cell]:
    return ({"variant": variant, "steps": STEPS[level]} for variant in VARIANTS)


def measure(cell: Cell, seed: int) -> Values:
    recipe = Recipe(
        seed=seed,
        steps=int(cell["steps"]),
        batch=16,
        length=LENGTH,
        layers=1,
        heads=1,
        weight_decay=0.01,
        **VARIANTS[str(cell["variant"])],
    )
    run, model = train(recipe, task())
    batch = task().examine(128, LENGTH, torch.Generator().manual_seed(1))
    (stats,) = rows_of(model, batch.ids)
    copying = batch.ids < TRIGGERS
    late = torch.arange(LENGTH) >= FIRST_ROWS
    mass, uniform = stats.sink_mass[:, 0], 1 / stats.count[:, 0]  # [B, N]
    with torch.no_grad():
        copied = loss_of(model, Batch(batch.ids, batch.targets.masked_fill(~copying, IGNORED)))
    return {
        **run.values(),
        "resting": float(mass[~copying & late].mean()),
        "copying": float(mass[copying & late].mean()),
        "times_uniform": float(mass[~copying & late].mean() / uniform[~copying & late].mean()),
        "copy_loss": float(copied),
    }


def judge(rows: Rows) -> Verdict:
    plain, count = rows.where(variant="softmax"), 2 + len(OUTLETS)
    checks = [
        Check(f"check.{name}", plain.interval(measured, count), low=least)
        for name, measured, least in (("preferred", "times_uniform", PREFERRED), ("sink", "resting", SINK))
    ]
    for outlet in OUTLETS:
        pairs = zip(rows.where(variant=outlet).numbers("resting"), plain.numbers("resting"), strict=True)
        left = interval([relieved / unrelieved for relieved, unrelieved in pairs], comparisons=count)
        checks.append(Check(f"left.{outlet}", left, high=RELIEVED))
    said: Said = {
        "resting": str(plain.interval("resting")),
        "copying": str(plain.interval("copying")),
        "times": str(plain.interval("times_uniform")),
        "kept": _names(saying("yes", checks)),
        "broken": _names(saying("no", checks)),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def _names(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"short.{label.split('.')[1]}" for label in labels)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    masses, losses = figure.subplots(1, 2)
    places = list(range(len(VARIANTS)))
    shown = (masses, "resting", "plot.resting"), (masses, "copying", "plot.copying"), (losses, "copy_loss", "plot.loss")
    for axes, name, label in shown:
        found = [rows.where(variant=variant).interval(name) for variant in VARIANTS]
        plots.curve(axes, places, found, say(label), fmt="o")
    uniform = rows.where(variant="softmax")
    share = uniform.interval("resting").mean / uniform.interval("times_uniform").mean
    masses.axhline(share, color=plots.COLOURS[-1], linestyle=":", label=say("plot.uniform"))
    for axes in (masses, losses):
        axes.set_xticks(places, [say(f"variant.{variant}") for variant in VARIANTS])
        axes.tick_params("x", labelsize="small")
        axes.set_ylim(bottom=0)
        axes.legend()


EXPERIMENT = Experiment(
    number=11,
    name="sinks",
    source="Guo et al. 2024, Active-Dormant Attention Heads (arXiv 2410.13835); Gu et al. 2024 (arXiv 2410.10781)",
    version=1,
    cells=cells,
    seeds={"quick": 2, "default": 12, "full": 12},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
