"""Tables and heat maps in plain text: widths in columns of a terminal, colour only where somebody sees it.

What they say is the caller's. East Asian characters take two columns.
"""

from __future__ import annotations

import os
import sys
import textwrap
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TextIO

from torch import Tensor

WIDTH, LABEL = 100, 12
SHADES, FROM = " ░▒▓█", (0.02, 0.2, 0.4, 0.7)  # each shade from that weight on
WIDE = 9  # so many tokens get wide columns, more get narrow ones and shorter numbers
HIDDEN = "·"  # what a token must not see


class Terminal:
    """Prints to a stream; with escape codes only if that is a terminal and the user has nothing against them."""

    def __init__(self, stream: TextIO | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self.stream = sys.stdout if stream is None else stream
        wanted = not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        self.colour = wanted and self.stream.isatty()

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text

    def print(self, text: str = "", code: str = "") -> None:
        print(self.paint(text, code) if code else text, file=self.stream)

    def step(self, title: str, *texts: str) -> None:
        """The heading of a step and its explanation."""
        self.print()
        self.print(title, "1")
        for text in texts:
            self.say(text, "2")
        self.print()

    def say(self, text: str, code: str = "") -> None:
        """Text, broken into lines and indented."""
        for line in wrap(text, WIDTH - 3):
            self.print("   " + line, code)

    def matrix(self, tokens: Sequence[str], values: Tensor, digits: int, corner: tuple[str, str], shaded: bool) -> None:
        """Rows look, columns are looked at: a number per pair and, if shaded, its shade. -inf is hidden.

        corner: what says so, for rows and for columns.
        """
        wide = len(tokens) <= WIDE
        rows = [[_number(x, digits if wide else 1, shaded and not wide) for x in row] for row in values.tolist()]
        width = 8 if wide else max(3, *(len(cell) for row in rows for cell in row))
        if LABEL + len(tokens) * (width + 1) > WIDTH:
            rows = [[_number(x, 0, shaded) for x in row] for row in values.tolist()]
            width = max(3, *(len(cell) for row in rows for cell in row))
        names = (" " + fit(word, 8, right=True) if wide else f" {j + 1:>{width}}" for j, word in enumerate(tokens))
        self.print(" " * LABEL + self.paint("  " + corner[1], "2"))
        self.print(self.paint(fit(corner[0], LABEL), "2") + "".join(names))
        for i, (row, cells) in enumerate(zip(values.tolist(), rows, strict=True)):
            line = label(tokens, i)
            for x, cell in zip(row, cells, strict=True):
                bar = shade(x) * (3 if wide else 1) if shaded and cell != HIDDEN else ""
                line += " " + self.paint(bar, "36") + cell.rjust(width - len(bar))
            self.print(line)

    def maps(self, tokens: Sequence[str], weights: Mapping[str, Tensor]) -> None:
        """Heat maps of shades only: side by side where they fit, else one below the other."""
        n, width = len(tokens), max(3 * len(tokens), 9)
        side_by_side = LABEL + len(weights) * (width + 2) <= WIDTH
        for group in [[*weights]] if side_by_side else [[name] for name in weights]:
            self.print(" " * LABEL + self.paint("  ".join(fit(" " + name, width) for name in group).rstrip(), "1"))
            numbered = fit("".join(f"{j + 1:>3}" for j in range(n)), width)
            self.print(" " * LABEL + "  ".join(numbered for _ in group).rstrip())
            for i in range(n):
                rows = ("".join(" " + 2 * shade(p) for p in weights[name][i].tolist()) for name in group)
                self.print(label(tokens, i) + self.paint("  ".join(fit(row, width) for row in rows).rstrip(), "36"))
            self.print()


def shade(weight: float) -> str:
    return SHADES[bisect_right(FROM, weight)]


def columns(text: str) -> list[int]:
    """How many columns of a terminal each character takes."""
    return [
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    ]


def fit(text: str, width: int, right: bool = False) -> str:
    """Cut or padded to so many columns."""
    sizes = columns(text)
    kept = bisect_right(list(accumulate(sizes)), width)
    parts = text[:kept], " " * (width - sum(sizes[:kept]))
    return "".join(reversed(parts) if right else parts)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most so many columns, broken at spaces; where a script has none, anywhere."""
    if sum(columns(text)) == len(text):
        return textwrap.wrap(text, width)
    lines = [""]
    for char in text:
        if sum(columns(lines[-1] + char)) > width and char not in "，。：；、）？”":
            lines.append("")
        lines[-1] += char
    return [line.strip() for line in lines]


def label(tokens: Sequence[str], row: int) -> str:
    return f"{row + 1:>3} " + fit(tokens[row], LABEL - 4)


def numbers(values: Tensor, shown: int) -> str:
    return "".join(f"{x:6.2f}" for x in values[:shown].tolist()) + (" …" if len(values) > shown else "")


def _number(x: float, digits: int, percent: bool) -> str:
    if x == float("-inf"):
        return HIDDEN
    return str(min(round(100 * x), 99)) if percent else f"{x:.{digits}f}"
