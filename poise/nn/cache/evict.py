"""Which tokens of a full cache to keep: policies as plain functions, whose answers `cache.keep(layer, kept)` takes.

An answer is bool [B, 1|G, keys], True = keep, with as many tokens in every head of a sequence. What a policy costs in
output error is measured by examples/smaller_caches.py.

Letters: B sequences, H query heads, G key/value heads, M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poise.kvview import KVView


def sinks_and_recent(view: KVView, sinks: int, recent: int) -> Tensor:
    """The first `sinks` tokens of each sequence and its last `recent` ones (StreamingLLM): [B, 1, M]."""
    _check(sinks=sinks, recent=recent)
    place, lengths = _places(view)
    return ((place < sinks) | (place >= lengths - recent)) & (place < lengths)


def heavy_hitters(view: KVView, received: Tensor, heavy: int, recent: int) -> Tensor:
    """The last `recent` tokens, and of the earlier ones the `heavy` that received most attention (H2O): [B, G, M].

    received: `poise.received(q, view, stats.lse, ...)` [B, H, M], or a sum of such over calls since (padded to the
    present keys, or gathered with `kept` after an eviction). The query heads that share a key are added up.
    """
    _check(heavy=heavy, recent=recent)
    place, lengths = _places(view)
    groups = view.k.shape[1]
    batch, keys = view.lengths.shape[0], view.keys
    heads = received.shape[1] if received.dim() == 3 else 0
    if received.dim() != 3 or received.shape[::2] != (batch, keys) or heads % groups:
        raise ValueError(
            f"received must be [{batch}, a multiple of {groups} heads, {keys}], as from poise.received on this view; "
            f"got {list(received.shape)}"
        )
    total = received.reshape(batch, groups, heads // max(groups, 1), keys).sum(2)  # [B, G, M]
    late = (place >= lengths - recent) & (place < lengths)  # [B, 1, M]
    early = place < lengths - recent
    # Ranks, not a threshold: ties must not make one head keep more than another.
    order = total.masked_fill(~early, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(keys, device=order.device).expand_as(order))
    return (early & (rank < heavy)) | late


def _places(view: KVView) -> tuple[Tensor, Tensor]:
    """Indices [1, 1, M] and lengths [B, 1, 1]."""
    return torch.arange(view.keys, device=view.k.device)[None, None], view.lengths[:, None, None]


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a number of tokens from 0 on; got {value!r}")
