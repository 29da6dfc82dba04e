"""The operator on a cache's view: lengths per sequence, pages, int8, other dtypes, every option, and what is refused.

Views are made by hand here, with NaN wherever no key is; the caches that make them are in test_cache_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import poise
from poise import KVView
from poise.testing import check_out, check_stats, truth

H, G, DK, DV, PAGE = 4, 2, 16, 8, 4
LENGTHS = (7, 13, 0, 9)


@dataclass
class Made:
    """A view, and the keys and values it stands for: [B, G, keys, D], zeros beyond each length."""

    view: KVView
    k: Tensor
    v: Tensor


def unfilled(lengths: tuple[int, ...], places: int) -> Tensor:
    """[B, 1, places, 1]: where no key is."""
    return (torch.arange(places) >= torch.tensor(lengths)[:, None])[:, None, :, None]


def in_one_piece(lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float32, spare: int = 3) -> Made:
    batch, keys = len(lengths), max(lengths)
    k, v = (torch.randn(batch, G, keys + spare, d).to(dtype) for d in (DK, DV))
    gone = unfilled(lengths, keys + spare)
    view = KVView(
        k.masked_fill(gone, torch.nan),
        v.masked_fill(gone, torch.nan),
        torch.tensor(lengths, dtype=torch.int32),
        keys,
        even=len(set(lengths)) == 1,
    )
    k, v = (x.masked_fill(gone, 0)[:, :, :keys] for x in (k, v))
    return Made(view, k, v)


def in_pages(made: Made) -> Made:
    """The same keys in a pool, pages in random order, NaN everywhere else."""
    view = made.view
    batch, width = len(view.lengths), -(-view.keys // PAGE) + 1
    pages = torch.full((batch, width), -1, dtype=torch.int32)
    free = torch.randperm(batch * width)
    stored = [x for x in (view.k, view.v, view.k_scale, view.v_scale) if x is not None]
    pools = [
        torch.full((batch * width, G, PAGE, *x.shape[3:]), 77 if x.dtype == torch.int8 else torch.nan, dtype=x.dtype)
        for x in stored
    ]
    for b, length in enumerate(view.lengths.tolist()):
        for t in range(-(-length // PAGE)):
            page, free = free[0], free[1:]
            pages[b, t] = page
            size = min(PAGE, length - t * PAGE)
            for x, pool in zip(stored, pools, strict=True):
                pool[page, :, :size] = x[b, :, t * PAGE : t * PAGE + size]
    k, v, *scales = pools
    k_scale, v_scale = scales or (None, None)
    return replace(made, view=replace(view, k=k, v=v, k_scale=k_scale, v_scale=v_scale, pages=pages))


def in_int8(made: Made) -> Made:
    """The values an int8 view holds are its own: the keys that it stands for are computed from it."""
    k, v = (torch.randint(-127, 128, x.shape, dtype=torch.int8) for x in (made.view.k, made.view.v))
    k_scale, v_scale = (torch.rand(x.shape[:3]) / 60 for x in (k, v))
    gone = unfilled(tuple(made.view.lengths.tolist()), k.shape[2])
    view = replace(
        made.view,
        k=k,
        v=v,
        k_scale=k_scale.masked_fill(gone[..., 0], torch.nan),
        v_scale=v_scale.masked_fill(gone[..., 0], torch.nan),
    )
    exact = (
        (x.float() * scale[..., None]).masked_fill(gone, 0)[:, :, : view.keys]
        for x, scale in ((k, k_scale), (v, v_scale))
    )
    return Made(view, *exact)


VIEWS: dict[str, Any] = {
    "even": lambda: in_one_piece((9, 9, 9, 9)),
    "exactly full": lambda: in_one_piece((9, 9, 9, 9), spare=0),
    "uneven": in_one_piece,
    "pages": lambda: in_pages(in_one_piece()),
    "even pages": lambda: in_pages(in_one_piece((8, 8, 8, 8))),
    "int8": lambda: in_int8(in_one_piece()),
    "int8 pages": lambda: in_pages(in_int8(in_one_piece())),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": poise.causal()},
    "window": {"mask": poise.window(3)},
    "prefix and window": {"mask": poise.window(2) | (poise.prefix(2) & poise.causal())},
    "bias": {"bias": poise.alibi(poise.alibi_slopes(H)), "mask": poise.causal()},
    "relative": {"bias": poise.relative(torch.linspace(-1, 1, 7))},
    "softcap and sink": {"softcap": 2.0, "sink": torch.linspace(-1, 1, H), "mask": poise.causal()},
    "scale per head": {"scale": torch.linspace(0.1, 0.4, H)},
    "scale per row": {"scale": torch.linspace(0.1, 0.4, 4)[:, None, None].expand(4, 1, 3)},
    "from the start": {"mask": poise.causal(), "q_offset": "start"},
    "at a place": {"mask": poise.causal(), "q_offset": 5},
    "each at its place": {"mask": poise.causal(), "q_offset": torch.tensor([1, 2, 3, 4])},
    "end by name": {"mask": poise.causal(), "q_offset": "end"},
}


def as_tensors(made: Made, options: dict[str, Any], queries: int) -> dict[str, Any]:
    """The same call on ordinary tensors."""
    lengths = made.view.lengths
    present = poise.lengths(lengths)
    mask = options.get("mask")
    offset = options.get("q_offset", "end")
    return {
        "k": made.k,
        "v": made.v,
        **options,
        "mask": present if mask is None else mask & present,
        "q_offset": lengths.long() - queries if isinstance(offset, str) and offset == "end" else offset,
    }


# Every option with the plainest and the richest of uneven views, every view with the options that need most of it.
PAIRS = [
    (kind, option)
    for kind in VIEWS
    for option in OPTIONS
    if kind in ("uneven", "int8 pages") or option in ("causal", "prefix and window", "bias")
]


@pytest.mark.parametrize(("kind", "option"), PAIRS, ids=[" with ".join(pair) for pair in PAIRS])
def test_a_view_gives_what_its_keys_and_values_give(kind: str, option: str, impl: Any) -> None:
    made, q, options = VIEWS[kind](), torch.randn(4, H, 3, DK), OPTIONS[option]
    expected = truth(q=q, **as_tensors(made, options, 3), sink_keys=(0,))
    check_out(poise.attention(q, made.view, **options, impl=impl), expected)
    out, stats = poise.observe(q, made.view, **options, impl=impl)
    check_out(out, expected)
    check_stats(stats.packed, expected)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_mask_of_tensors_may_hide_keys_of_a_view(kind: str, impl: Any) -> None:
    made, q = VIEWS[kind](), torch.randn(4, H, 3, DK)
    seen = torch.rand(4, 1, 3, made.view.keys) > 0.3
    documents = poise.documents((torch.arange(made.view.keys) // 5)[None].expand(4, -1))
    for mask in (poise.keep(seen), documents & poise.causal()):
        expected = truth(q=q, **as_tensors(made, {"mask": mask}, 3))
        check_out(poise.attention(q, made.view, mask=mask, impl=impl), expected)


@pytest.mark.parametrize("kind", VIEWS)
def test_layout_concerns_the_queries_alone(kind: str, impl: Any) -> None:
    made, q = VIEWS[kind](), torch.randn(4, H, 3, DK)
    want = poise.attention(q, made.view, mask=poise.causal(), impl=impl)
    got = poise.attention(
        q.transpose(1, 2).contiguous(), made.view, mask=poise.causal(), layout="bshd", impl=impl
    ).transpose(1, 2)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_view_of_one_sequence_serves_queries_without_a_batch(rank: int, impl: Any) -> None:
    made = in_one_piece((9,))
    made = made if rank == 3 else replace(made, view=replace(made.view, k=made.view.k[:, :1], v=made.view.v[:, :1]))
    q = torch.randn(1, H if rank == 3 else 1, 2, DK)
    got = poise.attention(q[(0,) * (4 - rank)], made.view, impl=impl)
    torch.testing.assert_close(got, poise.attention(q, made.view, impl=impl)[(0,) * (4 - rank)])


@pytest.mark.parametrize("kind", ["uneven", "pages", "int8", "int8 pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_may_have_another_dtype_than_the_cache(
    kind: str, dtype: torch.dtype, stored: torch.dtype, impl: Any
) -> None:
    made = in_one_piece(dtype=stored)
    made = in_int8(made) if "int8" in kind else made
    made = in_pages(made) if "pages" in kind else made
    q = torch.randn(4, H, 3, DK).to(dtype)
    out = poise.attention(q, made.view, mask=poise.causal(), impl=impl)
    assert out.dtype == dtype
    # No more may be lost than by rounding all of it to the coarser of the two.
    coarse = max((dtype, made.view.dtype), key=lambda x: torch.finfo(x).eps)
    exact = as_tensors(made, {"mask": poise.causal()}, 3)
    expected = truth(**{**exact, "q": q.to(coarse), "k": made.k.to(coarse), "v": made.v.to(coarse)})
    check_out(out.to(coarse), expected)


@pytest.mark.parametrize("kind", VIEWS)
def test_scores_and_received_read_views(kind: str) -> None:
    made, q = VIEWS[kind](), torch.randn(4, H, 3, DK)
    dense = as_tensors(made, {"mask": poise.causal()}, 3)
    rest = {name: dense[name] for name in ("k", "mask", "q_offset")}
    for stage in ("biased", "prob"):
        got = poise.scores(q, made.view, mask=poise.causal(), stage=stage)
        torch.testing.assert_close(got, poise.scores(q, **rest, stage=stage))
    _, stats = poise.observe(q, made.view, mask=poise.causal())
    got = poise.received(q, made.view, stats.lse, mask=poise.causal())
    torch.testing.assert_close(got, poise.received(q, lse=stats.lse, **rest))


def test_a_double_precision_view_keeps_its_precision() -> None:
    made = in_one_piece(dtype=torch.float64)
    q = torch.randn(4, H, 3, DK, dtype=torch.float64)
    check_out(poise.attention(q, made.view), truth(q=q, **as_tensors(made, {}, 3)))


def test_a_view_without_a_key_gives_zeros(impl: Any) -> None:
    made = in_one_piece((0, 0), spare=2)
    assert (poise.attention(torch.randn(2, H, 3, DK), made.view, impl=impl) == 0).all()


def test_a_nan_among_the_keys_that_are_there_shows(impl: Any) -> None:
    made, q = in_pages(in_one_piece()), torch.randn(4, H, 3, DK)
    page = made.view.pages[1, 2]
    made.view.v[page, 0, 3] = torch.nan  # key 11 of sequence 1
    out = poise.attention(q, made.view, mask=poise.causal(), impl=impl)
    assert out.isnan().any(-1).tolist() == [
        [[b == 1 and h < 2 and i >= 1 for i in range(3)] for h in range(H)] for b in range(4)
    ]


@pytest.mark.usefixtures("native")
def test_explain_tells_that_the_kernels_read_a_cache_in_place() -> None:
    assert "read in place" in str(poise.explain(torch.randn(4, H, 3, DK), VIEWS["int8 pages"]().view, impl="cpu"))


def test_explain_tells_of_the_cache() -> None:
    q = torch.randn(4, H, 3, DK)
    told = str(poise.explain(q, VIEWS["pages"]().view))
    assert "cache    float32 keys in pages of 4, of different lengths" in told
    assert "read in place" in str(poise.explain(q, VIEWS["even"]().view, impl="blockwise"))
    assert "gathered" in str(poise.explain(q, VIEWS["pages"]().view, impl="blockwise"))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
@pytest.mark.parametrize("kind", ["even", "pages"])
def test_no_gradient_passes_through_a_cache(name: str, kind: str) -> None:
    view, q, sink = VIEWS[kind]().view, torch.randn(4, H, 3, DK), torch.zeros(H)
    {"q": q, "k": view.k, "v": view.v, "sink": sink}[name].requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires a gradient, and none passes through a cache"):
        poise.attention(q, view, sink=sink)
    with torch.no_grad():
        poise.attention(q, view, sink=sink)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "values twice": (lambda q, view: poise.attention(q, view, view.v), TypeError, "v must be left out"),
    "no values": (lambda q, view: poise.attention(q, view.k), TypeError, "v must be a torch.Tensor"),
    "batch": (lambda q, view: poise.attention(q[:2], view), ValueError, "per cached sequence, 4"),
    "heads": (lambda q, view: poise.attention(q[:, :3], view), ValueError, "multiple of the 2 in the cache; got 3"),
    "head dim": (lambda q, view: poise.attention(q[..., :8], view), ValueError, "head dim of the cached keys, 16"),
    "double queries": (lambda q, view: poise.attention(q.double(), view), TypeError, "float64 cache go together"),
    "device": (lambda q, view: poise.attention(q.to("meta"), view), ValueError, "device of the cache"),
    "long lengths": (
        lambda q, view: poise.attention(q, replace(view, lengths=view.lengths.long())),
        ValueError,
        "lengths must be int32",
    ),
    "too many keys": (lambda q, view: poise.attention(q, replace(view, keys=99)), ValueError, "up to 99 keys"),
    "not a tensor": (lambda q, view: poise.attention(q, replace(view, lengths=[1])), TypeError, "KVView.lengths"),
    "int8 without scales": (
        lambda q, view: poise.attention(q, replace(view, k=view.k.to(torch.int8), v=view.v.to(torch.int8))),
        ValueError,
        "k_scale goes with int8",
    ),
    "wide pages": (
        lambda q, view: poise.attention(q, replace(view, pages=torch.zeros(4, 3, dtype=torch.int64))),
        ValueError,
        "pages must be int32",
    ),
    "strided": (
        lambda q, view: poise.attention(q, replace(view, k=view.k.mT.contiguous().mT)),
        ValueError,
        "contiguous last dim",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(torch.randn(4, H, 3, DK), in_one_piece().view)
