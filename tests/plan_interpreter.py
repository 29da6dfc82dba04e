"""A plan expanded to the dense mask it stands for, field by field, in the plainest way; and its comparison."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from poise.mask import Mask
from poise.plan import Plan, lower, visible_area


def interpret(plan: Plan, shape: tuple[int, int, int, int], offset: int | Tensor) -> np.ndarray:
    """All fields intersected, field by field and tile by tile: bool [B, H, N, M]."""
    batch, heads, rows, keys = shape
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * batch
    seen = np.ones(shape, bool)
    j = np.arange(keys)
    for b in range(batch):
        place = np.arange(rows)[:, None] + offsets[b]
        seen[b] &= (place - plan.left <= j) & (j <= place + plan.right)
        if plan.start is not None:
            seen[b] &= plan.start[b].item() <= j
        if plan.end is not None:
            seen[b] &= j < plan.end[b].item()
    if plan.rows is not None:
        lo, hi = plan.rows.expand(batch, heads, rows, 2).numpy()[..., None, :].transpose(4, 0, 1, 2, 3)
        seen &= (lo <= j) & (j < hi)
    if plan.tile_ptr is not None:
        seen &= interpret_tiles(plan, shape)
    for mask in plan.masks:
        assert mask.shape == shape
        seen &= mask.numpy()
    return seen


def interpret_tiles(plan: Plan, shape: tuple[int, int, int, int]) -> np.ndarray:
    batch, heads, rows, keys = shape
    assert plan.tile_ptr is not None
    assert plan.tile_runs is not None
    assert plan.patterns is not None
    down, across = -(-rows // 64), -(-keys // 64)
    runs, ptr = plan.tile_runs.tolist(), plan.tile_ptr.expand(batch, heads, down + 1)
    bits = plan.patterns.numpy().view(np.uint64)
    lane = np.arange(64, dtype=np.uint64)
    seen = np.zeros((batch, heads, down * 64, across * 64), bool)
    for b, h, t in np.ndindex(batch, heads, down):
        end = 0
        for first, count, pattern in runs[ptr[b, h, t] : ptr[b, h, t + 1]]:
            assert first >= end, "runs ascend and don't overlap"
            assert count >= 1
            assert pattern == -1 or count == 1
            end = first + count
            assert end <= across
            tile = np.ones((64, count * 64), bool) if pattern < 0 else ((bits[pattern][None] >> lane[:, None]) & 1) != 0
            seen[b, h, t * 64 : t * 64 + 64, first * 64 : end * 64] = tile
    return seen[:, :, :rows, :keys]


def dense(mask: Mask, shape: tuple[int, int, int, int], offset: int | Tensor) -> np.ndarray:
    return mask.evaluate(torch.arange(shape[2]), torch.arange(shape[3]), offset, shape).expand(shape).numpy()


def assert_same(mask: Mask, shape: tuple[int, int, int, int], offset: int | Tensor = 0) -> Plan:
    mask.validate(shape, torch.device("cpu"))
    plan = lower(mask, (), shape, offset)
    seen, want = interpret(plan, shape, offset), dense(mask, shape, offset)
    assert np.array_equal(seen, want)
    assert visible_area(plan, shape, offset) >= want.sum()
    return plan


def random_bits(seed: int, shape: tuple[int, ...], share: float) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
