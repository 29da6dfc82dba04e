"""What all models share: the configuration they were made from, and their names in checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from poise.models.checkpoint import Named
from poise.nn import CAUSAL, Decoder, Visible, linear
from poise.nn.cache import Cache

# Their names of activations, ours.
ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class Model(Named):
    """A model of one family, made from a configuration in the words of Hugging Face's `config.json`."""

    defaults: ClassVar[Mapping[str, Any]]  # what configurations leave out
    heads: ClassVar[Mapping[str, str]]  # head -> their class, the family's usual one first

    def __init__(self, config: Mapping[str, Any], head: str | None) -> None:
        super().__init__()
        self.given = dict(config)  # as it will be saved
        self.config: dict[str, Any] = {**self.defaults, **config}
        self.head = self.head_of(config) if head is None else head
        if self.head not in self.heads:
            raise ValueError(f"head must be one of {', '.join(map(repr, self.heads))}; got {self.head!r}")

    @classmethod
    def head_of(cls, config: Mapping[str, Any]) -> str:
        """The head that a configuration names, else the family's usual one."""
        named = config.get("architectures") or ()
        return next((head for head, name in cls.heads.items() if name in named), next(iter(cls.heads)))

    @property
    def longest(self) -> int | None:
        """How many positions the model can tell apart; None if any number."""
        return None

    def activation(self, key: str) -> str:
        name = self.config[key]
        if name not in ACTIVATION_NAMES:
            raise ValueError(f"config.json: {key} must be one of {', '.join(ACTIVATION_NAMES)}; got {name!r}")
        return ACTIVATION_NAMES[name]

    def refuse(self, **unsupported: Any) -> None:
        """Raises if the configuration sets one of these to anything else than the value given."""
        for key, only in unsupported.items():
            if self.config.get(key, only) != only:
                raise ValueError(f"config.json: {key} = {self.config[key]!r} is not supported, only {only!r}")


class CausalModel(Model):
    """A decoder alone: ids [B, N] to logits [B, N, V]. Subclasses make `tokens`, `decoder` and `unembed` if untied."""

    tokens: nn.Embedding
    decoder: Decoder

    @abstractmethod
    def embed(self, ids: Tensor, places: Tensor) -> Tensor:
        """What the first block reads: [B, N, C]."""

    def forward(
        self,
        ids: Tensor,
        padding: Tensor | None = None,
        *,
        cache: Cache | None = None,
        last: bool = False,
    ) -> Tensor:
        """padding: bool [B, N], True = real; only real tokens count as positions. cache: keys and values of the tokens
        before ids, which join them; padding must then be on the left. last: logits of the last position, [B, 1, V].
        """
        places = places_after(cache, ids, padding)
        visible = Visible(causal=True, padding=padding) if padding is not None else CAUSAL
        x = self.decoder(self.embed(ids, places), visible=visible, places=places, cache=cache)
        return self.unembedded(x[:, -1:] if last else x)

    def unembedded(self, x: Tensor) -> Tensor:
        own = getattr(self, "unembed", None)
        return linear(x, self.tokens.weight if own is None else own.weight)


def places_after(cache: Cache | None, ids: Tensor, padding: Tensor | None = None) -> Tensor:
    """Where ids [B, N] stand, counting real tokens from 0, or from what the cache holds: int64 [N] or [B, N]."""
    held = () if cache is None else cache.lengths()
    if padding is None and len(set(held)) <= 1:
        start = held[0] if held else 0
        return torch.arange(start, start + ids.shape[1], device=ids.device)
    real = torch.ones_like(ids, dtype=torch.bool) if padding is None else padding
    places = (real.cumsum(1) - 1).clamp(min=0)
    return places + torch.tensor(held, device=ids.device)[:, None] if held else places
