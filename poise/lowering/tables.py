"""Masks that read a table, on the grid: documents in any order, global tokens, blocks, dense bool tensors."""

from __future__ import annotations

from typing import Any

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
    ascending,
    below,
    clip,
    from_cells,
    from_tiles,
    pack,
    spans,
    take_rows,
)
from poise.lowering.intervals import numbers
from poise.lowering.leaf import CHUNK, LANES, Leaf, words_by_chunk
from poise.mask import Blocks, Documents, GlobalTokens, Keep


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
            np.broadcast_to(clip(place, 0, length - 1), (batch, grid.rows)),
            axis=1,
        )
        mine = np.where((place >= 0) & (place < length), mine, np.int32(-1))
        self.mine = _tiled(mine, grid.down)  # [B|1, T, 64]
        self.theirs = _tiled(ids[:, : grid.keys], grid.across)  # [B|1, C, 64]
        self.lines = (batch, 1)

    def make_runs(self) -> Runs:
        down, across = self.grid.down, self.grid.across
        batch = self.lines[0]
        theirs = np.broadcast_to(self.theirs, (batch, across, TILE))
        row_group, row_tile = self._occurrences(self.mine)
        key_group, key_tile = self._occurrences(theirs)
        first = np.searchsorted(key_group, row_group, "left")
        count = np.searchsorted(key_group, row_group, "right") - first
        row = row_group // self.documents * down + row_tile
        shared = np.repeat(row * across, count) + key_tile[spans(first, count)]
        at = ascending(shared)
        row, key = at // across, at % across
        uniform_row = (self.mine == self.mine[:, :, :1]).all(2).ravel()[row]
        uniform_key = (theirs == theirs[:, :, :1]).all(2)[row // down, key]
        return from_tiles(at, np.where(uniform_row & uniform_key, FULL, PARTIAL), batch * down, across)

    def _occurrences(self, ids: NDArray[Any]) -> tuple[Ints, Ints]:
        """Every (sequence x document, tile) that occurs, sorted: two arrays."""
        batch, tiles, _ = ids.shape
        group = np.arange(batch)[:, None, None] * self.documents + ids
        code = ascending((group * tiles + np.arange(tiles)[None, :, None])[ids >= 0])
        return code // tiles, code % tiles

    def words(self, tiles: Tiles) -> Words:
        b, _ = self.own(tiles)
        b_key = b if len(self.theirs) > 1 else np.zeros_like(b)

        def bits(part: slice) -> NDArray[np.bool_]:
            theirs = self.theirs[b_key[part], tiles.c[part]]
            same: NDArray[np.bool_] = theirs[:, :, None] == self.mine[b[part], tiles.t[part]][:, None]
            return same

        return words_by_chunk(bits, len(tiles.t))


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

    def make_runs(self) -> Runs:
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


class BlocksLeaf(Leaf):
    def __init__(self, mask: Blocks, grid: Grid) -> None:
        self.size, self.grid = mask.size, grid
        self.met = (TILE - 1) // self.size + 2  # blocks that a tile can meet in each direction
        table = mask.map.numpy()
        self.outside = table.shape[2]  # the row that stands for queries outside the map
        self.table = np.pad(table, ((0, 0), (0, 0), (0, 1), (0, 0)))
        self.lines = (max(table.shape[0], len(grid.offsets)), table.shape[1])

    def _row(self, place: Ints) -> Ints:
        row = place // self.size
        return np.where((row >= 0) & (row < self.outside), row, self.outside)

    def make_runs(self) -> Runs:
        grid, size = self.grid, self.size
        batch, heads = self.lines
        b = np.arange(batch)[:, None, None] if len(self.table) > 1 else 0
        h = np.arange(heads)[None, :, None]
        first, last = (np.broadcast_to(x, (batch, grid.down))[:, None] for x in grid.bands())  # [B|1, 1, T]
        some = every = self.table[b, h, self._row(first)]  # [B|1, H|1, T, Q]
        for step in range(1, self.met):  # the other rows of the map that a tile row meets
            part = self.table[b, h, self._row(np.minimum(first + step * size, last))]
            some, every = some | part, every & part
        if size % TILE == 0:
            units = -(-grid.keys // size)
            some, every, starts = some[..., :units], every[..., :units], np.arange(units) * (size // TILE)
        else:
            starts = np.arange(grid.across)
            c0, c1 = starts * TILE // size, (np.minimum(starts * TILE + TILE, grid.keys) - 1) // size
            columns = [np.minimum(c0 + step, c1) for step in range(self.met)]
            some = np.logical_or.reduce([some[..., column] for column in columns])
            every = np.logical_and.reduce([every[..., column] for column in columns])
        value = some.astype(np.uint8) + every
        return from_cells(value.reshape(-1, value.shape[-1]), starts, grid.across)

    def key(self, tiles: Tiles) -> tuple[Ints, int]:
        # The bits follow from where the tile lies within its blocks and from the part of the map that it meets.
        size, count = self.size, self.met
        if count * count + 2 * size.bit_length() > 62:
            return super().key(tiles)
        part = self._part(tiles).reshape(-1, count * count)
        code = part @ (1 << np.arange(count * count))
        phase = self._place(tiles) % size * size + tiles.c * TILE % size
        return code * size * size + phase, (1 << count * count) * size * size

    def words(self, tiles: Tiles) -> Words:
        words = np.empty((len(tiles.t), TILE), np.uint64)
        for start in range(0, len(words), CHUNK):
            chunk = slice(start, start + CHUNK)
            words[chunk] = self._words(Tiles(*(x[chunk] for x in tiles)))
        return words

    def _words(self, tiles: Tiles) -> Words:
        edge = np.arange(self.met + 1) * self.size - (self._place(tiles) % self.size)[:, None]
        queries = below(edge[:, 1:]) & ~below(edge[:, :-1])  # those of each met row of blocks, [K, met]
        keys = np.where(self._part(tiles), queries[:, :, None], np.uint64(0))
        words: Words = np.bitwise_or.reduce(keys, axis=1)  # one word per met column of blocks, [K, met]
        column = ((tiles.c * TILE % self.size)[:, None] + LANES) // self.size
        return np.take_along_axis(words, column, axis=1)

    def _part(self, tiles: Tiles) -> NDArray[np.bool_]:
        """The part of the map that each tile meets: [K, met, met]."""
        b, h = (x[:, None, None] if size > 1 else 0 for x, size in zip(tiles, self.table.shape[:2], strict=False))
        steps = np.arange(self.met) * self.size
        row = self._row(self._place(tiles)[:, None] + steps)
        column = np.minimum((tiles.c[:, None] * TILE + steps) // self.size, self.table.shape[3] - 1)
        part: NDArray[np.bool_] = self.table[b, h, row[:, :, None], column[:, None]]
        return part

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
            words = _pack_queries(np.pad(dense, ((0, 0), (0, 0), (0, -rows % TILE), (0, 0))) if rows % TILE else dense)
        if keys == 1:
            self.tiles = words[..., None]  # [B|1, H|1, T|1, C|1, 64|1]
        else:
            words = np.pad(words, ((0, 0), (0, 0), (0, 0), (0, -keys % TILE))) if keys % TILE else words
            self.tiles = words.reshape(*words.shape[:3], -1, TILE)

    def make_runs(self) -> Runs:
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


def _tiled(ids: NDArray[Any], tiles: int) -> NDArray[Any]:
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
    value: Ints = ((words & care) != 0).astype(np.int64) + ((words | ~care) == ONES)
    return value


def _pack_queries(dense: NDArray[np.bool_]) -> Words:
    """Bools [B, H, 64 T, M] as words of 64 queries: [B, H, T, M]."""
    batch, heads, rows, keys = dense.shape
    octets = dense.view(np.uint8).reshape(batch, heads, rows // 8, 8, keys)
    packed = octets[..., 0, :].copy()  # [B, H, 8 T, M]
    for bit in range(1, 8):
        packed |= octets[..., bit, :] << np.uint8(bit)
    packed = packed.reshape(batch, heads, -1, 8, keys).swapaxes(3, 4)
    return np.ascontiguousarray(packed).view("<u8")[..., 0]
