"""The grid of 64 x 64 tiles, and three-valued maps over it stored as runs.

A map says of every tile whether the mask leaves it EMPTY, FULL, or PARTIAL (maybe anything). It is piecewise constant
along the tile rows, so only the places where its value changes are stored: masks cost memory by their structure, not
by the number of tiles, and `&`, `|`, `~` become minimum, maximum and 2 - value over merged breakpoints.

Nothing here knows mask objects (see leaves.py) or bit patterns of whole expressions (see tilemap.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]  # one word per key of a tile, one bit per query

TILE = 64
EMPTY, PARTIAL, FULL = 0, 1, 2
ONES = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes and query offsets of one call."""

    rows: int  # N
    keys: int  # M
    offsets: Ints  # [B], or [1] when all sequences share one

    @property
    def down(self) -> int:
        """Tile rows of one head."""
        return -(-self.rows // TILE)

    @property
    def across(self) -> int:
        """Key tiles of one tile row."""
        return -(-self.keys // TILE)

    def positions(self) -> Ints:
        """i' of every row: [B|1, N]."""
        return self.offsets[:, None] + np.arange(self.rows)

    def bands(self) -> tuple[Ints, Ints]:
        """i' of the first and of the last row of every tile row: two of [B|1, T]."""
        first = np.arange(self.down) * TILE
        last = np.minimum(first + TILE, self.rows) - 1
        return self.offsets[:, None] + first, self.offsets[:, None] + last


class Tiles(NamedTuple):
    """Some tiles, by sequence, head, tile row and key tile: four of [K]."""

    b: Ints
    h: Ints
    t: Ints
    c: Ints


class Runs(NamedTuple):
    """A three-valued map: `value[e]` holds from linear tile index `at[e]` (row * across + key tile) up to `at[e + 1]`.

    Every tile row starts a run of its own, so that rows can be copied and runs never cross from one to the next.
    """

    at: Ints  # [E], ascending
    value: NDArray[np.uint8]  # [E]


def settle(at: Ints, value: NDArray[Any], rows: int, across: int) -> Runs:
    """Makes runs of breakpoints in ascending order: of equal ones the last counts, and those past the end drop out."""
    last = np.empty(at.shape, bool)
    last[-1:] = True
    np.not_equal(at[1:], at[:-1], out=last[:-1])
    last &= at < rows * across
    at, value = at[last], value[last].astype(np.uint8, copy=False)
    change = np.empty(at.shape, bool)
    change[:1] = True
    np.not_equal(value[1:], value[:-1], out=change[1:])
    change |= at % across == 0
    return Runs(at[change], value[change])


def from_intervals(extremes: Sequence[Ints], grid: Grid) -> Runs:
    """Rows see keys [lo, hi), within [0, M]; given are min lo, max lo, min hi, max hi over each tile row: four of [R].

    The union over a tile row's rows must have no holes. An empty row counts as lo = M, hi = 0.
    """
    min_lo, max_lo, min_hi, max_hi = extremes
    across = grid.across
    touched = min_lo // TILE
    end = np.maximum(-(-max_hi // TILE), touched)
    full = -(-max_lo // TILE)
    full_end = np.where(min_hi >= grid.keys, across, min_hi // TILE)
    none = full_end <= full
    full, full_end = np.where(none, end, full), np.where(none, end, full_end)
    rows = len(min_lo)
    at = np.stack([np.zeros_like(full), touched, full, full_end, end], axis=1)  # [R, 5]
    at += np.arange(rows)[:, None] * across
    value = np.tile(np.array([EMPTY, PARTIAL, FULL, PARTIAL, EMPTY], np.uint8), rows)
    return settle(at.ravel(), value, rows, across)


def from_cells(value: NDArray[Any], starts: Ints, across: int) -> Runs:
    """A dense table [R, U] whose column u covers the key tiles from starts[u] on (starts[0] = 0)."""
    change = np.ones(value.shape, bool)
    np.not_equal(value[:, 1:], value[:, :-1], out=change[:, 1:])
    row, unit = np.nonzero(change)
    return Runs(row * across + starts[unit], value[row, unit].astype(np.uint8, copy=False))


def from_tiles(at: Ints, value: NDArray[Any], rows: int, across: int) -> Runs:
    """EMPTY but for the tiles listed by ascending linear index."""
    start = np.arange(rows) * across
    everything = np.concatenate([start, at + 1, at])
    values = np.concatenate([np.zeros(rows + len(at), np.uint8), value.astype(np.uint8)])
    # Stable, so that a listed tile overrides both its row's start and the end of its left neighbour.
    order = np.argsort(everything, kind="stable")
    return settle(everything[order], values[order], rows, across)


def take_rows(runs: Runs, source: Ints, across: int) -> Runs:
    """Row r of the result is row source[r] of `runs`."""
    rows = int(runs.at[-1]) // across + 1
    first = np.searchsorted(runs.at, np.arange(rows + 1) * across)
    count = np.diff(first)[source]
    chosen = spans(first[source], count)
    shift = (np.arange(len(source)) - source) * across
    return Runs(runs.at[chosen] + np.repeat(shift, count), runs.value[chosen])


def combine(maps: list[Runs], join: np.ufunc, rows: int, across: int) -> Runs:
    """minimum = and, maximum = or, of maps over the same rows."""
    at = ascending(np.concatenate([m.at for m in maps]))
    value = join.reduce([m.value[np.searchsorted(m.at, at, "right") - 1] for m in maps])
    return settle(at, value, rows, across)


def invert(runs: Runs) -> Runs:
    return Runs(runs.at, FULL - runs.value)


def lengths(runs: Runs, rows: int, across: int) -> Ints:
    """Tiles per run."""
    return np.diff(runs.at, append=rows * across)


def ascending(values: Ints) -> Ints:
    """The distinct values in order. Faster than np.unique, above all on a few sorted pieces laid end to end."""
    values = np.sort(values, kind="stable")
    new = np.ones(values.shape, bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return values[new]


def group(code: Ints, limit: int) -> tuple[Ints, Ints]:
    """One index for each distinct code in [0, limit), and for every entry which of those it belongs to."""
    if limit > 4 * len(code) + 65536:
        _, chosen, which = np.unique(code, return_index=True, return_inverse=True)
        return chosen, which
    place = np.full(limit, -1)
    place[code] = np.arange(len(code))
    occurs = place >= 0
    return place[occurs], (np.cumsum(occurs) - 1)[code]


def clip(values: Ints, low: int, high: int) -> Ints:
    """np.clip without its overhead."""
    return np.minimum(np.maximum(values, low), high)


def spans(start: Ints, count: Ints) -> Ints:
    """start[0], start[0] + 1, ... (count[0] of them), start[1], ..."""
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(int(count.sum()))


def below(limit: Ints) -> Words:
    """A word with the bits [0, limit) set; any limit."""
    bits = clip(limit, 0, 63).astype(np.uint64)
    return np.where(limit >= TILE, ONES, (np.uint64(1) << bits) - np.uint64(1))


def pack(bits: NDArray[np.bool_]) -> Words:
    """The last axis, 64 bools, as one word."""
    return np.ascontiguousarray(np.packbits(bits, axis=-1, bitorder="little")).view("<u8")[..., 0]
