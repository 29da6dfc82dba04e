"""Who may see whom: the named masks and the functions that build them.

Masks are frozen objects that join with `&`, `|` and `~`; a bool tensor may stand for `keep(tensor)` on either side.
What speaks of positions (window, documents, ...) uses i' = i + offset; a dense tensor is indexed by the raw i. Masks
built from Python numbers compare and hash by value, so that their lowering can be cached; masks that hold a caller's
tensor are equal only to themselves and can't be hashed.

The algebra itself is in algebra.py, lowering in plan.py.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from poise.algebra import (
    UNBOUNDED,
    And,
    Keep,
    Lowered,
    Mask,
    Not,
    Offset,
    Or,
    Shape,
    as_mask,
    broadcasts,
    check_device,
    freeze,
    keep,
    positions,
)

__all__ = [
    "UNBOUNDED",
    "And",
    "Blocks",
    "Dilated",
    "Documents",
    "GlobalTokens",
    "Keep",
    "Lengths",
    "Lowered",
    "Mask",
    "Not",
    "Offset",
    "Or",
    "Shape",
    "Window",
    "as_mask",
    "blocks",
    "causal",
    "dilated",
    "documents",
    "global_tokens",
    "keep",
    "lengths",
    "positions",
    "prefix",
    "window",
]


@dataclass(frozen=True, eq=False, slots=True)
class Window(Mask):
    """i' - left <= j <= i' + right; `UNBOUNDED` lifts a side."""

    left: int
    right: int
    key: Hashable | None = field(init=False, repr=False)
    positional: bool = field(init=False, repr=False, default=True)

    def __post_init__(self) -> None:
        freeze(self, "key", ("window", self.left, self.right))

    def __repr__(self) -> str:
        if (self.left, self.right) == (UNBOUNDED, 0):
            return "causal()"
        sides = ["unbounded" if side == UNBOUNDED else str(side) for side in (self.left, self.right)]
        return f"window({sides[0]}, {sides[1]})"

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        distance = keys - positions(rows, offset)[:, None, :, None]  # [B|1, 1, n, m]
        return (distance >= -self.left) & (distance <= self.right)

    def validate(self, shape: Shape, device: torch.device) -> None:
        pass


@dataclass(frozen=True, eq=False, slots=True)
class Lengths(Mask):
    """start <= j < end, each an int or one value per sequence [B]."""

    end: int | Tensor
    start: int | Tensor
    key: Hashable | None = field(init=False, repr=False)
    positional: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        numbers = isinstance(self.end, int) and isinstance(self.start, int)
        freeze(self, "key", ("lengths", self.end, self.start) if numbers else None)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        start, end = (
            x.to(rows.device)[:, None, None, None] if isinstance(x, Tensor) else x for x in (self.start, self.end)
        )
        visible = (keys >= start) & (keys < end)  # [m] or [B, 1, 1, m]
        visible = visible if visible.dim() == 4 else visible[None, None, None]
        return visible.expand(-1, 1, rows.numel(), -1)

    def validate(self, shape: Shape, device: torch.device) -> None:
        for name, value in (("end", self.end), ("start", self.start)):
            if isinstance(value, Tensor):
                check_device(f"lengths({name}=...)", value, device)
                if not broadcasts(value.shape[0], shape[0]):
                    raise ValueError(
                        f"mask: lengths({name}=...) holds {value.shape[0]} values for a batch of {shape[0]}: "
                        "pass one per sequence, or an int"
                    )


@dataclass(frozen=True, eq=False, slots=True)
class Documents(Mask):
    """ids[b, i'] == ids[b, j]. A position outside the ids belongs to no document and sees nobody."""

    ids: Tensor  # [B|1, L], integers
    key: Hashable | None = field(repr=False, default=None)
    positional: bool = field(init=False, repr=False, default=True)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        ids, place = self.ids.to(rows.device), positions(rows, offset)
        length, n = ids.shape[1], rows.numel()
        batch = max(ids.shape[0], place.shape[0])
        if length == 0:
            return torch.zeros(1, 1, n, keys.numel(), dtype=torch.bool, device=rows.device)
        inside = (place >= 0) & (place < length)
        mine = ids.expand(batch, -1).gather(1, place.clamp(0, length - 1).expand(batch, n))  # [B|1, n]
        return ((mine[:, :, None] == ids[:, None, keys]) & inside[:, :, None])[:, None]

    def validate(self, shape: Shape, device: torch.device) -> None:
        check_device("documents", self.ids, device, owned=self.key is not None)
        batch, length = self.ids.shape
        if not broadcasts(batch, shape[0]):
            raise ValueError(f"mask: documents has ids for {batch} sequences, q for {shape[0]}: pass [L] or [B, L]")
        if length < shape[3]:
            raise ValueError(f"mask: documents covers {length} positions, k has {shape[3]}: give every key a document")


@dataclass(frozen=True, eq=False, slots=True)
class GlobalTokens(Mask):
    """i' in idx or j in idx. Negative entries of a tensor are padding and match nobody."""

    idx: Tensor  # [B|1, K], integers
    key: Hashable | None = field(repr=False, default=None)
    positional: bool = field(init=False, repr=False, default=True)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        idx = self.idx.to(rows.device)
        queries = _member(positions(rows, offset), idx)  # [B|1, n]
        return (queries[:, :, None] | _member(keys[None], idx)[:, None, :])[:, None]

    def validate(self, shape: Shape, device: torch.device) -> None:
        check_device("global_tokens", self.idx, device, owned=self.key is not None)
        if not broadcasts(self.idx.shape[0], shape[0]):
            raise ValueError(
                f"mask: global_tokens has rows for {self.idx.shape[0]} sequences, q for {shape[0]}: pass [K] or [B, K]"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Dilated(Mask):
    """|i' - j| <= w d and d divides i' - j."""

    w: int
    d: int
    key: Hashable | None = field(init=False, repr=False)
    positional: bool = field(init=False, repr=False, default=True)

    def __post_init__(self) -> None:
        freeze(self, "key", ("dilated", self.w, self.d))

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        distance = keys - positions(rows, offset)[:, None, :, None]  # [B|1, 1, n, m]
        return (distance.abs() <= self.w * self.d) & (distance.remainder(self.d) == 0)

    def validate(self, shape: Shape, device: torch.device) -> None:
        pass


@dataclass(frozen=True, eq=False, slots=True)
class Blocks(Mask):
    """map[i' // size, j // size]. A query outside the map sees nobody."""

    map: Tensor  # [B|1, H|1, P, Q] bool
    size: int
    key: Hashable | None = field(repr=False, default=None)
    positional: bool = field(init=False, repr=False, default=True)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        table = self.map.to(rows.device)[..., keys // self.size]  # [B|1, H|1, P, m]
        row = positions(rows, offset).div(self.size, rounding_mode="floor")  # [B|1, n]
        inside = (row >= 0) & (row < table.shape[2])
        if table.shape[2] == 0:
            return table.new_zeros(1, 1, rows.numel(), keys.numel())
        row = row.clamp(0, table.shape[2] - 1)
        if row.shape[0] == 1:
            chosen = table[:, :, row[0]]
        else:
            sequence = torch.arange(row.shape[0], device=rows.device)[:, None]
            # Advanced indices around a slice come first: [B, n, H|1, m]
            chosen = table.expand(row.shape[0], -1, -1, -1)[sequence, :, row].transpose(1, 2)
        return chosen & inside[:, None, :, None]

    def validate(self, shape: Shape, device: torch.device) -> None:
        check_device("blocks", self.map, device, owned=self.key is not None)
        for name, got, want in (("B", self.map.shape[0], shape[0]), ("H", self.map.shape[1], shape[1])):
            if not broadcasts(got, want):
                raise ValueError(f"mask: blocks has a map for {name} = {got}, q has {name} = {want}: pass 1 or {want}")
        if self.map.shape[3] * self.size < shape[3]:
            raise ValueError(
                f"mask: blocks covers {self.map.shape[3]} blocks of {self.size} keys, k has {shape[3]} keys: "
                "give every key a block"
            )


def causal() -> Mask:
    """j <= i'."""
    return _CAUSAL


def window(left: int | None, right: int | None = 0) -> Mask:
    """i' - left <= j <= i' + right. A query sees itself as well: `window(255)` is 256 keys. None lifts a side."""
    return Window(*(UNBOUNDED if x is None else _number("window", n, x) for n, x in (("left", left), ("right", right))))


def prefix(n: int | Tensor) -> Mask:
    """j < n; a prefix language model's mask is `causal() | prefix(n)`."""
    return Lengths(_length("prefix", "n", n), 0)


def lengths(end: int | Tensor | Sequence[int], start: int | Tensor | Sequence[int] = 0) -> Mask:
    """start <= j < end, one value per sequence (tensor [B]) or one for all."""
    return Lengths(_length("lengths", "end", end), _length("lengths", "start", start))


def documents(ids: Tensor | Sequence[int] | None = None, *, cu_seqlens: Tensor | Sequence[int] | None = None) -> Mask:
    """Same document only: ids [L] or [B, L] per position, or cu_seqlens [S + 1], the packed sequences' boundaries."""
    if (ids is None) == (cu_seqlens is None):
        raise ValueError("documents: pass exactly one of ids and cu_seqlens")
    if ids is not None:
        table, key = _integers("documents", "ids", ids)
        return Documents(table if table.dim() == 2 else table[None], key)
    bounds, key = _integers("documents", "cu_seqlens", cu_seqlens)
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens or ())
    if bounds.dim() != 1 or not ends or ends[0] != 0 or any(x > y for x, y in pairwise(ends)):
        raise ValueError("documents: cu_seqlens must be 1-D, start at 0 and never decrease, e.g. [0, 5, 9]")
    place = torch.arange(ends[-1], device=bounds.device)
    return Documents(torch.searchsorted(bounds, place, right=True)[None], key and ("cu_seqlens", key))


def global_tokens(idx: Tensor | Sequence[int]) -> Mask:
    """i' in idx or j in idx: tokens that see and are seen by all. idx [K], or [B, K] padded with -1."""
    table, key = _integers("global_tokens", "idx", idx)
    if not isinstance(idx, Tensor) and (least := min(_flat(idx), default=0)) < 0:
        raise ValueError(f"global_tokens: idx holds {least}: positions count from 0, not from the end")
    return GlobalTokens(table if table.dim() == 2 else table[None], key)


def dilated(w: int, d: int) -> Mask:
    """|i' - j| <= w d and d divides i' - j: w keys to each side, d apart, and the query's own."""
    w, d = _number("dilated", "w", w), _number("dilated", "d", d, least=1)
    return Window(w, w) if d == 1 else Dilated(min(w, UNBOUNDED // d), d)


def blocks(map: Tensor | Sequence[Sequence[bool]], size: int) -> Mask:
    """Query block i' // size may see key block j // size where map says so; map [P, Q], [H, P, Q] or [B, H, P, Q]."""
    size = _number("blocks", "size", size, least=1)
    if isinstance(map, Tensor):
        key, table = None, map
        if table.dtype != torch.bool:
            raise TypeError(f"blocks: map must be a bool tensor, got {table.dtype}: convert it with .bool()")
    else:
        table = torch.tensor(map, dtype=torch.bool, device="cpu")
        key = ("blocks", *_value(map, table), size)
    if not 2 <= table.dim() <= 4:
        raise ValueError(f"blocks: map must be [P, Q], [H, P, Q] or [B, H, P, Q], got shape {tuple(table.shape)}")
    return Blocks(table[(None,) * (4 - table.dim())], size, key)


_CAUSAL = Window(UNBOUNDED, 0)


def _number(where: str, name: str, value: object, least: int = 0) -> int:
    try:
        # A compiler's symbolic number is an int, and stays symbolic.
        number = value if isinstance(value, int) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{where}: {name} must be an int, got {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{where}: {name} must be at least {least}, got {number}")
    return min(number, UNBOUNDED)


def _length(where: str, name: str, value: int | Tensor | Sequence[int]) -> int | Tensor:
    if isinstance(value, Tensor | list | tuple):
        table, _ = _integers(where, name, value)
        if table.dim() != 1:
            raise ValueError(f"{where}: {name} must be an int or one value per sequence [B], got {tuple(table.shape)}")
        return table
    return _number(where, name, value)


def _integers(where: str, name: str, value: Tensor | Sequence[int] | None) -> tuple[Tensor, Hashable | None]:
    """A tensor as given, or a private one made of Python numbers together with the key that caching needs."""
    owned = not isinstance(value, Tensor)
    table = value if isinstance(value, Tensor) else torch.tensor(() if value is None else value, device="cpu")
    if table.numel() == 0 and owned:
        table = table.to(torch.int64)
    if table.dtype == torch.bool or table.is_floating_point() or table.is_complex():
        raise TypeError(f"{where}: {name} must hold integers, got {table.dtype}: convert it with .long()")
    if table.dim() not in (1, 2):
        raise ValueError(f"{where}: {name} must have 1 or 2 dims, got shape {tuple(table.shape)}")
    return table, (where, *_value(value, table)) if owned else None


def _value(given: Any, table: Tensor) -> tuple[Hashable, ...]:
    """What the table is equal by, for keys. Bytes hash once, and fast; a compiler knows the Python numbers only."""
    if torch.compiler.is_compiling():
        return tuple(table.shape), tuple(_flat(given))
    return tuple(table.shape), table.numpy().tobytes()


def _flat(value: Any) -> list[int]:
    """The numbers of nested sequences."""
    return [x for each in value for x in _flat(each)] if isinstance(value, Sequence) else [value]


def _member(place: Tensor, idx: Tensor) -> Tensor:
    """Which positions [B|1, n] are among the sequence's idx [B|1, K]: [B|1, n]."""
    found = torch.isin(place, idx) if idx.shape[0] == 1 else (place[:, :, None] == idx[:, None, :]).any(-1)
    return found & (place >= 0)
