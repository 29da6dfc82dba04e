"""What the lowering asks of a mask object on the grid of tiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from poise.lowering.grid import PARTIAL, TILE, Grid, Ints, Runs, Tiles, Words, pack

LANES = np.arange(TILE)
CHUNK = 1024  # tiles whose bools exist at once


class Leaf(ABC):
    """One mask object, ready for a grid.

    Bits beyond N or M are don't-care: whatever the formula gives there.
    """

    grid: Grid
    lines: tuple[int, int]  # (sequences, heads) it varies over; 1 = the same for all
    _runs: Runs | None = None

    @property
    def runs(self) -> Runs:
        """The three-valued map over this leaf's own lines x tile rows."""
        if self._runs is None:
            self._runs = self.make_runs()
        return self._runs

    @abstractmethod
    def make_runs(self) -> Runs:
        """Called once, by `runs`."""

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        """Per tile a number in [0, range), and the range: [K]. Equal key = equal bits, so that few tiles stand for all.

        Here: one key for all empty tiles, one for all full ones, and one for each other.
        """
        b, h = self.own(tiles)
        at = ((b * self.lines[1] + h) * self.grid.down + tiles.t) * self.grid.across + tiles.c
        value = self.runs.value[np.searchsorted(self.runs.at, at, "right") - 1]
        count = self.lines[0] * self.lines[1] * self.grid.down * self.grid.across
        return np.where(value == PARTIAL, at + 3, value), count + 3

    @abstractmethod
    def words(self, tiles: Tiles) -> Words:
        """The bits of each tile: [K, 64]."""

    def own(self, tiles: Tiles) -> tuple[Ints, Ints]:
        """The tiles' sequences and heads as indices into this leaf's lines: two of [K]."""
        b = tiles.b if self.lines[0] > 1 else np.zeros_like(tiles.b)
        return b, tiles.h if self.lines[1] > 1 else np.zeros_like(tiles.h)


def words_by_chunk(bits: Callable[[slice], NDArray[np.bool_]], count: int) -> Words:
    """Packs [K, 64 keys, 64 queries] bools a bounded number of tiles at a time."""
    words = np.empty((count, TILE), np.uint64)
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        words[part] = pack(bits(part))
    return words
