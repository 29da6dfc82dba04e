"""The lowered plan never disagrees with the mask objects, whatever the expression, sizes and offsets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_interpreter import assert_same, random_bits
from torch import Tensor

from poise.mask import Mask, blocks, causal, dilated, documents, global_tokens, keep, lengths, prefix, window

SIZES = (0, 1, 2, 15, 17, 31, 63, 64, 65, 127, 128, 130, 191, 257)
KINDS = ["causal", "window", "prefix", "lengths", "packed", "ids", "cu", "global", "global-ragged"]
KINDS += ["dilated", "blocks", "keep"]


@st.composite
def leaves(draw: st.DrawFn, shape: tuple[int, int, int, int]) -> Mask:
    batch, heads, rows, keys = shape
    some = st.integers(0, 2 * max(keys, 1))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    each = draw(st.sampled_from([1, batch]))

    def number(*size: int, high: int) -> Tensor:
        return torch.randint(0, max(high, 1), size, generator=generator)

    kind = draw(st.sampled_from(KINDS))
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


CALL = (1, 2, 200, 200)
NAMED = {
    "window": window(9, 3),
    "lengths": lengths(150, 20),
    "documents": documents(cu_seqlens=[0, 64, 100, 130, 200]),
    "unsorted documents": documents([i * 7 % 3 for i in range(200)]),
    "global": global_tokens([0, 70, 199]),
    "dilated": dilated(3, 5),
    "wide dilated": dilated(1, 90),
    "blocks": blocks([[True, False], [True, True]], 100),
    "keep": keep(random_bits(0, (200, 200), 0.5)),
}


@pytest.mark.parametrize("left", NAMED)
@pytest.mark.parametrize("right", NAMED)
def test_every_pair_of_masks_joins_exactly(left: str, right: str) -> None:
    for mask in (NAMED[left] | NAMED[right], NAMED[left] & ~NAMED[right], ~(NAMED[left] | ~NAMED[right])):
        assert_same(mask, CALL)


@pytest.mark.parametrize("gap", [0, 1, 2])
def test_intervals_unite_only_without_a_gap(gap: int) -> None:
    low, high = lengths(10), lengths(30, 10 + gap)
    for mask in (low | high, high | low):
        plan = assert_same(mask, CALL)
        assert (plan.rows is not None) is (gap == 0)


@pytest.mark.parametrize("size", [16, 24, 48, 80, 100])
@pytest.mark.parametrize("offset", [0, 7])
def test_blocks_that_repeat_out_of_step_with_tiles_keep_their_places(size: int, offset: int) -> None:
    place = torch.arange(400 // size + 2)
    assert_same(blocks((place[:, None] + place) % 2 == 0, size), (1, 1, 390, 400), offset)


@pytest.mark.parametrize("size", [65, 129, 193, 250])
@pytest.mark.parametrize("mask", [window(0, 0), window(9, 3), dilated(1, 2), global_tokens([0, 70])])
def test_an_uneven_last_tile_does_not_stand_for_whole_ones(mask: Mask, size: int) -> None:
    for each in (~mask, mask | global_tokens([3])):
        assert_same(each, (1, 1, size, size))
        assert_same(each, (1, 1, 256, size))
        assert_same(each, (1, 1, size, 256))
