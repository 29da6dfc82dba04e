"""Attention on one sentence, step by step, and what the scale of the scores does to it: `make demo`.

Computes with poise and shows in plain text; it trains nothing, so which word looks at which means nothing here. The
sizes of the scores are real: queries and keys have unit variance per dimension, as at the start of a training.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import time
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import poise

SENTENCE = "El gato se sentó en la alfombra."
SEED, D_MODEL, D = 0, 16, 64
MOST_TOKENS, WIDTH, LABEL = 20, 100, 12
SHADES, FROM = " ░▒▓█", (0.02, 0.2, 0.4, 0.7)  # each shade from that weight on
COLOR = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Lesson(NamedTuple):
    """Every stage of attention on one sentence of n tokens."""

    tokens: list[str]
    x: Tensor  # [n, D_MODEL] embeddings
    q: Tensor  # [n, D]
    k: Tensor  # [n, D]
    v: Tensor  # [n, D]
    raw: Tensor  # [n, n] q kᵀ
    scaled: Tensor  # [n, n] q kᵀ / √D
    weights: Tensor  # [n, n] softmax of each row
    out: Tensor  # [n, D] weights v


def tokenize(sentence: str) -> list[str]:
    """Words and punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFC", sentence))


def project(tokens: list[str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings and their queries, keys and values: seeded, of unit variance; a repeated word repeats its own."""
    generator = torch.Generator().manual_seed(SEED)
    w = torch.randn(3, D_MODEL, D, generator=generator) / math.sqrt(D_MODEL)
    words = list(dict.fromkeys(tokens))
    table = torch.randn(len(words), D_MODEL, generator=generator)
    x = table[[words.index(token) for token in tokens]]
    q, k, v = x @ w
    return x, q, k, v


def teach(tokens: list[str]) -> Lesson:
    """Attention stage by stage; tests and the demo itself hold it against poise.attention."""
    x, q, k, v = project(tokens)
    raw = poise.scores(q, k, scale=1.0, stage="raw")
    weights = poise.scores(q, k, stage="prob")
    return Lesson(tokens, x, q, k, v, raw, raw / math.sqrt(D), weights, weights @ v)


def compare(lesson: Lesson) -> list[tuple[str, Tensor, poise.ScoreStats]]:
    """The same queries and keys under three scales: name, weights [n, n] and what poise.observe reports of each row."""
    effects = []
    for name, scale in (("unscaled", 1.0), ("1/√d", 1 / math.sqrt(D)), ("1/d", 1 / D)):
        _, stats = poise.observe(lesson.q, lesson.k, lesson.v, scale=scale)
        effects.append((name, poise.scores(lesson.q, lesson.k, scale=scale, stage="prob", lse=stats.lse), stats))
    return effects


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


def paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOR and text else text


def fit(text: str, width: int, right: bool = False) -> str:
    """Cut or padded to so many columns of a terminal; East Asian characters take two."""
    sizes = [2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text]
    kept = bisect_right(list(accumulate(sizes)), width)
    parts = text[:kept], " " * (width - sum(sizes[:kept]))
    return "".join(reversed(parts) if right else parts)


def step(title: str, text: str) -> None:
    """The heading of a step and its explanation."""
    print("\n" + paint(title, "1"))
    print(paint("".join(f"   {line}\n" for line in text.split("\n")), "2"))


def label(tokens: list[str], row: int) -> str:
    return f"{row + 1:>3} " + fit(tokens[row], LABEL - 4)


def numbers(values: Tensor, shown: int) -> str:
    return "".join(f"{x:6.2f}" for x in values[:shown].tolist()) + (" …" if len(values) > shown else "")


def matrix(tokens: list[str], values: Tensor, digits: int, shaded: bool = False) -> None:
    """Rows look, columns are looked at. More than nine tokens get narrow columns and numbers of two digits."""
    wide = len(tokens) <= 9
    names = (" " + fit(word, 8, right=True) if wide else f"{j + 1:>4}" for j, word in enumerate(tokens))
    print(" " * LABEL + paint("  looked at →", "2"))
    print(paint(fit("who looks ↓", LABEL), "2") + "".join(names))
    for i, row in enumerate(values.tolist()):
        cells = []
        for x in row:
            bar = (SHADES[bisect_right(FROM, x)] * (3 if wide else 1)) if shaded else ""
            number = f"{x:.{digits}f}" if wide else f"{min(round(100 * x), 99) if shaded else round(x)}"
            cells.append(" " + paint(bar, "36") + number.rjust((8 if wide else 3) - len(bar)))
        print(label(tokens, i) + "".join(cells))


def maps(tokens: list[str], weights: dict[str, Tensor]) -> None:
    """Heat maps of shades only: side by side where they fit, else one below the other."""
    n, width = len(tokens), max(3 * len(tokens), 9)
    for group in [[*weights]] if LABEL + len(weights) * (width + 2) <= WIDTH else [[name] for name in weights]:
        print(" " * LABEL + paint("  ".join(fit(" " + name, width) for name in group).rstrip(), "1"))
        print(" " * LABEL + "  ".join(fit("".join(f"{j + 1:>3}" for j in range(n)), width) for _ in group).rstrip())
        for i in range(n):
            rows = (
                "".join(" " + 2 * SHADES[bisect_right(FROM, p)] for p in weights[name][i].tolist()) for name in group
            )
            print(label(tokens, i) + paint("  ".join(fit(row, width) for row in rows).rstrip(), "36"))
        print()


def show_steps(lesson: Lesson) -> None:
    tokens, n, i = lesson.tokens, len(lesson.tokens), min(1, len(lesson.tokens) - 1)
    step(f"1  Embeddings   X [{n} × {D_MODEL}]", "Every token is a vector: random here, learned in a model.")
    for j in range(n):
        print(label(tokens, j) + numbers(lesson.x[j], 10))
    text = "A query asks, a key says what it answers to, a value is what is handed over."
    step(f"2  Queries, keys, values   Q = X·Wq, K = X·Wk, V = X·Wv   [{n} × {D}] each", text)
    print(" " * LABEL + paint(fit("  q", 28) + fit("  k", 28) + "  v", "2"))
    for j in range(n):
        print(label(tokens, j) + "  ".join(numbers(m[j], 4) for m in (lesson.q, lesson.k, lesson.v)))
    size, typical = float(lesson.raw.square().mean().sqrt()), math.sqrt(D)
    text = f"Each adds up d = {D} products of variance 1, so its variance is d, its typical size √d = {typical:.0f}"
    step("3  Scores   Q·Kᵀ", f"{text}\n(over all weights one might draw; in this sentence {size:.1f}).")
    matrix(tokens, lesson.raw, 1)
    step("4  Scaled scores   Q·Kᵀ / √d", f"The typical size is now 1 whatever d is; here {size / typical:.1f}.")
    matrix(tokens, lesson.scaled, 2)
    text = "Positive, and a row sums to 1: how this token divides its attention.\nShades: "
    text += ", ".join(f"{s} from {100 * p:.0f} %" for s, p in zip(SHADES[1:], FROM, strict=True))
    step("5  Weights   softmax of each row", text + ("." if n <= 9 else "; numbers in %, at most 99."))
    matrix(tokens, lesson.weights, 2, shaded=True)
    step(f"6  Weighted values   what “{tokens[i]}” takes away", "Every value times its weight: one row of the output.")
    for j in range(n):
        print(f"{lesson.weights[i, j]:7.2f} × {label(tokens, j)}{numbers(lesson.v[j], 8)}")
    print(paint(f"{'= out':>9} {label(tokens, i)}{numbers(lesson.out[i], 8)}", "1"))
    step("7  The same in one call   poise.attention(q, k, v)", "Without ever storing the matrix of scores.")
    ran = poise.explain(lesson.q, lesson.k, lesson.v)
    difference = (poise.attention(lesson.q, lesson.k, lesson.v) - lesson.out).abs().max()
    print(f"   largest difference from the steps above: {difference:.1e}")
    print(f"   ran on {ran.impl}{f' ({ran.isa})' if ran.isa else ''}: {ran.why}")


def show_scales(lesson: Lesson) -> None:
    n, effects = len(lesson.tokens), compare(lesson)
    step("8  Why √d?   unscaled, by 1/√d and by 1/d", "Rows look, columns are looked at, numbered as above.")
    maps(lesson.tokens, {name: weights for name, weights, _ in effects})
    print(paint("means over rows, from poise.observe(q, k, v, scale=…)", "2"))
    names = ("score std", "max prob", "entropy", "effective keys", "gradient gain", "least gain")
    limits = ("", "of 1", f"of {math.log(n):.2f}", f"of {n}", f"of {1 - 1 / n:.2f}", "of any row")
    for line, code in ((names, "1"), (limits, "2")):
        print(" " * 10 + paint("".join(f"{cell:>15}" for cell in line), code))
    for name, _, stats in effects:
        gain = stats.responsiveness
        rows = (stats.std, stats.max_prob, stats.entropy, stats.effective_keys, gain)
        print(fit(name, 10) + "".join(f"{row.mean():15.2f}" for row in rows) + f"{gain.min():15.4f}")
    lesson_learnt = f"""
   gradient gain = 1 − Σp², the trace of the softmax's Jacobian: gradient that reaches scores.
   unscaled  nearly one-hot: a row whose gain is near 0 gets almost no gradient, right or wrong.
   1/√d      selective, and gradient passes in every row.
   1/d       nearly the average of all values; q and k get 1/{D} of what reaches scores, not 1/{math.sqrt(D):.0f}."""
    print(paint(lesson_learnt if n > 1 else "\n   A single token has all of the weight at any scale.", "2"))


def show_speed() -> None:
    b, h, n, d = shape = (1, 12, 2048, 64)
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}"
    text = "A quick figure: medians of interleaved calls over a few seconds. `make bench` is the real one."
    step(f"9  Speed   {shape}, {threads}, against torch {torch.__version__}", text)
    names = f"{'':10}{'torch SDPA':>20}{'poise.attention':>20}{'ratio':>9}{'poise.observe':>20}{'statistics':>14}"
    print(paint(names, "1"))
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
            print(f"{str(dtype)[6:]:10}{sdpa:>20}{plain:>20}{ratio:>8.1f}×{observed:>20}{100 * cost:>+12.0f} %")


def main() -> None:
    # A pipe under LC_ALL=C would be ASCII, and an argument read there has its bytes escaped.
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(description="Attention on one sentence, step by step.")
    parser.add_argument("sentence", nargs="?", default=SENTENCE)
    parser.add_argument("--no-timing", action="store_true", help="leave out the measurement of speed")
    options = parser.parse_args()
    sentence = options.sentence.encode(errors="surrogateescape").decode(errors="replace")
    tokens = tokenize(sentence)
    if not tokens:
        parser.error(f"sentence must contain a word; got {sentence!r}")
    print(paint("poise: exact attention that shows its scores", "1") + f"\n\n   “{sentence}”")
    if len(tokens) > MOST_TOKENS:
        print(f"   {len(tokens)} tokens; only the first {MOST_TOKENS} are used, more would not fit a terminal")
    lesson = teach(tokens[:MOST_TOKENS])
    show_steps(lesson)
    show_scales(lesson)
    if not options.no_timing:
        show_speed()


if __name__ == "__main__":
    main()
