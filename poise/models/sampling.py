"""How the next token is chosen from logits: greedily, or at random after temperature and cut-offs. One row at a time.

In the order that Hugging Face applies them: repetition penalty, temperature, top-k, top-p, min-p.

Letters: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_ROW = 0x9E3779B97F4A7C15  # odd, so that rows' seeds differ; a row's draws don't depend on how many rows there are
_SEEDS = 2**63


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token. Cut-offs keep: the k likeliest; the fewest likeliest whose probabilities
    reach top_p; those at least min_p times as likely as the likeliest. With a seed, the same draws each time.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0  # above 1: tokens that were there already become less likely
    seed: int | None = None  # None: from torch's generator, so that torch.manual_seed reproduces

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number from 0 on; got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None; got {self.top_k}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be a probability, or None; got {value}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be positive and finite; got {self.repetition_penalty}")

    def generators(self, rows: int) -> list[torch.Generator]:
        """One per row."""
        seed = int(torch.randint(_SEEDS - 1, ())) if self.seed is None else self.seed
        return [torch.Generator().manual_seed((seed + _ROW * row) % _SEEDS) for row in range(rows)]

    def choose(self, logits: Tensor, seen: Iterable[int], generator: torch.Generator) -> int:
        """The next token, from logits [V] and the tokens so far."""
        logits = self.penalised(logits.float(), seen)
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.cut(logits / self.temperature).softmax(-1).cpu(), 1, generator=generator))

    def penalised(self, logits: Tensor, seen: Iterable[int]) -> Tensor:
        """With every token of `seen` less likely: positive logits divided by the penalty, negative ones multiplied."""
        if self.repetition_penalty == 1.0:
            return logits
        index = torch.tensor(sorted(set(seen)), device=logits.device)
        chosen = logits[index]
        factor = torch.where(chosen < 0, self.repetition_penalty, 1 / self.repetition_penalty)
        return logits.index_copy(0, index, chosen * factor)

    def cut(self, logits: Tensor) -> Tensor:
        """-inf for what the cut-offs leave out; the likeliest token always stays."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = logits.sort(descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1)
            before[0] = 0.0
            drop = before >= self.top_p
            drop[0] = False
            logits = logits.masked_fill(torch.empty_like(drop).index_copy(0, index, drop), -torch.inf)
        if self.min_p is not None:
            p = logits.softmax(-1)
            logits = logits.masked_fill(p < self.min_p * p.max(), -torch.inf)
        return logits


GREEDY = Sampling()
