"""Dropout's random bits: the published Philox vectors, independence from blocks, the keep rate, and its use."""

import math
from dataclasses import replace

import pytest
import torch

from poise import dropout, reference
from poise.problem import prepare

KNOWN_ANSWERS = [  # Random123's kat_vectors, philox4x32 10: counter, key, result
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, result):
    words = dropout.philox(tuple(torch.tensor(c) for c in counter), key[0] | key[1] << 32)
    assert tuple(int(w) for w in words) == result


def test_keep_reads_the_word_of_its_key_from_the_documented_counter():
    seed, heads, b, h, i, p = 0x0123456789ABCDEF, 5, 2, 3, 1000, 0.37
    kept = dropout.keep(seed, b, h, heads, torch.tensor([i]), torch.arange(11), p)
    for j in range(11):
        words = dropout.philox(tuple(torch.tensor(c) for c in (b * heads + h, i, j // 4, 0)), seed)
        assert bool(kept[0, j]) == (int(words[j % 4]) >= math.floor(p * 2**32))


def test_a_block_equals_the_same_part_of_the_whole():
    whole = dropout.all_heads(99, 2, 3, torch.arange(40), torch.arange(37), 0.5)
    block = dropout.keep(99, 1, 2, 3, torch.arange(7, 30), torch.arange(5, 34), 0.5)
    assert torch.equal(block, whole[1, 2, 7:30, 5:34])


def test_keys_may_come_in_any_order():
    keys = torch.tensor([9, 2, 2, 31, 0])
    whole = dropout.keep(7, 0, 0, 1, torch.arange(6), torch.arange(32), 0.5)
    assert torch.equal(dropout.keep(7, 0, 0, 1, torch.arange(6), keys, 0.5), whole[:, keys])


def test_no_rows_or_no_keys_gives_an_empty_mask():
    assert dropout.all_heads(1, 2, 3, torch.arange(0), torch.arange(5), 0.5).shape == (2, 3, 0, 5)
    assert dropout.all_heads(1, 2, 3, torch.arange(5), torch.arange(0), 0.5).shape == (2, 3, 5, 0)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_kept_share_is_one_minus_p(p):
    kept = dropout.all_heads(3, 2, 4, torch.arange(128), torch.arange(256), p)
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(float(kept.double().mean()) - (1 - p)) <= 5 * deviation


def test_different_seeds_heads_and_batches_draw_different_masks():
    kept = torch.cat(
        [dropout.all_heads(s, 2, 2, torch.arange(16), torch.arange(16), 0.5).flatten(0, 1) for s in (1, 1 << 32)]
    )
    assert len({tuple(mask.flatten().tolist()) for mask in kept}) == len(kept)


def test_manual_seed_reproduces_the_drawn_seed_and_every_draw_differs():
    torch.manual_seed(5)
    first, second = dropout.draw_seed(), dropout.draw_seed()
    torch.manual_seed(5)
    assert (dropout.draw_seed(), first) == (first, first)
    assert second != first
    assert 0 <= first < 1 << 64


def doubles(*shapes):
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


class TestInTheReference:
    def test_drops_the_weights_that_the_mask_says_and_scales_the_others(self):
        q, k, v = doubles((2, 4, 5, 3), (2, 2, 9, 3), (2, 2, 9, 3))
        torch.manual_seed(3)
        problem = prepare(q, k, v, dropout=0.4)
        rows, keys = torch.arange(5), torch.arange(9)
        kept = dropout.all_heads(problem.seed, 2, 4, rows, keys, 0.4)
        p = reference.score_tile(problem, rows, keys, "prob")
        expected = (p * kept / 0.6) @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(reference.run(problem, False)[0], expected)

    def test_its_mean_over_seeds_is_the_output_without_it(self):
        problem = prepare(*doubles((1, 1, 40, 3), (1, 1, 50, 3), (1, 1, 50, 3)), dropout=0.3)
        mean = torch.stack([reference.run(replace(problem, seed=s), False)[0] for s in range(200)]).mean(0)
        plain = reference.run(replace(problem, dropout=0.0), False)[0]
        # Each weight's variance is p^2 0.3 / 0.7.
        p = reference.score_tile(problem, torch.arange(40), torch.arange(50), "prob")
        deviation = (p.square() @ problem.v.square() * 0.3 / 0.7 / 200).sqrt()
        assert ((mean - plain).abs() < 5 * deviation).all()

    def test_statistics_are_those_before_it(self):
        tensors = doubles((1, 2, 5, 3), (1, 2, 9, 3), (1, 2, 9, 3))
        packed = [reference.run(prepare(*tensors, dropout=p), True)[1] for p in (0.0, 0.5)]
        assert torch.equal(*packed)
