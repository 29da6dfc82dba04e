"""The lab's small GPT, of poise.nn's blocks, and the recipe that says what it is made of and how it is trained.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise import nn as blocks

Positions = Literal["waves", "sinusoidal", "rotary", "alibi", "t5", "none"]
Scale = Literal["1", "1/sqrt(d)", "1/d", "learned", "log n"]
Sink = Literal["none", "learned", "off-by-one"]


@dataclass(frozen=True)
class Recipe:
    """Everything one run depends on, besides its task."""

    seed: int = 0
    steps: int = 300
    lr: float = 3e-3
    warmup: int = 20  # steps until the learning rate is reached; then a cosine, down to a tenth
    batch: int = 8
    length: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 2
    head_dim: int | None = None  # None: width / heads
    value_dim: int | None = None  # None: as head_dim
    scale: Scale = "1/sqrt(d)"
    softcap: float | None = None
    qk_norm: bool = False
    gate: bool = False
    sink: Sink = "none"
    positions: Positions = "rotary"
    weight_decay: float = 0.1
    clip: float | None = 1.0  # of the gradient's norm
    observe_every: int = 10  # steps between two looks at the scores; the last step is always looked at

    def __post_init__(self) -> None:
        for name, known in (("positions", Positions), ("scale", Scale), ("sink", Sink)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, get_args(known)))}; got {getattr(self, name)!r}"
                )

    @property
    def key_dim(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim

    def but(self, **changes: Any) -> Recipe:
        return replace(self, **changes)


class GPT(nn.Module):
    """ids [B, N] to logits [B, N, V]; before training, queries and keys have entries of unit variance."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        super().__init__()
        width, heads, dim = recipe.width, recipe.heads, recipe.key_dim
        self.tokens = nn.Embedding(vocabulary, width)  # also the output layer
        self.positions = _added_positions(recipe)
        block = blocks.BlockConfig(
            width,
            heads,
            4 * width,
            head_dim=recipe.head_dim,
            value_dim=recipe.value_dim,
            activation="gelu_tanh",
            bias=False,
            qk_norm=recipe.qk_norm,
            gate=recipe.gate,
            sinks=recipe.sink != "none",
            softcap=recipe.softcap,
            scale=_scale(recipe.scale, heads, dim),
        )
        self.decoder = blocks.Decoder(block, recipe.layers, positions=_scheme(recipe))
        nn.init.normal_(self.tokens.weight, std=0.1)
        for each in self.attentions():
            nn.init.normal_(each.projection.weight, std=width**-0.5)
            nn.init.normal_(each.out.weight, std=(each.out.in_features * 2 * recipe.layers) ** -0.5)
            if each.sinks is not None and recipe.sink == "off-by-one":
                each.sinks.requires_grad_(False)  # stays 0: the denominator has one more

    def attentions(self) -> list[blocks.MultiHeadAttention]:
        return [block.attention for block in self.decoder.blocks]  # type: ignore[misc]

    def decoded(self, ids: Tensor) -> Tensor:
        """[B, N, C]"""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        decoded: Tensor = self.decoder(x)
        return decoded

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.decoded(ids), self.tokens.weight)


class _Waves(nn.Module):
    """Learned positions that begin as sinusoids three times the embeddings' size: so a byte model soon uses them."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        waves = blocks.Sinusoidal(width, layout="half")(torch.arange(count))
        self.table = blocks.Learned(count, width)
        self.table.weight.data.copy_(0.3 * waves)

    def forward(self, places: Tensor) -> Tensor:
        rows: Tensor = self.table(places)
        return rows


class _Sinusoids(nn.Module):
    """The same, fixed: for any length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.waves = blocks.Sinusoidal(width, layout="half")

    def forward(self, places: Tensor) -> Tensor:
        rows: Tensor = 0.3 * self.waves(places)
        return rows


def _added_positions(recipe: Recipe) -> nn.Module | None:
    if recipe.positions == "waves":
        return _Waves(recipe.length, recipe.width)
    return _Sinusoids(recipe.width) if recipe.positions == "sinusoidal" else None


def _scheme(recipe: Recipe) -> blocks.Scheme | None:
    if recipe.positions == "rotary":
        return blocks.Rotary(recipe.key_dim)
    if recipe.positions == "alibi":
        return blocks.Alibi(recipe.heads)
    return blocks.RelativeBuckets(recipe.heads, bidirectional=False) if recipe.positions == "t5" else None


def _scale(scale: Scale, heads: int, dim: int) -> float | Callable[[], nn.Module] | None:
    if scale == "learned":
        return partial(blocks.LearnedScale, heads, dim)
    if scale == "log n":
        return partial(blocks.LogLength, heads, dim)
    return {"1": 1.0, "1/sqrt(d)": None, "1/d": 1.0 / dim}[scale]
