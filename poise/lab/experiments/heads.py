"""Claim 15: one wide head against several narrow ones, of equal parameters, where several relations are asked at once.

At every position of a random sequence the answers are the tokens 1, 2, ..., R places before. A head is one softmax: it
can look at R places only at once, mixing their values. With rotary positions the values do not tell where they are
from; with positions added to the embeddings ("waves") they do, and a later layer could tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from poise.lab import plots
from poise.lab.evidence import Check, Interval, Said, Verdict, interval, saying, weigh, worst
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.lab.gpt import GPT, Positions, Recipe
from poise.lab.tasks import IGNORED, Batch
from poise.lab.training import train
from poise.nn import Linear
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYMBOLS, LENGTH = 16, 32
POSITIONS: tuple[Positions, ...] = ("rotary", "waves")
HEADS = {"quick": (1, 4), "default": (1, 2, 4, 8), "full": (1, 2, 4, 8, 16)}
RELATIONS = {"quick": (1, 4), "default": (1, 2, 4), "full": (1, 2, 4, 8)}
STEPS = {"quick": 60, "default": 400, "full": 3000}
SEVERAL = 4  # heads, and relations, that the verdict is about
SINGLE = "single"  # the control: one relation
WORSE, EQUAL = 0.1, 0.05  # nats per answer


class Lookback:
    """Random tokens; asked are those 1 to `relations` places before."""

    vocabulary = SYMBOLS
    ceiling = math.log(SYMBOLS)

    def __init__(self, relations: int) -> None:
        self.relations = relations

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(SYMBOLS, (batch, length), generator=generator)
        before = [F.pad(ids, (back, 0))[:, :length] for back in range(1, self.relations + 1)]
        targets = torch.stack(before, -1)  # [B, N, R]
        targets[:, : self.relations] = IGNORED
        return Batch(ids, targets)

    examine = draw  # there are too many sequences to meet one twice


class Answering(GPT):
    """ids [B, N] to logits [B, N, R, SYMBOLS]."""

    def __init__(self, recipe: Recipe, relations: int) -> None:
        super().__init__(recipe, SYMBOLS)
        self.unembed = Linear(recipe.width, relations * SYMBOLS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.unembed(self.decoded(ids))
        return logits.view(*ids.shape, -1, SYMBOLS)


def cells(level: Level) -> Iterator[Cell]:
    for positions in POSITIONS:
        for relations in RELATIONS[level]:
            for heads in HEADS[level]:
                yield {"positions": positions, "relations": relations, "heads": heads, "steps": STEPS[level]}


def measure(cell: Cell, seed: int) -> Values:
    positions, relations = "rotary" if cell["positions"] == "rotary" else "waves", int(cell["relations"])
    recipe = Recipe(seed=seed, layers=1, batch=16, length=LENGTH).but(
        positions=positions, heads=int(cell["heads"]), steps=int(cell["steps"])
    )
    torch.manual_seed(seed)
    return train(recipe, Lookback(relations), model=Answering(recipe, relations))[0].values()


def advantage(rows: Rows, positions: str, relations: int, comparisons: int = 1) -> Interval:
    """How much higher one head's loss is than that of several, seed by seed."""
    own = rows.where(positions=positions, relations=relations)
    pairs = zip(own.where(heads=1).numbers("final"), own.where(heads=SEVERAL).numbers("final"), strict=True)
    return interval([one - several for one, several in pairs], comparisons=comparisons)


def judge(rows: Rows) -> Verdict:
    count = 2 * len(POSITIONS)
    checks = [
        Check(f"several.{positions}", advantage(rows, positions, SEVERAL, count), low=WORSE) for positions in POSITIONS
    ]
    single = worst(
        Check(f"check.{SINGLE}", advantage(rows, positions, 1, count), -EQUAL, EQUAL, {"positions": positions})
        for positions in POSITIONS
    )
    checks.append(single)
    own = rows.where(positions="rotary", relations=SEVERAL)
    said: Said = {
        "one": str(own.where(heads=1).interval("final")),
        "several": str(own.where(heads=SEVERAL).interval("final")),
        "control": str(single.measured),
        "kept": _names(saying("yes", checks)),
        "broken": _names(saying("no", checks)),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def _names(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"short.{label.split('.')[1]}" for label in labels)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    heads = rows.parameter("heads")
    for axes, positions in zip(figure.subplots(1, 2, sharey=True), POSITIONS, strict=True):
        for relations in rows.parameter("relations"):
            own = rows.where(positions=positions, relations=relations)
            found = [own.where(heads=count).interval("final") for count in heads]
            plots.curve(axes, heads, found, say("plot.relations", count=relations))
        plots.ticks(axes, heads)
        axes.set(xlabel=say("plot.heads"), title=say(f"positions.{positions}"))
    figure.axes[0].set_ylabel(say("plot.loss"))
    axes.legend()


EXPERIMENT = Experiment(
    number=15,
    name="heads",
    source="Vaswani et al. 2017, Attention Is All You Need, §3.2.2",
    version=1,
    cells=cells,
    seeds={"quick": 2, "default": 3, "full": 8},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
