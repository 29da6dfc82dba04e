"""Claim 10: entropy collapse, forced by temperature: fatal during warm-up, recovered from after it?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from poise.lab import plots
from poise.lab.evidence import Check, Interval, Said, Verdict, interval, saying, share, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.lab.gpt import Recipe
from poise.lab.training import train
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOMENTS = ("never", "during", "after")  # when the temperature falls
SHARPER = 10.0  # from 1 to its inverse, where it stays
WARM_UP = 100  # steps
RATES = {"quick": (1e-2,), "default": (3e-3, 1e-2, 3e-2), "full": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
STEPS = {"quick": 170, "default": 400, "full": 3000}
RECOVERED = 0.05  # nats above the untouched run
DIVERGING = 0.5  # share of the runs


def cells(level: Level) -> Iterator[Cell]:
    return ({"lr": lr, "moment": moment, "steps": STEPS[level]} for lr in RATES[level] for moment in MOMENTS)


def measure(cell: Cell, seed: int) -> Values:
    recipe = Recipe(seed=seed, steps=int(cell["steps"]), lr=float(cell["lr"]), warmup=WARM_UP)
    moment = {"never": -1, "during": WARM_UP // 4, "after": 3 * WARM_UP // 2}[str(cell["moment"])]
    return train(recipe, change=partial(sharpen, moment))[0].values(40)


def sharpen(moment: int, step: int, model: nn.Module) -> None:
    if step == moment:
        for attention in model.attentions():  # type: ignore[operator]
            attention.scale = SHARPER * attention.projection.head_dim**-0.5


def excess(rows: Rows, moment: str, other: str) -> list[float]:
    """Of the final loss over that of the other moment, seed by seed, mean over learning rates."""
    rates = rows.parameter("lr")
    pairs = [[rows.where(lr=lr, moment=one).numbers("final") for one in (moment, other)] for lr in rates]
    seeds = len(pairs[0][0])
    return [sum(mine[i] - theirs[i] for mine, theirs in pairs) / len(rates) for i in range(seeds)]


def judge(rows: Rows) -> Verdict:
    early = rows.where(moment="during").numbers("diverged")
    lost = sum(value > 0.5 for value in early)

    def over(moment: str, other: str) -> Interval:
        return interval(excess(rows, moment, other), comparisons=3)

    checks = [
        Check(f"check.{name}", measured, low, high)
        for name, measured, low, high in (
            ("diverges", share(lost, len(early), comparisons=3), DIVERGING, math.inf),
            ("recovers", over("after", "never"), -math.inf, RECOVERED),
            ("earlier", over("during", "after"), 0.0, math.inf),
        )
    ]
    said: Said = {
        "lost": str(lost),
        "runs": str(len(early)),
        "during": str(over("during", "never")),
        "after": str(over("after", "never")),
        "kept": tuple(label.replace("check", "short") for label in saying("yes", checks)),
        "broken": tuple(label.replace("check", "short") for label in saying("no", checks)),
    }
    return Verdict(weigh(checks[:2], checks[2:]), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    rates, rate = rows.parameter("lr"), say("plot.rate")
    panels = figure.subplots(2, len(rates), sharex=True, squeeze=False)
    for (upper, lower), lr in zip(panels.T, rates, strict=True):
        for moment in MOMENTS:
            own = rows.where(lr=lr, moment=moment)
            steps = [step for step, _ in own[0].values["losses"]]
            losses = [interval(row.values["losses"][i][1] for row in own) for i in range(len(steps))]
            plots.curve(upper, steps, losses, say(f"moment.{moment}"), fmt="-", capsize=0, elinewidth=0.4)
            looks = own[0].values["looks"]["step"]
            entropies = [interval(row.values["looks"]["entropy"][i] for row in own) for i in range(len(looks))]
            plots.curve(lower, looks, entropies, say(f"moment.{moment}"), fmt="-", capsize=0, elinewidth=0.4)
        for axes in (upper, lower):
            axes.axvspan(0, WARM_UP, color="#f0f0f0", zorder=0)
        upper.set(title=f"{rate} {lr:g}", ylim=(1.9, 3.4))
        lower.set(xlabel=say("plot.step"))
    panels[0, 0].set_ylabel(say("plot.loss"))
    panels[1, 0].set_ylabel(say("plot.entropy"))
    panels[0, -1].legend()


EXPERIMENT = Experiment(
    number=10,
    name="collapse",
    source="Zhai et al. 2023, Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
    version=1,
    cells=cells,
    seeds={"quick": 2, "default": 5, "full": 8},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
