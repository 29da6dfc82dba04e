"""What every mask is, and how masks join: the base class, `&`, `|`, `~`, dense tensors, and lowered masks.

A mask answers one question, `evaluate(rows, keys, offset, shape)`: which of these keys may each of these query rows
attend to? That dense answer is the definition; `plan.py` turns the same objects into plain data for kernels and must
never disagree with it. Query row i sits at key position i' = i + offset.

The masks with names, and how users build them, are in mask.py; no scores, no kernels and no lowering here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

UNBOUNDED = 1 << 40  # "no limit" on one side of a window; the kernels' kUnbounded

Shape = tuple[int, int, int, int]  # B, H, N, M
Offset = int | Tensor  # i' = i + offset: an int, or int64 [B]


class Mask(ABC):
    """A set of visible (query, key) pairs; built with `causal()`, `window()`, ..., and never subclassed elsewhere."""

    __slots__ = ()
    key: Hashable | None  # the value this mask compares and hashes by; None when it holds a caller's tensor
    positional: bool  # whether i' matters, so that q_offset must be known when N != M

    @abstractmethod
    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        """The dense answer for some rows and keys (int64 [n], [m]): bool [B|1, H|1, n, m], maybe an expanded view."""

    @abstractmethod
    def validate(self, shape: Shape, device: torch.device) -> None:
        """Raises ValueError when this mask can't belong to a call of this shape and device."""

    def lower(
        self, q_len: int, k_len: int, batch: int = 1, heads: int = 1, q_offset: int | Tensor | str | None = None
    ) -> Lowered:
        """Lowers once what would otherwise be lowered per call; `mask=` accepts the result.

        A mask lowered for batch = 1 (heads = 1) serves any batch (any number of heads). Tensors inside the mask are
        read now: later changes to them are not seen.
        """
        offset: Offset
        if q_offset is None:
            if self.positional and q_len != k_len:
                raise ValueError(
                    f"q_offset: this mask depends on positions, and q_len = {q_len} differs from k_len = {k_len}: "
                    'pass q_offset="start" (0) or "end" (k_len - q_len), an int, or a tensor [B]'
                )
            offset = 0
        elif isinstance(q_offset, str):
            if q_offset not in ("start", "end"):
                raise ValueError(f'q_offset: got {q_offset!r}: pass "start", "end", an int, or a tensor [B]')
            offset = 0 if q_offset == "start" else k_len - q_len
        else:
            offset = q_offset
        if isinstance(offset, Tensor) and offset.shape != (batch,):
            raise ValueError(
                f"q_offset: got shape {tuple(offset.shape)} for a batch of {batch}: pass one per sequence, [B]"
            )
        if _lowering is None:
            raise RuntimeError("mask.lower() needs poise.plan to be imported, as `import poise` does")
        shape = (batch, heads, q_len, k_len)
        self.validate(shape, torch.device("cpu"))
        return Lowered(self, shape, offset, _lowering(self, shape, offset))

    def __and__(self, other: Mask | Tensor) -> Mask:
        return _join(And, self, other)

    def __rand__(self, other: Mask | Tensor) -> Mask:
        return _join(And, other, self)

    def __or__(self, other: Mask | Tensor) -> Mask:
        return _join(Or, self, other)

    def __ror__(self, other: Mask | Tensor) -> Mask:
        return _join(Or, other, self)

    def __invert__(self) -> Mask:
        return self.mask if isinstance(self, Not) else Not(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mask) and self.key is not None and self.key == other.key)

    def __hash__(self) -> int:
        if self.key is None:
            raise TypeError(f"{type(self).__name__} holds a tensor and can't be hashed; build it from Python numbers")
        return hash(self.key)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: join masks with &, | and ~, not with and, or, not")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached by `tensor & mask`: without it torch raises before Python tries __rand__.
        name = getattr(func, "__name__", "")
        if name not in ("__and__", "__or__"):
            return NotImplemented
        return _join(And if name == "__and__" else Or, *args)


_lowering: Callable[[Mask, Shape, Offset], object] | None = None


def install_lowering(function: Callable[[Mask, Shape, Offset], object]) -> None:
    """Called once by plan.py, which sits above this module and so can't be imported from it."""
    global _lowering
    _lowering = function


def as_mask(mask: Mask | Tensor) -> Mask:
    """A mask as given, or a bool tensor wrapped by `keep`."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return keep(mask)
    raise TypeError(f"mask: expected a mask object or a bool tensor, got {type(mask).__name__}")


def _join(kind: Callable[[tuple[Mask, ...]], And | Or], *operands: Mask | Tensor) -> Mask:
    flat: list[Mask] = []
    for operand in map(as_mask, operands):
        flat.extend(operand.masks if type(operand) is kind and isinstance(operand, And | Or) else (operand,))
    return kind(tuple(flat))


def positions(rows: Tensor, offset: Offset) -> Tensor:
    """i' of each row: [B|1, n]."""
    if isinstance(offset, Tensor):
        return rows + offset.to(rows.device)[:, None]
    return (rows + offset)[None]


def freeze(mask: Mask, name: str, value: object) -> None:
    """Sets a derived field of a frozen mask while it is being built."""
    object.__setattr__(mask, name, value)


@dataclass(frozen=True, eq=False, slots=True)
class Keep(Mask):
    """A dense bool tensor, True = may attend, indexed by the raw query row i."""

    tensor: Tensor  # [B|1, H|1, N|1, M|1] bool
    key: Hashable | None = field(init=False, repr=False, default=None)
    positional: bool = field(init=False, repr=False, default=False)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        part = self.tensor.to(rows.device)
        part = part.index_select(2, rows) if part.shape[2] != 1 else part.expand(-1, -1, rows.numel(), -1)
        return part.index_select(3, keys) if part.shape[3] != 1 else part.expand(-1, -1, -1, keys.numel())

    def validate(self, shape: Shape, device: torch.device) -> None:
        check_device("the tensor", self.tensor, device)
        if not all(broadcasts(got, want) for got, want in zip(self.tensor.shape, shape, strict=True)):
            raise ValueError(
                f"mask: a bool tensor of shape {tuple(self.tensor.shape)} does not broadcast to "
                f"[B, H, N, M] = {shape}: each dim must be 1 or match, aligned at the right"
            )


@dataclass(frozen=True, eq=False, slots=True)
class _Joined(Mask, ABC):
    masks: tuple[Mask, ...]
    key: Hashable | None = field(init=False, repr=False)
    positional: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = tuple(mask.key for mask in self.masks)
        freeze(self, "key", None if None in keys else (type(self).__name__, *keys))
        freeze(self, "positional", any(mask.positional for mask in self.masks))

    def _evaluate_each(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> list[Tensor]:
        return [mask.evaluate(rows, keys, offset, shape) for mask in self.masks]

    def validate(self, shape: Shape, device: torch.device) -> None:
        for mask in self.masks:
            mask.validate(shape, device)


class And(_Joined):
    """Visible where every mask says so."""

    __slots__ = ()

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        return reduce(torch.logical_and, self._evaluate_each(rows, keys, offset, shape))


class Or(_Joined):
    """Visible where any mask says so."""

    __slots__ = ()

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        return reduce(torch.logical_or, self._evaluate_each(rows, keys, offset, shape))


@dataclass(frozen=True, eq=False, slots=True)
class Not(Mask):
    """Visible where the mask says no."""

    mask: Mask
    key: Hashable | None = field(init=False, repr=False)
    positional: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        freeze(self, "key", None if self.mask.key is None else ("Not", self.mask.key))
        freeze(self, "positional", self.mask.positional)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        return ~self.mask.evaluate(rows, keys, offset, shape)

    def validate(self, shape: Shape, device: torch.device) -> None:
        self.mask.validate(shape, device)


@dataclass(frozen=True, eq=False, slots=True)
class Lowered(Mask):
    """A mask with its plan for one shape and offset; made by `mask.lower(...)`."""

    mask: Mask
    shape: Shape
    offset: Offset
    plan: object = field(repr=False)
    key: Hashable | None = field(init=False, repr=False, default=None)
    positional: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        freeze(self, "positional", self.mask.positional)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape) -> Tensor:
        self.check_offset(offset)
        return self.mask.evaluate(rows, keys, offset, shape)

    def validate(self, shape: Shape, device: torch.device) -> None:
        batch, heads, *lengths = self.shape
        if tuple(lengths) != shape[2:] or not (broadcasts(batch, shape[0]) and broadcasts(heads, shape[1])):
            raise ValueError(
                f"mask: lowered for [B, H, N, M] = {self.shape}, used with {shape}: lower it again for these sizes"
            )
        self.mask.validate(shape, device)

    def check_offset(self, offset: Offset) -> None:
        """Raises unless this is the offset the mask was lowered for."""
        if not self.positional or self.offset is offset:
            return
        if isinstance(self.offset, int) and isinstance(offset, int) and self.offset == offset:
            return
        mine, theirs = (torch.as_tensor(x).reshape(-1).cpu() for x in (self.offset, offset))
        if not bool((mine == theirs).all() if 1 in (len(mine), len(theirs)) else torch.equal(mine, theirs)):
            raise ValueError(
                f"mask: lowered for q_offset = {mine.tolist()}, used with {theirs.tolist()}: lower it again"
            )


def keep(tensor: Tensor) -> Mask:
    """A bool tensor that broadcasts to [B, H, N, M], aligned at the right ([M]: the keys); True = may attend."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"keep: expected a bool tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.bool:
        raise TypeError(
            f"keep: expected a bool tensor (True = may attend), got {tensor.dtype}: additive masks go to bias="
        )
    if tensor.dim() > 4:
        raise ValueError(f"keep: a mask broadcasts to [B, H, N, M], at most 4 dims, got shape {tuple(tensor.shape)}")
    return Keep(tensor[(None,) * (4 - tensor.dim())])


def broadcasts(got: int, want: int) -> bool:
    """Whether one size stands for the other. Not by `in (1, want)`: of a symbolic size a compiler denies that."""
    return got == 1 or got == want


def check_device(what: str, tensor: Tensor, device: torch.device, owned: bool = False) -> None:
    """Raises unless a caller's tensor lies where q does; private copies of Python numbers follow q instead."""
    if tensor.device != device and not owned:
        raise ValueError(f"mask: {what} is on {tensor.device}, q on {device}: move it there")
