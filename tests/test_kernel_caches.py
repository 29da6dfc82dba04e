"""Keys and values as a cache holds them: longer storage, pages, int8, another dtype; compared with plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from poise.kernels import ops

pytestmark = pytest.mark.usefixtures("native")

U = ops.UNBOUNDED
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NAN = float("nan")


def forward(q: Tensor, k: Tensor, v: Tensor, **changed: Any) -> tuple[Tensor, Tensor]:
    """poise::forward, causal for queries at the end of `keys`; output and statistics."""
    keys = changed.get("keys", k.shape[2])
    names = [argument.name for argument in torch.ops.poise.forward.default._schema.arguments]
    plain = {
        "q": q,
        "k": k,
        "v": v,
        "scale": 0.3,
        "softcap": 0.0,
        "dropout": 0.0,
        "seed": 0,
        "left": U,
        "right": 0,
        "offset": keys - q.shape[2],
    }
    given = {**dict.fromkeys(names), **plain, "stats": True, "save": False, "bshd": False, **changed}
    out, packed, _ = torch.ops.poise.forward.default(**given)
    return out, packed


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs), f"differ by {(mine.float() - theirs.float()).abs().max()}"


def in_pages(rows: Tensor, page: int, shuffle: list[int]) -> Tensor:
    """[B, G, M, ...] as a pool of pages in the order of `shuffle`; what is past the end is NaN (or -128)."""
    batch, heads, keys, *rest = rows.shape
    pages = -(-keys // page)
    filled = rows.new_full((batch, heads, pages * page, *rest), NAN if rows.is_floating_point() else -128)
    filled[:, :, :keys] = rows
    pool = filled.unflatten(2, (pages, page)).movedim(2, 1).reshape(batch * pages, heads, page, *rest)
    return pool[torch.tensor(shuffle).argsort()]


def table_of(batch: int, keys: int, page: int, spare: int = 2) -> tuple[Tensor, list[int]]:
    """A table in random order, its unused entries -1."""
    pages = -(-keys // page)
    order = torch.randperm(batch * pages)
    table = torch.full((batch, pages + spare), -1, dtype=torch.int32)
    table[:, :pages] = order.reshape(batch, pages)
    return table, order.tolist()


def tensors(queries: int, keys: int, dtype: torch.dtype, heads: int = 4, dim: int = 40) -> tuple[Tensor, ...]:
    shapes = ((2, heads, queries, dim), (2, 2, keys, dim), (2, 2, keys, dim + 8))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


@pytest.mark.parametrize("page", [1, 16, 33, 512])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_pages_give_the_bits_of_the_same_keys_in_one_tensor(queries: int, dtype: torch.dtype, page: int) -> None:
    q, k, v = tensors(queries, 300, dtype)
    table, order = table_of(2, 300, page)
    got = forward(q, in_pages(k, page, order), in_pages(v, page, order), pages=table, keys=300)
    assert_same(got, forward(q, k, v))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_keys_beyond_their_number_are_not_looked_at(queries: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(queries, 300, dtype)
    longer_k, longer_v = (torch.cat([x, torch.full_like(x[:, :, :90], NAN)], 2) for x in (k, v))
    assert_same(forward(q, longer_k, longer_v, keys=300), forward(q, k, v))


@pytest.mark.parametrize("queries", [1, 5, 70])
def test_each_sequence_has_its_own_length_and_only_needs_pages_for_it(queries: int) -> None:
    q, k, v = tensors(queries, 300, torch.float32)
    table, order = table_of(2, 300, 16)
    table[1, 7:] = -1
    end, offsets = torch.tensor([300, 100], dtype=torch.int32), torch.tensor([300, 100]) - queries
    got = forward(q, in_pages(k, 16, order), in_pages(v, 16, order), pages=table, keys=300, end=end, offsets=offsets)
    assert_same(got, forward(q, k, v, end=end, offsets=offsets))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 70])
def test_float32_queries_read_keys_of_another_dtype(queries: int, dtype: torch.dtype) -> None:
    q, k, v = tensors(queries, 300, dtype)
    out, packed = forward(q.float(), k, v)
    expected, expected_packed = forward(q.float(), k.float(), v.float())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed, expected_packed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 70])
def test_int8_keys_are_the_integers_times_their_factors(queries: int, dtype: torch.dtype, paged: bool) -> None:
    q, _, _ = tensors(queries, 300, dtype)
    k, v = (torch.randint(-127, 128, (2, 2, 300, dim), dtype=torch.int8) for dim in (40, 48))
    k_scale, v_scale = (torch.rand(2, 2, 300) / 50 for _ in range(2))
    expected, expected_packed = forward(q.float(), k * k_scale[..., None], v * v_scale[..., None])
    if paged:
        table, order = table_of(2, 300, 16)
        pools = (in_pages(x, 16, order) for x in (k, v, k_scale, v_scale))
        k, v, k_scale, v_scale = (x.contiguous() for x in pools)
        out, packed = forward(q, k, v, k_scale=k_scale, v_scale=v_scale, pages=table, keys=300)
    else:
        out, packed = forward(q, k, v, k_scale=k_scale, v_scale=v_scale)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=eps, atol=max(eps / 8, 1e-5))
    torch.testing.assert_close(packed, expected_packed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 70])
def test_a_nan_in_a_page_shows_only_to_who_sees_it(queries: int) -> None:
    q, k, v = tensors(queries, 300, torch.float32)
    v[0, 0, 250] = NAN
    k[1, 1, 299] = NAN
    table, order = table_of(2, 300, 16)
    for left in (U, 20):
        got = forward(q, in_pages(k, 16, order), in_pages(v, 16, order), pages=table, keys=300, left=left)
        expected = forward(q, k, v, left=left)
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert got[0][0, 0, -1].isfinite().all()
