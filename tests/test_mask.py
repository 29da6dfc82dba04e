"""Every mask against its one-line definition, how masks join, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from poise.mask import (
    UNBOUNDED,
    Mask,
    as_mask,
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

SHAPE = (2, 3, 7, 9)  # B, H, N, M
CPU = torch.device("cpu")
IDS = [[0, 0, 2, 2, 1, 1, 0, 0, 3, 3, 3], [5, 5, 5, 5, 5, 5, 1, 1, 1, 1, 1]]
IDX = [[0, 4, -1], [2, -1, -1]]
MAP = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
BITS = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(1)) < 0.5


def within(position: int, length: int) -> bool:
    return 0 <= position < length


# The definition, for sequence b, head h, row i at position p = i', key j.
DEFINITIONS: dict[str, tuple[Mask, Callable[[int, int, int, int, int], bool]]] = {
    "causal": (causal(), lambda b, h, i, p, j: j <= p),
    "window": (window(3), lambda b, h, i, p, j: p - 3 <= j <= p),
    "window both sides": (window(1, 2), lambda b, h, i, p, j: p - 1 <= j <= p + 2),
    "window open right": (window(1, None), lambda b, h, i, p, j: p - 1 <= j),
    "prefix": (prefix(4), lambda b, h, i, p, j: j < 4),
    "lengths": (lengths(6, 2), lambda b, h, i, p, j: 2 <= j < 6),
    "lengths per sequence": (
        lengths(torch.tensor([4, 9]), torch.tensor([1, 3])),
        lambda b, h, i, p, j: [1, 3][b] <= j < [4, 9][b],
    ),
    "documents": (documents(IDS[0]), lambda b, h, i, p, j: within(p, 11) and IDS[0][p] == IDS[0][j]),
    "documents per sequence": (
        documents(torch.tensor(IDS)),
        lambda b, h, i, p, j: within(p, 11) and IDS[b][p] == IDS[b][j],
    ),
    "packed documents": (
        documents(cu_seqlens=[0, 3, 3, 10]),
        lambda b, h, i, p, j: within(p, 10) and (p < 3) == (j < 3),
    ),
    "global tokens": (global_tokens([0, 5]), lambda b, h, i, p, j: p in (0, 5) or j in (0, 5)),
    "global tokens per sequence": (
        global_tokens(torch.tensor(IDX)),
        lambda b, h, i, p, j: (p >= 0 and p in IDX[b]) or j in IDX[b],
    ),
    "dilated": (dilated(2, 3), lambda b, h, i, p, j: abs(p - j) <= 6 and (p - j) % 3 == 0),
    "blocks": (
        blocks(MAP[0, 0], 3),
        lambda b, h, i, p, j: within(p, 12) and bool(MAP[0, 0, p // 3, j // 3]),
    ),
    "blocks per head": (blocks(MAP, 3), lambda b, h, i, p, j: within(p, 12) and bool(MAP[b, h, p // 3, j // 3])),
    "keep": (keep(BITS), lambda b, h, i, p, j: bool(BITS[b, 0, i, j])),
    "keep per key": (keep(BITS[:, :, :1]), lambda b, h, i, p, j: bool(BITS[b, 0, 0, j])),
}


def evaluate(mask: Mask, offset: int | Tensor = 0, shape: tuple[int, int, int, int] = SHAPE) -> Tensor:
    mask.validate(shape, CPU)
    found = mask.evaluate(torch.arange(shape[2]), torch.arange(shape[3]), offset, shape)
    assert found.dtype == torch.bool
    return found.expand(shape)


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("offset", [0, 2, -3, 40, torch.tensor([2, -1])])
def test_mask_is_its_definition(name: str, offset: int | Tensor) -> None:
    mask, visible = DEFINITIONS[name]
    offsets = offset.tolist() if isinstance(offset, Tensor) else [offset] * 2
    found = evaluate(mask, offset)
    batch, heads, rows, keys = (range(n) for n in SHAPE)
    want = [[[[visible(b, h, i, i + offsets[b], j) for j in keys] for i in rows] for h in heads] for b in batch]
    assert torch.equal(found, torch.tensor(want))


@pytest.mark.parametrize("name", DEFINITIONS)
def test_part_of_a_mask_is_that_part_of_the_whole(name: str) -> None:
    mask, offset = DEFINITIONS[name][0], torch.tensor([2, 1])
    rows, keys = torch.tensor([5, 0, 2]), torch.tensor([8, 3])
    part = mask.evaluate(rows, keys, offset, SHAPE).expand(2, 3, 3, 2)
    assert torch.equal(part, evaluate(mask, offset)[:, :, rows][..., keys])


@given(st.sampled_from(sorted(DEFINITIONS)), st.sampled_from(sorted(DEFINITIONS)))
def test_joins_are_elementwise(left: str, right: str) -> None:
    a, b = DEFINITIONS[left][0], DEFINITIONS[right][0]
    assert torch.equal(evaluate(a & b), evaluate(a) & evaluate(b))
    assert torch.equal(evaluate(a | b), evaluate(a) | evaluate(b))
    assert torch.equal(evaluate(~a), ~evaluate(a))


def test_tensor_joins_on_either_side() -> None:
    assert torch.equal(evaluate(BITS & causal()), evaluate(keep(BITS) & causal()))
    assert torch.equal(evaluate(causal() | BITS), evaluate(keep(BITS) | causal()))
    assert torch.equal(evaluate(BITS | causal()), evaluate(keep(BITS) | causal()))


def test_double_negation_is_the_mask_itself() -> None:
    mask = causal()
    assert ~~mask is mask


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - {"prefix", "lengths", "lengths per sequence"}))
def test_masks_about_positions_say_so(name: str) -> None:
    mask = DEFINITIONS[name][0]
    assert mask.positional is (not name.startswith("keep"))
    assert (mask & prefix(3)).positional is mask.positional
    assert (~mask).positional is mask.positional


def test_masks_of_numbers_compare_and_hash_by_value() -> None:
    def make() -> Mask:
        parts = (causal(), window(3), prefix(2), lengths(5, 1), documents([0, 1]), documents(cu_seqlens=[0, 2]))
        mask: Mask = global_tokens([3, 4]) | dilated(2, 2) | ~blocks([[True, False]], 8)
        for part in parts:
            mask = mask & part
        return mask

    assert make() == make()
    assert hash(make()) == hash(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (causal(), window(UNBOUNDED - 1)),
        (prefix(3), lengths(3, 1)),
        (documents([0, 1, 1]), documents([0, 0, 1])),
        (documents([0, 1]), global_tokens([0, 1])),
        (documents([0, 2]), documents(cu_seqlens=[0, 2])),
        (blocks([[True, True]], 2), blocks([[True], [True]], 2)),
        (blocks([[True, True]], 2), blocks([[True, True]], 3)),
        (causal() & prefix(2), causal() | prefix(2)),
        (causal(), ~causal()),
        (dilated(2, 3), dilated(3, 2)),
    ],
)
def test_different_masks_are_unequal(one: Mask, other: Mask) -> None:
    assert one != other


def test_masks_of_tensors_equal_only_themselves() -> None:
    mask = keep(BITS)
    assert mask == mask
    assert mask != keep(BITS)
    with pytest.raises(TypeError, match="Keep holds a tensor and can't be hashed"):
        hash(mask)


def test_private_copy_of_a_list_does_not_follow_it() -> None:
    ids = [0, 0, 1]
    mask = documents(ids)
    ids[0] = 1
    assert mask == documents([0, 0, 1])


def test_masks_are_frozen() -> None:
    with pytest.raises(AttributeError):
        window(3).left = 4  # type: ignore[attr-defined]


def test_masks_survive_pickle_and_deepcopy() -> None:
    mask = causal() & ~documents([0, 1, 1]) | window(3)
    assert pickle.loads(pickle.dumps(mask)) == mask
    assert copy.deepcopy(mask) == mask


def test_masks_have_no_truth_value() -> None:
    with pytest.raises(TypeError, match=r"join masks with &, \| and ~"):
        causal() and window(2)


def test_dilation_of_one_is_a_window() -> None:
    assert dilated(4, 1) == window(4, 4)


def test_huge_reach_does_not_overflow() -> None:
    assert torch.equal(evaluate(dilated(1 << 60, 3)), evaluate(dilated(9, 3)))
    assert evaluate(window(1 << 60, 1 << 60)).all()


def test_as_mask_wraps_a_bool_tensor() -> None:
    mask = causal()
    assert as_mask(mask) is mask
    assert torch.equal(evaluate(as_mask(BITS)), BITS.expand(SHAPE))


REFUSED_WHEN_BUILT: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: window(-1), ValueError, "window: left must be at least 0, got -1"),
    (lambda: window(1, -2), ValueError, "window: right must be at least 0, got -2"),
    (lambda: window(1.5), TypeError, "window: left must be an int, got float"),  # type: ignore[arg-type]
    (lambda: prefix(-1), ValueError, "prefix: n must be at least 0, got -1"),
    (lambda: prefix("3"), TypeError, "prefix: n must be an int, got str"),  # type: ignore[arg-type]
    (lambda: lengths(torch.ones(2)), TypeError, "lengths: end must hold integers, got torch.float32"),
    (
        lambda: lengths(3, torch.ones(2, 2).long()),
        ValueError,
        "lengths: start must be an int or one value",
    ),
    (lambda: documents(), ValueError, "documents: pass exactly one of ids and cu_seqlens"),
    (lambda: documents([0], cu_seqlens=[0, 1]), ValueError, "documents: pass exactly one of ids and cu_seqlens"),
    (lambda: documents([0.5]), TypeError, "documents: ids must hold integers"),  # type: ignore[list-item]
    (lambda: documents(cu_seqlens=[1, 2]), ValueError, "cu_seqlens must be 1-D, start at 0 and never decrease"),
    (lambda: documents(cu_seqlens=[0, 4, 3]), ValueError, "cu_seqlens must be 1-D, start at 0 and never decrease"),
    (lambda: global_tokens([-1]), ValueError, "idx holds -1: positions count from 0, not from the end"),
    (lambda: global_tokens(torch.zeros(1, 1, 1).long()), ValueError, "global_tokens: idx must have 1 or 2 dims"),
    (lambda: dilated(3, 0), ValueError, "dilated: d must be at least 1, got 0"),
    (lambda: dilated(-3, 2), ValueError, "dilated: w must be at least 0, got -3"),
    (lambda: blocks(torch.ones(2, 2), 4), TypeError, "blocks: map must be a bool tensor, got torch.float32"),
    (lambda: blocks(torch.ones(2).bool(), 4), ValueError, r"blocks: map must be \[P, Q\]"),
    (lambda: blocks(MAP, 0), ValueError, "blocks: size must be at least 1, got 0"),
    (lambda: keep(torch.zeros(2, 2)), TypeError, "got torch.float32: additive masks go to bias="),
    (lambda: keep(BITS[None]), ValueError, "at most 4 dims, got shape"),
    (lambda: keep([[True]]), TypeError, "keep: expected a bool tensor, got list"),  # type: ignore[arg-type]
    (lambda: causal() & 3, TypeError, "expected a mask object or a bool tensor, got int"),  # type: ignore[operator]
    (lambda: torch.ones(2, 2) & causal(), TypeError, "additive masks go to bias="),
]


@pytest.mark.parametrize(("build", "error", "message"), REFUSED_WHEN_BUILT)
def test_wrong_arguments_are_named(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lengths(torch.ones(3).long()), r"lengths\(end=...\) holds 3 values for a batch of 2"),
        (lengths(9, [1, 2, 3]), r"lengths\(start=...\) holds 3 values for a batch of 2"),
        (documents([0] * 8), "documents covers 8 positions, k has 9"),
        (documents(torch.zeros(3, 9).long()), "ids for 3 sequences, q for 2"),
        (global_tokens(torch.zeros(3, 1).long()), "rows for 3 sequences, q for 2"),
        (blocks(MAP[:, :2], 3), "blocks has a map for H = 2, q has H = 3"),
        (blocks(MAP, 2), "blocks covers 4 blocks of 2 keys, k has 9"),
        (keep(BITS[..., :8]), r"shape \(2, 1, 7, 8\) does not broadcast to \[B, H, N, M\] = \(2, 3, 7, 9\)"),
        (~(causal() | keep(BITS[:, :, :4])), r"shape \(2, 1, 4, 9\) does not broadcast"),
        (keep(BITS.to("meta")), "the tensor is on meta, q on cpu: move it there"),
        (documents(torch.zeros(9, dtype=torch.int64, device="meta")), "documents is on meta, q on cpu"),
    ],
)
def test_masks_refuse_calls_they_do_not_fit(mask: Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask.validate(SHAPE, CPU)


def test_masks_made_of_lists_go_to_any_device() -> None:
    for mask in (documents([0] * 9), global_tokens([1]), blocks([[True]], 9)):
        mask.validate(SHAPE, torch.device("meta"))
        rows, keys = torch.arange(7, device="meta"), torch.arange(9, device="meta")
        assert mask.evaluate(rows, keys, 0, SHAPE).device.type == "meta"


def test_lower_asks_for_the_offset_when_it_matters() -> None:
    with pytest.raises(ValueError, match=r"q_offset: .* q_len = 3 differs from k_len = 9"):
        causal().lower(3, 9)
    assert prefix(3).lower(3, 9).offset == 0


def test_lower_understands_start_and_end() -> None:
    assert causal().lower(3, 9, q_offset="start").offset == 0
    assert causal().lower(3, 9, q_offset="end").offset == 6
    with pytest.raises(ValueError, match="q_offset: got 'middle'"):
        causal().lower(3, 9, q_offset="middle")


def test_lower_wants_one_offset_per_sequence() -> None:
    with pytest.raises(ValueError, match=r"q_offset: got shape \(3,\) for a batch of 2"):
        causal().lower(3, 9, batch=2, q_offset=torch.tensor([0, 1, 2]))


def test_lowered_mask_evaluates_as_the_mask() -> None:
    mask = causal() & keep(BITS)
    lowered = mask.lower(7, 9, batch=2, heads=3, q_offset=torch.tensor([1, 2]))
    assert torch.equal(evaluate(lowered, torch.tensor([1, 2])), evaluate(mask, torch.tensor([1, 2])))


def test_lowered_mask_refuses_other_sizes_and_offsets() -> None:
    lowered = causal().lower(7, 9, q_offset=2)
    with pytest.raises(ValueError, match=r"lowered for \[B, H, N, M\] = \(1, 1, 7, 9\), used with \(2, 3, 7, 8\)"):
        lowered.validate((2, 3, 7, 8), CPU)
    with pytest.raises(ValueError, match=r"lowered for q_offset = \[2\], used with \[3\]"):
        evaluate(lowered, 3)
