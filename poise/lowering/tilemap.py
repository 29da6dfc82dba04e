"""Any mask expression as a tile map: per tile row runs of key tiles, full or with one of a few bit patterns.

Three-valued maps of the leaves combine into one; only tiles that it leaves undecided are looked at bit by bit, and of
those only one per combination of leaf keys. Tiles that turn out full join their neighbours, empty ones vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from poise.lowering.bands import DilatedLeaf, IntervalLeaf, LengthsLeaf, WindowLeaf
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
    combine,
    group,
    invert,
    lengths,
    spans,
    take_rows,
)
from poise.lowering.intervals import as_intervals
from poise.lowering.leaf import Leaf
from poise.lowering.tables import BlocksLeaf, DocumentsLeaf, GlobalLeaf, KeepLeaf
from poise.mask import And, Blocks, Dilated, Documents, GlobalTokens, Keep, Lengths, Mask, Not, Or, Window

_WHOLE, _NOTHING = -1, -2  # in place of a pattern's index
_MIXERS = np.random.Generator(np.random.PCG64(0)).integers(1, 1 << 63, TILE, dtype=np.uint64) | np.uint64(1)


class TileMap(NamedTuple):
    ptr: NDArray[np.int32]  # [B|1, H|1, T + 1]
    runs: NDArray[np.int32]  # [E, 3]: first key tile, number of key tiles, pattern or -1
    patterns: NDArray[np.int64]  # [P, 64]


class _Node(NamedTuple):
    join: type[And] | type[Or] | type[Not]
    parts: list[_Node | Leaf]


def tile_map(mask: Mask, grid: Grid, covers: Sequence[Leaf] = ()) -> TileMap | None:
    """The tile map of `mask`, or None when it hides nothing.

    `covers` are applied elsewhere; tiles that they leave empty are dropped here, and their bits are left alone.
    """
    leaves: list[Leaf] = []
    root = _prepare(mask, grid, leaves)
    lines = max(x.lines[0] for x in leaves), max(x.lines[1] for x in leaves)
    rows, across = lines[0] * lines[1] * grid.down, grid.across
    runs = _runs(root, lines, grid)
    # A cover that varies over more lines would multiply the map for little.
    fitting = [x for x in covers if x.lines[0] in (1, lines[0]) and x.lines[1] in (1, lines[1])]
    if fitting:
        seen = [Runs(x.at, np.where(x.value == EMPTY, EMPTY, FULL)) for x in (_spread(x, lines, grid) for x in fitting)]
        runs = combine([runs, *seen], np.minimum, rows, across)

    size = lengths(runs, rows, across)
    undecided = runs.value == PARTIAL
    at = spans(runs.at[undecided], size[undecided])
    pattern, patterns = _resolve(root, leaves, _locate(at, lines, grid), grid)

    whole = runs.value == FULL
    start = np.concatenate([runs.at[whole], at])
    count = np.concatenate([size[whole], np.ones(len(at), np.int64)])
    pattern = np.concatenate([np.full(int(whole.sum()), _WHOLE), pattern])
    order = np.argsort(start, kind="stable")  # two ascending pieces: a merge
    order = order[pattern[order] != _NOTHING]
    start, count, pattern = start[order], count[order], pattern[order]
    row = start // across
    # Full neighbours in the same row become one run.
    head = np.ones(len(start), bool)
    head[1:] = (pattern[1:] != _WHOLE) | (pattern[:-1] != _WHOLE)
    head[1:] |= (start[:-1] + count[:-1] != start[1:]) | (row[:-1] != row[1:])
    first = np.flatnonzero(head)
    if len(first):
        count = np.add.reduceat(count, first)
    start, pattern, row = start[first], pattern[first], row[first]
    if len(first) == rows and bool((count == across).all()) and bool((pattern == _WHOLE).all()):
        return None
    table = np.stack([start - row * across, count, pattern], axis=1).astype(np.int32)
    bound = np.searchsorted(row, np.arange(rows + 1)).astype(np.int32)
    ptr = bound[np.arange(lines[0] * lines[1])[:, None] * grid.down + np.arange(grid.down + 1)]
    return TileMap(ptr.reshape(*lines, grid.down + 1), table, patterns.view(np.int64))


def _prepare(mask: Mask, grid: Grid, leaves: list[Leaf]) -> _Node | Leaf:
    if isinstance(mask, And | Or):
        return _Node(type(mask), [_prepare(part, grid, leaves) for part in mask.masks])
    if isinstance(mask, Not):
        return _Node(Not, [_prepare(mask.mask, grid, leaves)])
    leaves.append(_leaf(mask, grid))
    return leaves[-1]


def _leaf(mask: Mask, grid: Grid) -> Leaf:
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


def _spread(leaf: Leaf, lines: tuple[int, int], grid: Grid) -> Runs:
    """A leaf's map repeated over the lines that it does not vary over."""
    runs = leaf.runs
    if leaf.lines == lines:
        return runs
    own = np.arange(leaf.lines[0] * leaf.lines[1]).reshape(leaf.lines)
    line = np.broadcast_to(own, lines).reshape(-1, 1)
    return take_rows(runs, (line * grid.down + np.arange(grid.down)).ravel(), grid.across)


def _runs(node: _Node | Leaf, lines: tuple[int, int], grid: Grid) -> Runs:
    if isinstance(node, Leaf):
        return _spread(node, lines, grid)
    parts = [_runs(part, lines, grid) for part in node.parts]
    if node.join is Not:
        return invert(parts[0])
    return combine(parts, np.minimum if node.join is And else np.maximum, lines[0] * lines[1] * grid.down, grid.across)


def _words(node: _Node | Leaf, tiles: Tiles) -> Words:
    if isinstance(node, Leaf):
        return node.words(tiles)
    parts = [_words(part, tiles) for part in node.parts]
    if node.join is Not:
        return ~parts[0]
    words: Words = (np.bitwise_and if node.join is And else np.bitwise_or).reduce(parts)
    return words


def _locate(at: Ints, lines: tuple[int, int], grid: Grid) -> Tiles:
    row, c = np.divmod(at, grid.across)
    line, t = np.divmod(row, grid.down)
    b, h = np.divmod(line, lines[1])
    return Tiles(b, h, t, c)


def _resolve(root: _Node | Leaf, leaves: list[Leaf], tiles: Tiles, grid: Grid) -> tuple[Ints, Words]:
    """Per tile its pattern's index, _WHOLE or _NOTHING; and the distinct patterns."""
    if len(tiles.t) == 0:
        return np.zeros(0, np.int64), np.zeros((0, TILE), np.uint64)
    ragged_rows, ragged_keys = grid.rows % TILE, grid.keys % TILE
    edge_row = (tiles.t == grid.down - 1) & bool(ragged_rows)
    edge_key = (tiles.c == grid.across - 1) & bool(ragged_keys)
    code, limit = edge_row * 2 + edge_key, 4
    for each in leaves:
        key, size = each.key(tiles)
        if limit * size >= 1 << 62:
            values, code = np.unique(code, return_inverse=True)
            limit = len(values)
        if limit * size >= 1 << 62:
            values, key = np.unique(key, return_inverse=True)
            size = len(values)
        code, limit = code * size + key, limit * size
    chosen, which = group(code, limit)

    words = _words(root, Tiles(*(x[chosen] for x in tiles)))  # [U, 64]
    row_care = np.where(edge_row[chosen], below(np.array([ragged_rows])), ONES)[:, None]
    key_care = ~edge_key[chosen][:, None] | (np.arange(TILE) < ragged_keys)
    care = np.where(key_care, row_care, np.uint64(0))
    full, empty = ((words | ~care) == ONES).all(1), ((words & care) == 0).all(1)
    mixed = ~(full | empty)
    pattern = np.where(full, _WHOLE, _NOTHING)
    patterns, pattern[mixed] = _distinct(words[mixed])
    return pattern[which], patterns


def _distinct(words: Words) -> tuple[Words, Ints]:
    """The distinct rows, and for each row which of them it is."""
    if len(words) == 0:
        return words, np.zeros(0, np.int64)
    # Multiplying moves bits up only: unless the upper half is folded down, patterns of high bits all look alike.
    folded = (words ^ (words >> np.uint64(29))) * np.uint64(0x9E37_79B9_7F4A_7C15)
    folded ^= folded >> np.uint64(32)
    _, first, which = np.unique((folded * _MIXERS).sum(1), return_index=True, return_inverse=True)
    if not np.array_equal(words[first[which]], words):  # two patterns share a hash: compare whole rows
        table, which = np.unique(words, axis=0, return_inverse=True)
        return table, which.reshape(-1)
    return words[first], which
