"""Claim 9: logits that grow make training diverge, and QK-norm, soft-cap, QK-Clip and σReparam help.

Two parts. The sweep trains at growing learning rates, plainly and with each remedy. The transplant scales W_q and W_k
of a trained model until its largest logit is κ, looks at the loss, and trains on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Interval, Said, Verdict, interval, saying, share, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.lab.gpt import GPT, Recipe
from poise.lab.tasks import BYTES, text
from poise.lab.training import examined, rows_of, sensitivity, train
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN = "plain"
# The thresholds suit these models, whose logits stay below about 30 where they learn best.
REMEDIES: Mapping[str, Mapping[str, Any]] = {
    "qk-norm": {},
    "soft-cap": {"cap": 30.0},
    "qk-clip": {"tau": 30.0},
    "sigma-reparam": {},
}
RATES = {
    "quick": (3e-3, 3e-1),
    "default": (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "full": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
}
STEPS = {"quick": 50, "default": 250, "full": 2000}
KAPPAS = (10, 100, 1000, 10_000, 100_000)
AFTER = 100  # steps of training after the transplant, at most as many as before it
DEGRADED, WORSE_THAN_BIGRAM = 1000, 10_000  # κ at which the loss is said to degrade, and to be worse than a bigram's
LARGE = 1e4  # the largest logit above which every run is said to diverge
GAIN, HARM, NEARLY_ALL = 0.02, 0.05, 0.8  # nats; nats; share


def cells(level: Level) -> Iterator[Cell]:
    yield {"part": "transplant", "steps": STEPS[level]}
    for lr in RATES[level]:
        for remedy in (PLAIN, *REMEDIES):
            yield {"part": "sweep", "remedy": remedy, "lr": lr, "steps": STEPS[level]}


def measure(cell: Cell, seed: int) -> Values:
    recipe = Recipe(seed=seed, steps=int(cell["steps"]))
    if cell["part"] == "transplant":
        return transplanted(recipe)
    recipe = recipe.but(lr=float(cell["lr"]))
    if cell["remedy"] == PLAIN:
        return train(recipe)[0].values()
    torch.manual_seed(seed)
    model = GPT(recipe, BYTES)
    name = str(cell["remedy"])
    with poise.remedy(model, name, **REMEDIES[name]):
        return train(recipe, model=model)[0].values()


def transplanted(recipe: Recipe) -> Values:
    """Held-out loss of a trained model, and with each layer's largest logit at κ: at once, and trained on."""
    _, model = train(recipe)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    values: dict[str, Any] = {"before": examined(model, text(), recipe), "bigram": text().bigram}
    for kappa in KAPPAS:
        model.load_state_dict(trained)
        transplant(model, kappa, recipe)
        values[f"loss.{kappa}"] = examined(model, text(), recipe)
        values[f"after.{kappa}"] = train(recipe.but(steps=min(AFTER, recipe.steps)), model=model)[0].final
    return values


@torch.no_grad()
def transplant(model: torch.nn.Module, kappa: float, recipe: Recipe) -> None:
    """Scales W_q and W_k by the same factor, layer by layer from the first, until the largest logit is κ in each."""
    ids = text().examine(16, recipe.length, torch.Generator().manual_seed(recipe.seed)).ids
    for layer, attention in enumerate(model.attentions()):  # type: ignore[operator]
        largest = float(rows_of(model, ids)[layer].max_logit.max())
        q, k, _ = torch.split(attention.projection.weight, attention.projection.rows)
        for weight in (q, k):
            weight.mul_((kappa / largest) ** 0.5)


def sensitivities(rows: Rows, remedy: str) -> list[float]:
    """Of the loss to the learning rate, seed by seed; final losses are at most that of byte frequencies already."""
    own = rows.where(part="sweep", remedy=remedy)
    finals = {lr: own.where(lr=lr).numbers("final") for lr in own.parameter("lr")}
    seeds = len(next(iter(finals.values())))
    return [sensitivity({lr: losses[i] for lr, losses in finals.items()}, ceiling=math.inf) for i in range(seeds)]


def judge(rows: Rows) -> Verdict:
    count = len(REMEDIES) + 3
    plain = sensitivities(rows, PLAIN)
    checks = [
        Check(f"gain.{remedy}", _differences(plain, sensitivities(rows, remedy), count), low=GAIN)
        for remedy in REMEDIES
    ]
    moved = rows.where(part="transplant")
    harm = {kappa: _differences(moved.numbers(f"loss.{kappa}"), moved.numbers("before"), count) for kappa in KAPPAS}
    above_bigram = _differences(moved.numbers(f"loss.{WORSE_THAN_BIGRAM}"), moved.numbers("bigram"), count)
    large = [row for row in rows.where(part="sweep", remedy=PLAIN) if not row.values["max_logit"] <= LARGE]
    lost = sum(row.values["diverged"] > 0.5 for row in large)
    diverging = share(lost, len(large), comparisons=count) if large else Interval(0.0, 0.5, 1.0)
    checks += [
        Check(f"check.{name}", measured, low=least)
        for name, measured, least in (
            ("degraded", harm[DEGRADED], HARM),
            ("bigram", above_bigram, 0.0),
            ("large", diverging, NEARLY_ALL),
        )
    ]
    said: Said = {
        "plain": str(interval(plain)),
        "norm": str(interval(sensitivities(rows, "qk-norm"))),
        "harm": str(harm[DEGRADED]),
        "lost": str(lost),
        "large": str(len(large)),
        "kept": _names(saying("yes", checks)),
        "broken": _names(saying("no", checks)),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def _differences(mine: list[float], theirs: list[float], comparisons: int) -> Interval:
    return interval([a - b for a, b in zip(mine, theirs, strict=True)], comparisons=comparisons)


def _names(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"short.{label.split('.')[1]}" for label in labels)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    losses, logits, moved = figure.subplots(1, 3)
    sweep = rows.where(part="sweep")
    rates = sweep.parameter("lr")
    for axes, name, label in ((losses, "final", "plot.loss"), (logits, "max_logit", "plot.logit")):
        for remedy in (PLAIN, *REMEDIES):
            found = [sweep.where(remedy=remedy, lr=lr).interval(name) for lr in rates]
            plots.curve(axes, rates, found, say(f"remedy.{remedy}"))
        axes.set(xscale="log", xlabel=say("plot.rate"), title=say(label))
    logits.set_yscale("log")
    losses.legend()
    transplants = rows.where(part="transplant")
    for name in ("loss", "after"):
        plots.curve(moved, KAPPAS, [transplants.interval(f"{name}.{kappa}") for kappa in KAPPAS], say(f"moved.{name}"))
    moved.axhline(transplants.interval("bigram").mean, color=plots.COLOURS[-1], linestyle=":", label=say("plot.bigram"))
    moved.set(xscale="log", xlabel="κ", title=say("plot.transplant"))
    moved.legend()


EXPERIMENT = Experiment(
    number=9,
    name="growth",
    source="Wortsman et al. 2023, Small-scale proxies (arXiv 2309.14322); remedies: docs/remedies.md",
    version=1,
    cells=cells,
    seeds={"quick": 1, "default": 8, "full": 8},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
