"""Runs experiments: what is stored already is kept, the rest is measured, stored and judged.

Verdicts go to stdout; progress goes to stderr, and only where somebody watches it: a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from poise.lab import plots
from poise.lab.evidence import Verdict
from poise.lab.experiment import Experiment, Level, Row, Rows, experiments
from poise.lab.results import Results, key
from poise.lab.texts import fill, speaker

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
    return f"{experiment.number:2}  {experiment.name:<12}{text}"


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
