"""Where the fast arithmetic of the kernels cannot be trusted: they must notice, and be right all the same."""

import math

import pytest
import torch

import poise
from poise.testing import check_out, check_stats, truth

pytestmark = pytest.mark.usefixtures("native")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(**call):
    call = {"sink_keys": (0,), **call}
    expected = truth(**call)
    out, stats = poise.observe(**call, impl="cpu")
    check_out(out, expected)
    check_stats(stats.packed, expected)
    plain = {name: value for name, value in call.items() if name != "sink_keys"}
    torch.testing.assert_close(poise.attention(**plain, impl="cpu"), out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e3, 1e4, 3e4, 1e5, 1e9, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_beyond_any_sane_size_still_pick_the_largest(size, dtype):
    q, k, v = (torch.randn(1, 2, 70, 32) for _ in range(3))
    check(q=(q * size).to(dtype), k=(k * size).to(dtype), v=v.to(dtype))


def test_one_pair_with_a_huge_score_returns_its_value():
    x = torch.full((1, 1, 1, 1), 1e5)
    assert poise.attention(x, x, torch.ones(1, 1, 1, 1)).item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"bias": torch.zeros(3, 4)}], ids=["plain", "cap", "bias"])
def test_a_row_whose_scores_are_all_minus_infinity_shows_it(dtype, options):
    q = -torch.ones(1, 1, 3, 8, dtype=dtype)
    k = torch.full((1, 1, 4, 8), math.inf, dtype=dtype)
    check(q=q, k=k, v=torch.ones(1, 1, 4, 8, dtype=dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, poise.causal(), ~poise.window(3)], ids=["none", "causal", "far"])
def test_statistics_count_an_attended_minus_infinity(dtype, mask):
    q, k, v = (torch.randn(1, 2, 65, 8).to(dtype) for _ in range(3))
    q[..., 0] = -1
    k[:, :, 10, 0] = math.inf
    check(q=q, k=k, v=v, mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounds", [(1001, 0), (1024, 25), (999, 25), (26, 25)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poisoned_padding_next_to_an_odd_bound_never_leaks(dtype, bounds, poison):
    end, start = bounds
    q, k, v = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, 16)
    for x in (k, v):
        x[:, :, end:] = poison
        x[:, :, :start] = poison
    check(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), mask=poise.lengths(end, start))


@pytest.mark.parametrize("function", [poise.attention, poise.scaled_dot_product_attention])
def test_a_head_dim_of_zero_averages_the_values(function):
    v = torch.randn(1, 2, 5, 4)
    out = function(torch.randn(1, 2, 3, 0), torch.randn(1, 2, 5, 0), v)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand(1, 2, 3, 4))


@pytest.mark.parametrize("byte", [1, 2, 128, 255])
def test_a_bool_is_true_whatever_its_byte(byte):
    q, k, v = (torch.randn(1, 1, 200, 16) for _ in range(3))
    mask = torch.rand(200, 200) < 0.5
    odd = (mask.to(torch.uint8) * byte).view(torch.bool)
    assert torch.equal(poise.attention(q, k, v, mask=odd), poise.attention(q, k, v, mask=mask))


def test_the_smallest_softcap_is_still_a_cap():
    q, k, v = (torch.randn(1, 1, 9, 8) for _ in range(3))
    check(q=q, k=k, v=v, softcap=1e-46)


def test_a_scale_that_is_no_number_is_not_taken_for_the_default():
    q, k, v = (torch.randn(1, 1, 9, 8) for _ in range(3))
    assert poise.scaled_dot_product_attention(q, k, v, scale=-math.inf).isnan().all()
    with pytest.raises(ValueError, match="scale"):
        poise.attention(q, k, v, scale=-math.inf)
