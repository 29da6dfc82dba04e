"""Claim 14: bidirectional, causal and cross attention each solve what the others cannot; the masked future weighs 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import poise
from poise import nn as blocks
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, exact, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("bidirectional", "causal", "cross")
TASKS = {"gap": "bidirectional", "write": "causal", "translate": "cross"}  # each with the role that should solve it
STEPS = {"quick": 150, "default": 400, "full": 2000}
SYMBOLS, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 8, 8, 48, 4, 2, 32
BEGIN = SYMBOLS  # the token before the first; also what stands where a token is not known
SOLVED, UNSOLVED = 0.9, 0.5  # accuracy; guessing gives 1/8


def cells(level: Level) -> Iterator[Cell]:
    yield {"part": "future"}
    for task in TASKS:
        for role in ROLES:
            yield {"part": "task", "task": task, "role": role, "steps": STEPS[level]}


def measure(cell: Cell, seed: int) -> Values:
    if cell["part"] == "future":
        return future(seed)
    return {"accuracy": accuracy(str(cell["task"]), str(cell["role"]), int(cell["steps"]), seed)}


def future(seed: int) -> Values:
    """The largest weight of a masked key, and how much of the output changes with masked keys and values."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 4, 96, 32, generator=generator)
    hidden = torch.ones(96, 96, dtype=torch.bool).triu(1)
    weights = poise.scores(4 * q, 4 * k, mask=poise.causal(), stage="prob")
    whole = poise.attention(q, k, v, mask=poise.causal())
    half = 48
    k[:, :, half:] += 100
    v[:, :, half:] -= 100
    other = poise.attention(q, k, v, mask=poise.causal())
    return {
        "weight": float(weights[..., hidden].max()),
        "change": float((other - whole)[:, :, :half].abs().max()),
    }


class Model(nn.Module):
    """A stack that reads what its role lets it: all of its own sequence, its past, or itself and another sequence."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.cross = role == "cross"
        self.visible = blocks.Visible(mask=MASKS[role])
        config = blocks.BlockConfig(WIDTH, HEADS, 4 * WIDTH)
        self.tokens, self.places = nn.Embedding(SYMBOLS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.stack = blocks.Stack(config, LAYERS, cross=self.cross)
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor, source: Tensor) -> Tensor:
        context = self._embedded(source) if self.cross else None
        logits: Tensor = self.out(self.stack(self._embedded(ids), context, visible=self.visible))
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return embedded


MASKS = {"bidirectional": None, "causal": poise.causal(), "cross": poise.window(0, 0)}


def accuracy(task: str, role: str, steps: int, seed: int) -> float:
    """After training on fresh examples. What is written is written symbol by symbol, each on what came before."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Model(role)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids, source, targets, asked = example(task, BATCH, generator)
        logits = model(ids, source)
        loss = F.cross_entropy(logits[asked], targets[asked])
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        ids, source, targets, asked = example(task, 256, generator)
        if task == "gap":
            found = model(ids, source).argmax(-1)
        else:
            found = _written(model, source, ids[:, :2] if task == "write" else ids[:, :1])
    return float((found == targets)[asked].float().mean())


def _written(model: Model, source: Tensor, begun: Tensor) -> Tensor:
    """Answers at every position when each is given back as the next input; the future is unknown, not merely hidden."""
    count = begun.shape[0]
    ids = torch.full((count, LENGTH), BEGIN)
    ids[:, : begun.shape[1]] = begun
    answers = torch.zeros(count, LENGTH, dtype=torch.long)
    for i in range(LENGTH):
        answers[:, i] = model(ids, source)[:, i].argmax(-1)
        if begun.shape[1] <= i + 1 < LENGTH:
            ids[:, i + 1] = answers[:, i]
    return answers


def example(task: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, source, targets [count, LENGTH], and which of the targets are asked for.

    gap: a missing symbol is the one after it. write: each symbol is the last one plus the first. translate: the source
    backwards, with every symbol replaced.
    """
    drawn = torch.randint(SYMBOLS, (count, LENGTH), generator=generator)
    source = torch.randint(SYMBOLS, (count, LENGTH), generator=generator)
    if task == "gap":
        missing = torch.randint(LENGTH - 1, (count,), generator=generator)
        each = torch.arange(count)
        ids, targets = drawn.clone(), drawn.clone()
        targets[each, missing] = drawn[each, missing + 1]
        ids[each, missing] = BEGIN
        return ids, source, targets, ids == BEGIN
    if task == "write":
        first, second = drawn[:, :1], drawn[:, 1:2]
        whole = (second + first * torch.arange(LENGTH)) % SYMBOLS  # second, then plus first each time
        whole = torch.cat((first, whole), 1)
        asked = torch.zeros(count, LENGTH, dtype=torch.bool)
        asked[:, 1:] = True
        return whole[:, :-1], source, whole[:, 1:], asked
    targets = (source.flip(1) * 3 + 1) % SYMBOLS
    ids = torch.cat((torch.full((count, 1), BEGIN), targets[:, :-1]), 1)
    return ids, source, targets, torch.ones(count, LENGTH, dtype=torch.bool)


def judge(rows: Rows) -> Verdict:
    own, hidden = rows.where(part="task"), rows.where(part="future")
    count = len(TASKS) * len(ROLES)
    checks = []
    for task, solver in TASKS.items():
        for role in ROLES:
            found = own.where(task=task, role=role).interval("accuracy", count)
            name = f"{task}.{role}"
            checks.append(Check(name, found, low=SOLVED) if role == solver else Check(name, found, high=UNSOLVED))
    largest = max(max(hidden.numbers("weight")), max(hidden.numbers("change")))
    checks.append(Check("future", exact(largest), 0.0, 0.0))
    said: Said = {
        **{task: str(own.where(task=task, role=role).interval("accuracy")) for task, role in TASKS.items()},
        "future": f"{largest:g}",
        "kept": saying("yes", checks),
        "broken": saying("no", checks),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    axes = figure.subplots()
    own = rows.where(part="task")
    for place, role in enumerate(ROLES):
        found = [own.where(task=task, role=role).interval("accuracy") for task in TASKS]
        bars = [[x.mean - x.low for x in found], [x.high - x.mean for x in found]]
        at = [i + 0.27 * (place - 1) for i in range(len(TASKS))]
        axes.bar(
            at,
            [x.mean for x in found],
            0.25,
            yerr=bars,
            capsize=2,
            label=say(f"plot.{role}"),
            color=plots.COLOURS[place],
        )
    axes.axhline(1 / SYMBOLS, color="#4d4d4d", linestyle=":", label=say("plot.guess"))
    axes.set_xticks(range(len(TASKS)), [say(f"task.{task}") for task in TASKS])
    axes.set(ylim=(0, 1.05), ylabel=say("plot.accuracy"))
    figure.legend(loc="outside lower center", ncols=4)


EXPERIMENT = Experiment(
    number=14,
    name="roles",
    source="Vaswani et al. 2017, §3.2.3; Devlin et al. 2019 (BERT)",
    version=1,
    cells=cells,
    seeds={"quick": 3, "default": 6, "full": 16},
    measure=measure,
    judge=judge,
    draw=draw,
    side_by_side=True,
)
