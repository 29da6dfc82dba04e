"""What each kind of cache promises: generation equals the full computation, errors change nothing, options and dtypes.

Random sequences of operations are in test_cache_stateful.py, eviction is in test_eviction.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import poise
from poise.nn import (
    BlockConfig,
    Cache,
    CacheFull,
    Decoder,
    GrowingCache,
    PagedCache,
    QuantCache,
    RollingCache,
    Rotary,
    StaticCache,
    Visible,
)
from poise.testing import check_out, check_stats, truth

B, H, G, DK, DV, LENGTH = 2, 4, 2, 16, 8, 23

EXACT: dict[str, Callable[[], Cache]] = {
    "growing": GrowingCache,
    "static": lambda: StaticCache(40),
    "rolling, all in the window": lambda: RollingCache(40, sinks=2),
    "paged": lambda: PagedCache(pages=24, page=4),
}
KINDS: dict[str, Callable[[], Cache]] = {
    **EXACT,
    "rolling": lambda: RollingCache(6, sinks=2),
    "int8": QuantCache,
    "paged int8": lambda: PagedCache(pages=24, page=4, dtype=torch.int8),
}


def tokens(n: int = LENGTH, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, H, n, DK), torch.randn(batch, G, n, DK), torch.randn(batch, G, n, DV)


def contents(cache: Cache, layer: int = 0) -> list[tuple[Tensor, Tensor]]:
    """What a view shows of each sequence: keys and values [G, length, D]."""
    view = cache.view(layer)
    k, v = view.dense(torch.float32)
    return [(k[b, :, :length], v[b, :, :length]) for b, length in enumerate(view.lengths.tolist())]


def same(mine: list[tuple[Tensor, Tensor]], theirs: list[tuple[Tensor, Tensor]]) -> bool:
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


# --- generation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[1] * LENGTH, [LENGTH], [9, 1, 1, 7, 5], [17] + [1] * 6], ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_chunks_and_single_steps_give_the_rows_of_the_full_computation(kind: str, steps: list[int], impl: Any) -> None:
    q, k, v = tokens()
    expected = truth(q=q, k=k, v=v, mask=poise.causal(), sink_keys=(0,))
    cache, outs, packed, at = EXACT[kind](), [], [], 0
    for n in steps:
        part = slice(at, at + n)
        cache.append(0, k[:, :, part], v[:, :, part])
        out, stats = poise.observe(q[:, :, part], cache.view(0), mask=cache.mask, impl=impl)
        assert torch.equal(out, poise.attention(q[:, :, part], cache.view(0), mask=cache.mask, impl=impl))
        outs.append(out)
        packed.append(stats.packed)
        at += n
    check_out(torch.cat(outs, 2), expected)
    check_stats(torch.cat(packed, 3), expected)


def windowed(window: int, sinks: int) -> poise.Mask:
    """What a rolling cache's queries see, in terms of the whole stream."""
    return poise.causal() & (poise.window(window - 1) | poise.prefix(sinks))


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("steps", [[1] * LENGTH, [LENGTH], [5, 1, 1, 8, 2, 6], [2, 9, 1, 11]], ids=str)
def test_a_rolling_cache_is_attention_to_sinks_and_a_window(steps: list[int], sinks: int, impl: Any) -> None:
    q, k, v = tokens()
    cache, outs, at = RollingCache(5, sinks), [], 0
    for n in steps:
        part = slice(at, at + n)
        cache.append(0, k[:, :, part], v[:, :, part])
        outs.append(poise.attention(q[:, :, part], cache.view(0), mask=cache.mask, impl=impl))
        at += n
    check_out(torch.cat(outs, 2), truth(q=q, k=k, v=v, mask=windowed(5, sinks)))


@pytest.mark.parametrize("kind", ["growing", "static", "rolling", "paged"])
def test_prompts_of_different_lengths_are_padded_on_the_left(kind: str, impl: Any) -> None:
    q, k, v = tokens(batch=3)
    cache, counts = KINDS[kind](), [LENGTH - 4, 3, 0]
    first = slice(0, LENGTH - 4)
    cache.append(0, k[:, :, first], v[:, :, first], counts)
    outs = [poise.attention(q[:, :, first], cache.view(0), mask=cache.mask, impl=impl)]
    for at in range(LENGTH - 4, LENGTH):
        part = slice(at, at + 1)
        cache.append(0, k[:, :, part], v[:, :, part])
        outs.append(poise.attention(q[:, :, part], cache.view(0), mask=cache.mask, impl=impl))
    assert cache.lengths() == tuple(count + 4 for count in counts)
    mask = windowed(6, 2) if kind == "rolling" else poise.causal()
    for b, count in enumerate(counts):
        mine = slice(LENGTH - 4 - count, LENGTH)
        alone = {"q": q[b : b + 1, :, mine], "k": k[b : b + 1, :, mine], "v": v[b : b + 1, :, mine]}
        check_out(torch.cat(outs, 2)[b : b + 1, :, mine], truth(**alone, mask=mask))


@pytest.mark.parametrize("kind", EXACT)
def test_a_speculative_tree_is_verified_in_one_call_and_the_rest_forgotten(kind: str, impl: Any) -> None:
    """Drafts 0 -> {1, 2}, 2 -> 3: each sees the text and its own ancestors; then 0, 1 are rejected for 0, 2, 3."""
    q, k, v = tokens()
    text, cache = LENGTH - 4, EXACT[kind]()
    cache.append(0, k[:, :, :text], v[:, :, :text])
    cache.append(0, k[:, :, text:], v[:, :, text:])
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    mask = poise.keep(torch.cat([torch.ones(4, text, dtype=torch.bool), tree], -1))
    out = poise.attention(q[:, :, text:], cache.view(0), mask=mask, impl=impl)
    accepted = [*range(text), text, text + 2, text + 3]
    path = {name: x[:, :, accepted] for name, x in (("q", q), ("k", k), ("v", v))}
    expected = poise.attention(**path, mask=poise.causal(), impl="reference")
    torch.testing.assert_close(out[:, :, [0, 2, 3]], expected[:, :, text:])
    cache.truncate(text)
    again = accepted[text:]
    cache.append(0, k[:, :, again], v[:, :, again])
    assert same(contents(cache), [(path["k"][b], path["v"][b]) for b in range(B)])


@pytest.mark.parametrize("kind", [*EXACT, "rolling"])
def test_a_decoder_generates_through_a_cache_what_it_computes_at_once(kind: str) -> None:
    config = BlockConfig(32, 4, 48, kv_heads=2, norm="rms", activation="silu", gated=True, bias=False)
    decoder, x = Decoder(config, 2, positions=Rotary(8)), torch.randn(B, LENGTH, 32)
    cache, outs = KINDS[kind](), []
    visible = Visible(causal=True, mask=windowed(6, 2) if kind == "rolling" else None)
    with torch.no_grad():
        for part in (slice(0, 15), *(slice(i, i + 1) for i in range(15, LENGTH))):
            outs.append(decoder(x[:, part], places=torch.arange(LENGTH)[part], cache=cache))
        expected = decoder(x, visible=visible)
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=1e-4, atol=1e-5)


def test_beams_share_pages_until_they_differ() -> None:
    _, k, v = tokens(n=10, batch=1)
    cache = PagedCache(pages=8, page=4)
    cache.append(0, k, v)
    assert cache.pages_free == 5
    cache.reorder([0, 0, 0, 0])
    assert cache.pages_free == 5
    _, more_k, more_v = tokens(n=1, batch=4)
    cache.append(0, more_k, more_v)  # three of the four copy the last, partly filled page
    assert cache.pages_free == 2
    for b, (got_k, got_v) in enumerate(contents(cache)):
        assert torch.equal(got_k, torch.cat([k[0], more_k[b]], 1))
        assert torch.equal(got_v, torch.cat([v[0], more_v[b]], 1))
    cache.reorder([2])
    assert cache.pages_free == 5


def test_layers_share_the_page_table_and_copy_together() -> None:
    cache = PagedCache(pages=6, page=4)
    _, k, v = tokens(n=6, batch=1)
    for layer in range(3):
        cache.append(layer, k + layer, v - layer)
    assert cache.pages_free == 4
    cache.reorder([0, 0])
    _, more_k, more_v = tokens(n=1, batch=2)
    for layer in range(3):
        cache.append(layer, more_k + layer, more_v - layer)
    assert cache.pages_free == 3
    for layer in range(3):
        for b, (got_k, got_v) in enumerate(contents(cache, layer)):
            assert torch.equal(got_k, torch.cat([k[0], more_k[b]], 1) + layer)
            assert torch.equal(got_v, torch.cat([v[0], more_v[b]], 1) - layer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_freed_sequence_starts_anew_among_the_others(kind: str) -> None:
    _, k, v = tokens()
    cache, alone = KINDS[kind](), KINDS[kind]()
    cache.append(0, k[:, :, :15], v[:, :, :15])
    cache.free(0)
    cache.append(0, k[:, :, 15:], v[:, :, 15:])
    alone.append(0, k[:1, :, 15:], v[:1, :, 15:])
    assert cache.lengths() == (8, 23)
    assert same(contents(cache)[:1], contents(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_appending_nothing_changes_nothing(kind: str) -> None:
    _, k, v = tokens()
    cache = KINDS[kind]()
    cache.append(0, k, v)
    before = contents(cache)
    cache.append(0, k, v, [0, 0])
    cache.append(0, k[:, :, :0], v[:, :, :0])
    assert same(contents(cache), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_works_in_and_after_inference_mode(kind: str) -> None:
    q, k, v = tokens()
    cache = KINDS[kind]()
    with torch.inference_mode():
        cache.append(0, k[:, :, :20], v[:, :, :20])
        inside = poise.attention(q[:, :, 19:20], cache.view(0), mask=cache.mask)
    with torch.no_grad():
        assert torch.equal(poise.attention(q[:, :, 19:20], cache.view(0), mask=cache.mask), inside)
        cache.append(0, k[:, :, 20:], v[:, :, 20:])
        cache.reorder([1, 0])
    assert cache.lengths() == (23, 23)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_appended_is_copied(kind: str) -> None:
    _, k, v = tokens()
    cache = KINDS[kind]()
    cache.append(0, k, v)
    before = contents(cache)
    k.zero_()
    v.zero_()
    assert same(contents(cache), before)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_scores_and_received_read_the_cache(kind: str) -> None:
    q, k, v = tokens()
    cache = KINDS[kind]()
    cache.append(0, k, v)
    cache.append(0, k[:, :, :3], v[:, :, :3])
    view = cache.view(0)
    _, stats = poise.observe(q[:, :, -3:], view, mask=cache.mask)
    given = poise.received(q[:, :, -3:], view, stats.lse, mask=cache.mask)
    torch.testing.assert_close(given.sum(-1), torch.full((B, H), 3.0))
    weights = poise.scores(q[:, :, -3:], view, mask=cache.mask, stage="prob")
    torch.testing.assert_close(given, weights.sum(-2))


# --- dtypes and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [GrowingCache, lambda dtype: PagedCache(9, 8, dtype)], ids=["growing", "paged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cache_may_have_a_dtype_of_its_own(make: Any, dtype: torch.dtype) -> None:
    q, k, v = tokens()
    cache = make(dtype=dtype)
    cache.append(0, k, v)
    out = poise.attention(q, cache.view(0), mask=poise.causal())
    assert out.dtype == torch.float32
    rounded = {"k": k.to(dtype).float(), "v": v.to(dtype).float()}
    check_out(out, truth(q=q, **rounded, mask=poise.causal()))


def test_int8_is_off_by_half_a_step_at_most() -> None:
    _, k, v = tokens()
    cache = QuantCache()
    cache.append(0, k, v)
    for b, (got_k, got_v) in enumerate(contents(cache)):
        for got, exact in ((got_k, k[b]), (got_v, v[b])):
            step = exact.abs().amax(-1, keepdim=True) / 127
            assert ((got - exact).abs() <= step * 0.501).all()


def test_int8_keeps_zeros_and_shows_what_is_not_finite() -> None:
    _, k, v = tokens(n=4)
    k[:, :, 1], k[:, :, 2, 3], v[:, :, 3, 0] = 0, torch.nan, torch.inf
    cache = QuantCache()
    cache.append(0, k, v)
    for got_k, got_v in contents(cache):
        assert (got_k[:, 1] == 0).all()
        assert got_k[:, 2].isnan().all()
        assert got_v[:, 3].isnan().all()
        assert got_k[:, 3].isfinite().all()


def test_int8_halves_the_memory_of_bf16() -> None:
    wide = [torch.randn(1, 1, 1024, 128, dtype=torch.bfloat16) for _ in range(2)]
    caches = [GrowingCache(), QuantCache()]
    for cache in caches:
        cache.append(0, *wide)
    assert caches[1].nbytes == caches[0].nbytes * (128 + 4) / 256


def test_growing_copies_each_token_a_bounded_number_of_times() -> None:
    cache, copied, last = GrowingCache(), 0, 0
    for _ in range(5000):
        cache.append(0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        places = cache.nbytes // 8
        copied += last if places != last else 0
        last = places
    assert copied <= 2 * 5000
    assert last <= 2 * 5000


def test_a_static_cache_never_moves() -> None:
    _, k, v = tokens()
    cache = StaticCache(2 * LENGTH)
    cache.append(0, k, v)
    place, size = cache.view(0).k.data_ptr(), cache.nbytes
    cache.append(0, k[:, :, :20], v[:, :, :20])
    cache.reorder([1, 0])
    cache.keep(0, torch.ones(B, 1, LENGTH + 20, dtype=torch.bool))
    assert (cache.view(0).k.data_ptr(), cache.nbytes) == (place, size)


def test_ten_million_tokens_roll_through_constant_memory() -> None:
    """Single tokens and chunks in turn; the output at the end is the windowed reference's."""
    window, sinks, chunk, total = 64, 4, 4096, 10_000_000
    cache = RollingCache(window, sinks)
    stream = torch.randn(2, 1, 1, chunk + 1, 4)
    sizes, seen = set(), 0
    while seen < total:
        stream.mul_(-1).add_(0.001)  # every round brings other tokens
        if seen == 0:
            first = stream[..., :sinks, :].clone()
        for part in (slice(0, chunk), slice(chunk, None)):
            cache.append(0, stream[0][:, :, part], stream[1][:, :, part])
        seen += chunk + 1
        sizes.add(cache.nbytes)
    assert cache.lengths() == (seen,)
    assert seen >= total
    assert max(sizes) <= 4 * (chunk + window + sinks) * 4 * 2 * 4  # 4 times what a chunk needs
    assert len(sizes) <= 2
    q = torch.randn(1, 2, 2, 4)
    recent = stream[..., -window - 2 :, :]
    cache.append(0, *(x[:, :, :2] for x in stream))
    k, v = (torch.cat([first[i], recent[i], stream[i][:, :, :2]], 2) for i in range(2))
    expected = truth(q=q, k=k, v=v, mask=windowed(window, sinks), q_offset="end")
    check_out(poise.attention(q, cache.view(0), mask=cache.mask), expected)


# --- errors change nothing --------------------------------------------------------------------------------------------


def unchanged(cache: Cache, call: Callable[[], Any], error: type[Exception], words: str) -> pytest.ExceptionInfo[Any]:
    """The call raises, and the cache is what it was."""
    before, lengths = contents(cache), cache.lengths()
    free = cache.pages_free if isinstance(cache, PagedCache) else 0
    with pytest.raises(error, match=words) as caught:
        call()
    assert same(contents(cache), before)
    assert cache.lengths() == lengths
    assert free == (cache.pages_free if isinstance(cache, PagedCache) else 0)
    return caught


def test_running_out_of_pages_names_need_and_free() -> None:
    _, k, v = tokens()
    cache = PagedCache(pages=13, page=4)
    cache.append(0, k, v)  # 2 x 6 pages
    caught = unchanged(
        cache,
        lambda: cache.append(0, k[:, :, :2], v[:, :, :2]),
        CacheFull,
        "2 pages of 4 tokens are needed and 1 of 13",
    )
    assert (caught.value.need, caught.value.free) == (2, 1)
    cache.append(0, k[:, :, :2], v[:, :, :2], [2, 1])  # the free place of one sequence, a new page of the other
    assert cache.pages_free == 0


def test_a_first_append_that_does_not_fit_leaves_the_cache_new() -> None:
    _, k, v = tokens()
    for cache in (PagedCache(pages=3, page=4), StaticCache(5)):
        with pytest.raises(CacheFull):
            cache.append(0, k, v)
        assert cache.batch == 0
        cache.append(0, k[:1, :, :5], v[:1, :, :5])
        assert cache.lengths() == (5,)


def test_copies_of_shared_pages_count_as_need() -> None:
    _, k, v = tokens(n=6, batch=1)
    cache = PagedCache(pages=3, page=4)
    cache.append(0, k, v)
    cache.reorder([0, 0, 0])
    _, more_k, more_v = tokens(n=1, batch=3)
    unchanged(cache, lambda: cache.append(0, more_k, more_v), CacheFull, "2 pages of 4 tokens are needed and 1 of 3")
    cache.append(0, more_k, more_v, [0, 1, 0])
    assert cache.pages_free == 0


def test_too_long_a_sequence_is_named() -> None:
    _, k, v = tokens()
    cache = StaticCache(30)
    cache.append(0, k, v)
    caught = unchanged(
        cache,
        lambda: cache.append(0, k[:, :, :9], v[:, :, :9], [7, 9]),
        CacheFull,
        "sequence 1 holds 23 of 30 tokens: 9 more",
    )
    assert (caught.value.need, caught.value.free) == (9, 7)


def test_what_rolled_out_does_not_come_back() -> None:
    _, k, v = tokens()
    cache = RollingCache(4, sinks=1)
    cache.append(0, k[:, :, :20], v[:, :, :20])
    cache.append(0, k[:, :, 20:], v[:, :, 20:])
    unchanged(cache, lambda: cache.truncate(19), ValueError, "before token 20 some are gone")
    cache.truncate([20, 21])
    assert cache.lengths() == (20, 21)


_, K, V = torch.Generator(), torch.zeros(B, G, 3, DK), torch.zeros(B, G, 3, DV)
WRONG: dict[str, tuple[Callable[[Cache], Any], type[Exception], str]] = {
    "layer": (lambda c: c.append(-1, K, V), ValueError, "layer must be an int from 0 on; got -1"),
    "not a tensor": (lambda c: c.append(0, [1], V), TypeError, "k must be a torch.Tensor; got list"),
    "three dims": (lambda c: c.append(0, K[0], V), ValueError, "k must be .batch, kv heads, tokens, dim"),
    "gradient": (lambda c: c.append(0, K, V.clone().requires_grad_()), ValueError, "v requires a gradient"),
    "tokens of k and v": (lambda c: c.append(0, K, V[:, :, 1:]), ValueError, "k and v must agree"),
    "integers": (lambda c: c.append(0, K.int(), V.int()), TypeError, "k and v must be float32"),
    "batch": (lambda c: c.append(1, K[:1], V[:1]), ValueError, "tokens for 2 sequences"),
    "heads": (lambda c: c.append(0, K[:, :1], V[:, :1]), ValueError, "layer 0 holds heads 2, got 1"),
    "dims": (lambda c: c.append(0, V, K), ValueError, "key dim 16, got 8; value dim 8, got 16"),
    "counts": (lambda c: c.append(0, K, V, [4, 0]), ValueError, "counts must be 2 numbers from 0 to the 3"),
    "counts of floats": (lambda c: c.append(0, K, V, [1.0, 0]), TypeError, "counts must hold ints"),
    "unknown layer": (lambda c: c.view(7), ValueError, "layer 7 holds no keys yet"),
    "truncate": (lambda c: c.truncate(24), ValueError, "sequence 0 has 23 tokens and can't be truncated to 24"),
    "truncate below": (lambda c: c.truncate([3, -1]), ValueError, "sequence"),
    "truncate too many": (lambda c: c.truncate([1, 2, 3]), ValueError, "one per sequence, 2; got 3"),
    "free": (lambda c: c.free(2), ValueError, "rows must name sequences 0 ... 1; got 2"),
    "fork": (lambda c: c.fork(0, -1), ValueError, "rows must name sequences"),
    "reorder to nothing": (lambda c: c.reorder([]), ValueError, "at least one sequence"),
}


@pytest.mark.parametrize(("call", "error", "words"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_named_and_change_nothing(
    kind: str, call: Callable[[Cache], Any], error: type[Exception], words: str
) -> None:
    cache = KINDS[kind]()
    _, k, v = tokens()
    cache.append(0, k, v)
    unchanged(cache, lambda: call(cache), error, words)


def test_another_dtype_is_not_taken_silently() -> None:
    _, k, v = tokens()
    cache = GrowingCache()
    cache.append(0, k, v)
    unchanged(cache, lambda: cache.append(0, k.bfloat16(), v.bfloat16()), ValueError, "give the cache a dtype")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StaticCache(0), "capacity must be a positive number"),
        (lambda: RollingCache(0), "window must be an int of at least 1"),
        (lambda: RollingCache(4, sinks=-1), "sinks must be an int of at least 0"),
        (lambda: PagedCache(0), "pages must be a positive int"),
        (lambda: PagedCache(4, page=0), "page must be a positive int"),
    ],
)
def test_sizes_are_checked(make: Callable[[], Cache], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_dtype_that_no_cache_has_is_refused() -> None:
    with pytest.raises(TypeError, match="dtype must be float32"):
        GrowingCache(torch.int32)
