"""Where each part of a mask goes in a plan, how small plans get, the cache, biases.

That plans equal their masks is tested in test_plan_equivalence.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from plan_interpreter import assert_same, dense, random_bits
from torch import Tensor

from poise import plan as plan_module
from poise.mask import (
    UNBOUNDED,
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

CALL = (1, 2, 200, 200)


@pytest.fixture
def empty_cache() -> Iterator[None]:
    plan_module.clear_cache()
    yield
    plan_module.clear_cache()


def tensors(plan: Plan) -> list[str]:
    return [name for name in Plan.__slots__ if isinstance(getattr(plan, name), Tensor)]


def test_no_mask_leaves_everything_open() -> None:
    assert lower(None, (), (1, 1, 5, 5)) == Plan()


def test_bands_intersect_into_two_numbers_and_no_tensor() -> None:
    plan = lower(causal() & window(100, 50) & window(70, 90), (), (1, 12, 1 << 17, 1 << 17))
    assert (plan.left, plan.right) == (70, 0)
    assert tensors(plan) == []


def test_causal_is_one_plan_for_every_shape() -> None:
    assert lower(causal(), (), (1, 1, 1, 17)) is lower(causal(), (), (2, 3, 1, 18), 17)


def test_lengths_become_one_start_and_end_per_sequence() -> None:
    plan = lower(lengths(torch.tensor([3, 9]), 2) & prefix(7) & causal(), (), (2, 1, 9, 9))
    assert tensors(plan) == ["start", "end"]
    assert plan.start is not None
    assert plan.end is not None
    assert (plan.start.tolist(), plan.end.tolist()) == ([2, 2], [3, 7])
    assert plan.start.dtype == plan.end.dtype == torch.int32


@pytest.mark.parametrize(
    "mask",
    [
        causal() | prefix(30),
        documents(cu_seqlens=[0, 10, 99, 200]),
        documents([2] * 50 + [0] * 100 + [1] * 50),
        causal() | documents(torch.tensor([[0] * 90 + [1] * 110, [0] * 10 + [1] * 190])),
        ~(causal() & prefix(300)),
        ~window(None, 4),
    ],
)
def test_one_interval_per_row_needs_no_tiles(mask: Mask) -> None:
    plan = assert_same(mask, (2, 1, 200, 200))
    assert tensors(plan) == ["rows"]
    assert plan.rows is not None
    assert plan.rows.dtype == torch.int32


def test_parts_of_a_conjunction_go_each_where_they_are_cheapest() -> None:
    bits = keep(random_bits(1, (200, 200), 0.9))
    plan = assert_same(causal() & prefix(190) & documents(cu_seqlens=[0, 80, 200]) & (window(5) | bits) & bits, CALL)
    assert tensors(plan) == ["end", "rows", "tile_ptr", "tile_runs", "patterns"]
    assert len(plan.masks) == 1


def test_negated_disjunction_is_split_like_a_conjunction() -> None:
    plan = assert_same(~(~causal() | ~prefix(30)), CALL)
    assert (plan.right, tensors(plan)) == (0, ["end"])


def test_longformer_needs_a_handful_of_patterns_and_as_many_runs_as_tiles() -> None:
    rows = 1 << 14
    plan = lower(window(256, 256) | global_tokens([0]), (), (1, 12, rows, rows))
    assert plan.patterns is not None
    assert plan.tile_runs is not None
    assert len(plan.patterns) <= 8
    # Each row: the global column, both edges of the band, its inside. The first row of tiles: all of them.
    assert len(plan.tile_runs) <= (4 + 1) * (rows // 64)


def test_bigbird_blocks_need_no_patterns_and_neighbours_share_a_run() -> None:
    near = torch.arange(32)
    allowed = (near[:, None] - near).abs() <= 1
    allowed[0] = allowed[:, 0] = True
    plan = assert_same(blocks(allowed, 64), (1, 1, 32 * 64, 32 * 64))
    assert plan.patterns is not None
    assert plan.tile_runs is not None
    assert len(plan.patterns) == 0
    assert plan.tile_runs[:3].tolist() == [[0, 32, -1], [0, 3, -1], [0, 4, -1]]


def test_tiles_that_only_bits_show_to_be_full_join_their_neighbours() -> None:
    odd, even = dilated(500, 2), ~dilated(500, 2)
    plan = lower((odd & window(900, 900)) | even | global_tokens([0]), (), (1, 1, 256, 256))
    assert plan == Plan()


def test_a_map_of_nothing_has_no_runs() -> None:
    plan = assert_same(dilated(1, 500) & ~window(10, 10) & global_tokens([3]), (1, 1, 200, 200))
    assert plan.tile_runs is not None
    assert len(plan.tile_runs) == 0


def test_ragged_edges_share_the_patterns_of_the_inside() -> None:
    whole = lower(~window(10, 10), (), (1, 1, 256, 256)).patterns
    ragged = lower(~window(10, 10), (), (1, 1, 250, 250)).patterns
    assert whole is not None
    assert ragged is not None
    assert {tuple(x) for x in ragged.tolist()} <= {tuple(x) for x in whole.tolist()}


def test_tiles_outside_the_band_are_not_listed() -> None:
    bits = keep(random_bits(2, (1024, 1024), 0.5))
    plan = lower(window(64) & ~bits, (), (1, 1, 1024, 1024))
    assert plan.tile_runs is not None
    assert len(plan.tile_runs) <= 3 * 16


def test_patterns_of_high_bits_only_are_told_apart() -> None:
    # The last query of each tile sees one key, another one in every tile: words with nothing but bit 63 set.
    table = torch.zeros(64 * 20, 64 * 20, dtype=torch.bool)
    last = torch.arange(20) * 64 + 63
    table[last, (torch.arange(20) * 64 + torch.arange(20))] = True
    plan = assert_same(~keep(~table), (1, 1, 1280, 1280))
    assert plan.patterns is not None
    assert len(plan.patterns) == 20


def test_patterns_that_share_a_hash_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poise.lowering.tilemap._MIXERS", np.zeros(64, np.uint64))
    assert_same(~keep(random_bits(3, (200, 300), 0.5)), (1, 1, 200, 300))


def test_dense_masks_are_read_in_place() -> None:
    table = random_bits(4, (3, 1, 1, 40), 0.5)
    plan = lower(keep(table) & causal(), (), (3, 5, 40, 40))
    assert plan.masks[0].data_ptr() == table.data_ptr()
    assert plan.masks[0].stride() == (40, 0, 0, 1)


def test_surplus_dense_masks_are_joined() -> None:
    parts = [
        keep(random_bits(seed, shape, 0.7)) for seed, shape in enumerate([(1, 20), (20, 1), (20, 20), (2, 1, 20, 20)])
    ]
    plan = assert_same(parts[0] & parts[1] & parts[2] & parts[3], (2, 1, 20, 20))
    assert len(plan.masks) == 2


def test_equal_offsets_of_a_batch_share_one_map() -> None:
    plan = lower(window(3) | global_tokens([0]), (), (2, 1, 128, 200), torch.tensor([72, 72]))
    assert plan.tile_ptr is not None
    assert plan.tile_ptr.shape == (1, 1, 3)


def test_masks_of_numbers_are_lowered_once(empty_cache: None) -> None:
    make = lambda: window(7, 2) | global_tokens([1, 5]) | blocks([[True]], 999)  # noqa: E731
    first = lower(make(), (), (1, 1, 99, 99), 0)
    assert lower(make(), (), (1, 1, 99, 99), 0) is first
    assert lower(make(), (), (1, 1, 99, 99), 1) is not first
    assert lower(make(), (), (1, 1, 98, 99), 0) is not first


def test_masks_of_tensors_are_lowered_per_call(empty_cache: None) -> None:
    allowed = torch.zeros(1, 1, dtype=torch.bool)
    mask = blocks(allowed, 64)
    before = lower(mask, (), (1, 1, 10, 10))
    allowed.fill_(True)
    assert before.tile_runs is not None
    assert lower(mask, (), (1, 1, 10, 10)) == Plan()
    assert len(plan_module._cache) == 0


def test_cache_is_bounded_by_entries(empty_cache: None) -> None:
    for n in range(plan_module.CACHE_ENTRIES + 50):
        lower(window(n), (), (1, 1, 9, 9))
    assert len(plan_module._cache) == plan_module.CACHE_ENTRIES


def test_cache_is_bounded_by_bytes(empty_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "CACHE_BYTES", 50_000)
    for n in range(40):
        lower(causal() | prefix(n + 2), (), (1, 1, 1000, 1000))  # 8 kB each
    assert 1 <= len(plan_module._cache) <= 6


def test_cache_serves_threads(empty_cache: None) -> None:
    def work(seed: int) -> bool:
        masks = [causal() | prefix((seed + n) % 17 + 2) for n in range(200)]
        return all(lower(m, (), (1, 1, 64, 64)).rows is not None for m in masks)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_lowered_mask_is_not_lowered_again() -> None:
    table = torch.ones(1, 1, dtype=torch.bool)
    mask = (blocks(table, 64) & causal() & prefix(9)).lower(10, 10)
    table.fill_(False)
    plan = lower(mask, (), (3, 2, 10, 10))
    assert plan.tile_runs is None
    assert plan.end is not None
    assert plan.end.tolist() == [9, 9, 9]


def test_lowered_mask_serves_larger_batches() -> None:
    mask = (keep(random_bits(5, (30, 30), 0.5)) & lengths(20, 2) & causal()).lower(30, 30)
    assert_same(mask, (3, 2, 30, 30))


def test_lowered_mask_joins_with_others() -> None:
    assert_same(~causal().lower(30, 30) | dilated(2, 3), (1, 1, 30, 30))


def test_lowered_mask_refuses_another_offset() -> None:
    with pytest.raises(ValueError, match=r"q_offset = \[0\], used with \[3\]"):
        lower(causal().lower(30, 30), (), (1, 1, 30, 30), 3)


def test_sizes_of_zero_lower_to_nothing() -> None:
    for shape in ((0, 1, 4, 4), (1, 1, 0, 4), (1, 1, 4, 0)):
        assert lower(~dilated(1, 2), (), shape) == Plan()


def test_plans_are_for_the_cpu() -> None:
    with pytest.raises(ValueError, match="got device meta"):
        lower(causal(), (), (1, 1, 4, 4), 0, "meta")


def added(plan: Plan, shape: tuple[int, int, int, int], offset: int | Tensor) -> Tensor:
    rows, keys = shape[2:]
    total = torch.zeros(shape)
    for bias in plan.biases:
        assert bias.shape == shape
        total = total + bias
    place = torch.arange(rows) + torch.as_tensor(offset).reshape(-1, 1)
    distance = torch.arange(keys) - place[:, :, None]  # [B|1, N, M]
    if plan.slopes is not None:
        total = total - plan.slopes[:, None, None] * distance.abs()[:, None]
    if plan.table is not None:
        radius = plan.table.shape[1] // 2
        total = total + plan.table[:, distance.clamp(-radius, radius) + radius].transpose(0, 1)
    return total


def test_biases_add_up_to_their_dense_values() -> None:
    shape, offset = (2, 3, 20, 30), torch.tensor([4, 10])
    # Multiples of 1/8: sums are exact in any order.
    number = lambda *size: torch.randint(-40, 40, size) / 8  # noqa: E731
    bias: Bias = (
        number(20, 30) + alibi(number(3)) + relative(number(3, 9)) + relative(number(15)) + alibi(number(3))
    ) + number(2, 1, 1, 30).double()
    bias = bias + number(3, 1, 1)
    plan = lower(None, terms(bias), shape, offset)
    want = bias.evaluate(torch.arange(20), torch.arange(30), offset, shape, torch.float32)
    assert torch.equal(added(plan, shape, offset), want.expand(shape))
    assert len(plan.biases) == 2


def test_dense_bias_is_read_in_place() -> None:
    bias = torch.randn(4, 1, 7, dtype=torch.bfloat16, requires_grad=True)
    plan = lower(None, terms(bias), (2, 4, 5, 7))
    assert plan.biases[0].data_ptr() == bias.data_ptr()
    assert plan.biases[0].stride() == (0, 7, 0, 1)
    assert not plan.biases[0].requires_grad


def test_bias_keeps_the_plan_of_the_mask() -> None:
    plan = lower(causal(), terms(alibi([0.5])), (1, 1, 4, 4))
    assert plan.right == 0
    assert plan.slopes is not None


def test_visible_area_is_exact_for_intervals() -> None:
    shape = (2, 3, 50, 70)
    for mask in (causal(), window(3, 2) & lengths(torch.tensor([9, 60]), 1), causal() | prefix(9)):
        plan = lower(mask, (), shape, 5)
        assert visible_area(plan, shape, 5) == dense(mask, shape, 5).sum()


def test_visible_area_of_a_tile_map_counts_its_bits() -> None:
    shape = (2, 3, 128, 256)
    mask = window(3, 2) | global_tokens([3])
    assert visible_area(lower(mask, (), shape), shape) == dense(mask, shape, 0).sum()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (None, "every query sees every key"),
        (causal(), "causal band"),
        (window(4, 2), "band of keys from i' - 4 to i' + 2"),
        (causal() | prefix(3), "one key interval per row"),
        (lengths(3), "key lengths per sequence"),
        (~window(4, 2), "tile map of 0 full and 4 partial tiles (3 patterns)"),
        (keep(torch.ones(100, 100, dtype=torch.bool)), "1 dense mask"),
    ],
)
def test_plan_describes_itself(mask: Mask | None, words: str) -> None:
    assert lower(mask, (), (1, 1, 100, 100)).describe() == words


def test_plan_describes_its_biases() -> None:
    bias = torch.zeros(4, 4) + alibi([1.0]) + relative([1.0, 2.0, 3.0])
    words = "1 dense bias, relative table of 3 distances, alibi slopes"
    assert lower(None, terms(bias), (1, 1, 4, 4)).describe() == words


def test_unlimited_windows_stay_unlimited() -> None:
    assert lower(window(None, None), (), (1, 1, 4, 4)) == Plan(UNBOUNDED, UNBOUNDED)
