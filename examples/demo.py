"""Attention on one sentence, step by step; how fast; and what the heads of a trained model do: `make demo`.

The walk is that of `poise walk`, without a model; the inspection that of `poise inspect`, over the sentence in five
languages and a long text. What is added here is a quick comparison of speed with torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import poise
from poise.inspection import progress
from poise.report.lesson import SEED, seeded
from poise.report.terminal import Terminal
from poise.report.texts import LANGUAGES, speaker
from poise.report.walk import walk

SENTENCE = "El gato se sentó en la alfombra."


def interleaved(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Seconds per round and call: every round runs each call once, so that a busy machine slows all of them alike."""
    for call in calls:
        call()
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 5 or time.perf_counter() < end:
        clock = [time.perf_counter()]
        for call in calls:
            call()
            clock.append(time.perf_counter())
        rounds.append([after - before for before, after in pairwise(clock)])
    return rounds


def show_speed(terminal: Terminal) -> None:
    b, h, n, d = shape = (1, 12, 2048, 64)
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    text = "A quick figure: medians of interleaved calls over a few seconds. `make bench` is the real one."
    terminal.step(f"Speed   {shape}, {threads}, against torch {torch.__version__}", text)
    names = f"{'':10}{'torch SDPA':>20}{'poise.attention':>20}{'ratio':>9}{'poise.observe':>20}{'statistics':>14}"
    terminal.print(names, "1")
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(b, h, n, d, generator=generator).to(dtype) for _ in range(3))
            calls = [partial(f, q, k, v) for f in (scaled_dot_product_attention, poise.attention, poise.observe)]
            rounds = interleaved(calls, seconds=2.0)
            sdpa, plain, observed = (
                f"{1e3 * t:.1f} ms {4e-9 * b * h * n * n * d / t:4.0f} GF/s"
                for t in map(statistics.median, zip(*rounds, strict=True))
            )
            # Ratios within a round first: neighbours in time saw the same machine.
            ratio = statistics.median(s / p for s, p, _ in rounds)
            cost = statistics.median(o / p - 1 for _, p, o in rounds)
            terminal.print(
                f"{str(dtype)[6:]:10}{sdpa:>20}{plain:>20}{ratio:>8.1f}×{observed:>20}{100 * cost:>+12.0f} %"
            )


def long_text() -> str:
    """Some 4,600 tokens of prose that every Python brings along."""
    from pydoc_data.topics import topics

    return topics["specialnames"][:20_000]


def show_inspection(terminal: Terminal, report: Path) -> None:
    terminal.step("What the heads of SmolLM2-135M do", "The sentence in five languages, and 20,000 letters of prose.")
    sentences = [speaker(language)("sentence") for language in LANGUAGES]
    with progress.shown() as told:
        found = poise.inspect("smollm2", [*sentences, long_text()], progress=told)
    report.parent.mkdir(parents=True, exist_ok=True)
    found.html(report)
    terminal.print(str(found))
    terminal.print(f"\nThe attention of every head, as a page: {report.resolve()}", "1")


def main() -> None:
    # A pipe under LC_ALL=C would be ASCII, and an argument read there has its bytes escaped.
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(description="Attention on one sentence, step by step.")
    parser.add_argument("sentence", nargs="?", default=SENTENCE)
    parser.add_argument("--no-timing", action="store_true", help="leave out the measurement of speed")
    parser.add_argument("--report", type=Path, metavar="OUT", help="inspect SmolLM2 as well, and write its page")
    options = parser.parse_args()
    sentence = options.sentence.encode(errors="surrogateescape").decode(errors="replace")
    try:
        lesson = seeded(sentence)
    except ValueError as error:
        parser.error(str(error))
    terminal = Terminal()
    walk(lesson, sentence, speaker("en"), terminal)
    if not options.no_timing:
        show_speed(terminal)
    if options.report is not None:
        show_inspection(terminal, options.report)


if __name__ == "__main__":
    main()
