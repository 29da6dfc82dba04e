"""Claim 8: training a small GPT on real text with five scales; does 1/√d win over a wide range of head dims?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, interval, saying, weigh, worst
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.lab.gpt import Recipe
from poise.lab.training import train
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = {"root": "1/sqrt(d)", "one": "1", "inverse": "1/d", "learned": "learned", "log": "log n"}
FIXED, RIVALS = ("one", "inverse"), ("one", "inverse", "learned", "log")
DIMS = {"quick": (64,), "default": (16, 64, 256), "full": (16, 32, 64, 128, 256)}
RATES = {"quick": (3e-3,), "default": (2e-3, 6e-3), "full": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
STEPS = {"quick": 60, "default": 300, "full": 2000}
VALUE_DIM = 32  # whatever the head dim: only queries and keys change their size
TOLERANCE = 0.05  # nats by which 1/√d may do worse than the best


def cells(level: Level) -> Iterator[Cell]:
    for d in DIMS[level]:
        for lr in RATES[level]:
            for scale in SCALES.values():
                yield {"head_dim": d, "lr": lr, "scale": scale, "steps": STEPS[level]}


def measure(cell: Cell, seed: int) -> Values:
    return train(Recipe(seed=seed, value_dim=VALUE_DIM).but(**cell))[0].values()


def best(rows: Rows, scale: str) -> Rows:
    """One scale's runs at the learning rate that is best for it; narrow down to one head dim first."""
    own = rows.where(scale=SCALES[scale])

    def mean(lr: float) -> float:
        return interval(own.where(lr=lr).numbers("final")).mean

    return own.where(lr=min(own.parameter("lr"), key=mean))


def excess(rows: Rows, scale: str, rival: str) -> list[float]:
    """How much higher the loss of a scale is than its rival's, each at its best rate, seed by seed."""
    losses = (best(rows, one).numbers("final") for one in (scale, rival))
    return [mine - theirs for mine, theirs in zip(*losses, strict=True)]


def judge(rows: Rows) -> Verdict:
    dims = rows.parameter("head_dim")
    count = len(dims) * len(RIVALS)
    checks = [
        worst(
            Check(
                f"rival.{rival}",
                interval(excess(rows.where(head_dim=d), "root", rival), comparisons=count),
                high=TOLERANCE,
                values={"d": str(d)},
            )
            for d in dims
        )
        for rival in RIVALS
    ]
    largest = rows.where(head_dim=dims[-1])
    said: Said = {
        "d": str(dims[-1]),
        **{name: str(best(largest, name).interval("final")) for name in ("root", "one", "inverse")},
        "kept": _names(saying("yes", checks)),
        "broken": _names(saying("no", checks)),
    }
    return Verdict(weigh(checks[: len(FIXED)], checks[len(FIXED) :]), tuple(checks), said)


def _names(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(label.replace("rival", "scale") for label in labels)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    dims = rows.parameter("head_dim")
    shown = (("plot.loss", "final"), ("plot.entropy", "entropy"), ("plot.logit", "max_logit"))
    for axes, (label, name) in zip(figure.subplots(1, 3), shown, strict=True):
        for scale in SCALES:
            runs = [best(rows.where(head_dim=d), scale) for d in dims]
            found = [interval(_last(own, name)) for own in runs]
            plots.curve(axes, dims, found, say(f"scale.{scale}"))
        plots.ticks(axes, dims)
        axes.set(xlabel="d", title=say(label), yscale="log" if name == "max_logit" else "linear")
    axes.legend()


def _last(runs: Rows, name: str) -> list[float]:
    if name == "final":
        return runs.numbers(name)
    return [float(row.values["looks"][name][-1]) for row in runs]


EXPERIMENT = Experiment(
    number=8,
    name="scales",
    source="Vaswani et al. 2017, Attention Is All You Need, §3.2.1; 1/d: Yang et al. 2022, Tensor Programs V",
    version=1,
    cells=cells,
    seeds={"quick": 2, "default": 5, "full": 5},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
