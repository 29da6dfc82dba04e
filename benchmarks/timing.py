"""Timing that compares like with like: contestants take turns in one process, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    contestants: Mapping[str, Callable[[], object]], seconds: float = 2.0, least: int = 7, most: int = 400
) -> dict[str, float]:
    """Median seconds per call. Every round runs each contestant once, in turn, so that all see the same machine."""
    for call in contestants.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < least or (time.perf_counter() < end and rounds < most):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(times) for name, times in took.items()}


def per_call(contestants: Mapping[str, Callable[[], object]], calls: int = 400, rounds: int = 41) -> dict[str, float]:
    """The same for calls too short for a clock: a round times a batch of calls."""

    def batch(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                call()

        return run

    batches = {name: batch(call) for name, call in contestants.items()}
    return {name: t / calls for name, t in interleaved(batches, 0.0, rounds, rounds).items()}
