"""Training of the lab's small models: one seeded run, and what its scores were like meanwhile.

`train` turns a `Recipe`, all that a run depends on, into a `Run`; both are plain data. No verdicts here, and no files.

Letters: B batch, N positions, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import poise
from poise import nn as blocks
from poise import torch_hook
from poise.lab.gpt import GPT, Recipe
from poise.lab.tasks import IGNORED, Batch, Task, text
from poise.op import Scored

SMOOTH = 10  # losses that are averaged before they are judged


@dataclass
class Look:
    """The state of the scores in one step: a number per layer, over its heads and the rows of the batch."""

    step: int
    max_logit: list[float]
    entropy: list[float]  # nats, mean over rows
    least_entropy: list[float]  # of the head that has the least
    responsiveness: list[float]
    sink_mass: list[float]  # of the head that gives key 0 most
    gradient_q: list[float]  # norm of the gradient of W_q, before clipping
    gradient_k: list[float]


@dataclass
class Run:
    """What came of a recipe."""

    recipe: Recipe
    losses: list[float] = field(default_factory=list)  # per step, nats
    looks: list[Look] = field(default_factory=list)
    held_out: float = math.nan
    ceiling: float = math.nan
    stopped_at: int | None = None  # the step whose loss or gradient was not finite

    @property
    def final(self) -> float:
        """The held-out loss, the ceiling where there is none or a worse one: a diverged run knows nothing."""
        return min(self.held_out, self.ceiling) if math.isfinite(self.held_out) else self.ceiling

    @property
    def diverged(self) -> bool:
        """Not finite, or at its end worse than one who knows only how frequent the answers are."""
        return self.stopped_at is not None or not self.held_out < self.ceiling

    @property
    def max_logit(self) -> float:
        """The largest seen in any look, in any layer."""
        return max((max(look.max_logit) for look in self.looks), default=math.nan)

    def smoothed(self) -> list[float]:
        """Means over SMOOTH losses, ending at each step from the SMOOTH-th on."""
        sums = [sum(self.losses[end - SMOOTH : end]) for end in range(SMOOTH, len(self.losses) + 1)]
        return [one / SMOOTH for one in sums]

    def values(self, points: int = 16) -> dict[str, Any]:
        """What a result record keeps of it: the outcome, and curves thinned to about so many points."""
        smoothed = self.smoothed()
        kept = range(0, len(smoothed), max(1, len(smoothed) // points))
        looks = [*self.looks[:: max(1, len(self.looks) // points)], *self.looks[-1:]]
        curves = {
            name: [_rounded(pick(getattr(one, name))) for one in looks]
            for name, pick in (
                ("max_logit", max),
                ("entropy", _mean),
                ("least_entropy", min),
                ("responsiveness", _mean),
                ("sink_mass", max),
                ("gradient_q", _mean),
                ("gradient_k", _mean),
            )
        }
        return {
            "held_out": _rounded(self.held_out),
            "final": _rounded(self.final),
            "diverged": self.diverged,
            "max_logit": _rounded(self.max_logit),
            "losses": [[SMOOTH + i, _rounded(smoothed[i])] for i in kept],
            "looks": {"step": [one.step for one in looks], **curves},
        }


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _rounded(number: float) -> float:
    """To five digits, which is what a record is read for."""
    return float(f"{number:.5g}")


Change = Callable[[int, nn.Module], None]  # step, model: called before each step


def train(
    recipe: Recipe,
    task: Task | None = None,
    *,
    model: nn.Module | None = None,
    change: Change | None = None,
    after_step: Callable[[int], object] | None = None,
) -> tuple[Run, nn.Module]:
    """One run from its seed on, and the model it leaves. Stops early where a loss or a gradient is not finite.

    task: the text by default. model: goes on with this one instead of a new `GPT`; its `attentions()` are looked at.
    change: what is done to the model before each step. after_step: called after the optimizer's.
    """
    task = text() if task is None else task
    torch.manual_seed(recipe.seed)
    model = GPT(recipe, task.vocabulary) if model is None else model
    optimizer = optimizer_of(model, recipe)
    order = torch.Generator().manual_seed(recipe.seed)
    run = Run(recipe, ceiling=task.ceiling)
    for step in range(recipe.steps):
        if change is not None:
            change(step, model)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        looked = step % recipe.observe_every == 0 or step == recipe.steps - 1
        batch = task.draw(recipe.batch, recipe.length, order)
        if looked:
            with poise.watch(model, alarms=False) as watch:
                loss = loss_of(model, batch)
                summaries = watch.summaries
        else:
            loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if looked:
            run.looks.append(look(step, model, summaries))
        size = nn.utils.clip_grad_norm_(model.parameters(), math.inf if recipe.clip is None else recipe.clip)
        run.losses.append(loss.item())
        if not (math.isfinite(run.losses[-1]) and math.isfinite(float(size))):
            run.stopped_at = step
            break
        optimizer.step()
        if after_step is not None:
            after_step(step)
    if run.stopped_at is None:
        run.held_out = examined(model, task, recipe)
    return run, model


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weights decay, vectors (norms, sinks, temperatures) do not."""
    wanted = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in wanted if one.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [one for one in wanted if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], recipe.lr, (0.9, 0.95), fused=True)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Up linearly, then down to a tenth along a cosine."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean surprise per answer, in nats."""
    return F.cross_entropy(model(batch.ids).flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED)


def look(step: int, model: nn.Module, summaries: Mapping[str, poise.ScoreSummary]) -> Look:
    """What a watch saw of this step, and the gradients it left."""
    seen = list(summaries.values())
    shares = [_gradient_norms(each) for each in model.attentions()]  # type: ignore[operator]
    return Look(
        step,
        max_logit=[float(one.max("max_logit").max()) for one in seen],
        entropy=[float(one.mean("entropy").mean()) for one in seen],
        least_entropy=[float(one.mean("entropy").min()) for one in seen],
        responsiveness=[float(one.mean("responsiveness").mean()) for one in seen],
        sink_mass=[float(one.mean("sink_mass").max()) for one in seen],
        gradient_q=[q for q, _ in shares],
        gradient_k=[k for _, k in shares],
    )


def _gradient_norms(attention: blocks.MultiHeadAttention) -> tuple[float, float]:
    """Of the parameter that gives W_q and W_k, which a reparametrisation keeps as its "original"."""
    own = dict(attention.projection.named_parameters())
    weight = own.get("weight", own.get("parametrizations.weight.original"))
    if weight is None or weight.grad is None:
        return math.nan, math.nan
    q, k, _ = torch.split(weight.grad, attention.projection.rows)
    return float(q.norm()), float(k.norm())


@torch.no_grad()
def examined(model: nn.Module, task: Task, recipe: Recipe, batches: int = 16) -> float:
    """Mean loss on text that was never learned from; the same for all runs of a length."""
    generator = torch.Generator().manual_seed(20261119)
    model.eval()
    losses = [loss_of(model, task.examine(16, recipe.length, generator)).item() for _ in range(batches)]
    model.train()
    return sum(losses) / batches


def sensitivity(losses: Mapping[float, float], ceiling: float) -> float:
    """Of the final loss to the learning rate: mean over rates of min(loss, ceiling) - best (Wortsman et al. 2023)."""
    finals = [min(loss, ceiling) if math.isfinite(loss) else ceiling for loss in losses.values()]
    return sum(finals) / len(finals) - min(finals)


class _Listener:
    """Keeps what one forward pass tells, row by row."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.heard: list[poise.ScoreStats] = []

    def name_of(self, module: nn.Module) -> str | None:
        return self.names.get(id(module))

    def wants(self, name: str) -> bool:
        return True

    def receive(self, name: str, stats: poise.ScoreStats, scored: Scored) -> None:
        self.heard.append(stats.detach())

    def miss(self, name: str, why: str) -> None:
        raise RuntimeError(f"{name} computed attention that could not be seen: {why}")


def rows_of(model: nn.Module, ids: Tensor) -> list[poise.ScoreStats]:
    """The statistics of every query row, [B, H, N], call by call, of a forward pass over ids."""
    listener = _Listener(model)
    torch_hook.listen(listener)
    try:
        with torch.no_grad():
            model(ids)
    finally:
        torch_hook.stop_listening(listener)
    return listener.heard
