"""Summaries of one step merged over the ranks of torch.distributed, by one packed collective.

Sums and histograms add up; extremes do not, so each rank writes its own into its own place among zeros, and one
all_reduce(SUM) carries both. All ranks must know the same layers in the same order: they agree on them once, and again
whenever a rank, by a number in the packed tensor, says that it has seen another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poise.summary import EDGES, ScoreSummary

_NAMES = tuple(EDGES)
_BINS = [len(edges) + 1 for edges in EDGES.values()]
_SUMS = 3 + sum(3 + bins for bins in _BINS)  # a head's row counts; per statistic sum, square sum, NaNs and histogram
_EXTREMES = 2 * len(_NAMES)


class Merger:
    """Merges over one process group, for one model."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        self._group = group
        self._active = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.leads = not self._active or dist.get_rank(group) == 0  # one rank writes what all know
        self._layout: dict[str, int] | None = None  # heads by layer, in the order that all ranks use
        self._device = torch.device("cpu")
        if self._active and dist.get_backend(group) == "nccl":
            self._device = next((p.device for p in model.parameters() if p.is_cuda), torch.device("cuda"))

    def give_up(self) -> None:
        """From now on this rank merges with nobody."""
        self._active = False

    def merged(self, summaries: dict[str, ScoreSummary]) -> dict[str, ScoreSummary]:
        """This rank's summaries of a step with those of all others; every rank must call it for the same step."""
        if not self._active:
            return summaries
        mine = {name: summary.rows.numel() for name, summary in summaries.items()}
        if self._layout is None:
            self._agree(mine)
        packed = self._reduced(summaries, mine)
        if packed is None:  # some rank has seen another layer
            self._agree(mine)
            packed = self._reduced(summaries, mine)
        assert packed is not None
        assert self._layout is not None
        return _unpacked(packed, self._layout, dist.get_world_size(self._group))

    def _agree(self, mine: dict[str, int]) -> None:
        theirs: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(theirs, {**(self._layout or {}), **mine}, group=self._group)
        self._layout = {}
        for layers in theirs:
            self._layout.update(layers)

    def _reduced(self, summaries: dict[str, ScoreSummary], mine: dict[str, int]) -> Tensor | None:
        assert self._layout is not None
        news = float(any(self._layout.get(name) != heads for name, heads in mine.items()))
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        packed = _packed({} if news else summaries, self._layout, rank, world, news).to(self._device)
        dist.all_reduce(packed, group=self._group)
        return None if packed[0] > 0 else packed.cpu()


def _packed(summaries: dict[str, ScoreSummary], layout: dict[str, int], rank: int, world: int, news: float) -> Tensor:
    parts = [torch.tensor([news], dtype=torch.float64)]
    for name, heads in layout.items():
        extremes = torch.zeros(world, heads, _EXTREMES, dtype=torch.float64)
        extremes[rank, :, 0::2], extremes[rank, :, 1::2] = math.inf, -math.inf
        summary = summaries.get(name)
        sums = torch.zeros(heads, _SUMS, dtype=torch.float64)
        if summary is not None:
            columns = [summary.row_counts.double()]
            for place, statistic in enumerate(_NAMES):
                moments = summary.moments[statistic]
                columns += [moments[:, :2], summary.nans[statistic][:, None].double()]
                columns.append(summary.histograms[statistic].double())
                extremes[rank, :, 2 * place : 2 * place + 2] = moments[:, 2:]
            sums = torch.cat([column.cpu() for column in columns], 1)
        parts += [sums.reshape(-1), extremes.reshape(-1)]
    return torch.cat(parts)


def _unpacked(packed: Tensor, layout: dict[str, int], world: int) -> dict[str, ScoreSummary]:
    merged: dict[str, ScoreSummary] = {}
    start = 1
    for name, heads in layout.items():
        sums = packed[start : start + heads * _SUMS].view(heads, _SUMS)
        start += heads * _SUMS
        extremes = packed[start : start + world * heads * _EXTREMES].view(world, heads, _EXTREMES)
        start += world * heads * _EXTREMES
        counts = sums[:, :3].round().long()
        if not bool(counts.any()):  # seen by no rank in this step
            continue
        moments, histograms, nans = {}, {}, {}
        column = 3
        for place, (statistic, bins) in enumerate(zip(_NAMES, _BINS, strict=True)):
            least, most = extremes[..., 2 * place].amin(0), extremes[..., 2 * place + 1].amax(0)
            moments[statistic] = torch.cat([sums[:, column : column + 2], torch.stack([least, most], -1)], 1)
            nans[statistic] = sums[:, column + 2].round().long()
            histograms[statistic] = sums[:, column + 3 : column + 3 + bins].round().long()
            column += 3 + bins
        merged[name] = ScoreSummary("head", moments, histograms, nans, counts)
    return merged
