"""Longformer: a window for every token, and a few global tokens that see and are seen by all (arXiv:2004.05150).

Who sees whom is a mask, window | global tokens, so that the operator skips the rest. Global tokens may have projections
of their own, as in the published models: their queries then see every key through those, in a second call of few rows
whose results take their rows' place in the first.

Letters: B batch, H heads, N positions, C width, D head dim, K global tokens of a sequence (at most).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from poise.mask import Keep, Mask, dilated, global_tokens
from poise.nn.attention import Call, Visible, real_keys
from poise.op import attention
from poise.variants.calls import PLAIN, attend, check_self_attention, refuse


@dataclass(frozen=True)
class LongformerVisible(Visible):
    """`Visible` that also names the global tokens of each sequence, for every layer of one forward pass."""

    tokens: Tensor | None = None  # bool [B, N]; padding among them does not count
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def real_tokens(self) -> Tensor | None:
        """bool [B, N], or None if there are no global tokens."""
        if "tokens" not in self._known:
            tokens = self.tokens
            if tokens is not None and self.padding is not None:
                tokens = tokens & self.padding
            self._known["tokens"] = tokens if tokens is not None and bool(tokens.any()) else None
        found: Tensor | None = self._known["tokens"]
        return found

    @property
    def indices(self) -> Tensor | None:
        """int64 [B, K]: each sequence's global tokens, padded with -1."""
        if "indices" not in self._known:
            tokens = self.real_tokens
            self._known["indices"] = None if tokens is None else _indices(tokens)
        found: Tensor | None = self._known["indices"]
        return found

    def local(self, window: int, dilation: int, rows: bool) -> Mask:
        """window | global keys (and global queries if `rows`), and all else that is to hold; lowered once."""
        key = window, dilation, rows
        if key not in self._known:
            mask, tokens = dilated(window // 2, dilation), self.real_tokens
            if tokens is not None:
                one = tokens[:1] if bool((tokens == tokens[:1]).all()) else tokens
                mask = mask | (global_tokens(_indices(one)) if rows else Keep(one[:, None, None]))
            mask = mask if self.joined is None else mask & self.joined
            if tokens is not None and tokens.device.type == "cpu":
                mask = mask.lower(tokens.shape[1], tokens.shape[1], batch=tokens.shape[0])
            self._known[key] = mask
        known: Mask = self._known[key]
        return known


class Longformer(nn.Module):
    """Attention within |i - j| <= window / 2, plus global tokens; an attention choice of poise.nn.

    window: the total width, even.
    tokens: the global positions when the call names none (see `LongformerVisible`).
    dilation: the window's keys lie this far apart, and it reaches as much further. Work is skipped by whole tiles, so
        that a dilated window costs as much as the span it reaches over.
    width, heads: C and H, for projections of the global tokens' own (`query`, `key`, `value`, applied to call.hidden);
        without them global tokens use the projections of all.

    >>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    >>> Longformer(512, tokens=(0,))(q, k, v).shape
    torch.Size([1, 8, 4096, 64])
    """

    def __init__(
        self,
        window: int,
        *,
        tokens: Sequence[int] = (),
        dilation: int = 1,
        width: int | None = None,
        heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        if window < 2 or window % 2:
            raise ValueError(f"Longformer: window is the total width, even and at least 2; got {window}")
        if dilation < 1:
            raise ValueError(f"Longformer: dilation must be at least 1; got {dilation}")
        if (width is None) != (heads is None):
            raise ValueError("Longformer: projections for global tokens need both width and heads, or neither")
        self.window, self.dilation, self.tokens = window, dilation, tuple(tokens)
        self._mask = dilated(window // 2, dilation)
        if self.tokens:
            self._mask = self._mask | global_tokens(list(self.tokens))
        self.query = self.key = self.value = None
        if width is not None and heads is not None:
            inner = heads * (head_dim or width // heads)
            self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))

    def __repr__(self) -> str:
        own = "" if self.query is None else ", own projections"
        return f"Longformer(window={self.window}, tokens={self.tokens}, dilation={self.dilation}{own})"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN) -> Tensor:
        """[B, H, N, Dv] from q [B, H, N, D], k and v with as many positions."""
        check_self_attention("Longformer", q, k, v, call)
        visible = call.visible
        named = visible if isinstance(visible, LongformerVisible) else None
        if self.query is None and named is None:
            return attend(q, k, v, call, visible.for_call(q, k, self._mask))
        if named is None:
            named = LongformerVisible(visible.causal, visible.padding, visible.mask, tokens=self._default(q))
        if self.query is None:
            return attend(q, k, v, call, named.local(self.window, self.dilation, True))
        out = attend(q, k, v, call, named.local(self.window, self.dilation, False))
        idx = named.indices
        return out if idx is None else self._with_globals(out, call, idx)

    def _default(self, q: Tensor) -> Tensor | None:
        if not self.tokens:
            return None
        tokens = torch.zeros(q.shape[2], dtype=torch.bool, device=q.device)
        tokens[[token for token in self.tokens if token < q.shape[2]]] = True
        return tokens.expand(q.shape[0], -1)

    def _with_globals(self, out: Tensor, call: Call, idx: Tensor) -> Tensor:
        """`out` with the rows of the global tokens computed by their own projections."""
        assert self.query is not None
        assert self.key is not None
        assert self.value is not None
        refuse(
            "Longformer with projections for global tokens",
            call,
            *("causal", "mask", "bias", "softcap", "sink"),
            instead="Make it without width and heads",
        )
        hidden = call.hidden
        if hidden is None:
            raise ValueError("Longformer: its global tokens are projected from call.hidden [B, N, C], which is None")
        batch, heads, _, dim = out.shape
        count, width = idx.shape[1], hidden.shape[2]
        scale = dim**-0.5 if call.scale is None else call.scale
        mask = None if call.visible.padding is None else real_keys(call.visible.padding)
        there = idx >= 0
        rows = hidden.gather(1, idx.clamp_min(0)[..., None].expand(-1, -1, width))  # [B, K, C]
        queries = self.query(rows).view(batch, count, heads, dim)
        if heads * count < width // 2 and not call.dropout and isinstance(scale, float):
            # (W x + b)·q = x·(Wᵀq) + b·q: few queries are cheaper to project to the width of x than all of x to keys
            # and values, and as exact.
            to_keys, to_values = (x.weight.view(heads, dim, width) for x in (self.key, self.value))
            wide = torch.einsum("bkhd,hdc->bkhc", queries, to_keys).reshape(batch, 1, count * heads, width)
            same = (queries * self.key.bias.view(heads, dim)).sum(-1).view(batch, 1, -1, 1) * scale
            seen = attention(wide, hidden[:, None], hidden[:, None], mask=mask, bias=same, scale=scale)
            found = torch.einsum("bkhc,hdc->bkhd", seen.view(batch, count, heads, width), to_values)
            found = found + self.value.bias.view(heads, dim)
        else:
            keys, values = (x(hidden).view(batch, -1, heads, dim) for x in (self.key, self.value))
            found = attention(queries, keys, values, mask=mask, scale=scale, dropout=call.dropout, layout="bshd")
        sequence, slot = there.nonzero(as_tuple=True)
        by_position = out.transpose(1, 2)  # [B, N, H, D]
        # Out of place: the operator's backward pass reads its own output.
        replace = by_position.index_put_ if not by_position.requires_grad else by_position.index_put
        return replace((sequence, idx[sequence, slot]), found[sequence, slot]).transpose(1, 2)


def _indices(tokens: Tensor) -> Tensor:
    """bool [B, N] -> int64 [B, K], ascending, padded with -1."""
    count = tokens.sum(-1)
    most = int(count.max())
    order = tokens.int().argsort(dim=-1, descending=True, stable=True)[:, :most]
    return torch.where(torch.arange(most, device=tokens.device) < count[:, None], order, -1)
