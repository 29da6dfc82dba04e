"""Mask + bias -> Plan: the plain data that kernels read (poise/kernels/cpu/forward.h names the same fields).

A kernel can't call Python, so masks are lowered before the boundary. The operands of a top-level `&` go where they cost
least: windows to `left` and `right`, lengths to `start` and `end`, whatever leaves each row one interval (a prefix-LM,
packed documents) to `rows`, bool tensors to `masks` as they are; the rest becomes one tile map. A pair is visible where
all of these agree. Plans of masks made of Python numbers are cached.

`poise/lowering` holds the algorithms; reference and blockwise never see a plan, they evaluate the mask objects.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poise.algebra import install_lowering
from poise.lowering.bands import IntervalLeaf, LengthsLeaf, WindowLeaf
from poise.lowering.grid import TILE, Grid, Ints, clip
from poise.lowering.intervals import Interval, as_intervals, intersect, numbers
from poise.lowering.leaf import Leaf
from poise.lowering.tilemap import tile_map
from poise.mask import UNBOUNDED, And, Keep, Lengths, Lowered, Mask, Not, Offset, Or, Shape, Window
from poise.score import Alibi, Bias, Dense, Relative, terms

MAX_DENSE = 2  # dense masks, and dense biases, that a kernel reads in place; more are combined beforehand
CACHE_ENTRIES, CACHE_BYTES = 256, 1 << 26


@dataclass(frozen=True, slots=True)
class Plan:
    """Who sees whom, all fields intersected, and what is added. i' = i + offset; the offset itself is not in here."""

    left: int = UNBOUNDED  # i' - left <= j
    right: int = UNBOUNDED  # j <= i' + right
    start: Tensor | None = None  # int32 [B]: start <= j
    end: Tensor | None = None  # int32 [B]: j < end
    rows: Tensor | None = None  # int32 [B|1, H|1, N, 2]: lo <= j < hi
    tile_ptr: Tensor | None = None  # int32 [B|1, H|1, T + 1]: runs of query tile t are ptr[t] .. ptr[t + 1]
    tile_runs: Tensor | None = (
        None  # int32 [E, 3]: first key tile, number of key tiles, pattern (-1 = full; else 1 tile)
    )
    patterns: Tensor | None = None  # int64 [P, 64]: word = key within the tile, bit = query within the tile
    masks: tuple[Tensor, ...] = ()  # at most 2, bool [B, H, N, M], views expanded by stride 0
    biases: tuple[Tensor, ...] = ()  # at most 2, float [B, H, N, M], views expanded by stride 0
    table: Tensor | None = None  # fp32 [H|1, 2R + 1]: added at clamp(j - i', -R, R) + R
    slopes: Tensor | None = None  # fp32 [H]: -slope |i' - j|

    def describe(self) -> str:
        """One line for `explain`."""
        parts: list[str] = []
        if self.right < UNBOUNDED and self.left >= UNBOUNDED:
            parts.append("causal band" if self.right == 0 else f"band of keys up to i' + {self.right}")
        elif self.left < UNBOUNDED:
            right = "" if self.right >= UNBOUNDED else f" + {self.right}"
            parts.append(f"band of keys from i' - {self.left} to " + (f"i'{right}" if right else "the end"))
        if self.start is not None or self.end is not None:
            parts.append("key lengths per sequence")
        if self.rows is not None:
            parts.append("one key interval per row")
        if self.tile_runs is not None and self.patterns is not None:
            single = int((self.tile_runs[:, 2] >= 0).sum())
            whole = int(self.tile_runs[:, 1].sum()) - single
            parts.append(f"tile map of {whole} full and {single} partial tiles ({len(self.patterns)} patterns)")
        for name, dense in (("mask", self.masks), ("bias", self.biases)):
            if dense:
                parts.append(
                    f"{len(dense)} dense {name}{'es' * (len(dense) > 1) if name == 'bias' else 's' * (len(dense) > 1)}"
                )
        if self.table is not None:
            parts.append(f"relative table of {self.table.shape[1]} distances")
        if self.slopes is not None:
            parts.append("alibi slopes")
        return ", ".join(parts) or "every query sees every key"


_OPEN = Plan()


def lower(
    mask: Mask | None,
    bias: Sequence[Bias],
    shape: Shape,
    offset: Offset = 0,
    device: torch.device | str = "cpu",
) -> Plan:
    """The plan of a validated mask and bias terms for one shape [B, H, N, M] and query offset."""
    if torch.device(device).type != "cpu":
        raise ValueError(f"lower: plans are made for the cpu kernels, got device {device}: evaluate the mask there")
    plan = _OPEN if mask is None else _mask_plan(mask, shape, offset)
    return with_biases(plan, bias, shape)


class _Cache:
    """Least recently used plans, bounded by number and by bytes; safe to share between threads."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                return plan
        plan = make()  # outside the lock: two threads may lower the same mask once each
        size = _bytes(plan)
        if size <= CACHE_BYTES // 2:
            with self._lock:
                if key not in self._plans:
                    self._plans[key] = plan
                    self._bytes += size
                while len(self._plans) > CACHE_ENTRIES or self._bytes > CACHE_BYTES:
                    self._bytes -= _bytes(self._plans.popitem(last=False)[1])
        return plan

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self._bytes = 0

    def __len__(self) -> int:
        return len(self._plans)


_cache = _Cache()


def clear_cache() -> None:
    """Forgets all cached plans."""
    _cache.clear()


def _bytes(plan: Plan) -> int:
    tensors = (getattr(plan, each.name) for each in fields(plan))
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))


def _mask_plan(mask: Mask, shape: Shape, offset: Offset) -> Plan:
    if type(mask) is Window:  # the same for every shape: generation would fill the cache with one plan per step
        return _cache.get(mask, lambda: Plan(left=mask.left, right=mask.right))
    if type(mask) is Keep:
        return _OPEN if 0 in shape else Plan(masks=(mask.tensor.expand(shape),))
    if isinstance(mask, Lowered):
        mask.check_offset(offset)
        assert isinstance(mask.plan, Plan)
        return _broadcast(mask.plan, shape)
    if mask.key is not None and isinstance(offset, int):
        return _cache.get((mask, shape, offset), lambda: _lower_mask(mask, shape, offset))
    return _lower_mask(mask, shape, offset)


def _broadcast(plan: Plan, shape: Shape) -> Plan:
    """A plan made for batch or heads 1, used for more."""
    start, end = (None if x is None else x.expand(shape[0]).contiguous() for x in (plan.start, plan.end))
    return replace(plan, start=start, end=end, masks=tuple(x.expand(shape) for x in plan.masks))


def _lower_mask(mask: Mask, shape: Shape, offset: Offset) -> Plan:
    batch, _, rows, keys = shape
    if 0 in shape:
        return _OPEN
    offsets = numbers(offset)
    if len(offsets) > 1 and bool((offsets == offsets[0]).all()):
        offsets = offsets[:1]
    grid = Grid(rows, keys, offsets)

    left = right = UNBOUNDED
    lengths: list[Lengths] = []
    dense: list[Tensor] = []
    interval: Interval | None = None
    rest: list[Mask] = []
    for part in _operands(mask, offset):
        if type(part) is Window:
            left, right = min(left, part.left), min(right, part.right)
        elif type(part) is Lengths:
            lengths.append(part)
        elif type(part) is Keep:
            dense.append(part.tensor)
        elif (mine := as_intervals(part, grid)) is not None:
            interval = mine if interval is None else intersect(interval, mine)
        else:
            rest.append(part)

    found: dict[str, Any] = {"left": left, "right": right}
    if interval is not None:
        lo, hi = (np.broadcast_to(x, (x.shape[0], rows)) for x in interval)
        found["rows"] = torch.from_numpy(np.stack([lo, hi], axis=-1).astype(np.int32)[:, None])
    if lengths:
        start = reduce(np.maximum, (numbers(x.start) for x in lengths))
        end = reduce(np.minimum, (numbers(x.end) for x in lengths))
        if bool((start > 0).any()):
            found["start"] = _per_sequence(start, batch, keys)
        if bool((end < keys).any()):
            found["end"] = _per_sequence(end, batch, keys)
    if dense:
        found["masks"] = tuple(x.expand(shape) for x in _at_most(dense, torch.logical_and))
    if rest:
        covers: list[Leaf] = [LengthsLeaf(x, grid) for x in lengths]
        if left < UNBOUNDED or right < UNBOUNDED:
            covers.append(WindowLeaf(Window(left, right), grid))
        if interval is not None:
            covers.append(IntervalLeaf(interval, grid))
        tiles = tile_map(And(tuple(rest)) if len(rest) > 1 else rest[0], grid, covers)
        if tiles is not None:
            found["tile_ptr"], found["tile_runs"], found["patterns"] = map(torch.from_numpy, tiles)
    return Plan(**found)


def _operands(mask: Mask, offset: Offset, negated: bool = False) -> list[Mask]:
    """The operands of the top-level `&`, with every `~` pushed down to the leaves, so that more of them are found."""
    mask = _push(mask, offset, negated)
    return list(mask.masks) if isinstance(mask, And) else [mask]


def _push(mask: Mask, offset: Offset, negated: bool) -> Mask:
    if not negated and type(mask) in (Window, Lengths, Keep):  # isinstance is slow on abstract classes
        return mask
    if isinstance(mask, Lowered):
        mask.check_offset(offset)
        return _push(mask.mask, offset, negated)
    if isinstance(mask, Not):
        return _push(mask.mask, offset, not negated)
    if isinstance(mask, And | Or):
        joined = And if isinstance(mask, And) != negated else Or
        flat: list[Mask] = []
        for part in mask.masks:
            pushed = _push(part, offset, negated)
            flat.extend(pushed.masks if isinstance(pushed, joined) else (pushed,))
        return joined(tuple(flat))
    return Not(mask) if negated else mask


def _per_sequence(value: np.ndarray[Any, Any], batch: int, keys: int) -> Tensor:
    clipped = clip(value, 0, keys).astype(np.int32)
    return torch.from_numpy(np.broadcast_to(clipped, (batch,)).copy())


def _at_most(dense: list[Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Joins the smallest ones until kernels can read the rest in place."""
    while len(dense) > MAX_DENSE:
        first, second, *others = sorted(dense, key=Tensor.numel)
        dense = [join(first, second), *others]
    return dense


def with_biases(plan: Plan, bias: Sequence[Bias], shape: Shape) -> Plan:
    """The plan of a mask alone, with what is added to the scores."""
    if not bias:
        return plan
    dense: list[Tensor] = []
    tables: list[Tensor] = []
    slopes: list[Tensor] = []
    for part in (each for term in bias for each in terms(term)):
        if isinstance(part, Dense):
            tensor = part.tensor.detach()
            dense.append(tensor.float() if tensor.dtype == torch.float64 else tensor)
        elif isinstance(part, Relative):
            tables.append(part.table.detach().float())
        elif isinstance(part, Alibi):
            slopes.append(part.slopes.detach().float())
        else:
            raise TypeError(f"bias: don't know how to lower {type(part).__name__}")
    return replace(
        plan,
        biases=tuple(x.expand(shape) for x in _at_most(dense, lambda x, y: x.float() + y.float())),
        table=_sum_tables(tables),
        slopes=reduce(torch.add, slopes).contiguous() if slopes else None,
    )


def _sum_tables(tables: list[Tensor]) -> Tensor | None:
    """Tables of different radius add once the shorter ones repeat their ends, which is what clamping reads there."""
    if not tables:
        return None
    longest = max(table.shape[1] for table in tables)
    total: Tensor | None = None
    for table in tables:
        pad = (longest - table.shape[1]) // 2
        ends = table[:, :1].expand(-1, pad), table[:, -1:].expand(-1, pad)
        padded = torch.cat([ends[0], table, ends[1]], dim=1) if pad else table
        total = padded if total is None else total + padded
    assert total is not None
    return total.contiguous()


def visible_area(plan: Plan, shape: Shape, offset: Offset = 0) -> int:
    """Pairs (b, h, i, j) that a kernel can't skip: an upper bound of the visible ones, exact for intervals alone.

    Dense masks let nothing be skipped and don't count; of intervals and a tile map the smaller area counts.
    """
    batch, heads, rows, keys = shape
    if 0 in shape:
        return 0
    place = Grid(rows, keys, numbers(offset)).positions()  # [B|1, N]
    lo, hi = np.maximum(place - plan.left, 0), np.minimum(place + plan.right + 1, keys)
    if plan.start is not None:
        lo = np.maximum(lo, plan.start.numpy()[:, None])
    if plan.end is not None:
        hi = np.minimum(hi, plan.end.numpy()[:, None])
    lo, hi = lo[:, None], hi[:, None]
    if plan.rows is not None:
        interval = plan.rows.numpy()
        lo, hi = np.maximum(lo, interval[..., 0]), np.minimum(hi, interval[..., 1])  # [B|1, H|1, N]
    width: Ints = np.maximum(hi - lo, 0)
    area: int = int(width.sum()) * (batch // width.shape[0]) * (heads // width.shape[1])
    if plan.tile_ptr is None or plan.tile_runs is None or plan.patterns is None:
        return area
    first, count, pattern = plan.tile_runs.numpy().T.astype(np.int64)
    ptr = plan.tile_ptr.numpy()
    tile_row = np.tile(np.arange(ptr.shape[2] - 1), ptr.shape[0] * ptr.shape[1])
    tall = np.minimum(rows - np.repeat(tile_row, np.diff(ptr, axis=2).ravel()) * TILE, TILE)
    wide = np.minimum((first + count) * TILE, keys) - first * TILE
    bits = np.unpackbits(plan.patterns.numpy().view(np.uint8), axis=1).sum(1, dtype=np.int64)
    part = np.minimum(tall * wide, np.append(bits, TILE * TILE)[pattern] if len(bits) else tall * wide)
    covered = int(np.where(pattern < 0, tall * wide, part).sum())
    lines: int = ptr.shape[0] * ptr.shape[1]
    return min(area, covered * (batch * heads // lines))


install_lowering(_lower_mask)
