"""How far an inspection is, on standard error, where that is a terminal; by rich, or as plain percents without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from poise.inspection import run


@contextmanager
def shown() -> Iterator[run.Progress | None]:
    """Something to pass as `progress`; None where nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        try:
            yield _percents()
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("loading", total=1.0)
        yield lambda share, doing: bars.update(bar, completed=share, description=doing)


def _percents() -> Callable[[float, str], None]:
    return lambda share, doing: print(f"\r{100 * share:3.0f} % {doing}\x1b[K", end="", file=sys.stderr, flush=True)
