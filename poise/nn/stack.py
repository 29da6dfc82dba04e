"""Blocks and stacks of them: encoder, decoder and both, one configurable form for every model.

`BlockConfig` says what a block is made of; no model has a copy of this file. Embeddings and heads are the models'.

Letters: B batch, N positions, M positions of the other sequence, C width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise.nn.attention import CAUSAL, EVERYTHING, EXACT, Choice, KeyValues, MultiHeadAttention, Visible
from poise.nn.cache import Cache
from poise.nn.feedforward import FeedForward
from poise.nn.norm import RMSNorm
from poise.nn.positions import Placement, Scheme


@dataclass(frozen=True)
class BlockConfig:
    """One transformer block: sizes, and which of the known ways it goes in each choice."""

    width: int
    heads: int
    hidden: int  # of the feed-forward layer
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    activation: str = "gelu"  # one of poise.nn.ACTIVATIONS
    gated: bool = False  # the feed-forward layer
    norm: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5
    pre_norm: bool = True  # norm before each sublayer, and once after the last block; else after each
    bias: bool = True  # of the projections to queries, keys and values
    out_bias: bool | None = None  # of the one back; None: as bias
    hidden_bias: bool | None = None  # of the feed-forward layer; None: as bias
    dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0  # inside the feed-forward layer
    qk_norm: bool = False
    gate: bool = False
    sinks: bool = False
    softcap: float | None = None
    scale: float | Callable[[], nn.Module] | None = None  # None: 1/√Dk
    choice: Callable[[], Choice] | None = None  # makes each layer's attention; None: exact

    def make_norm(self) -> nn.Module:
        return RMSNorm(self.width, self.eps) if self.norm == "rms" else nn.LayerNorm(self.width, self.eps)

    def make_attention(self, cross: bool = False) -> MultiHeadAttention:
        return MultiHeadAttention(
            self.width,
            self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            bias=self.bias,
            out_bias=self.out_bias,
            qk_norm=self.eps if self.qk_norm else None,
            gate=self.gate,
            sinks=self.sinks,
            softcap=self.softcap,
            scale=self.scale() if callable(self.scale) else self.scale,
            dropout=self.attention_dropout,
            choice=EXACT if self.choice is None or cross else self.choice(),
        )

    def make_feedforward(self) -> FeedForward:
        return FeedForward(
            self.width,
            self.hidden,
            activation=self.activation,
            gated=self.gated,
            bias=self.bias if self.hidden_bias is None else self.hidden_bias,
            dropout=self.hidden_dropout,
        )


class Block(nn.Module):
    """Attention, attention to a context if `cross`, feed-forward; each with its norm and around it the residual."""

    def __init__(self, config: BlockConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.pre_norm, self.dropout = config.pre_norm, config.dropout
        self.attention = config.make_attention()
        self.attention_norm = config.make_norm()
        self.cross = config.make_attention(cross=True) if cross else None
        self.cross_norm = config.make_norm() if cross else None
        self.feedforward = config.make_feedforward()
        self.feedforward_norm = config.make_norm()

    def forward(
        self,
        x: Tensor,
        context: Tensor | KeyValues | None = None,
        *,
        visible: Visible = EVERYTHING,
        context_visible: Visible = EVERYTHING,
        places: Tensor | None = None,
        placement: Placement | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            out: Tensor = self.attention(
                y, visible=visible, places=places, placement=placement, cache=cache, layer=layer
            )
            return out

        x = self._around(x, self.attention_norm, attend)
        if self.cross is not None and self.cross_norm is not None:
            if context is None:
                raise ValueError("this block attends to a context as well: pass context [B, M, C]")
            cross = self.cross
            x = self._around(x, self.cross_norm, lambda y: cross(y, context, visible=context_visible, places=places))
        return self._around(x, self.feedforward_norm, self.feedforward)

    def _around(self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        out = F.dropout(sublayer(norm(x) if self.pre_norm else x), self.dropout, self.training)
        return x + out if self.pre_norm else norm(x + out)


class Stack(nn.Module):
    """Blocks in a row, with one position scheme for all and, with pre-norm, a norm at the end."""

    def __init__(
        self,
        config: BlockConfig,
        layers: int,
        *,
        positions: Scheme | None = None,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, cross=cross) for _ in range(layers))
        self.positions = positions
        self.norm = config.make_norm() if config.pre_norm else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | Sequence[KeyValues] | None = None,
        *,
        visible: Visible = EVERYTHING,
        context_visible: Visible = EVERYTHING,
        places: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """x [B, N, C] at `places`, int64 [N] or [B, N] (None: from 0); context [B, M, C], or `remember` of it."""
        if places is None:
            if cache is not None:
                raise ValueError("places is needed with a cache: the positions of x, which follow the cached ones")
            places = torch.arange(x.shape[1], device=x.device)
        placement = Placement() if self.positions is None else self.positions.place(places)
        for layer, block in enumerate(self.blocks):
            x = block(
                x,
                context if context is None or isinstance(context, Tensor) else context[layer],
                visible=visible,
                context_visible=context_visible,
                places=places,
                placement=placement,
                cache=cache,
                layer=layer,
            )
        return x if self.norm is None else self.norm(x)


class Encoder(Stack):
    """Every position sees all others, or those that `visible` leaves."""


class Decoder(Stack):
    """Every position sees itself and those before it; with `cross`, also a context."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | Sequence[KeyValues] | None = None,
        *,
        visible: Visible = CAUSAL,
        context_visible: Visible = EVERYTHING,
        places: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        return super().forward(x, context, visible=visible, context_visible=context_visible, places=places, cache=cache)

    def remember(self, context: Tensor) -> list[KeyValues]:
        """Each layer's keys and values of a context [B, M, C], to be passed as `context` in every step."""
        return [block.cross.keys_values(context) for block in self.blocks]  # type: ignore[union-attr, operator]


class EncoderDecoder(nn.Module):
    """An encoder, and a decoder that attends to what it gives."""

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, x: Tensor, y: Tensor, *, padding: Tensor | None = None) -> Tensor:
        """x [B, M, C] encoded, with padding bool [B, M], True = real; y [B, N, C] decoded: [B, N, C]."""
        visible = Visible(padding=padding)
        out: Tensor = self.decoder(y, self.encoder(x, visible=visible), context_visible=visible)
        return out
