"""Which tokens the policies keep, and what is left of a cache afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poise
from poise.nn import GrowingCache, QuantCache, StaticCache, heavy_hitters, sinks_and_recent
from poise.nn.cache.slab import Evictable
from poise.testing import check_out, truth

B, H, G, LENGTH, D = 2, 4, 2, 12, 8
CACHES: dict[str, Callable[[], Evictable]] = {
    "growing": GrowingCache,
    "static": lambda: StaticCache(20),
    "int8": QuantCache,
}


def filled(
    make: Callable[[], Evictable], counts: list[int] | None = None
) -> tuple[Evictable, torch.Tensor, torch.Tensor]:
    k, v = torch.randn(B, G, LENGTH, D), torch.randn(B, G, LENGTH, D)
    cache = make()
    cache.append(0, k, v, counts)
    return cache, k, v


@pytest.mark.parametrize("kind", CACHES)
def test_after_an_eviction_attention_is_that_over_the_kept_tokens(kind: str, impl: Any) -> None:
    cache, _, _ = filled(CACHES[kind])
    k, v = cache.view(0).dense(torch.float32)
    kept = torch.stack([torch.randperm(LENGTH) < 5 for _ in range(B * G)]).view(B, G, LENGTH)
    left_k, left_v = (x[kept].view(B, G, 5, D) for x in (k, v))
    cache.keep(0, kept)
    assert cache.view(0).lengths.tolist() == [5, 5]
    assert cache.lengths() == (LENGTH, LENGTH)  # the position of the next token is what it was
    q = torch.randn(B, H, 1, D)
    check_out(poise.attention(q, cache.view(0), impl=impl), truth(q=q, k=left_k, v=left_v))


def test_tokens_appended_after_an_eviction_follow_what_is_left(impl: Any) -> None:
    cache, k, v = filled(GrowingCache, [LENGTH, 7])
    cache.keep(0, sinks_and_recent(cache.view(0), 1, 3))
    cache.append(0, k[:, :, :2], v[:, :, :2])
    assert cache.lengths() == (14, 9)
    q = torch.randn(B, H, 2, D)
    out = poise.attention(q, cache.view(0), mask=cache.mask, impl=impl)
    for b, first in enumerate((0, LENGTH - 7)):  # shorter prompts are the last columns
        chosen = [first, 9, 10, 11, 0, 1]
        alone = {"q": q[b : b + 1], "k": k[b : b + 1, :, chosen], "v": v[b : b + 1, :, chosen]}
        check_out(out[b : b + 1], truth(**alone, mask=poise.causal(), q_offset="end"))


def test_what_was_evicted_does_not_come_back() -> None:
    cache, k, v = filled(GrowingCache)
    cache.keep(0, sinks_and_recent(cache.view(0), 1, 3))
    cache.append(0, k[:, :, :2], v[:, :, :2])
    with pytest.raises(ValueError, match="before token 12 some are gone"):
        cache.truncate(11)
    cache.truncate(12)
    assert cache.view(0).lengths.tolist() == [4, 4]


def test_sinks_and_recent_keeps_the_ends_of_every_sequence() -> None:
    cache, _, _ = filled(GrowingCache, [12, 6])
    kept = sinks_and_recent(cache.view(0), 2, 3)
    assert kept[0, 0].nonzero().flatten().tolist() == [0, 1, 9, 10, 11]
    assert kept[1, 0].nonzero().flatten().tolist() == [0, 1, 3, 4, 5]


def test_sinks_and_recent_of_a_short_sequence_is_all_of_it() -> None:
    cache, _, _ = filled(GrowingCache, [12, 4])
    assert sinks_and_recent(cache.view(0), 2, 3)[1, 0].tolist() == [True] * 4 + [False] * 8


def test_heavy_hitters_are_those_that_received_most_in_each_head() -> None:
    cache, _, _ = filled(GrowingCache, [12, 6])
    received = torch.zeros(B, H, LENGTH)
    received[:, 0, 1] = received[:, 1, 4] = 1.0  # the query heads of group 0
    received[:, 2, 2] = received[:, 2, 3] = 1.0
    received[:, :, 11] = 9.0  # recent anyway, or not there
    kept = heavy_hitters(cache.view(0), received, 2, 1)
    assert [[head.nonzero().flatten().tolist() for head in sequence] for sequence in kept] == [
        [[1, 4, 11], [2, 3, 11]],
        [[1, 4, 5], [2, 3, 5]],
    ]


def test_heavy_hitters_of_equals_are_as_many_in_every_head() -> None:
    cache, _, _ = filled(GrowingCache, [12, 3])
    kept = heavy_hitters(cache.view(0), torch.ones(B, H, LENGTH), 3, 2)
    assert kept.sum(-1).tolist() == [[5, 5], [3, 3]]
    cache.keep(0, kept)


def test_heavy_hitters_lose_less_than_the_last_tokens_where_attention_is_uneven() -> None:
    """Queries look for a few early keys: a policy that sees what was received keeps them, one that does not can't."""
    q, k, v = torch.randn(1, H, 64, D), torch.randn(1, G, 64, D), torch.randn(1, G, 64, D)
    k[:, :, 5:60:10] += 3.0
    q += 2.0
    exact = poise.attention(q[:, :, -1:], k, v)

    def error(policy: Callable[..., torch.Tensor]) -> float:
        cache = GrowingCache()
        cache.append(0, k, v)
        _, stats = poise.observe(q, cache.view(0), mask=cache.mask)
        received = poise.received(q, cache.view(0), stats.lse, mask=cache.mask)
        cache.keep(0, policy(cache.view(0), received))
        return float((poise.attention(q[:, :, -1:], cache.view(0)) - exact).norm() / exact.norm())

    by_weight = error(lambda view, received: heavy_hitters(view, received, 12, 4))
    by_age = error(lambda view, received: sinks_and_recent(view, 4, 12))
    assert by_weight < 0.1
    assert by_age > 5 * by_weight


@pytest.mark.parametrize(
    ("kept", "error", "words"),
    [
        (torch.ones(B, 1, LENGTH), TypeError, "kept must be a bool tensor"),
        (torch.ones(B, 1, LENGTH + 1).bool(), ValueError, "kept must be .2, 1 or 2, 12."),
        (torch.ones(B, 3, LENGTH).bool(), ValueError, "kept must be .2, 1 or 2, 12."),
        (torch.eye(G, LENGTH).bool().cumsum(0).bool().expand(B, -1, -1), ValueError, "as many tokens in every head"),
    ],
    ids=["floats", "keys", "heads", "uneven heads"],
)
def test_what_can_not_be_kept_is_named_and_changes_nothing(kept: Any, error: type[Exception], words: str) -> None:
    cache, k, _ = filled(GrowingCache)
    with pytest.raises(error, match=words):
        cache.keep(0, kept)
    assert torch.equal(cache.view(0).k, k)


def test_policies_name_bad_arguments() -> None:
    cache, _, _ = filled(GrowingCache)
    with pytest.raises(ValueError, match="recent must be a number of tokens from 0 on; got -1"):
        sinks_and_recent(cache.view(0), 1, -1)
    with pytest.raises(ValueError, match=r"received must be \[2, a multiple of 2 heads, 12\]"):
        heavy_hitters(cache.view(0), torch.ones(B, 3, LENGTH), 1, 1)
