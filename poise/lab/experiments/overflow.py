"""Claim 6: scaling keeps exp from overflowing. Without and with subtracting the maximum, per dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

import poise
from poise.lab.evidence import Check, Interval, Said, Verdict, saying, share, weigh
from poise.lab.experiment import Cell, Experiment, Level, Rows, Values
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = {"quick": (1, 8), "default": (1, 2, 4, 8, 16), "full": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
SMALL, LARGE = 1, 8  # deviations of the entries of q and k that the rule compares
DIM, ROWS, KEYS = 64, 2048, 1024
RARE = 0.001  # share of rows that may overflow where it is said that none does


def cells(level: Level) -> Iterator[Cell]:
    grid = ((dtype, scale, size) for dtype in DTYPES for scale in ("unscaled", "root") for size in SIZES[level])
    return ({"dtype": dtype, "scale": scale, "size": size} for dtype, scale, size in grid)


def measure(cell: Cell, seed: int) -> Values:
    """Rows of exp(s) / Σ exp(s) that are not finite: as written, with the maximum subtracted, and in poise."""
    generator = torch.Generator().manual_seed(seed)
    dtype, size = DTYPES[str(cell["dtype"])], float(cell["size"])
    scale = DIM**-0.5 if cell["scale"] == "root" else 1.0
    q = size * torch.randn(1, 1, ROWS, DIM, generator=generator)
    k = size * torch.randn(1, 1, KEYS, DIM, generator=generator)
    s = poise.scores(q, k, scale=scale, stage="raw")[0, 0].to(dtype)
    out = poise.attention(q.to(dtype), k.to(dtype), torch.ones(1, 1, KEYS, 16, dtype=dtype), scale=scale)
    return {
        "rows": ROWS,
        "written": _overflowed(s.exp()),
        "shifted": _overflowed((s - s.amax(-1, keepdim=True)).exp()),
        "poise": int((~out.isfinite()).any(-1).sum()),
        "limit": limit(dtype),
    }


def _overflowed(powers: torch.Tensor) -> int:
    p = powers / powers.sum(-1, keepdim=True)
    return int((~p.isfinite()).any(-1).sum())


def limit(dtype: torch.dtype) -> float:
    """The largest number whose exp is finite, by bisection over what the dtype can hold."""
    low, high = 0.0, 200.0
    for _ in range(64):
        middle = (low + high) / 2
        fits = bool(torch.tensor(middle, dtype=dtype).exp().isfinite())
        low, high = (middle, high) if fits else (low, middle)
    return float(torch.tensor(low, dtype=dtype))


def overflowing(rows: Rows, way: str, comparisons: int = 1) -> Interval:
    """Share of rows, over all seeds."""
    return share(int(sum(rows.numbers(way))), int(sum(rows.numbers("rows"))), comparisons=comparisons)


def judge(rows: Rows) -> Verdict:
    count = 3 * len(DTYPES)

    def checks(kind: str, way: str, scale: str, size: int) -> list[Check]:
        return [
            Check(
                f"{kind}.{dtype}", overflowing(rows.where(dtype=dtype, scale=scale, size=size), way, count), high=RARE
            )
            for dtype in DTYPES
        ]

    core = checks("small", "written", "root", SMALL)
    variations = checks("large", "written", "root", LARGE)
    beside = checks("shifted", "shifted", "unscaled", LARGE)
    said: Said = {
        **{f"limit_{dtype}": f"{rows.where(dtype=dtype).numbers('limit')[0]:.4g}" for dtype in DTYPES},
        "size": str(LARGE),
        "kept": saying("yes", [*core, *variations], ("small", "large")),
        "broken": saying("no", [*core, *variations], ("small", "large")),
        "safe": saying("yes", beside, ("shifted",)),
    }
    return Verdict(weigh(core, variations), (*core, *variations, *beside), said)


def draw(figure: Figure, rows: Rows, say: Say) -> None:
    sizes = rows.parameter("size")
    panels = figure.subplots(1, len(DTYPES), sharey=True)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for scale, way, style in (
            ("unscaled", "written", "o-"),
            ("root", "written", "o-"),
            ("unscaled", "shifted", "s--"),
            ("unscaled", "poise", "^:"),
        ):
            own = rows.where(dtype=dtype, scale=scale)
            found = [overflowing(own.where(size=size), way).mean for size in sizes]
            label = say(f"plot.{way}", scale="1/√d" if scale == "root" else "1")
            axes.plot(sizes, found, style, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
        axes.set(xlabel=say("plot.size"), title=f"{dtype}: exp ≤ {rows.where(dtype=dtype).numbers('limit')[0]:.4g}")
    panels[0].set_ylabel(say("plot.share"))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


EXPERIMENT = Experiment(
    number=6,
    name="overflow",
    source="common in explanations of scaled attention; the limits follow from IEEE 754 and bfloat16",
    version=1,
    cells=cells,
    seeds={"quick": 6, "default": 8, "full": 16},
    measure=measure,
    judge=judge,
    draw=draw,
)
