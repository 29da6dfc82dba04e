"""Runs experiments: what is stored already is kept, the rest is measured, stored and judged.

Progress goes to stderr, and only where somebody watches it: a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from poise.lab.evidence import Verdict
from poise.lab.experiment import Experiment, Level, Row, Rows
from poise.lab.results import Results, key

Tick = Callable[[str], None]  # told before each measurement what comes


def run(experiment: Experiment, level: Level, seed: int, results: Results, tick: Tick = lambda what: None) -> Verdict:
    """All measurements of a level; those that are stored are not made again."""
    finished = results.finished(experiment)
    rows = []
    for cell, own in experiment.tasks(level, seed):
        tick(" ".join(f"{name}={value}" for name, value in cell.items()) + f" seed={own}")
        row = finished.get(key(cell, own))
        if row is None:
            started = time.perf_counter()
            values = experiment.measure(cell, own)
            row = Row(cell, own, values, time.perf_counter() - started)
            results.store(experiment, row)
        rows.append(row)
    verdict = experiment.judge(Rows(rows))
    results.write(experiment, level, seed, Rows(rows), verdict)
    return verdict


@contextmanager
def progress(chosen: Sequence[Experiment], level: Level, seed: int) -> Iterator[Callable[[Experiment], Tick]]:
    """A bar over all measurements on a terminal; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda experiment: lambda what: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        raise ImportError("progress is shown with rich: pip install 'poise[lab]', or redirect stderr") from None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        whole = bar.add_task("poise lab", total=sum(len(each.tasks(level, seed)) for each in chosen))

        def of(experiment: Experiment) -> Tick:
            def tick(what: str) -> None:
                bar.update(whole, description=f"{experiment.name}: {what}")
                bar.advance(whole)

            return tick

        yield of
