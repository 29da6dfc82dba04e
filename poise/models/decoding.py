"""A batch of sequences under way: a model, its cache, and for encoder-decoders what the decoder attends to.

Chooses no tokens (sampling.py, generate.py). Prompts of different lengths are padded on the left, and padding never
reaches the cache. Letters: B sequences, N the longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from poise.models.bert import padded
from poise.models.model import CausalModel, Model
from poise.models.t5 import T5
from poise.nn import KeyValues
from poise.nn.cache import Cache


class Decoding:
    """`begin` reads the prompts, `step` one more token of each sequence; both give logits [B, V] for what follows."""

    def __init__(self, model: Model, cache: Cache) -> None:
        if not isinstance(model, CausalModel) and not (isinstance(model, T5) and model.head == "seq2seq_lm"):
            raise TypeError(
                f"model must be a causal or a sequence-to-sequence language model; got {type(model).__name__} "
                f"with head {model.head!r}"
            )
        self.model, self.cache = model, cache
        self.device = model.tokens.weight.device
        self._memory: list[KeyValues] = []
        self._padding: Tensor | None = None

    def begin(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        ids, real = padded(prompts, self.device)
        if isinstance(self.model, T5):
            self._padding = None if bool(real.all()) else real
            self._memory = self.model.decoder.remember(self.model.encode(ids, self._padding))
            return self.step([self.model.config["decoder_start_token_id"]] * len(prompts))
        if bool(real.all()):
            return self._causal(ids, None)
        shift = ids.shape[1] - real.sum(1, keepdim=True)
        turned = (torch.arange(ids.shape[1], device=self.device) - shift) % ids.shape[1]
        return self._causal(ids.gather(1, turned), real.flip(1))

    def step(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor(tokens, device=self.device)[:, None]
        if isinstance(self.model, T5):
            return self.model.decode(ids, self._memory, self._padding, cache=self.cache, last=True)[:, 0]
        return self._causal(ids, None)

    def select(self, rows: Sequence[int]) -> None:
        """Sequence i becomes what rows[i] was; more or fewer rows change the batch."""
        self.cache.reorder(rows)
        if self._memory:
            index = torch.tensor(rows, device=self.device)
            self._memory = [KeyValues(kv.keys[index], kv.values[index]) for kv in self._memory]
            self._padding = None if self._padding is None else self._padding[index]

    def _causal(self, ids: Tensor, padding: Tensor | None) -> Tensor:
        out: Tensor = self.model(ids, padding, cache=self.cache, last=True)
        return out[:, 0]
