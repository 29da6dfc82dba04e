"""Claim 17: whether trained scores are near variance 1, in every head of SmolLM2 and MiniLM."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import poise
from poise import models
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, interval, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say
from poise.testing import weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("smollm2", "minilm")
TOKENS = 256
NEAR = (0.8, 1.25)  # deviation of the median head's scores
AROUND = (0.5, 2.0)  # deviation of a head that counts as around 1
MOST = 0.5  # share of the heads that should be
STATISTICS = ("std", "normalized_entropy", "sink_mass", "max_logit")


def needs() -> str | None:
    for model in MODELS:
        try:
            weights.directory(model)
        except FileNotFoundError as missing:
            return str(missing)
    return None


def cells(level: Level) -> Iterator[Cell]:
    return ({"model": model} for model in MODELS)


def measure(cell: Cell, seed: int) -> Values:
    """Means over the rows of a passage, per layer and head; of max_logit the largest."""
    encoded, model = _loaded(str(cell["model"]))
    ids = passage(encoded, seed)
    with torch.no_grad(), poise.watch(model, alarms=False) as watch:
        model.embed([ids.tolist()]) if cell["model"] == "minilm" else model(ids[None])
        seen = list(watch.summaries.values())
    means: dict[str, Any] = {
        name: [_rounded(each.max(name) if name == "max_logit" else each.mean(name)) for each in seen]
        for name in STATISTICS
    }
    deviations = [x for layer in means["std"] for x in layer]
    around = [x for x in deviations if AROUND[0] <= x <= AROUND[1]]
    return means | {"median": statistics.median(deviations), "around": len(around) / len(deviations)}


def _rounded(numbers: Tensor) -> list[float]:
    return [float(f"{x:.4g}") for x in numbers.flatten().tolist()]


@cache
def _loaded(name: str) -> tuple[Tensor, Any]:
    """A long text in the model's tokens, and the model."""
    from pydoc_data import topics

    directory = weights.directory(name)
    text = "\n".join(topics.topics[key] for key in sorted(topics.topics))  # Python's own documentation: English prose
    model: nn.Module = models.load(directory, head="embedding") if name == "minilm" else models.load(directory)
    return torch.tensor(models.tokenizer(directory).encode(text, add_special_tokens=False).ids), model.eval()


def passage(encoded: Tensor, seed: int) -> Tensor:
    start = int(torch.randint(len(encoded) - TOKENS, (), generator=torch.Generator().manual_seed(seed)))
    return encoded[start : start + TOKENS]


def judge(rows: Rows) -> Verdict:
    checks = []
    for model in MODELS:
        own = rows.where(model=model)
        checks.append(Check(f"median.{model}", own.interval("median", 4), *NEAR))
        checks.append(Check(f"around.{model}", own.interval("around", 4), low=MOST))
    said: dict[str, str | tuple[str, ...]] = {"kept": saying("yes", checks), "broken": saying("no", checks)}
    for model in MODELS:
        own = rows.where(model=model)
        every = sorted(_per_head(own, "std"))
        said |= {
            f"median_{model}": str(own.interval("median")),
            f"least_{model}": f"{every[0]:.2g}",
            f"most_{model}": f"{every[-1]:.2g}",
            f"sinks_{model}": str(interval([_sinks(row.values) for row in own])),
        }
    final: Said = said
    return Verdict(weigh(checks), tuple(checks), final)


def _sinks(values: Values) -> float:
    """Share of heads that give the first token more than 0.3 of their weight."""
    masses = [x for layer in values["sink_mass"] for x in layer]
    return float(sum(x > 0.3 for x in masses)) / len(masses)


def _per_head(rows: Rows, name: str) -> list[float]:
    """Means over passages, layer by layer, head by head."""
    flat = [[x for layer in row.values[name] for x in layer] for row in rows]
    return [statistics.fmean(head) for head in zip(*flat, strict=True)]


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    panels = figure.subplots(2, 3, sharex="row")
    for model, line in zip(MODELS, panels, strict=True):
        own = rows.where(model=model)
        heads = len(own[0].values["std"][0])
        names = ("std", "normalized_entropy", "sink_mass")
        for axes, name, label in zip(
            line, names, (say("plot.std"), say("plot.entropy"), say("plot.sink")), strict=True
        ):
            every = _per_head(own, name)
            axes.plot([i // heads for i in range(len(every))], every, ".", alpha=0.7, rasterized=True)
            middles = [statistics.median(every[i : i + heads]) for i in range(0, len(every), heads)]
            axes.plot(range(len(middles)), middles, color=plots.COLOURS[1], linewidth=1.5)
            axes.set_title(f"{model}: {label}")
        line[0].axhspan(*NEAR, color=plots.COLOURS[2], alpha=0.2)
        line[0].set_yscale("log", base=2)
        line[0].yaxis.set_major_formatter("{x:g}")
    for axes in panels[-1]:
        axes.set_xlabel(say("plot.layer"))


EXPERIMENT = Experiment(
    number=17,
    name="trained",
    source="the assumption behind 1/√d, Vaswani et al. 2017, footnote 4, asked of trained models",
    version=1,
    cells=cells,
    seeds={"quick": 4, "default": 10, "full": 40},
    measure=measure,
    judge=judge,
    draw=draw,
    needs=needs,
)
