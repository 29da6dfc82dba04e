"""What the native kernels promise beyond the case table: the same bits whatever runs them, any size, any strides."""

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poise
from poise.testing import check_out, check_stats, truth

pytestmark = pytest.mark.usefixtures("native")

SIZES = (0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def threads():
    """Restores torch's thread count afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tensors(batch, heads, groups, queries, keys, dim, dtype=torch.float32):
    shapes = ((batch, heads, queries, dim), (batch, groups, keys, dim), (batch, groups, keys, dim))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


# Many blocks; few blocks, so that keys are split; a causal mask, where tasks differ most; a bias in final mode.
SHAPES = {
    "many-blocks": ((2, 4, 2, 300, 300, 40), {}),
    "split-keys": ((1, 1, 1, 30, 5000, 64), {}),
    "decode": ((1, 8, 2, 1, 3001, 64), {}),
    "decode-many-heads": ((1, 48, 3, 2, 1500, 40), {"mask": poise.causal(), "q_offset": "end"}),
    "decode-final": ((2, 4, 1, 7, 1200, 64), {"softcap": 5.0, "bias": torch.randn(7, 1200)}),
    "split-keys-causal": ((1, 2, 1, 130, 2600, 24), {"mask": poise.causal(), "q_offset": "end"}),
    "causal": ((1, 8, 8, 257, 257, 16), {"mask": poise.causal()}),
    "dense-bias": ((1, 2, 2, 300, 300, 40), {"bias": torch.randn(300, 300)}),
    "dense-and-relative": (
        (1, 2, 2, 70, 90, 32),
        {"bias": torch.randn(70, 90) + poise.relative(torch.randn(2, 9)), "q_offset": 0},
    ),
    "alibi": ((1, 2, 2, 70, 1500, 32), {"bias": poise.alibi(torch.tensor([0.5, 0.01])), "q_offset": "end"}),
    "final": ((1, 2, 2, 70, 1500, 32), {"softcap": 5.0, "bias": poise.alibi(torch.tensor([0.5, 0.01])), "q_offset": 0}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_the_number_of_threads(name, dtype, threads):
    sizes, options = SHAPES[name]
    q, k, v = tensors(*sizes, dtype=dtype)
    threads(1)
    out, stats = poise.observe(q, k, v, impl="cpu", **options)
    for _ in range(100 // len(SHAPES) + 1):
        threads(random.randint(1, 16))
        again, same = poise.observe(q, k, v, impl="cpu", **options)
        assert torch.equal(out, again)
        assert torch.equal(stats.packed, same.packed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_observing_does_not_change_the_output(name, dtype):
    sizes, options = SHAPES[name]
    q, k, v = tensors(*sizes, dtype=dtype)
    out, _ = poise.observe(q, k, v, impl="cpu", **options)
    assert torch.equal(out, poise.attention(q, k, v, impl="cpu", **options))


def test_callers_in_several_threads_do_not_disturb_each_other():
    inputs = [tensors(1, 4, 2, 60 + 70 * i, 90 + 50 * i, 8 + 16 * i) for i in range(4)]
    expected = [poise.attention(*x) for x in inputs]
    wrong = []

    def call(index):
        for _ in range(30):
            if not torch.equal(poise.attention(*inputs[index]), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def strided(draw, tensor):
    """The same values in other memory: padded rows, heads and tokens swapped, or every second row of a larger one."""
    kind = draw(st.sampled_from(["plain", "padded", "bshd", "skipping"]))
    b, h, n, d = tensor.shape
    if kind == "padded":
        store = torch.full((b, h, n, d + 5), float("nan")).to(tensor.dtype)[..., 2 : d + 2]
    elif kind == "bshd":
        store = torch.empty(b, n, h, d, dtype=tensor.dtype).transpose(1, 2)
    elif kind == "skipping":
        store = torch.full((b, h, 2 * n, d), float("nan")).to(tensor.dtype)[:, :, ::2]
    else:
        return tensor
    return store.copy_(tensor)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_size_and_strides_are_within_the_error_budget(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    groups = draw(st.integers(1, 2))
    heads = groups * draw(st.integers(1, 2))
    queries, keys = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    dim = draw(st.sampled_from((1, 3, 8, 15, 16, 33, 64, 80)))
    dtype = draw(st.sampled_from(DTYPES))
    q, k, v = (strided(draw, x) for x in tensors(draw(st.integers(1, 2)), heads, groups, queries, keys, dim, dtype))
    mask = draw(st.sampled_from([None, poise.causal(), poise.window(20, 3), ~poise.window(9), poise.dilated(4, 3)]))
    call = {"q": q, "k": k, "v": v, "mask": mask, "q_offset": "end", "sink_keys": (0, 7)}
    expected = truth(**call)
    out, stats = poise.observe(**call, impl="cpu")
    check_out(out, expected)
    check_stats(stats.packed, expected)
