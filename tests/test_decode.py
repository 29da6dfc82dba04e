"""Few queries over many keys: what generation asks of the native kernels, beyond the cases of the table."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poise
from poise.testing import check_out, check_stats, truth

pytestmark = pytest.mark.usefixtures("native")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_few_queries_are_within_the_error_budget(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, groups, ratio = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    queries = draw(st.sampled_from((1, 2, 3, 7, 16)))
    keys = draw(st.sampled_from((1, 2, 17, 63, 64, 130, 255, 513, 1030)))
    dim, dtype = draw(st.sampled_from((8, 32, 40, 64, 80, 128, 256))), draw(st.sampled_from(DTYPES))
    shapes = ((batch, groups * ratio, queries, dim), (batch, groups, keys, dim), (batch, groups, keys, dim))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    masks = [
        None,
        poise.causal(),
        poise.window(50),
        poise.lengths(torch.randint(0, keys + 1, (batch,))),
        poise.keep(torch.rand(queries, keys) < 0.7) & poise.causal(),
        poise.keep(torch.rand(batch, groups * ratio, queries, keys) < 0.5),
    ]
    call = {"q": q, "k": k, "v": v, "mask": draw(st.sampled_from(masks)), "q_offset": "end", "sink_keys": (0, 60)}
    if draw(st.booleans()):
        call["softcap"] = 8.0
    if draw(st.booleans()):
        call["sink"] = torch.randn(groups * ratio)
    if draw(st.booleans()):
        call["bias"] = poise.alibi(torch.rand(groups * ratio))
    expected = truth(**call)
    out, stats = poise.observe(**call, impl="cpu")
    check_out(out, expected)
    check_stats(stats.packed, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 8])
def test_tokens_decoded_one_by_one_are_the_rows_of_the_whole(heads, dtype):
    q, k, v = torch.randn(2, heads, 90, 64), torch.randn(2, 2, 90, 64), torch.randn(2, 2, 90, 64)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    expected = truth(q=q, k=k, v=v, mask=poise.causal(), sink_keys=(0,))
    rows = [poise.observe(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], impl="cpu") for t in range(90)]
    check_out(torch.cat([out for out, _ in rows], 2), expected)
    check_stats(torch.cat([stats.packed for _, stats in rows], 3), expected)


def test_gradients_of_few_queries_are_those_of_many():
    q, k, v = (torch.randn(1, 4, length, 32, requires_grad=True) for length in (40, 300, 300))
    weight = torch.randn(1, 4, 40, 32)
    whole = torch.autograd.grad((poise.attention(q, k, v, impl="cpu") * weight).sum(), (q, k, v))
    parts = [
        torch.autograd.grad(
            (poise.attention(q[:, :, t : t + 8], k, v, impl="cpu") * weight[:, :, t : t + 8]).sum(), (q, k, v)
        )
        for t in range(0, 40, 8)
    ]
    for mine, theirs in zip(map(sum, zip(*parts, strict=True)), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
