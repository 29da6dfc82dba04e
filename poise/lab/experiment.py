"""What an experiment is: a claim, a grid of cells measured with several seeds, a rule, a plot; and how it is found.

An experiment is a module in `experiments/` that defines EXPERIMENT, and its words in five languages in
`texts/NAME.json`. The runner calls `measure` once per cell and seed and stores what it returns at once, so an
interrupted run loses at most one cell. `judge` and `draw` see only those stored rows.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from poise.lab import experiments as folder
from poise.lab.evidence import Interval, Verdict, interval
from poise.report.texts import Say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Level = Literal["quick", "default", "full"]
LEVELS: tuple[Level, ...] = ("quick", "default", "full")

Cell = Mapping[str, str | int | float | bool]  # the parameters of one measurement, as JSON has them
Values = Mapping[str, Any]  # numbers, strings, lists and dicts of them: what JSON can hold, and inf and nan

SEEDS_APART = 1000  # runs with different --seed share no seed of theirs: seed = 1000 · base + replica


@dataclass(frozen=True)
class Row:
    """What one cell gave with one seed."""

    cell: Cell
    seed: int
    values: Values
    seconds: float = 0.0


class Rows(Sequence[Row]):
    """All rows of an experiment, to be narrowed down by parameters."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = tuple(rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def where(self, **cell: Any) -> Rows:
        """Those whose cells have these parameters."""
        return Rows(row for row in self if all(row.cell.get(name) == value for name, value in cell.items()))

    def parameter(self, name: str) -> list[Any]:
        """The values a parameter takes, in the order they come."""
        return list(dict.fromkeys(row.cell[name] for row in self if name in row.cell))

    def numbers(self, name: str) -> list[float]:
        """One measured number per row."""
        return [float(row.values[name]) for row in self]

    def interval(self, name: str, comparisons: int = 1) -> Interval:
        """Of the mean over seeds; narrow down to one cell first."""
        return interval(self.numbers(name), comparisons=comparisons)


@dataclass(frozen=True)
class Experiment:
    """One claim. Its texts: title, claim, method, rule, finding.KIND of each verdict it can give, labels of checks."""

    number: int
    name: str  # of its module and of its texts
    source: str  # where the claim is made: authors, year, title
    version: int  # raise it when measure gives other values for the same cell and seed: stored rows are then void
    cells: Callable[[Level], Iterable[Cell]]  # a cell that is in two levels is measured once
    seeds: Mapping[Level, int]  # how many
    measure: Callable[[Cell, int], Values]  # deterministic in cell and seed, times aside
    judge: Callable[[Rows], Verdict]  # pure, by the rule that the texts state
    draw: Callable[[Figure, Rows, Say], None]  # labels of the axes by Say
    side_by_side: bool = False  # several measurements at once, a thread each: for small ones of many small steps
    needs: Callable[[], str | None] = lambda: None  # what is missing to run it here and how to get it, or None

    def tasks(self, level: Level, seed: int) -> list[tuple[Cell, int]]:
        """Every measurement of a level, the cells in turn for each seed: a run cut short has whole replicas."""
        cells = list(self.cells(level))
        return [(cell, SEEDS_APART * seed + replica) for replica in range(self.seeds[level]) for cell in cells]


@cache
def experiments() -> tuple[Experiment, ...]:
    """All of them, in the order of their numbers."""
    names = [module.name for module in pkgutil.iter_modules(folder.__path__)]
    found = [importlib.import_module(f"{folder.__name__}.{name}").EXPERIMENT for name in names]
    return tuple(sorted(found, key=lambda experiment: experiment.number))


def find(name: str) -> Experiment:
    """By its name or number."""
    for experiment in experiments():
        if name in (experiment.name, str(experiment.number)):
            return experiment
    known = ", ".join(experiment.name for experiment in experiments())
    raise ValueError(f"NAME must be one of {known}, or a number of `poise lab list`; got {name!r}")
