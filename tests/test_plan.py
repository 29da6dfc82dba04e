"""The lowered plan never disagrees with the mask objects: plans are expanded by a plain interpreter and compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poise import plan as plan_module
from poise.mask import (
    UNBOUNDED,
    Lengths,
    Mask,
    blocks,
    causal,
    dilated,
    documents,
    global_tokens,
    keep,
    lengths,
    prefix,
    window,
)
from poise.plan import Plan, lower, visible_area
from poise.score import Bias, alibi, relative, terms

SIZES = (0, 1, 2, 15, 17, 31, 63, 64, 65, 127, 128, 130, 191, 257)


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


@st.composite
def leaves(draw: st.DrawFn, shape: tuple[int, int, int, int]) -> Mask:
    batch, heads, rows, keys = shape
    some = st.integers(0, 2 * max(keys, 1))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    each = draw(st.sampled_from([1, batch]))

    def number(*size: int, high: int) -> Tensor:
        return torch.randint(0, max(high, 1), size, generator=generator)

    kind = draw(
        st.sampled_from("causal window prefix lengths packed ids cu global global-ragged dilated blocks keep".split())
    )
    if kind == "causal":
        return causal()
    if kind == "window":
        return window(draw(st.none() | some), draw(st.none() | some))
    if kind == "prefix":
        return prefix(draw(some))
    if kind == "lengths":
        if draw(st.booleans()):
            return lengths(draw(some), draw(some))
        return lengths(number(each, high=keys + 2), number(each, high=keys // 2))
    if kind == "packed":
        return documents(number(each, keys + draw(st.integers(0, 80)), high=draw(st.integers(1, 6))).sort(dim=1).values)
    if kind == "ids":
        return documents(number(each, keys + draw(st.integers(0, 80)), high=draw(st.integers(1, 6))))
    if kind == "cu":
        cuts = sorted(draw(st.lists(st.integers(0, keys), max_size=5)))
        return documents(cu_seqlens=[0, *cuts, keys])
    if kind == "global":
        return global_tokens(draw(st.lists(some, max_size=4)))
    if kind == "global-ragged":
        return global_tokens(number(each, 3, high=keys + 2) - 1)
    if kind == "dilated":
        return dilated(draw(st.integers(0, 9)), draw(st.sampled_from([1, 2, 3, 7, 63, 64, 65, 100])))
    if kind == "blocks":
        size = draw(st.sampled_from([1, 3, 16, 48, 64, 80, 128]))
        dims = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])))
        table = (*dims, draw(st.integers(0, 2)) + rows // size, -(-keys // size))
        return blocks(random_bits(seed, table, draw(st.sampled_from([0.05, 0.5, 0.95]))), size)
    dims = (each, draw(st.sampled_from([1, heads])), draw(st.sampled_from([1, rows])), draw(st.sampled_from([1, keys])))
    return keep(random_bits(seed, dims, draw(st.sampled_from([0.02, 0.5, 0.98]))))


@st.composite
def expressions(draw: st.DrawFn, shape: tuple[int, int, int, int], depth: int = 3) -> Mask:
    kind = draw(st.sampled_from(["leaf", "and", "or", "not"])) if depth else "leaf"
    if kind == "leaf":
        return draw(leaves(shape))
    if kind == "not":
        return ~draw(expressions(shape, depth - 1))
    left, right = draw(expressions(shape, depth - 1)), draw(expressions(shape, depth - 1))
    return left & right if kind == "and" else left | right


@st.composite
def calls(draw: st.DrawFn) -> tuple[Mask, tuple[int, int, int, int], int | Tensor]:
    size = st.sampled_from(SIZES)
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(size), draw(size))
    offset: int | Tensor = draw(st.sampled_from([0, 0, 64, shape[3] - shape[2], -5, 37, 300]))
    if draw(st.booleans()):
        offset = torch.tensor(draw(st.lists(st.integers(-70, 140), min_size=shape[0], max_size=shape[0])))
    return draw(expressions(shape)), shape, offset


@settings(max_examples=400, deadline=None)
@given(calls())
def test_plan_equals_dense_evaluation(call: tuple[Mask, tuple[int, int, int, int], int | Tensor]) -> None:
    assert_same(*call)
