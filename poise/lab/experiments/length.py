"""Claim 12: softmax disperses over more keys than trained on; do scales that grow with their number help?

The task of Veličković et al. (2024): items with a priority and a class each; the answer is the class of the item of
highest priority. One head, one query; trained on up to TRAINED items, tested on many more. Compared are the fixed
scale; SSMax, a learned s · log n (Nakanishi 2025); log n over the logarithm of the trained length (Chiang & Cholak
2022); and, on the model of the fixed scale, the adaptive temperature of Veličković et al., with their polynomial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Interval, Said, Verdict, interval, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.nn import Linear, Projection
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSES, WIDTH, BATCH, TRAINED = 10, 64, 128, 16
EXAMINED = 512  # sets of each length
TESTED = (16, 64, 256, 1024)
FAR = 1024  # the length the verdict is about
ADAPTIVE = (-0.037, 0.481, -2.3, 4.917, -1.791)  # the inverse temperature as a polynomial of the entropy
SCALINGS = ("softmax", "ssmax", "log")
HELPERS = ("ssmax", "log", "adaptive")
STEPS = {"quick": 150, "default": 3000, "full": 30000}
DISPERSED = 0.5  # of the largest weight at the trained length
GAIN = 0.03  # share of right answers
KEPT = 0.9  # of the share of right answers at the trained length


class Retriever(nn.Module):
    """Items [B, M, CLASSES + 1] to logits [B, CLASSES], by one query's attention over them."""

    def __init__(self, scaling: str) -> None:
        super().__init__()
        self.scaling = scaling
        self.items = nn.Sequential(Linear(CLASSES + 1, WIDTH), nn.GELU(), Linear(WIDTH, WIDTH))
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.projection = Projection(WIDTH, 1, bias=False)
        self.answer = nn.Sequential(Linear(WIDTH, WIDTH), nn.GELU(), Linear(WIDTH, CLASSES))
        self.s = nn.Parameter(torch.ones(())) if scaling == "ssmax" else None

    def scale(self, count: int) -> float | Tensor:
        plain = 1 / math.sqrt(WIDTH)
        if self.s is not None:
            grown: Tensor = self.s * (math.log(count) * plain)
            return grown
        grows = math.log(count) / math.log(TRAINED) if self.scaling == "log" else 1.0
        return plain * grows

    def projected(self, items: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, 1, 1, D], k and v [B, 1, M, D]"""
        q = self.projection.queries(self.query).expand(len(items), -1, -1, -1)
        k, v = (one.transpose(1, 2) for one in self.projection.keys_values(self.items(items)))
        return q, k, v

    def forward(self, items: Tensor) -> Tensor:
        out = poise.attention(*self.projected(items), scale=self.scale(items.shape[1]))
        answer: Tensor = self.answer(out[:, 0, 0])
        return answer

    def observed(self, items: Tensor, adaptive: bool) -> tuple[Tensor, poise.ScoreStats]:
        """The same with its statistics; adaptive: sharpened by the entropy of a first pass."""
        projected, scale = self.projected(items), self.scale(items.shape[1])
        out, stats = poise.observe(*projected, scale=scale)
        if adaptive:
            out, stats = poise.observe(*projected, scale=scale * inverse_temperature(stats.entropy))
        return self.answer(out[:, 0, 0]), stats


def inverse_temperature(entropy: Tensor) -> Tensor:
    """Of the adaptive softmax, from the entropy at temperature 1; never below 1."""
    value = torch.zeros_like(entropy)
    for coefficient in ADAPTIVE:
        value = value * entropy + coefficient
    return torch.where(entropy > 0.5, value.clamp(min=1.0), 1.0)


def draw_sets(count: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Items of random priority and class, and the class of the one of highest priority."""
    priority = torch.rand(batch, count, 1, generator=generator)
    classes = torch.randint(CLASSES, (batch, count), generator=generator)
    return torch.cat((priority, F.one_hot(classes, CLASSES).float()), -1), classes.gather(1, priority.argmax(1))[:, 0]


def cells(level: Level) -> Iterator[Cell]:
    return ({"scaling": scaling, "steps": STEPS[level]} for scaling in SCALINGS)


def measure(cell: Cell, seed: int) -> Values:
    torch.manual_seed(seed)
    steps, scaling = int(cell["steps"]), str(cell["scaling"])
    model, generator = Retriever(scaling), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-3, fused=True)
    for count in torch.randint(2, TRAINED + 1, (steps,), generator=generator).tolist():
        items, target = draw_sets(count, BATCH, generator)
        loss = F.cross_entropy(model(items), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    values = tested(model, adaptive=False)
    if scaling == "softmax":
        values |= {f"adaptive.{name}": value for name, value in tested(model, adaptive=True).items()}
    return values


@torch.no_grad()
def tested(model: Retriever, adaptive: bool) -> dict[str, Any]:
    """By length: the share of right answers and the largest weight; the sets are the same for all models."""
    values = {}
    for count in TESTED:
        items, target = draw_sets(count, EXAMINED, torch.Generator().manual_seed(count))
        logits, stats = model.observed(items, adaptive)
        values[f"accuracy.{count}"] = float((logits.argmax(-1) == target).double().mean())
        values[f"weight.{count}"] = float(stats.max_prob.double().mean())
    return values


def judge(rows: Rows) -> Verdict:
    count = 1 + 2 * len(HELPERS)
    plain = rows.where(scaling="softmax")

    def numbers(helper: str, length: int) -> list[float]:
        if helper == "adaptive":
            return plain.numbers(f"adaptive.accuracy.{length}")
        return rows.where(scaling=helper).numbers(f"accuracy.{length}")

    far, near = plain.numbers(f"weight.{FAR}"), plain.numbers(f"weight.{TRAINED}")
    fallen = interval([a / b for a, b in zip(far, near, strict=True)], comparisons=count)
    core, fully = [Check("dispersed.softmax", fallen, high=DISPERSED)], []
    for helper in HELPERS:
        gained = zip(numbers(helper, FAR), plain.numbers(f"accuracy.{FAR}"), strict=True)
        core.append(Check(f"gain.{helper}", interval([a - b for a, b in gained], comparisons=count), low=GAIN))
        kept = zip(numbers(helper, FAR), numbers(helper, TRAINED), strict=True)
        fully.append(Check(f"kept.{helper}", interval([a / b for a, b in kept], comparisons=count), low=KEPT))

    def accuracy(helper: str) -> Interval:
        return interval(numbers(helper, FAR))

    checks = [*core, *fully]
    said: Said = {
        "fallen": str(fallen),
        "plain": str(accuracy("softmax")),
        **{helper: str(accuracy(helper)) for helper in HELPERS},
        "kept": _names(saying("yes", checks)),
        "broken": _names(saying("no", checks)),
    }
    return Verdict(weigh(core, fully), tuple(checks), said)


def _names(labels: tuple[str, ...]) -> tuple[str, ...]:
    said = {"dispersed": "disperses", "gain": "helps", "kept": "keeps"}
    return tuple(f"{said[asked]}.{scaling}" for asked, scaling in (label.split(".") for label in labels))


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    for axes, name in zip(figure.subplots(1, 2), ("accuracy", "weight"), strict=True):
        for scaling in (*SCALINGS, "adaptive"):
            own = rows.where(scaling="softmax" if scaling == "adaptive" else scaling)
            prefix = "adaptive." if scaling == "adaptive" else ""
            found = [own.interval(f"{prefix}{name}.{count}") for count in TESTED]
            plots.curve(axes, TESTED, found, say(f"scaling.{scaling}"))
        plots.ticks(axes, TESTED)
        axes.set(xlabel="n", title=say(f"plot.{name}"), ylim=(0, 1.02))
    axes.legend()


EXPERIMENT = Experiment(
    number=12,
    name="length",
    source="Veličković et al. 2024, softmax is not enough (arXiv 2410.01104); Nakanishi 2025 (arXiv 2501.19399)",
    version=1,
    cells=cells,
    seeds={"quick": 2, "default": 12, "full": 12},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
