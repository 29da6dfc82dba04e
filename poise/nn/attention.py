"""Multi-head attention as a module: projections, positions, norms, gates and sinks around one attention function.

What happens between the projected q, k, v and the output is a `Choice`: `Exact`, the operator itself, unless another is
passed (poise.variants has more). `Visible` tells who may see whom in one forward pass, and is shared by all its layers.

Letters: B batch, N queries, M keys, C width, H query heads, G key/value heads, Dk and Dv head dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from poise.arguments import OffsetLike, ScaleLike
from poise.mask import Mask, causal, keep, lengths
from poise.nn.cache import Cache
from poise.nn.linear import Linear
from poise.nn.norm import RMSNorm
from poise.nn.positions import Placement, Scheme
from poise.nn.projection import Projection
from poise.op import attention
from poise.score import Bias


@dataclass(frozen=True)
class Visible:
    """Who may see whom: the conjunction of its parts, kept apart for choices that can honour only some of them."""

    causal: bool = False
    padding: Tensor | None = None  # bool [B, M], True = a real key
    mask: Mask | None = None  # whatever else
    _lowered: dict[Hashable, Mask] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def joined(self) -> Mask | None:
        """All parts as one mask, None if everybody sees everybody."""
        parts = [
            self.mask,
            None if self.padding is None else real_keys(self.padding),
            causal() if self.causal else None,
        ]
        joined: Mask | None = None
        for part in parts:
            joined = part if joined is None else joined if part is None else joined & part
        return joined

    @cached_property
    def counts(self) -> list[int] | None:
        """How many tokens of each sequence are real, None if all are."""
        return None if self.padding is None else self.padding.sum(-1).tolist()

    def for_call(self, q: Tensor, k: Tensor, own: Mask | None = None) -> Mask | None:
        """`joined`, and a choice's own mask of Python numbers: lowered once for all layers that ask for the same."""
        joined = self.joined
        mask = own if joined is None else joined if own is None else own & joined
        # A mask with a key is all Python numbers: the operator remembers how it lowered it.
        if mask is None or mask.key is not None or q.device.type != "cpu" or q.shape[2] != k.shape[2]:
            return mask
        shape = (q.shape[2], k.shape[2], q.shape[0], q.shape[1])
        if (shape, own) not in self._lowered:
            self._lowered[shape, own] = mask.lower(*shape)
        return self._lowered[shape, own]


EVERYTHING = Visible()
CAUSAL = Visible(causal=True)


def real_keys(padding: Tensor) -> Mask:
    """The mask that hides padding: bool [B, M], True = real. Where a sequence's keys are one run, work is skipped."""
    if padding.dtype is not torch.bool or padding.dim() != 2:
        raise TypeError(f"padding must be bool [batch, keys], True = real; got {padding.dtype} {list(padding.shape)}")
    count = padding.sum(-1)
    first = padding.int().argmax(-1)
    place = torch.arange(padding.shape[1], device=padding.device)
    run = (place >= first[:, None]) & (place < (first + count)[:, None])
    return lengths(first + count, first) if torch.equal(run, padding) else keep(padding[:, None, None])


class Call(NamedTuple):
    """What a choice may need besides q, k and v. One that cannot honour a part that is set must raise."""

    visible: Visible = EVERYTHING
    hidden: Tensor | None = None  # [B, N, C], what was projected to q (and to k and v, in self-attention)
    bias: Bias | Tensor | None = None
    scale: ScaleLike | None = None  # None: 1/√Dk
    softcap: float | None = None
    sink: Tensor | None = None  # [H]
    dropout: float = 0.0
    q_offset: OffsetLike | None = None


class Choice(Protocol):
    """How q [B, H, N, Dk], k [B, G, M, Dk] and v [B, G, M, Dv] become outputs [B, H, N, Dv], any strides.

    A function, or a module where it has parameters of its own.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor: ...


class Exact:
    """Exact attention: `poise.attention`, or what stands in for it with the same arguments."""

    def __init__(self, attend: Callable[..., Tensor] = attention) -> None:
        self.attend = attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        out = self.attend(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask=call.visible.for_call(q, k),
            bias=call.bias,
            scale=call.scale,
            softcap=call.softcap,
            sink=call.sink,
            dropout=call.dropout,
            q_offset=call.q_offset,
            layout="bshd",
        )
        return out.transpose(1, 2)

    def __repr__(self) -> str:
        return "Exact()"


EXACT = Exact()


class KeyValues(NamedTuple):
    """Keys [B, M, G, Dk] and values [B, M, G, Dv] projected before: a context that many calls read."""

    keys: Tensor
    values: Tensor


class MultiHeadAttention(nn.Module):
    """Attention over x [B, N, C], or from x to a context [B, M, C]: [B, N, C].

    width, heads, kv_heads, head_dim, value_dim: C, H, G, Dk and Dv; by default G = H and Dk = Dv = C / H.
    bias, out_bias: of the projections to q, k, v, and of the one back.
    qk_norm: RMSNorm of each head's queries and keys, with that eps, before positions (Qwen 3).
    gate: outputs times sigmoid(W x), one gate per output dim. sinks: a learned logit per head that takes probability.
    scale: None for 1/√Dk, a number, or a module from `places` (int64 [N] or [B, N]) to what `poise.attention` accepts
        (`LearnedScale`, `LogLength`).
    positions: a scheme for self-attention; a stack that shares one passes `placement` instead.
    choice: another attention than the exact one.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        qk_norm: float | None = None,
        gate: bool = False,
        sinks: bool = False,
        softcap: float | None = None,
        scale: float | nn.Module | None = None,
        positions: Scheme | None = None,
        dropout: float = 0.0,
        choice: Choice = EXACT,
    ) -> None:
        super().__init__()
        self.projection = Projection(width, heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, bias=bias)
        wide = heads * self.projection.value_dim
        self.query_norm = None if qk_norm is None else RMSNorm(self.projection.head_dim, qk_norm)
        self.key_norm = None if qk_norm is None else RMSNorm(self.projection.head_dim, qk_norm)
        self.gate = Linear(width, wide, bias=bias) if gate else None
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.out = Linear(wide, width, bias=bias if out_bias is None else out_bias)
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        self.positions = positions
        self.choice = choice

    def forward(
        self,
        x: Tensor,
        context: Tensor | KeyValues | None = None,
        *,
        visible: Visible = EVERYTHING,
        places: Tensor | None = None,
        placement: Placement | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """places: where x stands, int64 [N] or [B, N]; None counts from 0.

        cache: keys and values of earlier tokens, which x sees and joins, causally. Padding in `visible` is then that of
        x [B, N], at its left, and stays out of the cache.
        """
        if places is None and (self.positions is not None or isinstance(self.scale, nn.Module)):
            if cache is not None:
                raise ValueError("places is needed with a cache: the positions of x, which follow the cached ones")
            places = torch.arange(x.shape[1], device=x.device)
        if placement is None and self.positions is not None and context is None:
            assert places is not None
            placement = self.positions.place(places)
        q, k, v = self._projected(x, context, placement)
        call = Call(
            visible=visible,
            hidden=x,
            bias=None if placement is None else placement.bias,
            scale=self.scale(places) if isinstance(self.scale, nn.Module) else self.scale,
            softcap=self.softcap,
            sink=self.sinks,
            dropout=self.dropout if self.training else 0.0,
        )
        if cache is None:
            out = self.choice(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call).transpose(1, 2)
        else:
            out = self._cached(q, k, v, call, cache, layer)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid().view(out.shape)
        attended: Tensor = self.out(out.flatten(2))
        return attended

    def keys_values(self, context: Tensor) -> KeyValues:
        """The context [B, M, C] projected once, to be passed as `context` many times."""
        keys, values = self.projection.keys_values(context)
        return KeyValues(keys if self.key_norm is None else self.key_norm(keys), values)

    def _projected(
        self, x: Tensor, context: Tensor | KeyValues | None, placement: Placement | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, N, H, Dk], k [B, M, G, Dk], v [B, M, G, Dv], normed and turned."""
        rotate: Callable[[Tensor], Tensor] | None = None if placement is None else placement.rotate
        if context is not None:
            if not isinstance(context, KeyValues):
                context = self.keys_values(context)
            q = self.projection.queries(x)
            q = q if self.query_norm is None else self.query_norm(q)
            return (q if rotate is None else rotate(q)), context.keys, context.values
        both, v = self.projection(x)
        sizes = (self.projection.heads, self.projection.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = both.split(sizes, 2)
            both = torch.cat((self.query_norm(q), self.key_norm(k)), 2)
        if rotate is not None:
            both = rotate(both)
        q, k = both.split(sizes, 2)
        return q, k, v

    def _cached(self, q: Tensor, k: Tensor, v: Tensor, call: Call, cache: Cache, layer: int) -> Tensor:
        """[B, N, H, Dv]: from q to all that the cache holds of this layer, k and v included."""
        if not isinstance(self.choice, Exact):
            raise ValueError(f"only exact attention reads a cache; this module's choice is {self.choice!r}")
        cache.append(layer, k.transpose(1, 2), v.transpose(1, 2), call.visible.counts)
        mask = cache.mask if call.visible.mask is None else cache.mask & call.visible.mask
        scoring: dict[str, Any] = {"bias": call.bias, "scale": call.scale, "softcap": call.softcap, "sink": call.sink}
        out: Tensor = attention(q.transpose(1, 2), cache.view(layer), mask=mask, **scoring).transpose(1, 2)
        return out


class LearnedScale(nn.Module):
    """A temperature per head, learned, from 1/√Dk on: exp(log_scale) [H]."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((heads,), -0.5 * math.log(head_dim)))

    def forward(self, places: Tensor) -> Tensor:
        return self.log_scale.exp()


class LogLength(nn.Module):
    """Scalable softmax: s · log n / √Dk, n the number of keys a causal query sees and s learned per head."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(heads))
        self.head_dim = head_dim

    def forward(self, places: Tensor) -> Tensor:
        seen = (places if places.dim() == 2 else places[None]) + 1  # [B|1, N]
        return self.s[:, None] * seen[:, None].log() / math.sqrt(self.head_dim)
