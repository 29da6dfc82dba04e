"""Linformer: attention over k projected keys and values instead of n, linear in the length (arXiv:2006.04768).

K̄ = E K and V̄ = F V mix positions with learned matrices [k, n], then exact attention runs on k keys. Padded keys and
values are zeroed before they are mixed: after it there is no telling them apart. A causal form does not exist, for
every mixed key holds something of the last token.

Letters: B batch, H query heads, G key/value heads, N queries, M <= n keys, D head dim.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from poise.nn.attention import Call
from poise.op import attention
from poise.variants.calls import PLAIN, check_heads, check_padding, refuse

Sharing: TypeAlias = Literal["none", "headwise", "key-value", "layerwise"]
SHARINGS = ("none", "headwise", "key-value", "layerwise")


class Linformer(nn.Module):
    """Attention through projections to `rank` keys.

    length: n, the longest sequence; shorter ones use the first columns.
    rank: k.
    heads: G, the heads of k and v.
    sharing: "none", one E and one F per head; "headwise", one E and one F for all heads; "key-value", E = F for all
        heads; "layerwise", the E = F of another layer's Linformer, given as `like` (None in the first of them).

    >>> first = Linformer(4096, 256, heads=8, sharing="layerwise")
    >>> second = Linformer(4096, 256, heads=8, sharing="layerwise", like=first)
    >>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    >>> second(q, k, v).shape
    torch.Size([1, 8, 4096, 64])
    """

    e: nn.Parameter  # [G|1, k, n]
    f: nn.Parameter | None  # likewise; None where F = E

    def __init__(
        self,
        length: int,
        rank: int,
        heads: int,
        *,
        sharing: Sharing = "headwise",
        like: Linformer | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("length", length), ("rank", rank), ("heads", heads)):
            if value < 1:
                raise ValueError(f"Linformer: {name} must be at least 1; got {value}")
        if sharing not in SHARINGS:
            raise ValueError(f"Linformer: sharing must be one of {', '.join(map(repr, SHARINGS))}; got {sharing!r}")
        self.length, self.rank, self.heads, self.sharing = length, rank, heads, sharing
        if like is not None:
            if sharing != "layerwise" or like.sharing != "layerwise":
                raise ValueError('Linformer: like= shares one matrix between layers, both with sharing="layerwise"')
            if (like.length, like.rank) != (length, rank):
                raise ValueError(
                    f"Linformer: like= projects {like.length} positions to {like.rank}, this layer {length} to {rank}"
                )
            self.e = like.e
        else:
            self.e = _matrix(heads if sharing == "none" else 1, rank, length)
        self.f = _matrix(*self.e.shape) if sharing in ("none", "headwise") else None

    def extra_repr(self) -> str:
        return f"length={self.length}, rank={self.rank}, heads={self.heads}, sharing={self.sharing!r}"

    def __repr__(self) -> str:
        return f"Linformer({self.extra_repr()})"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN) -> Tensor:
        """[B, H, N, Dv] from q [B, H, N, D], k [B, G, M, D], v [B, G, M, Dv]."""
        refuse(
            "Linformer",
            call,
            "causal",
            instead="Each projected key mixes all positions, later ones too: take Performer or a window",
        )
        refuse("Linformer", call, "mask", "bias", "q_offset")
        check_heads("Linformer", q, k, v)
        padding = call.visible.padding
        check_padding("Linformer", padding, k)
        heads, present = k.shape[1:3]
        if heads != self.heads:
            raise ValueError(f"Linformer: made for {self.heads} key/value heads; k has {heads}")
        if present > self.length:
            raise ValueError(f"Linformer: made for at most {self.length} positions; k has {present}. Make a longer one")
        if padding is not None:  # selected, not multiplied: padding may hold NaN
            k, v = (torch.where(padding[:, None, :, None], x, 0.0) for x in (k, v))
        e = self.e[..., :present].to(k.dtype)
        f = e if self.f is None else self.f[..., :present].to(v.dtype)
        return attention(q, e @ k, f @ v, scale=call.scale, softcap=call.softcap, sink=call.sink, dropout=call.dropout)


def _matrix(groups: int, rank: int, length: int) -> nn.Parameter:
    """[groups, k, n], so that a projected key is about as large as a key."""
    return nn.Parameter(torch.randn(groups, rank, length) / math.sqrt(length))
