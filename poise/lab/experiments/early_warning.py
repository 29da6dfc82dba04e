"""Claim 18: the scores tell of a divergence that attention causes, long before the loss does; and what then helps.

The rules, fixed before the runs: `diverged_at` for what a divergence is, poise.watch's own alarms with their default
limits for what a warning is, the remedies' defaults for what is tried. The learning rates were chosen with seeds that
are not among those measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, saying, share, weigh
from poise.lab.experiment import Cell, Experiment, Level, Row, Rows, Values
from poise.lab.gpt import GPT, Recipe
from poise.lab.tasks import BYTES, Batch, text
from poise.lab.training import loss_of, optimizer_of
from poise.monitor.alarms import Alarms
from poise.monitor.remedies.handle import Remedy
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What a divergence is: from some step to the end the loss, as a mean over WINDOW steps, stays MARGIN nats above the
# lowest such mean so far. It diverges at the first of those steps; or where loss or gradient are not finite, if sooner.
WINDOW, MARGIN = 20, 0.5
# What a warning is: one of these alarms, about scores that are too large.
WARNINGS = ("logit_growth", "entropy_collapse", "max_logit", "saturation", "diverged_logit")
EVERY = 4  # steps between two looks at the scores
LEAD = 100  # steps that a warning should come ahead


@dataclass(frozen=True)
class Kind:
    """How a run goes: its learning rate doubles every `doubling` steps after step 150, up to `most`; what breaks it."""

    steps: int
    most: float = 4e-3
    doubling: int = 35
    qk_norm: bool = False
    clip: float | None = 1.0
    harm: str | None = None  # "embeddings": they grow by 2 % a step from step 250 on; "data": noise from step 300 on


KINDS = {
    # Attention is to blame: with QK-norm they train through.
    "slow": Kind(620, most=0.2, doubling=70),
    "fast": Kind(560, most=0.2),
    # Healthy.
    "calm": Kind(420),
    "brisk": Kind(420, most=0.01),
    "hot": Kind(420, most=0.03),
    "normed": Kind(420, most=0.03, qk_norm=True),
    # Something else is to blame.
    "overheated": Kind(420, most=math.inf, qk_norm=True, clip=None),
    "embeddings": Kind(420, harm="embeddings"),
    "data": Kind(380, harm="data"),
}
ATTENTION, HEALTHY = ("slow", "fast"), ("calm", "brisk", "hot", "normed")
OTHER = ("overheated", "embeddings", "data")
REMEDIES = ("qk-clip", "qk-norm", "soft-cap", "sigma-reparam")
NEVER = {"remedy": "none", "when": "never"}
# Where remedies are tried, and since when; also where attention is not to blame. Overheated runs have QK-norm, with one
# gain for all heads, which QK-Clip refuses.
TRIED = {
    ("slow", "start"): REMEDIES,
    ("slow", "warning"): REMEDIES,
    ("fast", "start"): REMEDIES,
    ("fast", "warning"): REMEDIES,
    ("overheated", "start"): ("soft-cap", "sigma-reparam"),
    ("embeddings", "start"): REMEDIES,
}


def cells(level: Level) -> Iterator[Cell]:
    if level == "quick":
        return ({"run": name, **NEVER} for name in ("fast", "calm"))
    made: list[Cell] = [{"run": name, **NEVER} for name in KINDS]
    made += [
        {"run": name, "remedy": remedy, "when": when} for (name, when), chosen in TRIED.items() for remedy in chosen
    ]
    return iter(made)


def learning_rate(kind: Kind, step: int) -> float:
    """A short warm-up to the healthy rate, and from step 150 on up."""
    rate: float = 4e-3 * min(1.0, (step + 1) / 20) * 2.0 ** (max(0, step - 150) / kind.doubling)
    return min(rate, kind.most) if step >= 20 else rate


def measure(cell: Cell, seed: int) -> Values:
    kind = KINDS[str(cell["run"])]
    recipe = Recipe(
        seed, kind.steps, layers=3, width=32, heads=2, batch=16, weight_decay=0.0, clip=kind.clip, qk_norm=kind.qk_norm
    )
    torch.manual_seed(seed)
    model = GPT(recipe, BYTES)
    optimizer = optimizer_of(model, recipe)
    order = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    largest: list[list[float]] = []
    broken = applied = None
    with poise.watch(model, every=EVERY, alarms=Alarms()) as watch, ExitStack() as remedies:
        for step in range(kind.steps):
            warned = any(alarm.kind in WARNINGS for alarm in watch.alarms)
            if applied is None and (cell["when"] == "start" or (cell["when"] == "warning" and warned)):
                remedies.enter_context(apply(str(cell["remedy"]), model, optimizer))
                applied = step
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(kind, step)
            batch = _harmed(kind, step, model, text().draw(recipe.batch, recipe.length, order), order)
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            size = nn.utils.clip_grad_norm_(model.parameters(), math.inf if kind.clip is None else kind.clip)
            losses.append(loss.item())
            if not (math.isfinite(losses[-1]) and math.isfinite(float(size))):
                broken = step
                break
            optimizer.step()
            if step % EVERY == 0 and watch.record is not None:
                largest.append([step, _largest(watch.record)])
    smoothed = means(losses)
    return {
        "diverged_at": diverged_at(losses, broken),
        "alarms": [[alarm.step, alarm.kind, alarm.layer, alarm.head] for alarm in watch.alarms],
        "applied": applied,
        "best": round(min(smoothed), 4),
        "end": round(smoothed[-1], 4) if broken is None else math.inf,
        "losses": [[WINDOW - 1 + i, round(smoothed[i], 3)] for i in range(0, len(smoothed), 10)],
        "largest": [[step, float(f"{z:.4g}")] for step, z in largest[::3]],
    }


def apply(remedy: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Remedy:
    """With its defaults; what it adds that learns, learns."""
    learns = remedy in ("qk-norm", "sigma-reparam")
    return poise.remedy(model, remedy, optimizer=optimizer if learns else None)


@torch.no_grad()
def _harmed(kind: Kind, step: int, model: GPT, batch: Batch, order: torch.Generator) -> Batch:
    if kind.harm == "embeddings" and step >= 250:
        model.tokens.weight.mul_(1.02)
    if kind.harm == "data" and step >= 300:
        return Batch(batch.ids, torch.randint(BYTES, batch.targets.shape, generator=order))
    return batch


def _largest(record: dict[str, Any]) -> float:
    return max(
        (z for layer in record["layers"].values() for z in layer["max_logit"]["max"] if z is not None), default=0
    )


def means(losses: Sequence[float]) -> list[float]:
    """Over WINDOW steps, ending at each step from the WINDOW-th on."""
    ends = range(min(WINDOW, len(losses)), len(losses) + 1)
    return [statistics.fmean(losses[max(0, end - WINDOW) : end]) for end in ends]


def diverged_at(losses: Sequence[float], broken: int | None = None) -> int | None:
    """The step at which a run diverged, by the rule above; None if it did not. broken: where it was not finite."""
    best, since = math.inf, None
    for step, mean in enumerate(means(losses), WINDOW - 1):
        best = min(best, mean)
        if mean <= best + MARGIN:
            since = None
        elif since is None:
            since = step
    return since if since is not None else broken


def warned_at(row: Row) -> int | None:
    """The step of the first warning before the run diverged, or at all if it did not."""
    end = row.values["diverged_at"]
    steps = [step for step, kind, *_ in row.values["alarms"] if kind in WARNINGS and (end is None or step < end)]
    return min(steps, default=None)


def lead(row: Row) -> int | None:
    """Steps from the first warning to the divergence; None without either."""
    warned, end = warned_at(row), row.values["diverged_at"]
    return None if warned is None or end is None else end - warned


def untreated(rows: Rows, run: str) -> Rows:
    return rows.where(run=run, **NEVER)


def judge(rows: Rows) -> Verdict:
    """Of runs that did what their kind is for: leads where they diverged, silence where they did not."""
    core, variations = [], []
    for run in ATTENTION:
        own = [row for row in untreated(rows, run) if row.values["diverged_at"] is not None]
        if own:
            early = sum((lead(row) or 0) >= LEAD for row in own)
            core.append(Check(f"lead.{run}", share(early, len(own)), 0.5, 1.0))
    for run in HEALTHY:
        own = [row for row in untreated(rows, run) if row.values["diverged_at"] is None]
        if own:
            loud = sum(warned_at(row) is not None for row in own)
            variations.append(Check(f"quiet.{run}", share(loud, len(own)), 0.0, 0.5))
    told = [row for run in ATTENTION for row in untreated(rows, run) if row.values["diverged_at"] is not None]
    leads = [lead(row) or 0 for row in told]
    silent = [row for run in HEALTHY for row in untreated(rows, run) if row.values["diverged_at"] is None]
    said: Said = {
        "lead": f"{statistics.median(leads):.0f}" if leads else "–",
        "diverged": str(len(told)),
        "missed": str(sum(lead(row) is None for row in told)),
        "false": str(sum(warned_at(row) is not None for row in silent)),
        "healthy": str(len(silent)),
        "kept": saying("yes", [*core, *variations]),
        "broken": saying("no", [*core, *variations]),
    }
    return Verdict(weigh(core, variations), (*core, *variations), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    present = [run for run in KINDS if len(untreated(rows, run))]
    colours = dict(zip(("slow", "fast", "calm"), plots.COLOURS, strict=False))
    for run in [run for run in colours if run in present]:
        for index, row in enumerate(untreated(rows, run)):
            steps, sizes = zip(*row.values["largest"], strict=True)
            left.plot(steps, sizes, color=colours[run], linewidth=1, label=None if index else say(f"run.{run}"))
            for at, marker in ((warned_at(row), "^"), (row.values["diverged_at"], "x")):
                if at is not None:
                    nearest = min(row.values["largest"], key=lambda point: abs(point[0] - at))
                    left.plot([at], [nearest[1]], marker, color=colours[run], markersize=6)
    left.set(yscale="log", xlabel=say("plot.step"), ylabel=say("plot.largest"), title=say("plot.marks"))
    left.legend()
    shown = [run for run in present if any(row.values["diverged_at"] is not None for row in untreated(rows, run))]
    for place, run in enumerate(shown):
        leads = [lead(row) or 0 for row in untreated(rows, run) if row.values["diverged_at"] is not None]
        right.plot(leads, [place] * len(leads), "o", color=plots.COLOURS[0 if run in ATTENTION else 1])
    right.axvline(LEAD, color=plots.COLOURS[-1], linewidth=1, linestyle=":")
    right.set_yticks(range(len(shown)), [say(f"run.{run}") for run in shown])
    right.invert_yaxis()
    right.set(xlabel=say("plot.lead"), ylim=(len(shown) - 0.5, -0.5))


EXPERIMENT = Experiment(
    number=18,
    name="early_warning",
    source="Wortsman et al. 2023, Small-scale proxies for large-scale Transformer training instabilities",
    version=1,
    cells=cells,
    seeds={"quick": 1, "default": 5, "full": 20},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
