"""Runs experiments: what is stored already is kept, the rest is measured, stored and judged.

Measurements that train small models run side by side, a process for each core and a thread for each process.
Verdicts go to stdout; progress goes to stderr, and only where somebody watches it: a terminal.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context

import torch

from poise.lab import plots
from poise.lab.evidence import Verdict
from poise.lab.experiment import Cell, Experiment, Level, Row, Rows, Values, experiments
from poise.lab.results import Results, key
from poise.lab.texts import fill, speaker

Tick = Callable[[str], None]  # told of each measurement, before it, or after it where several run at once
Task = tuple[Cell, int]
Measure = Callable[[Cell, int], Values]


def run(experiment: Experiment, level: Level, seed: int, results: Results, tick: Tick = lambda what: None) -> Verdict:
    """All measurements of a level; those that are stored are not made again."""
    finished, tasks = results.finished(experiment), experiment.tasks(level, seed)
    missing = [task for task in tasks if key(*task) not in finished]
    for cell, own in tasks:
        if key(cell, own) in finished:
            tick(_named(cell, own))
    for row in (_side_by_side if experiment.side_by_side else _in_turn)(experiment.measure, missing, tick):
        results.store(experiment, row)
        finished[key(row.cell, row.seed)] = row
    rows = Rows(finished[key(*task)] for task in tasks)
    verdict = experiment.judge(rows)
    results.write(experiment, level, seed, rows, verdict)
    return verdict


def _named(cell: Cell, seed: int) -> str:
    return " ".join(f"{name}={value}" for name, value in cell.items()) + f" seed={seed}"


def _in_turn(measure: Measure, tasks: Sequence[Task], tick: Tick) -> Iterator[Row]:
    for cell, seed in tasks:
        tick(_named(cell, seed))
        yield _measured((measure, cell, seed))


def _side_by_side(measure: Measure, tasks: Sequence[Task], tick: Tick) -> Iterator[Row]:
    """In the order they end. Processes are spawned: threads of a forked torch may hang."""
    workers = min(len(tasks), torch.get_num_threads())
    if workers < 2:
        yield from _in_turn(measure, tasks, tick)
        return
    with get_context("spawn").Pool(workers, _alone) as pool:  # its processes end with it, also when interrupted
        for row in pool.imap_unordered(_measured, [(measure, cell, seed) for cell, seed in tasks]):
            tick(_named(row.cell, row.seed))
            yield row


def _alone() -> None:
    """What a process of the pool begins with: one thread, and Ctrl-C is its parent's affair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _measured(task: tuple[Measure, Cell, int]) -> Row:
    measure, cell, seed = task
    started = time.perf_counter()
    values = measure(cell, seed)
    return Row(cell, seed, values, time.perf_counter() - started)


def run_all(chosen: Sequence[Experiment], level: Level, seed: int, results: Results, language: str) -> None:
    """One after the other; a line for each, and its plot beside its record. One that cannot run here says why."""
    with progress(chosen, level, seed) as tick_of:
        for experiment in chosen:
            say = speaker(experiment.name, language)
            missing = experiment.needs()
            if missing is not None:
                if len(chosen) == 1:
                    raise FileNotFoundError(missing)
                print(_line(experiment, say("run.skipped", reason=missing)), flush=True)
                continue
            try:
                verdict = run(experiment, level, seed, results, tick_of(experiment))
            except KeyboardInterrupt:
                print(say("run.stored", out=results.out), file=sys.stderr)
                raise
            record = results.record(experiment, level)
            assert record is not None
            picture = results.out / level / f"{experiment.name}.svg"
            picture.write_text(plots.svg(experiment, record["rows"], language), encoding="utf-8")
            finding = fill(say, verdict.finding, verdict.values)
            print(_line(experiment, f"{say(f'kind.{verdict.kind}')}: {finding}"), flush=True)


def listing(results: Results, language: str) -> Iterator[str]:
    """A line per experiment: its claim, and its verdict if it has been run."""
    for experiment in experiments():
        say, record = speaker(experiment.name, language), results.record(experiment)
        verdict = (
            record and f"{say('kind.' + experiment.judge(record['rows']).kind)} ({say('name.' + record['level'])})"
        )
        yield _line(experiment, f"{say('claim')} [{verdict or say('list.unrun')}]")


def _line(experiment: Experiment, text: str) -> str:
    return f"{experiment.number:2}  {experiment.name:<15}{text}"


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
    # Lines go around the bar only where both are on the terminal: a redirected stdout must stay redirected.
    both = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=both) as bar:
        whole = bar.add_task("poise lab", total=sum(len(each.tasks(level, seed)) for each in chosen))

        def of(experiment: Experiment) -> Tick:
            def tick(what: str) -> None:
                bar.update(whole, description=f"{experiment.name}: {what}")
                bar.advance(whole)

            return tick

        yield of
