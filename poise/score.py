"""What is added to the scores: dense tensors, ALiBi and relative tables, and their sums.

A bias answers `evaluate(rows, keys, offset, shape, dtype)`, the dense values for some rows and keys, differentiable in
whatever tensors it holds. `alibi` and `relative` stand for an [N, M] matrix in O(H) and O(R) memory; kernels read them
in that form (see plan.py). Query row i sits at i' = i + offset; a dense tensor is indexed by the raw i.

No scale, softcap or sink here: those act on the scores one by one and are plain arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from poise.algebra import broadcasts
from poise.mask import Offset, Shape, positions


class Bias(ABC):
    """Something added to the scores. Biases add with `+`, also to tensors."""

    __slots__ = ()
    positional: bool  # whether i' matters, so that q_offset must be known when N != M

    @abstractmethod
    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The dense values for some rows and keys (int64 [n], [m]): [B|1, H|1, n, m] in `dtype`."""

    @abstractmethod
    def validate(self, shape: Shape, device: torch.device) -> None:
        """Raises ValueError when this bias can't belong to a call of this shape and device."""

    def __add__(self, other: Bias | Tensor) -> Bias:
        return Sum((*terms(self), *terms(other)))

    def __radd__(self, other: Bias | Tensor) -> Bias:
        return Sum((*terms(other), *terms(self)))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached by `tensor + bias`: without it torch raises before Python tries __radd__.
        if getattr(func, "__name__", "") in ("add", "__add__", "__radd__") and not kwargs and len(args) == 2:
            # `a + b` with a tensor on the left arrives as add(a, b); reflected calls arrive as __radd__(b, a).
            first, second = args if func.__name__ != "__radd__" else args[::-1]
            return Sum((*terms(first), *terms(second)))
        return NotImplemented


@dataclass(frozen=True, eq=False, slots=True)
class Dense(Bias):
    """A tensor as given, indexed by the raw query row i."""

    tensor: Tensor  # [B|1, H|1, N|1, M|1]
    positional: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", self.tensor[(None,) * (4 - self.tensor.dim())])

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape, dtype: torch.dtype) -> Tensor:
        part = self.tensor
        part = part.index_select(2, rows) if part.shape[2] != 1 else part.expand(-1, -1, rows.numel(), -1)
        part = part.index_select(3, keys) if part.shape[3] != 1 else part.expand(-1, -1, -1, keys.numel())
        return part.to(dtype)

    def validate(self, shape: Shape, device: torch.device) -> None:
        _check_device("the tensor", self.tensor, device)
        if not all(broadcasts(got, want) for got, want in zip(self.tensor.shape, shape, strict=True)):
            raise ValueError(
                f"bias: a tensor of shape {tuple(self.tensor.shape)} does not broadcast to [B, H, N, M] = {shape}: "
                "each dim must be 1 or match, aligned at the right"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Alibi(Bias):
    """-slope |i' - j|, one slope per head."""

    slopes: Tensor  # [H]
    positional: bool = field(init=False, repr=False, default=True)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape, dtype: torch.dtype) -> Tensor:
        distance = (keys - positions(rows, offset)[:, None, :, None]).abs()  # [B|1, 1, n, m]
        return -self.slopes.to(dtype)[:, None, None] * distance.to(dtype)

    def validate(self, shape: Shape, device: torch.device) -> None:
        _check_device("alibi", self.slopes, device)
        if self.slopes.shape[0] != shape[1]:
            raise ValueError(
                f"bias: alibi has {self.slopes.shape[0]} slopes, q has {shape[1]} heads: pass one per head"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Relative(Bias):
    """table[h, clamp(j - i', -R, R) + R]."""

    table: Tensor  # [H|1, 2R + 1]
    positional: bool = field(init=False, repr=False, default=True)

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape, dtype: torch.dtype) -> Tensor:
        radius = self.table.shape[1] // 2
        distance = keys - positions(rows, offset)[:, :, None]  # [B|1, n, m]
        index = distance.clamp(-radius, radius) + radius
        return self.table.to(dtype)[:, index].transpose(0, 1)  # [B|1, H|1, n, m]

    def validate(self, shape: Shape, device: torch.device) -> None:
        _check_device("relative", self.table, device)
        if not broadcasts(self.table.shape[0], shape[1]):
            raise ValueError(
                f"bias: relative has a table of {self.table.shape[0]} rows, q has {shape[1]} heads: pass one row per "
                "head, or a single one"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Sum(Bias):
    """Several biases, added."""

    parts: tuple[Bias, ...]
    positional: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positional", any(part.positional for part in self.parts))

    def evaluate(self, rows: Tensor, keys: Tensor, offset: Offset, shape: Shape, dtype: torch.dtype) -> Tensor:
        first, *others = (part.evaluate(rows, keys, offset, shape, dtype) for part in self.parts)
        for other in others:
            first = first + other
        return first

    def validate(self, shape: Shape, device: torch.device) -> None:
        for part in self.parts:
            part.validate(shape, device)


def terms(bias: Bias | Tensor | None) -> tuple[Bias, ...]:
    """The bias as a flat tuple of Dense, Alibi and Relative terms; () for None."""
    if bias is None:
        return ()
    if isinstance(bias, Sum):
        return bias.parts
    if isinstance(bias, Bias):
        return (bias,)
    if isinstance(bias, Tensor):
        if not bias.is_floating_point():
            way_out = "Pass it as mask= (True = may attend)" if bias.dtype == torch.bool else "Convert it with .float()"
            raise TypeError(
                f"bias must be a floating-point tensor; got {str(bias.dtype).removeprefix('torch.')}. {way_out}"
            )
        if bias.dim() > 4:
            raise ValueError(f"bias must broadcast to [B, H, N, M], at most 4 dims; got shape {tuple(bias.shape)}")
        return (Dense(bias),)
    raise TypeError(
        "bias must be a tensor, poise.alibi(...), poise.relative(...), a sum of those, or None; "
        f"got {type(bias).__name__}"
    )


def alibi(slopes: Tensor | Sequence[float]) -> Bias:
    """-slope |i' - j| per head; `alibi_slopes(heads)` gives the published slopes."""
    table = _floats("alibi", "slopes", slopes)
    if table.dim() != 1:
        raise ValueError(f"alibi: slopes must be 1-D, one per head, got shape {tuple(table.shape)}")
    return Alibi(table)


def relative(table: Tensor | Sequence[float]) -> Bias:
    """A learned value per clamped distance j - i': table [H|1, 2R + 1] or [2R + 1], entry R for the query's own key."""
    values = _floats("relative", "table", table)
    if values.dim() == 1:
        values = values[None]
    if values.dim() != 2 or values.shape[1] % 2 == 0:
        raise ValueError(
            f"relative: table must be [H, 2R + 1] or [2R + 1], an odd number of distances, got {tuple(values.shape)}"
        )
    return Relative(values)


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of Press et al. (2022): 2^(-8 h / H), interleaved with those of 2H' when H is no power of two."""
    if heads < 1:
        raise ValueError(f"alibi_slopes: heads must be at least 1, got {heads}")
    closest = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / closest) for h in range(closest)]
    slopes += [2.0 ** (-4.0 * (2 * h + 1) / closest) for h in range(heads - closest)]
    return torch.tensor(slopes)


def _floats(where: str, name: str, value: Tensor | Sequence[float]) -> Tensor:
    table = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
    if not table.is_floating_point():
        raise TypeError(f"{where}: {name} must hold floats, got {table.dtype}: convert it with .float()")
    return table


def _check_device(what: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"bias: {what} is on {tensor.device}, q on {device}: move it there")
