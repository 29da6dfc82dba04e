"""Claim 16: what attention costs in time and memory as n grows, exact and in efficient forms, as fitted exponents."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import poise
from poise.lab import plots
from poise.lab.evidence import Check, Said, Verdict, saying, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say
from poise.variants import BigBird, Linformer, Longformer, Performer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EFFICIENT = ("longformer", "bigbird", "linformer", "performer")
FORMS = ("exact", *EFFICIENT, "dense")
LONGEST = {"quick": 4096, "default": 8192, "full": 65536}
DENSE_AT_MOST = 4096  # beyond it the matrix of weights would not fit many a machine
SHORTEST, HEADS, DIM = 1024, 2, 64
ROUNDS = 5
QUADRATIC, LINEAR = (1.7, 2.3), 1.3  # exponents


def cells(level: Level) -> Iterator[Cell]:
    for form in FORMS:
        yield {"form": form, "longest": min(LONGEST[level], DENSE_AT_MOST) if form == "dense" else LONGEST[level]}


def measure(cell: Cell, seed: int) -> Values:
    """Of calls without gradients: the least time of a few, and inputs, output and what else is held meanwhile."""
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths_of(str(cell["form"]), int(cell["longest"]))
    seconds, held = [], []
    with torch.no_grad():
        for n in lengths:
            q, k, v = torch.randn(3, 1, HEADS, n, DIM, generator=generator)
            call = partial(form_of(str(cell["form"]), n), q, k, v)
            rounds = ROUNDS
            if cell["form"] == "dense":
                rounds = 1  # it is there for its memory, and slow
            else:
                call()  # what is made once, such as threads
            held.append(4 * q.numel() * q.element_size() + growth(call))
            seconds.append(min(_timed(call) for _ in range(rounds)))
    return {
        "lengths": lengths,
        "seconds": seconds,
        "bytes": held,
        "time": exponent(lengths, seconds),
        "memory": exponent(lengths, held),
    }


def lengths_of(form: str, longest: int) -> list[int]:
    """Doubling; of the dense form only some whose matrices are large beside all else that a process holds."""
    if form == "dense":
        return [longest // 2, 3 * longest // 4, longest]
    return [SHORTEST << step for step in range((longest // SHORTEST).bit_length())]


def form_of(form: str, n: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Each query's share of work is the same at every length, but for the dense and the exact form."""
    choices: dict[str, Callable[[], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
        "dense": lambda: partial(poise.attention, impl="reference"),
        "exact": lambda: poise.attention,
        "longformer": lambda: Longformer(128, tokens=(0,)),
        "bigbird": lambda: BigBird(32, 2),
        "linformer": lambda: Linformer(n, 128, HEADS, sharing="key-value"),
        "performer": lambda: Performer(DIM, 128),
    }
    return choices[form]()


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def growth(call: Callable[[], object]) -> int:
    """By how many bytes the process's resident memory rises while it runs, at most, beyond the output it returns.

    From Linux's own high-water mark, reset before; NaN elsewhere.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def kilobytes(name: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(name))

    gc.collect()  # what was freed before must not hide what is taken now
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        reset.write_text("5")
        before = kilobytes("VmRSS:")
        out = call()
        size = out.numel() * out.element_size() if isinstance(out, Tensor) else 0
        return max(0, 1024 * (kilobytes("VmHWM:") - before) - size)
    except (OSError, StopIteration):
        return math.nan  # type: ignore[return-value]


def exponent(lengths: Sequence[int], costs: Sequence[float]) -> float:
    """Slope of log cost over log length, by least squares, in the upper half of the lengths."""
    x, y = (
        torch.tensor(each, dtype=torch.float64).log()[-max(3, (len(lengths) + 1) // 2) :] for each in (lengths, costs)
    )
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def judge(rows: Rows) -> Verdict:
    count = 3 + 2 * len(EFFICIENT)

    def check(form: str, what: str, low: float = -math.inf, high: float = math.inf) -> Check:
        return Check(f"{form}.{what}", rows.where(form=form).interval(what, count), low, high)

    checks = [
        check("exact", "time", *QUADRATIC),
        check("dense", "memory", *QUADRATIC),
        check("exact", "memory", high=LINEAR),
        *(check(form, what, high=LINEAR) for form in EFFICIENT for what in ("time", "memory")),
    ]
    said: Said = {
        **{each.label.replace(".", "_"): f"{each.measured.mean:.2f}" for each in checks},
        "kept": saying("yes", checks),
        "broken": saying("no", checks),
    }
    return Verdict(weigh(checks), tuple(checks), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    for axes, what, label in zip(
        figure.subplots(1, 2), ("seconds", "bytes"), (say("plot.time"), say("plot.memory")), strict=True
    ):
        for form in FORMS:
            own = rows.where(form=form)
            lengths = own[0].values["lengths"]
            least = [min(costs) for costs in zip(*(row.values[what] for row in own), strict=True)]
            unit = 1e3 if what == "seconds" else 1 / 2**20
            axes.plot(lengths, [unit * cost for cost in least], "o-", label=say(f"form.{form}"))
        plots.ticks(axes, rows.where(form="exact")[0].values["lengths"])
        axes.set(yscale="log", xlabel="n", title=label)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


EXPERIMENT = Experiment(
    number=16,
    name="cost",
    source="Vaswani et al. 2017, Table 1; Rabe and Staats 2021, Self-attention Does Not Need O(n²) Memory",
    version=1,
    cells=cells,
    seeds={"quick": 5, "default": 7, "full": 9},
    measure=measure,
    judge=judge,
    draw=draw,
)
