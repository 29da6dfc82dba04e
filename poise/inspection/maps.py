"""Attention maps: exact for short texts; for long ones pooled into cells, in O(N · block) memory.

Every number is e^(s - lse) of the call's own scores and of the lse that `observe` gave: never a second softmax. Beside
a pooled map comes the same one without the key that takes the most (the sink), each row scaled to 1 again; an exact map
needs none, for it can be made from it.

Letters: H query heads, G key/value heads, N queries, M keys, C cells to a side, h, n, m their extents in a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from poise.kernels.tiles import reach, unwrapped
from poise.kvview import KVView
from poise.problem import prepare

CELLS = 48  # to a side of a pooled map, at most
CELL_BYTES = 20  # in which a cell is written down
_BUDGET = 1 << 20  # probabilities in a block: 4 MB, which stay in a cache while they are reduced
_MOST_ROWS = 128


@dataclass(frozen=True)
class Pooled:
    """Cell (a, b) holds queries a · side[0] ... and keys b · side[1] ...; pairs that are masked count as 0."""

    shape: tuple[int, int]  # N, M
    side: tuple[int, int]  # queries and keys per cell
    mean: Tensor  # [H, C, C] over all pairs of the cell
    largest: Tensor  # [H, C, C]
    place: Tensor  # int64 [H, C, C]: where that is, query · M + key
    sink: Tensor  # int64 [H]: the key left out of the other two
    mean_without: Tensor
    largest_without: Tensor


class Scores:
    """The scores of one sequence, block of rows by block of rows."""

    def __init__(self, q: Tensor, k: Tensor | KVView, lse: Tensor, options: dict[str, Any]) -> None:
        """As an observed call had them; lse [1, H, N] or [H, N] from its statistics."""
        keys = (k, None) if isinstance(k, KVView) else (k, k)
        problem = unwrapped(prepare(q, *keys, **options).dense())
        if problem.shape[0] != 1:
            raise ValueError(f"a map is of one sequence; got a batch of {problem.shape[0]}")
        self._problem = problem
        self.heads, self.queries, self.keys = problem.shape[1:]
        lse = lse.reshape(1, self.heads, self.queries)
        self._lse = lse.masked_fill(lse.isneginf(), 0.0)  # of a row that sees nothing: its weights are 0 all the same
        scale = problem.scale if isinstance(problem.scale, Tensor) else torch.tensor(problem.scale)
        dtype = torch.promote_types(problem.q.dtype, torch.float32)
        self._q = problem.q.to(dtype) * scale.to(dtype).expand(1, self.heads, self.queries)[..., None]
        self._k = problem.k.to(dtype)

    def seen(self, rows: slice) -> slice:
        """The keys that these rows may see, as far as the mask's structure tells."""
        problem = self._problem
        if not isinstance(problem.offset, int):
            return slice(0, self.keys)
        return slice(*reach(problem.mask, rows.start + problem.offset, rows.stop - 1 + problem.offset, self.keys))

    def log_weights(self, heads: slice, rows: Tensor, keys: slice) -> Tensor:
        """s - lse for some heads, any rows (int64 [n]) and a run of keys: [h, n, m], -inf where masked."""
        problem = self._problem
        ratio = self.heads // self._k.shape[1]
        groups = slice(heads.start // ratio, -(-heads.stop // ratio))
        k = self._k[0, groups, keys]
        if heads.stop - heads.start != (groups.stop - groups.start) * ratio:
            k = k.repeat_interleave(ratio, 0)[heads.start - groups.start * ratio :][: heads.stop - heads.start]
        q, lse = self._q[0, heads][:, rows], self._lse[0, heads][:, rows, None]
        shape = (heads.stop - heads.start, rows.numel(), k.shape[1])
        q = q.reshape(k.shape[0], -1, q.shape[-1])  # query heads that share keys are more rows to them
        if problem.softcap is None and not problem.bias:
            out = torch.baddbmm(-lse.reshape(k.shape[0], -1, 1).to(q.dtype), q, k.mT).view(shape)
        else:
            z = (q @ k.mT).view(shape)
            z = z if problem.softcap is None else problem.softcap * torch.tanh(z / problem.softcap)
            for term in problem.bias:
                places = torch.arange(keys.start, keys.stop)
                z = (
                    z
                    + term.evaluate(rows, places, problem.offset, problem.shape, z.dtype).expand(1, self.heads, -1, -1)[
                        0, heads
                    ]
                )
            out = z - lse
        if problem.mask is not None:
            places = torch.arange(keys.start, keys.stop)
            visible = problem.mask.evaluate(rows, places, problem.offset, problem.shape)
            if not visible.all():
                visible = visible if visible.shape[1] == 1 else visible[:, heads]
                out.masked_fill_(~visible[0], -math.inf)
        return out


def exact(scores: Scores) -> Tensor:
    """[H, N, M], for short texts."""
    return scores.log_weights(slice(0, scores.heads), torch.arange(scores.queries), slice(0, scores.keys)).exp_()


def pooled(scores: Scores, sink: Tensor, cells: int = CELLS) -> Pooled:
    """sink: int64 [H], the key to leave out in `mean_without` and `largest_without`."""
    heads, queries, keys = scores.heads, scores.queries, scores.keys
    side = max(1, -(-queries // cells)), max(1, -(-keys // cells))
    down, across = -(-queries // side[0]), -(-keys // side[1])
    made = Pooled(
        shape=(queries, keys),
        side=side,
        mean=torch.zeros(heads, down, across),
        largest=torch.zeros(heads, down, across),
        place=torch.zeros(heads, down, across, dtype=torch.int64),
        sink=sink,
        mean_without=torch.zeros(heads, down, across),
        largest_without=torch.zeros(heads, down, across),
    )
    rows = max(1, min(side[0], _MOST_ROWS, _BUDGET // keys))
    together = max(1, min(heads, _BUDGET // (rows * keys)))
    for first in range(0, heads, together):
        some = slice(first, min(first + together, heads))
        for a in range(down):
            end = min((a + 1) * side[0], queries)
            for start in range(a * side[0], end, rows):
                _add(made, scores, some, a, slice(start, min(start + rows, end)))
    pairs = torch.full((down, 1), float(side[0])), torch.full((1, across), float(side[1]))
    pairs[0][-1], pairs[1][:, -1] = queries - (down - 1) * side[0], keys - (across - 1) * side[1]
    return replace(made, mean=made.mean / (pairs[0] * pairs[1]), mean_without=made.mean_without / (pairs[0] * pairs[1]))


def _add(made: Pooled, scores: Scores, heads: slice, a: int, rows: slice) -> None:
    """Adds a block of rows, which lie in the cells of row a."""
    wide, seen = made.side[1], scores.seen(rows)
    first, last = seen.start // wide, -(-seen.stop // wide)  # cells
    if first >= last:
        return
    keys = slice(first * wide, min(last * wide, scores.keys))
    s = scores.log_weights(heads, torch.arange(rows.start, rows.stop), keys)  # [h, n, m]
    if s.shape[-1] % wide:
        s = torch.nn.functional.pad(s, (0, wide - s.shape[-1] % wide), value=-math.inf)
    s = s.view(*s.shape[:2], last - first, wide)
    top = s.amax(-1)  # [h, n, cells]
    best, row = top.max(1)
    best = best.exp()
    inside = s.gather(1, row[:, None, :, None].expand(-1, 1, -1, wide))[:, 0].argmax(-1)  # [h, cells]
    key = inside + torch.arange(first, last) * wide + keys.start - first * wide
    target = made.largest[heads, a, first:last]
    better = best > target
    target.copy_(torch.where(better, best, target))
    place = made.place[heads, a, first:last]
    place.copy_(torch.where(better, (row + rows.start) * scores.keys + key, place))
    # Without the sink: the cells that hold it are looked at again, the others only scaled.
    sink = made.sink[heads]
    cell, at = (sink // wide - first).clamp(0, last - first - 1), sink - keys.start
    held = (at >= 0) & (at < s.shape[2] * wide)
    hidden = (torch.arange(wide) == (at % wide)[:, None]) & held[:, None]  # [h, m of a cell]
    one = s.gather(2, cell[:, None, None, None].expand(-1, s.shape[1], 1, wide))[:, :, 0]
    one.masked_fill_(hidden[:, None], -math.inf)
    index = cell[:, None, None].expand(-1, s.shape[1], 1)
    top = top.scatter(2, index, one.amax(-1, keepdim=True))
    share = s.exp_().sum(-1)  # [h, n, cells]
    made.mean[heads, a, first:last] += share.sum(1)
    share.scatter_(2, index, one.exp_().sum(-1, keepdim=True))
    whole = share.sum(-1, keepdim=True)
    rest = torch.where(whole > 0, 1 / whole, 0.0)
    made.mean_without[heads, a, first:last] += (share * rest).sum(1)
    without = made.largest_without[heads, a, first:last]
    without.copy_(torch.maximum(without, (top.exp() * rest).amax(1)))
