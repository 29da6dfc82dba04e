"""Which masks leave each query row one interval of keys, and which interval.

Windows and lengths always do; documents do when each is one contiguous stretch; `&` of intervals always is one, `|`
and `~` sometimes: that is checked row by row. The empty interval is (0, 0).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poise.lowering.grid import Grid, Ints
from poise.mask import And, Documents, Lengths, Mask, Not, Or, Window

Interval = tuple[Ints, Ints]  # lo, hi: [B|1, N|1], within [0, M]


def as_intervals(mask: Mask, grid: Grid) -> Interval | None:
    """The visible keys [lo, hi) of every row, or None when some row's are not one interval."""
    if not _promising(mask):
        return None
    return _intervals(mask, grid)


def _promising(mask: Mask) -> bool:
    """False spares the work: some part can't be an interval whatever its values."""
    if isinstance(mask, And | Or):
        return all(_promising(part) for part in mask.masks)
    if isinstance(mask, Not):
        return _promising(mask.mask)
    return isinstance(mask, Window | Lengths | Documents)


def _intervals(mask: Mask, grid: Grid) -> Interval | None:
    if isinstance(mask, Window):
        place = grid.positions()
        return _clip(place - mask.left, place + mask.right + 1, grid.keys)
    if isinstance(mask, Lengths):
        start, end = np.broadcast_arrays(numbers(mask.start), numbers(mask.end))
        return _clip(start[:, None], end[:, None], grid.keys)
    if isinstance(mask, Documents):
        return _documents(mask, grid)
    if isinstance(mask, Not):
        inner = _intervals(mask.mask, grid)
        return None if inner is None else _complement(*inner, grid.keys)
    assert isinstance(mask, And | Or)
    join = intersect if isinstance(mask, And) else _unite
    result: Interval | None = None
    for part in mask.masks:
        other = _intervals(part, grid)
        if other is None:
            return None
        result = other if result is None else join(result, other)
        if result is None:
            return None
    return result


def _documents(mask: Documents, grid: Grid) -> Interval | None:
    ids = numbers(mask.ids)
    length = ids.shape[1]
    new = np.ones(ids.shape, bool)  # where a stretch of equal ids starts
    np.not_equal(ids[:, 1:], ids[:, :-1], out=new[:, 1:])
    if not bool((ids[:, 1:] >= ids[:, :-1]).all()):
        # Not sorted, yet contiguous if no stretch's id comes back.
        for row, starts in zip(ids, new, strict=True):
            firsts = row[starts]
            if len(np.unique(firsts)) != len(firsts):
                return None
    place = np.arange(length)
    start = np.maximum.accumulate(np.where(new, place, 0), axis=1)  # [B|1, L]
    stop = np.full(ids.shape, length)
    stop[:, :-1] = np.where(new[:, 1:], place[1:], length)
    end = np.minimum.accumulate(stop[:, ::-1], axis=1)[:, ::-1]
    query = grid.positions()
    inside = (query >= 0) & (query < length)
    query = np.clip(query, 0, length - 1)
    batch = max(len(ids), len(query))
    lo, hi = (
        np.take_along_axis(np.broadcast_to(x, (batch, length)), np.broadcast_to(query, (batch, grid.rows)), axis=1)
        for x in (start, end)
    )
    return _clip(np.where(inside, lo, 0), np.where(inside, hi, 0), grid.keys)


def intersect(x: Interval, y: Interval) -> Interval:
    return _tidy(np.maximum(x[0], y[0]), np.minimum(x[1], y[1]))


def _unite(x: Interval, y: Interval) -> Interval | None:
    x_empty, y_empty = x[0] >= x[1], y[0] >= y[1]
    touching = (x[0] <= y[1]) & (y[0] <= x[1])
    if not bool((touching | x_empty | y_empty).all()):
        return None
    lo = np.where(x_empty, y[0], np.where(y_empty, x[0], np.minimum(x[0], y[0])))
    hi = np.where(x_empty, y[1], np.where(y_empty, x[1], np.maximum(x[1], y[1])))
    return lo, hi


def _complement(lo: Ints, hi: Ints, keys: int) -> Interval | None:
    empty, from_start, to_end = lo >= hi, lo <= 0, hi >= keys
    if not bool((empty | from_start | to_end).all()):
        return None
    left = np.where(empty | ~from_start, 0, hi)
    right = np.where(empty | from_start, keys, lo)
    return _tidy(left, right)


def _clip(lo: Ints, hi: Ints, keys: int) -> Interval:
    return _tidy(np.maximum(lo, 0), np.minimum(hi, keys))


def _tidy(lo: Ints, hi: Ints) -> Interval:
    empty = lo >= hi
    return np.where(empty, 0, lo), np.where(empty, 0, hi)


def numbers(value: int | Tensor | NDArray[np.int64]) -> Ints:
    """An int (as [1]) or an integer tensor, as int64 in numpy."""
    if isinstance(value, int):
        return np.array([value])
    array = value.numpy() if isinstance(value, Tensor) else value
    return array.astype(np.int64, copy=False)
