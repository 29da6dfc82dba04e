"""What a head does: measures of its weights, and the classes that follow from them. No model is run here.

Measures are means over query rows that may see many keys (with few, everything is local and everything a sink):

| measure | of a row's weights p | class, where it reaches |
|---|---|---|
| sink | the one key that gets most over all rows: its p | sink, 0.3 (Gu et al. 2024, arXiv:2410.10781) |
| previous | p of the key before | previous-token, 0.4 |
| diagonal | p of the key itself | diagonal, 0.4 |
| local | sum of p within 8 keys to either side | local, 0.6, if neither of those two |
| flatness | entropy over that of a uniform row | uniform, 0.95 |
| response | 1 - sum p^2, how much gradient passes | saturated, where it falls to 0.05, and no sink of 0.5 |
| duplicate | on a repeated sequence: p of the same token before | duplicate-token, 0.4 |
| induction | there: p of the token after that (Olsson et al. 2022, arXiv:2209.11895) | induction, 0.4 |

A head may be of several classes, or of none. Rows are sampled in long texts, evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from poise.inspection.maps import Scores
from poise.stats import ScoreStats

KEYS = 32  # that a row must see to count
NEAR = 8
ROWS = 256  # looked at in each text; their weights take ROWS · M numbers per head
_BUDGET = 1 << 22  # weights held at once

MEASURES = ("sink", "previous", "diagonal", "local", "flatness", "response", "duplicate", "induction")
# class: (measure, limit), the more telling first; "saturated" is below its limit
CLASSES = {
    "induction": ("induction", 0.4),
    "duplicate-token": ("duplicate", 0.4),
    "previous-token": ("previous", 0.4),
    "diagonal": ("diagonal", 0.4),
    "local": ("local", 0.6),
    "uniform": ("flatness", 0.95),
    "saturated": ("response", 0.05),
    "sink": ("sink", 0.3),
}
_IDLE = 0.5  # a head that gives this much to its sink is idle, not saturated


@dataclass(frozen=True)
class Evidence:
    """Sums over rows, by measure, of one layer's heads; adds over texts."""

    rows: int
    sums: Mapping[str, Tensor]  # float64 [H]

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(self.rows + other.rows, {name: x + other.sums[name] for name, x in self.sums.items()})

    def means(self) -> dict[str, Tensor]:
        """[H] each; NaN where no row counted."""
        return {name: x / self.rows if self.rows else torch.full_like(x, torch.nan) for name, x in self.sums.items()}


def of_text(scores: Scores, stats: ScoreStats) -> tuple[Evidence, Tensor]:
    """The evidence of one call, and its sink: the key that gets most, int64 [H]."""
    heads, queries, keys = scores.heads, scores.queries, scores.keys
    count = stats.count.reshape(heads, queries)
    eligible = (count.amin(0) >= KEYS).nonzero()[:, 0]
    rows = eligible[torch.linspace(0, len(eligible) - 1, min(ROWS, len(eligible))).round().long()]
    fallback = torch.arange(queries)[-ROWS:] if not len(rows) else rows  # a short text has a sink all the same
    received = torch.zeros(heads, keys, dtype=torch.float64)
    sums = {name: torch.zeros(heads, dtype=torch.float64) for name in MEASURES[:6]}
    step = max(1, _BUDGET // max(heads * keys, 1))
    square = queries == keys
    for part in torch.split(fallback, step):
        weights = scores.log_weights(slice(0, heads), part, slice(0, keys)).exp_()  # [H, n, M]
        received += weights.sum(1).double()
        if len(rows) and square:
            for name, first, last in (("previous", -1, -1), ("diagonal", 0, 0), ("local", -NEAR, NEAR)):
                sums[name] += _band(weights, part, first, last)
    if len(rows):
        sums["sink"] += received.amax(1)
        sums["flatness"] += stats.normalized_entropy.reshape(heads, queries)[:, rows].double().sum(1)
        sums["response"] += stats.responsiveness.reshape(heads, queries)[:, rows].double().sum(1)
    return Evidence(len(rows), sums), received.argmax(1)


def of_repetition(scores: Scores, start: int, length: int) -> Evidence:
    """On a sequence whose `length` tokens from `start` on are repeated at once: what the repetition's rows look at."""
    rows = torch.arange(start + length, start + 2 * length - 1)  # the last has nothing that follows
    if scores.queries != scores.keys or scores.queries < start + 2 * length:  # it does not read the sequence itself
        return Evidence(0, {name: torch.zeros(scores.heads, dtype=torch.float64) for name in MEASURES[6:]})
    weights = scores.log_weights(slice(0, scores.heads), rows, slice(0, scores.keys)).exp_()
    bands = {"duplicate": -length, "induction": 1 - length}
    return Evidence(len(rows), {name: _band(weights, rows, at, at) for name, at in bands.items()})


def _band(weights: Tensor, rows: Tensor, first: int, last: int) -> Tensor:
    """What rows give to the keys at these distances, summed over rows: float64 [H]."""
    columns = rows[:, None] + torch.arange(first, last + 1)
    inside = (columns >= 0) & (columns < weights.shape[-1])
    index = columns.clamp(0, weights.shape[-1] - 1).expand(weights.shape[0], -1, -1)
    return weights.gather(2, index).masked_fill(~inside, 0.0).double().sum((1, 2))


def classify(means: Mapping[str, float]) -> list[str]:
    """The classes of a head by its measures, the most telling first; a measure may be missing or NaN."""

    def holds(name: str) -> bool:
        measure, limit = CLASSES[name]
        value = means.get(measure, torch.nan)
        return value <= limit if name == "saturated" else value >= limit

    found = [name for name in CLASSES if holds(name)]
    if "local" in found and {"previous-token", "diagonal"} & {*found}:
        found.remove("local")
    if "saturated" in found and not means.get("sink", 0.0) < _IDLE:
        found.remove("saturated")
    return found


def strength(name: str, means: Mapping[str, float]) -> float:
    """How clearly a head is of a class, for ranking."""
    measure, _ = CLASSES[name]
    return -means[measure] if name == "saturated" else means[measure]
