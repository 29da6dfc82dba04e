"""Dropout's random bits: the published Philox vectors, independence from blocks, the keep rate, and its use."""

import math
from dataclasses import replace

import pytest
import torch

import poise
from poise import dropout, reference
from poise.problem import prepare, seeded

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
        problem = seeded(prepare(q, k, v, dropout=0.4))
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
        packed = [reference.run(seeded(prepare(*tensors, dropout=p)), True)[1] for p in (0.0, 0.5)]
        assert torch.equal(*packed)


def weights_of(impl: str, seed: int, p: float, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weights [2, 4, 96, 128] that an implementation mixes values with, all 1/128 but for dropout."""
    q, k = torch.zeros(2, 4, 96, 8, dtype=dtype), torch.randn(2, 2, 128, 8).to(dtype)
    values = torch.eye(128, dtype=dtype).expand(2, 2, 128, 128)  # an output is its row's weights
    torch.manual_seed(seed)
    return poise.attention(q, k, values, dropout=p, impl=impl)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_every_implementation_drops_the_same_weights(p, dtype, impl):
    torch.manual_seed(3)
    kept = dropout.all_heads(dropout.draw_seed(), 2, 4, torch.arange(96), torch.arange(128), p)
    weights = weights_of(impl, 3, p, dtype=dtype)
    assert torch.equal(weights != 0, kept)
    rounded = torch.tensor(1 / 128 / (1 - p)).to(dtype)
    torch.testing.assert_close(weights[kept], rounded.expand(int(kept.sum())), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_the_backward_pass_drops_what_the_forward_pass_dropped(impl):
    q, k, v = torch.zeros(1, 1, 96, 8), torch.randn(1, 1, 128, 8), torch.randn(1, 1, 128, 96).requires_grad_()
    torch.manual_seed(4)
    out = poise.attention(q, k, v, dropout=0.3, impl=impl)
    (gradient,) = torch.autograd.grad(out, v, torch.eye(96)[None, None])  # of v_j in dim i: the weight of i and j
    torch.manual_seed(4)
    kept = dropout.all_heads(dropout.draw_seed(), 1, 1, torch.arange(96), torch.arange(128), 0.3)
    assert torch.equal(gradient.mT != 0, kept)


class TestStatistics:
    """Seeds are fixed, so these always pass or always fail; the probability is that of an ideal generator failing."""

    SEEDS = range(8)

    @pytest.fixture(params=[0.1, 0.5])
    def drawn(self, impl, request):
        """p, and for 8 seeds which weights were kept: [8, 2, 4, 96, 128]."""
        return request.param, torch.stack([weights_of(impl, seed, request.param) != 0 for seed in self.SEEDS]).double()

    def test_the_mean_is_that_of_the_keep_rate(self, drawn):
        """786432 draws, 5 deviations: false alarm 6e-7."""
        p, kept = drawn
        assert abs(float(kept.mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / kept.numel())

    def test_the_number_kept_per_row_varies_as_a_binomial_does(self, drawn):
        """6144 rows of 128: the sum of squared deviations is near chi-square, 6 of its deviations: false alarm 1e-7."""
        p, kept = drawn
        counts = kept.sum(-1)
        squares = (counts - 128 * (1 - p)).square() / (128 * p * (1 - p))
        excess = (1 - 6 * p * (1 - p)) / (128 * p * (1 - p))  # of a binomial's fourth moment over a normal's
        assert abs(float(squares.mean()) - 1) < 6 * math.sqrt((2 + excess) / counts.numel())

    @pytest.mark.parametrize("distance", [1, 2, 3, 4])
    @pytest.mark.parametrize("what", ["seeds", "heads", "queries", "keys"])
    def test_neighbours_are_independent(self, drawn, what, distance):
        """At least 90000 pairs of draws each, correlation within 5.5 deviations: false alarm 4e-8 a test."""
        p, kept = drawn
        centred = ((kept - (1 - p)) / math.sqrt(p * (1 - p))).flatten(1, 2)  # the heads of the second sequence follow
        axis = ["seeds", "heads", "queries", "keys"].index(what)
        length = centred.shape[axis]
        products = centred.narrow(axis, 0, length - distance) * centred.narrow(axis, distance, length - distance)
        assert abs(float(products.mean())) < 5.5 / math.sqrt(products.numel())

    def test_the_mean_over_seeds_is_the_output_without_it(self, impl):
        """2560 outputs, each within 6 deviations: false alarm 5e-6."""
        q, k, v = (torch.randn(1, 2, n, 32) for n in (40, 50, 50))
        outs = []
        for seed in range(100):
            torch.manual_seed(seed)
            outs.append(poise.attention(q, k, v, dropout=0.3, impl=impl).double())
        weights = poise.scores(q, k, stage="prob").double()
        deviation = (weights.square() @ v.double().square() * 0.3 / 0.7 / len(outs)).sqrt()
        assert ((torch.stack(outs).mean(0) - poise.attention(q, k, v)).abs() < 6 * deviation).all()
