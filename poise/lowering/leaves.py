"""Each kind of mask on the grid of tiles: its three-valued map, and the exact bits of any tile.

A leaf answers `runs()` for all its tile rows, and for given tiles `key()` (equal key = equal bits, so that a few
representatives stand for all tiles) and `words()`. Bits beyond N or M are don't-care: whatever the formula gives there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from poise.lowering.grid import (
    EMPTY,
    FULL,
    ONES,
    PARTIAL,
    TILE,
    Grid,
    Ints,
    Runs,
    Tiles,
    Words,
    below,
    from_cells,
    from_intervals,
    from_tiles,
    pack,
    spans,
    take_rows,
)
from poise.lowering.intervals import Interval, as_intervals, numbers
from poise.mask import UNBOUNDED, Blocks, Dilated, Documents, GlobalTokens, Keep, Lengths, Mask, Window

LANES = np.arange(TILE)
CHUNK = 2048  # tiles whose 4096 bools exist at once


class Leaf(ABC):
    """One mask object, ready for a grid. `lines` = (sequences, heads) it varies over; 1 = the same for all."""

    lines: tuple[int, int]

    @abstractmethod
    def runs(self) -> Runs:
        """The map over this leaf's own lines x tile rows."""

    @abstractmethod
    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        """Per tile a number in [0, range), and the range: [K]."""

    @abstractmethod
    def words(self, tiles: Tiles) -> Words:
        """The bits of each tile: [K, 64]."""

    def own(self, tiles: Tiles) -> tuple[Ints | int, Ints | int]:
        """The tiles' indices into this leaf's lines."""
        return (tiles.b if self.lines[0] > 1 else 0), (tiles.h if self.lines[1] > 1 else 0)


def leaf(mask: Mask, grid: Grid) -> Leaf:
    """The leaf of a mask that is no `&`, `|` or `~`."""
    if isinstance(mask, Window):
        return WindowLeaf(mask, grid)
    if isinstance(mask, Lengths):
        return LengthsLeaf(mask, grid)
    if isinstance(mask, Documents):
        interval = as_intervals(mask, grid)
        return DocumentsLeaf(mask, grid) if interval is None else IntervalLeaf(interval, grid)
    if isinstance(mask, GlobalTokens):
        return GlobalLeaf(mask, grid)
    if isinstance(mask, Dilated):
        return DilatedLeaf(mask, grid)
    if isinstance(mask, Blocks):
        return BlocksLeaf(mask, grid)
    if isinstance(mask, Keep):
        return KeepLeaf(mask, grid)
    raise TypeError(f"mask: don't know how to lower {type(mask).__name__}")


class WindowLeaf(Leaf):
    def __init__(self, mask: Window, grid: Grid) -> None:
        self.left, self.right, self.grid = mask.left, mask.right, grid
        self.lines = (len(grid.offsets), 1)

    def runs(self) -> Runs:
        first, last = (x.ravel() for x in self.grid.bands())
        bounds = (first - self.left, last - self.left, first + self.right + 1, last + self.right + 1)
        return from_intervals(*(np.clip(x, 0, self.grid.keys) for x in bounds), self.grid)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        # Bits depend on the distance alone, and no longer on that where a tile lies wholly on one side of each edge.
        low = (self.right if self.left >= UNBOUNDED else -self.left) - TILE
        high = (-self.left if self.right >= UNBOUNDED else self.right) + TILE
        high = max(low, high)
        return np.clip(self._distance(tiles), low, high) - low, high - low + 1

    def words(self, tiles: Tiles) -> Words:
        distance = self._distance(tiles)[:, None] + LANES  # key - first query, [K, 64]
        return below(distance + self.left + 1) & ~below(distance - self.right)

    def _distance(self, tiles: Tiles) -> Ints:
        return tiles.c * TILE - (tiles.t * TILE + self.grid.offsets[self.own(tiles)[0]])


class LengthsLeaf(Leaf):
    def __init__(self, mask: Lengths, grid: Grid) -> None:
        start, end = np.broadcast_arrays(numbers(mask.start), numbers(mask.end))  # [B|1]
        self.start, self.end = np.clip(start, 0, grid.keys), np.clip(end, 0, grid.keys)
        self.lines, self.grid = (len(start), 1), grid

    def runs(self) -> Runs:
        grid, empty = self.grid, self.start >= self.end
        lo, hi = np.where(empty, grid.keys, self.start), np.where(empty, 0, self.end)
        return take_rows(from_intervals(lo, lo, hi, hi, grid), np.repeat(np.arange(len(lo)), grid.down), grid.across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        start, end = self._within(tiles)
        return np.clip(start, 0, TILE) * (TILE + 1) + np.clip(end, 0, TILE), (TILE + 1) ** 2

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

    def runs(self) -> Runs:
        empty = self.lo >= self.hi
        lo, hi = np.where(empty, self.grid.keys, self.lo), np.where(empty, 0, self.hi)
        return from_intervals(*(x.ravel() for x in (lo.min(2), lo.max(2), hi.min(2), hi.max(2))), self.grid)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        return _one_per_tile(self, tiles, self.grid)

    def words(self, tiles: Tiles) -> Words:
        b = np.broadcast_to(self.own(tiles)[0], tiles.t.shape)

        def bits(part: slice) -> NDArray[np.bool_]:
            keys = (tiles.c[part, None] * TILE + LANES)[:, :, None]
            lo, hi = self.lo[b[part], tiles.t[part]][:, None], self.hi[b[part], tiles.t[part]][:, None]
            return (keys >= lo) & (keys < hi)

        return _words_by_chunk(bits, len(tiles.t))


class DocumentsLeaf(Leaf):
    """Documents in any order."""

    def __init__(self, mask: Documents, grid: Grid) -> None:
        self.grid = grid
        names, ids = np.unique(numbers(mask.ids), return_inverse=True)
        ids = ids.reshape(mask.ids.shape).astype(np.int32)
        self.documents, length = len(names), ids.shape[1]
        place = grid.positions()
        batch = max(len(ids), len(place))
        mine = np.take_along_axis(
            np.broadcast_to(ids, (batch, length)),
            np.broadcast_to(np.clip(place, 0, length - 1), (batch, grid.rows)),
            axis=1,
        )
        mine = np.where((place >= 0) & (place < length), mine, -1)
        self.mine = _tiled(mine, grid.down)  # [B|1, T, 64]
        self.theirs = _tiled(ids[:, : grid.keys], grid.across)  # [B|1, C, 64]
        self.lines = (batch, 1)

    def runs(self) -> Runs:
        down, across = self.grid.down, self.grid.across
        batch = self.lines[0]
        theirs = np.broadcast_to(self.theirs, (batch, across, TILE))
        row_group, row_tile = self._occurrences(self.mine)
        key_group, key_tile = self._occurrences(theirs)
        first = np.searchsorted(key_group, row_group, "left")
        count = np.searchsorted(key_group, row_group, "right") - first
        row = row_group // self.documents * down + row_tile
        shared = np.repeat(row * across, count) + key_tile[spans(first, count)]
        at = np.unique(shared)
        row, key = at // across, at % across
        uniform_row = (self.mine == self.mine[:, :, :1]).all(2).ravel()[row]
        uniform_key = (theirs == theirs[:, :, :1]).all(2)[row // down, key]
        return from_tiles(at, np.where(uniform_row & uniform_key, FULL, PARTIAL), batch * down, across)

    def _occurrences(self, ids: NDArray[np.int32]) -> tuple[Ints, Ints]:
        """Every (sequence x document, tile) that occurs, sorted: two arrays."""
        batch, tiles, _ = ids.shape
        group = np.arange(batch)[:, None, None] * self.documents + ids
        code = np.unique((group * tiles + np.arange(tiles)[None, :, None])[ids >= 0])
        return code // tiles, code % tiles

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        return _one_per_tile(self, tiles, self.grid)

    def words(self, tiles: Tiles) -> Words:
        b = np.broadcast_to(self.own(tiles)[0], tiles.t.shape)
        b_key = b if len(self.theirs) > 1 else np.zeros_like(b)

        def bits(part: slice) -> NDArray[np.bool_]:
            theirs = self.theirs[b_key[part], tiles.c[part]]
            return theirs[:, :, None] == self.mine[b[part], tiles.t[part]][:, None]

        return _words_by_chunk(bits, len(tiles.t))


class GlobalLeaf(Leaf):
    def __init__(self, mask: GlobalTokens, grid: Grid) -> None:
        self.grid = grid
        idx = numbers(mask.idx)  # [B|1, K]
        batch = max(len(idx), len(grid.offsets))
        self.lines = (batch, 1)
        offsets = np.broadcast_to(grid.offsets[:, None], (batch, 1))
        idx = np.broadcast_to(idx, (batch, idx.shape[1]))
        self.row_words = _members(np.where(idx >= 0, idx - offsets, -1), grid.rows, grid.down)  # [B|1, T]
        self.key_words = _members(idx, grid.keys, grid.across)  # [B|1, C]

    def runs(self) -> Runs:
        across = self.grid.across
        row = _any_all(self.row_words, self.grid.rows)  # [B|1, T]
        key = _any_all(self.key_words, self.grid.keys)  # [B|1, C]
        # Three rows per sequence, of which each tile row copies one: no global query, some, only global ones.
        kinds = np.maximum(key[:, None], np.array([EMPTY, PARTIAL, FULL])[:, None]).reshape(-1, across)
        source = np.arange(len(row))[:, None] * 3 + row
        return take_rows(from_cells(kinds, np.arange(across), across), source.ravel(), across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        b = self.own(tiles)[0]
        rows, row = np.unique(self.row_words, return_inverse=True)
        keys, key = np.unique(self.key_words, return_inverse=True)
        row, key = row.reshape(self.row_words.shape), key.reshape(self.key_words.shape)
        return row[b, tiles.t] * len(keys) + key[b, tiles.c], len(rows) * len(keys)

    def words(self, tiles: Tiles) -> Words:
        b = self.own(tiles)[0]
        is_global = (self.key_words[b, tiles.c][:, None] >> LANES.astype(np.uint64)) & np.uint64(1)
        return np.where(is_global != 0, ONES, self.row_words[b, tiles.t][:, None])


class DilatedLeaf(Leaf):
    def __init__(self, mask: Dilated, grid: Grid) -> None:
        self.reach, self.step, self.grid = mask.w * mask.d, mask.d, grid
        self.lines = (len(grid.offsets), 1)

    def runs(self) -> Runs:
        grid, across = self.grid, self.grid.across
        first, last = (x.ravel() for x in grid.bands())
        if self.step < TILE:  # every tile of the band holds some pair
            bounds = (first - self.reach, last + self.reach + 1)
            lo, hi = (np.clip(x, 0, grid.keys) for x in bounds)
            nobody = np.full_like(lo, grid.keys), np.zeros_like(lo)
            return from_intervals(lo, nobody[0], nobody[1], hi, grid)
        # Diagonals are further apart than a tile: each touches one or two key tiles of a row.
        row = np.arange(len(first))[:, None]
        reach = min(self.reach, (grid.rows + grid.keys + int(np.abs(grid.offsets).max())) // self.step * self.step)
        steps = np.arange(-reach, reach + 1, self.step)
        ends = first[:, None] + steps, last[:, None] + steps  # [R, 2w + 1]
        seen = (ends[1] >= 0) & (ends[0] < grid.keys)
        tile = np.concatenate([(row * across + np.clip(x, 0, grid.keys - 1) // TILE)[seen] for x in ends])
        at = np.unique(tile)
        return from_tiles(at, np.full(len(at), PARTIAL), len(first), across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        limit = self.grid.rows + self.grid.keys + int(np.abs(self.grid.offsets).max()) + TILE
        low = -min(self.reach + TILE, limit)
        return np.clip(self._distance(tiles), low, -low) - low, 1 - 2 * low

    def words(self, tiles: Tiles) -> Words:
        distance = self._distance(tiles)

        def bits(part: slice) -> NDArray[np.bool_]:
            each = distance[part, None, None] + LANES[:, None] - LANES
            return (np.abs(each) <= self.reach) & (each % self.step == 0)

        return _words_by_chunk(bits, len(tiles.t))

    def _distance(self, tiles: Tiles) -> Ints:
        return tiles.c * TILE - (tiles.t * TILE + self.grid.offsets[self.own(tiles)[0]])


class BlocksLeaf(Leaf):
    def __init__(self, mask: Blocks, grid: Grid) -> None:
        self.size, self.grid = mask.size, grid
        table = mask.map.numpy()
        self.outside = table.shape[2]  # the row that stands for queries outside the map
        self.table = np.pad(table, ((0, 0), (0, 0), (0, 1), (0, 0)))
        self.lines = (max(table.shape[0], len(grid.offsets)), table.shape[1])

    def _row(self, place: Ints) -> Ints:
        row = place // self.size
        return np.where((row >= 0) & (row < self.outside), row, self.outside)

    def runs(self) -> Runs:
        grid, size = self.grid, self.size
        batch, heads = self.lines
        b = np.arange(batch)[:, None, None] if len(self.table) > 1 else 0
        h = np.arange(heads)[None, :, None]
        first, last = (np.broadcast_to(x, (batch, grid.down))[:, None] for x in grid.bands())  # [B|1, 1, T]
        some = every = self.table[b, h, self._row(first)]  # [B|1, H|1, T, Q]
        for step in range(1, (TILE - 1) // size + 2):  # the other rows of the map that a tile row meets
            part = self.table[b, h, self._row(np.minimum(first + step * size, last))]
            some, every = some | part, every & part
        if size % TILE == 0:
            units = -(-grid.keys // size)
            some, every, starts = some[..., :units], every[..., :units], np.arange(units) * (size // TILE)
        else:
            starts = np.arange(grid.across)
            c0, c1 = starts * TILE // size, (np.minimum(starts * TILE + TILE, grid.keys) - 1) // size
            columns = [np.minimum(c0 + step, c1) for step in range((TILE - 1) // size + 2)]
            some = np.logical_or.reduce([some[..., column] for column in columns])
            every = np.logical_and.reduce([every[..., column] for column in columns])
        value = some.astype(np.uint8) + every
        return from_cells(value.reshape(-1, value.shape[-1]), starts, grid.across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        # The bits follow from where the tile lies within its blocks and from the part of the map that it meets.
        size, count = self.size, (TILE - 1) // self.size + 2
        if count * count + 2 * size.bit_length() > 62:
            return _one_per_tile(self, tiles, self.grid)
        place, keys = self._place(tiles), tiles.c * TILE
        steps = np.arange(count) * size
        met = self._gather(tiles, place[:, None] + steps, keys[:, None] + steps).reshape(len(place), -1)
        code = met @ (1 << np.arange(count * count))
        return (code * size + place % size) * size + keys % size, (1 << count * count) * size * size

    def words(self, tiles: Tiles) -> Words:
        place = self._place(tiles)[:, None] + LANES
        keys = tiles.c[:, None] * TILE + LANES

        def bits(part: slice) -> NDArray[np.bool_]:
            chosen = Tiles(*(x[part] for x in tiles))
            return self._gather(chosen, place[part], keys[part]).transpose(0, 2, 1)

        return _words_by_chunk(bits, len(tiles.t))

    def _gather(self, tiles: Tiles, place: Ints, keys: Ints) -> NDArray[np.bool_]:
        """[K, queries, keys] for positions [K, queries] and [K, keys]."""
        b = tiles.b[:, None, None] if len(self.table) > 1 else 0
        h = tiles.h[:, None, None] if self.lines[1] > 1 else 0
        column = np.minimum(keys // self.size, self.table.shape[3] - 1)
        return self.table[b, h, self._row(place)[:, :, None], column[:, None]]

    def _place(self, tiles: Tiles) -> Ints:
        return tiles.t * TILE + self.grid.offsets[tiles.b if len(self.grid.offsets) > 1 else 0]


class KeepLeaf(Leaf):
    def __init__(self, mask: Keep, grid: Grid) -> None:
        self.grid = grid
        dense = mask.tensor.numpy()
        batch, heads, rows, keys = dense.shape
        self.lines = (batch, heads)
        if rows == 1:
            words = np.where(dense, ONES, np.uint64(0))
        else:
            dense = np.pad(dense, ((0, 0), (0, 0), (0, -rows % TILE), (0, 0))) if rows % TILE else dense
            packed = np.packbits(dense.reshape(batch, heads, -1, 8, 8, keys), axis=-2, bitorder="little")
            packed = packed.reshape(batch, heads, -1, 8, keys).swapaxes(3, 4)
            words = np.ascontiguousarray(packed).view("<u8")[..., 0]  # [B|1, H|1, T, M|1]
        if keys == 1:
            self.tiles = words[..., None]  # [B|1, H|1, T|1, C|1, 64|1]
        else:
            words = np.pad(words, ((0, 0), (0, 0), (0, 0), (0, -keys % TILE))) if keys % TILE else words
            self.tiles = words.reshape(*words.shape[:3], -1, TILE)

    def runs(self) -> Runs:
        grid = self.grid
        batch, heads, down, across, width = self.tiles.shape
        care = np.full(down, ONES)
        if down == grid.down and down > 1:
            care[-1] = below(np.array([grid.rows - (down - 1) * TILE]))[0]
        care = care[:, None, None]
        some = ((self.tiles & care) != 0).any(-1)
        full = (self.tiles | ~care) == ONES
        if width > 1:
            full[..., -1, grid.keys - (across - 1) * TILE :] = True
        value = (some.astype(np.uint8) + full.all(-1)).reshape(-1, across)
        runs = from_cells(value, np.arange(across), grid.across)
        if down == grid.down:
            return runs
        return take_rows(runs, np.repeat(np.arange(batch * heads), grid.down), grid.across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        shape = self.tiles.shape[:4]
        return np.ravel_multi_index(self._index(tiles), shape), int(np.prod(shape))

    def words(self, tiles: Tiles) -> Words:
        return np.broadcast_to(self.tiles[self._index(tiles)], (len(tiles.t), TILE))

    def _index(self, tiles: Tiles) -> tuple[Ints, ...]:
        return tuple(x if size > 1 else np.zeros_like(x) for x, size in zip(tiles, self.tiles.shape[:4], strict=True))


def _one_per_tile(leaf: Leaf, tiles: Tiles, grid: Grid) -> tuple[Ints, int]:
    b, h = leaf.own(tiles)
    line = b * leaf.lines[1] + h
    return (line * grid.down + tiles.t) * grid.across + tiles.c, leaf.lines[0] * leaf.lines[1] * grid.down * grid.across


def _words_by_chunk(bits: Callable[[slice], NDArray[np.bool_]], count: int) -> Words:
    """Packs [K, 64 keys, 64 queries] bools a bounded number of tiles at a time."""
    words = np.empty((count, TILE), np.uint64)
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        words[part] = pack(bits(part))
    return words


def _tiled(ids: NDArray[np.int32], tiles: int) -> NDArray[np.int32]:
    """[B, L] as [B, tiles, 64]; the last id fills up, so that an uneven tile stays uniform if it can."""
    return np.pad(ids, ((0, 0), (0, tiles * TILE - ids.shape[1])), mode="edge").reshape(len(ids), tiles, TILE)


def _members(idx: Ints, length: int, tiles: int) -> Words:
    """Which of the positions [0, length) are in idx [B, K]: words [B, tiles]."""
    member = np.zeros((len(idx), tiles * TILE), bool)
    b, k = np.nonzero((idx >= 0) & (idx < length))
    member[b, idx[b, k]] = True
    return pack(member.reshape(len(idx), tiles, TILE))


def _any_all(words: Words, length: int) -> NDArray[np.int64]:
    """EMPTY, PARTIAL or FULL per word [B, tiles], looking at the first `length` bits of a row only."""
    care = below(length - np.arange(words.shape[1]) * TILE)
    return ((words & care) != 0).astype(np.int64) + ((words | ~care) == ONES)
