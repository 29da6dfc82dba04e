"""Masks that follow the diagonal or a range of keys, on the grid: window, lengths, intervals, dilated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from poise.lowering.grid import (
    ONES,
    PARTIAL,
    TILE,
    Grid,
    Ints,
    Runs,
    Tiles,
    Words,
    ascending,
    below,
    clip,
    from_intervals,
    from_tiles,
    take_rows,
)
from poise.lowering.intervals import Interval, numbers
from poise.lowering.leaf import LANES, Leaf, words_by_chunk
from poise.mask import UNBOUNDED, Dilated, Lengths, Window


class WindowLeaf(Leaf):
    def __init__(self, mask: Window, grid: Grid) -> None:
        self.left, self.right, self.grid = mask.left, mask.right, grid
        self.lines = (len(grid.offsets), 1)

    def make_runs(self) -> Runs:
        first, last = (x.ravel() for x in self.grid.bands())
        bounds = (first - self.left, last - self.left, first + self.right + 1, last + self.right + 1)
        return from_intervals([clip(x, 0, self.grid.keys) for x in bounds], self.grid)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        # Bits depend on the distance alone, and no longer on that where a tile lies wholly on one side of each edge.
        low = (self.right if self.left >= UNBOUNDED else -self.left) - TILE
        high = (-self.left if self.right >= UNBOUNDED else self.right) + TILE
        high = max(low, high)
        return clip(self._distance(tiles), low, high) - low, high - low + 1

    def words(self, tiles: Tiles) -> Words:
        distance = self._distance(tiles)[:, None] + LANES  # key - first query, [K, 64]
        return below(distance + self.left + 1) & ~below(distance - self.right)

    def _distance(self, tiles: Tiles) -> Ints:
        return tiles.c * TILE - (tiles.t * TILE + self.grid.offsets[self.own(tiles)[0]])


class LengthsLeaf(Leaf):
    def __init__(self, mask: Lengths, grid: Grid) -> None:
        start, end = np.broadcast_arrays(numbers(mask.start), numbers(mask.end))  # [B|1]
        self.start, self.end = clip(start, 0, grid.keys), clip(end, 0, grid.keys)
        self.lines, self.grid = (len(start), 1), grid

    def make_runs(self) -> Runs:
        grid, empty = self.grid, self.start >= self.end
        lo, hi = np.where(empty, grid.keys, self.start), np.where(empty, 0, self.end)
        return take_rows(from_intervals([lo, lo, hi, hi], grid), np.repeat(np.arange(len(lo)), grid.down), grid.across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        start, end = self._within(tiles)
        return clip(start, 0, TILE) * (TILE + 1) + clip(end, 0, TILE), (TILE + 1) ** 2

    def words(self, tiles: Tiles) -> Words:
        start, end = self._within(tiles)
        return np.where((start[:, None] <= LANES) & (end[:, None] > LANES), ONES, np.uint64(0))

    def _within(self, tiles: Tiles) -> tuple[Ints, Ints]:
        b = self.own(tiles)[0]
        return self.start[b] - tiles.c * TILE, self.end[b] - tiles.c * TILE


class IntervalLeaf(Leaf):
    """One interval of keys per row, without holes between the rows of a tile: packed documents."""

    def __init__(self, interval: Interval, grid: Grid) -> None:
        lo, hi = (np.broadcast_to(x, (x.shape[0], grid.rows)) for x in interval)
        pad = ((0, 0), (0, grid.down * TILE - grid.rows))
        self.lo, self.hi = (np.pad(x, pad, mode="edge").reshape(len(lo), grid.down, TILE) for x in (lo, hi))
        self.lines, self.grid = (len(lo), 1), grid

    def make_runs(self) -> Runs:
        empty = self.lo >= self.hi
        lo, hi = np.where(empty, self.grid.keys, self.lo), np.where(empty, 0, self.hi)
        return from_intervals([x.ravel() for x in (lo.min(2), lo.max(2), hi.min(2), hi.max(2))], self.grid)

    def words(self, tiles: Tiles) -> Words:
        b, _ = self.own(tiles)
        keys = LANES.astype(np.uint8)[:, None]

        def bits(part: slice) -> NDArray[np.bool_]:
            edge = tiles.c[part, None] * TILE
            # Bytes compare eight times as fast.
            lo, hi = (clip(x[b[part], tiles.t[part]] - edge, 0, TILE).astype(np.uint8) for x in (self.lo, self.hi))
            return (lo[:, None] <= keys) & (hi[:, None] > keys)

        return words_by_chunk(bits, len(tiles.t))


class DilatedLeaf(Leaf):
    def __init__(self, mask: Dilated, grid: Grid) -> None:
        self.reach, self.step, self.grid = mask.w * mask.d, mask.d, grid
        self.lines = (len(grid.offsets), 1)

    def make_runs(self) -> Runs:
        grid, across = self.grid, self.grid.across
        first, last = (x.ravel() for x in grid.bands())
        if self.step < TILE:  # every tile of the band holds some pair
            bounds = (first - self.reach, last + self.reach + 1)
            lo, hi = (clip(x, 0, grid.keys) for x in bounds)
            nobody = np.full_like(lo, grid.keys), np.zeros_like(lo)
            return from_intervals([lo, *nobody, hi], grid)
        # Diagonals are further apart than a tile: each touches one or two key tiles of a row.
        row = np.arange(len(first))[:, None]
        reach = min(self.reach, (grid.rows + grid.keys + int(np.abs(grid.offsets).max())) // self.step * self.step)
        steps = np.arange(-reach, reach + 1, self.step)
        ends = first[:, None] + steps, last[:, None] + steps  # [R, 2w + 1]
        seen = (ends[1] >= 0) & (ends[0] < grid.keys)
        tile = np.concatenate([(row * across + clip(x, 0, grid.keys - 1) // TILE)[seen] for x in ends])
        at = ascending(tile)
        return from_tiles(at, np.full(len(at), PARTIAL), len(first), across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        limit = self.grid.rows + self.grid.keys + int(np.abs(self.grid.offsets).max()) + TILE
        low = -min(self.reach + TILE, limit)
        return clip(self._distance(tiles), low, -low) - low, 1 - 2 * low

    def words(self, tiles: Tiles) -> Words:
        distance = self._distance(tiles)

        def bits(part: slice) -> NDArray[np.bool_]:
            each = distance[part, None] + TILE - 1 - np.arange(2 * TILE)  # falling, [k, 128]
            seen = (np.abs(each) <= self.reach) & (each % self.step == 0)
            # Key c and query r are distance + c - r apart: query r of key c reads entry 63 - c + r.
            return np.lib.stride_tricks.sliding_window_view(seen, TILE, axis=1)[:, TILE - 1 :: -1]

        return words_by_chunk(bits, len(tiles.t))

    def _distance(self, tiles: Tiles) -> Ints:
        return tiles.c * TILE - (tiles.t * TILE + self.grid.offsets[self.own(tiles)[0]])
