"""How blockwise cuts a problem: tiles, the operands' parts that belong to each, and the mask's answer for it.

A tile is a block of query rows with every key those rows may see, for as many heads as a memory budget allows. Keys
are left out only where the mask's structure tells which, without asking the device. No arithmetic on scores here.

Letters: B batch, H query heads, G key/value heads, N queries, M keys; b, h, g, n, m their extents in a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from poise.mask import UNBOUNDED, And, Dilated, Lengths, Lowered, Mask, Or, Window
from poise.problem import Problem
from poise.score import Alibi, Bias, Dense, Relative

# Scores per tile. On a CPU a matrix of them stays in a core's cache; elsewhere a tile must be large to pay for its
# launch. It must not depend on the number of threads, for neither may the result.
_CPU_BUDGET = 1 << 19
_DEVICE_BUDGET = 1 << 25
# Rows per tile: fewer waste the products' speed, more waste work at the edge of a band.
_FEWEST_ROWS = 32
_MOST_ROWS = 256


class Tile(NamedTuple):
    """Which part of the problem: batch elements, query heads, their key/value heads, query rows, keys."""

    batch: slice
    heads: slice
    groups: slice
    rows: slice
    keys: slice
    all_heads: int  # H of the call


# Which slices of a tile cut which dims of an operand. A dim of size 1 that broadcasts is left whole.
_AXES: dict[str, tuple[str | None, ...]] = {
    "q": ("batch", "heads", "rows", None),
    "k": ("batch", "groups", "keys", None),
    "v": ("batch", "groups", "keys", None),
    "scale": ("batch", "heads", "rows"),
    "sink": ("heads",),
    "tensor": ("batch", "heads", "rows", "keys"),
    "slopes": ("heads",),
    "table": ("heads", None),
}


def tiles(problem: Problem, whole: bool = False) -> Iterator[tuple[Tile, Tensor | None]]:
    """Every tile, and the mask's answer for it [b|1, h|1, n, m]. `whole`: with all batch elements and heads at once."""
    batch, heads, queries, keys = problem.shape
    groups = problem.k.shape[1]
    ratio = heads // max(groups, 1)
    device, mask, offset = problem.q.device, problem.mask, problem.offset
    budget = _CPU_BUDGET if device.type == "cpu" else _DEVICE_BUDGET

    def span(first: int, last: int) -> tuple[int, int]:
        if isinstance(offset, int):
            return reach(mask, first + offset, last + offset, keys)
        return reach(mask, -UNBOUNDED, UNBOUNDED, keys)  # reading the offsets would wait for the device

    # The widest row of a band is the first, the last or, if the band is cut off at both ends, one in the middle.
    spans = [span(row, row) for row in (0, queries // 2, queries - 1)]
    fitting = budget // max(ratio * max(high - low for low, high in spans), 1)
    step = max(1, min(max(fitting, _FEWEST_ROWS // max(ratio, 1)), _MOST_ROWS, queries))
    for start in range(0, max(queries, 1), step):
        rows = slice(start, min(start + step, queries))
        seen = slice(*span(rows.start, rows.stop - 1))
        visible = None
        if mask is not None:
            visible = mask.evaluate(indices(rows, device), indices(seen, device), offset, problem.shape)
        fitting = max(1, budget // max((rows.stop - rows.start) * (seen.stop - seen.start) * ratio, 1))
        b, g = (batch, groups) if whole else (max(1, fitting // max(groups, 1)), min(groups, fitting))
        for b0 in range(0, batch, b) if b else [0]:
            for g0 in range(0, groups, g) if g else [0]:
                of_batch, of_groups = slice(b0, min(b0 + b, batch)), slice(g0, min(g0 + g, groups))
                of_heads = slice(of_groups.start * ratio, of_groups.stop * ratio)
                tile = Tile(of_batch, of_heads, of_groups, rows, seen, heads)
                yield tile, None if visible is None else _sliced(visible, (of_batch, of_heads))


def reach(mask: Mask | None, first: int, last: int, keys: int) -> tuple[int, int]:
    """An interval that holds every key the positions first .. last may see, as far as the mask's structure tells."""
    low, high = 0, keys
    if isinstance(mask, Window):
        low, high = first - mask.left, last + mask.right + 1
    elif isinstance(mask, Dilated):
        low, high = first - mask.w * mask.d, last + mask.w * mask.d + 1
    elif isinstance(mask, Lengths):
        low = mask.start if isinstance(mask.start, int) else 0
        high = mask.end if isinstance(mask.end, int) else keys
    elif isinstance(mask, And):
        lows, highs = zip(*(reach(each, first, last, keys) for each in mask.masks), strict=True)
        low, high = max(lows), min(highs)
    elif isinstance(mask, Or):
        some = [(a, b) for a, b in (reach(each, first, last, keys) for each in mask.masks) if a < b]
        low, high = (min(a for a, _ in some), max(b for _, b in some)) if some else (0, 0)
    low = min(max(low, 0), keys)
    return low, min(max(high, low), keys)


def kinds(problem: Problem) -> list[str]:
    """What each operand is, by its key in _AXES."""
    kinds = ["q", "k", "v"]
    kinds += ["scale"] if isinstance(problem.scale, Tensor) else []
    kinds += ["sink"] if problem.sink is not None else []
    return kinds + [_field(term) for term in problem.bias]


def operands(problem: Problem) -> list[Tensor]:
    """Every tensor with a derivative, in the order of kinds."""
    tensors = [problem.q, problem.k, problem.v]
    tensors += [problem.scale] if isinstance(problem.scale, Tensor) else []
    tensors += [problem.sink] if problem.sink is not None else []
    return tensors + [getattr(term, _field(term)) for term in problem.bias]


def with_operands(problem: Problem, tensors: Sequence[Tensor]) -> Problem:
    """The problem with other operands, in the same order."""
    q, k, v, *rest = tensors
    scale = rest.pop(0) if isinstance(problem.scale, Tensor) else problem.scale
    sink = rest.pop(0) if problem.sink is not None else None
    bias = tuple(_rebuilt(term, x) for term, x in zip(problem.bias, rest, strict=True))
    return replace(problem, q=q, k=k, v=v, scale=scale, sink=sink, bias=bias)


_NOTHING = torch.empty(1, 1, 1, 1, device="meta")


def hollow(problem: Problem) -> Problem:
    """The problem without its operands: what autograd's context may keep beside the saved tensors."""
    return with_operands(problem, [_NOTHING] * len(kinds(problem)))


def _rebuilt(term: Bias, tensor: Tensor) -> Bias:
    return Dense(tensor) if isinstance(term, Dense) else Alibi(tensor) if isinstance(term, Alibi) else Relative(tensor)


def _field(term: Bias) -> str:
    return "tensor" if isinstance(term, Dense) else "slopes" if isinstance(term, Alibi) else "table"


def part_of(problem: Problem, tile: Tile, tensors: Sequence[Tensor]) -> Problem:
    """The tile's part of the problem, in the dtype of q among `tensors`."""
    dtype = tensors[0].dtype
    return of_tile(
        problem, tile, [cut(kind, x, tile).to(dtype) for kind, x in zip(kinds(problem), tensors, strict=True)]
    )


def of_tile(problem: Problem, tile: Tile, leaves: Sequence[Tensor]) -> Problem:
    offset = problem.offset if isinstance(problem.offset, int) else problem.offset[tile.batch]
    return replace(with_operands(problem, leaves), offset=offset)


def cut(kind: str, tensor: Tensor, tile: Tile) -> Tensor:
    """The view of an operand that a tile reads."""
    parts = [slice(None) if axis is None else getattr(tile, axis) for axis in _AXES[kind]]
    return tensor[tuple(parts)] if kind in ("q", "k", "v") else _sliced(tensor, parts)


def _sliced(tensor: Tensor, slices: Sequence[slice]) -> Tensor:
    """The tensor cut along its leading dims, those of size 1 left whole: they broadcast."""
    return tensor[tuple(slice(None) if size == 1 else part for part, size in zip(slices, tensor.shape, strict=False))]


def indices(part: slice, device: torch.device) -> Tensor:
    return torch.arange(part.start, part.stop, device=device)


def upcast(problem: Problem) -> list[Tensor]:
    """The operands in the computing dtype, converted once; dense biases may be large and are converted per tile."""
    dtype, pairs = compute_dtype(problem), zip(kinds(problem), operands(problem), strict=True)
    return [x if kind == "tensor" else x.to(dtype) for kind, x in pairs]


def compute_dtype(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.q.dtype is torch.float64 else torch.float32


def unwrapped(problem: Problem) -> Problem:
    if not isinstance(problem.mask, Lowered):
        return problem
    problem.mask.check_offset(problem.offset)
    return replace(problem, mask=problem.mask.mask)
