"""Summaries of per-row statistics: sums, extremes and fixed-bin histograms that add over batches, steps and machines.

Knows the names of the statistics and a histogram scale for each; what they mean is in stats.py. It keeps no history and
raises no alarms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def _octaves(first: int, last: int, *, signed: bool = False) -> tuple[float, ...]:
    """Four bin edges per octave from 2^first to 2^last, one at 0, and the mirror image if signed."""
    up = tuple(2.0 ** (e / 4) for e in range(4 * first, 4 * last + 1))
    return (*(-x for x in reversed(up)), 0.0, *up) if signed else (0.0, *up)


_SCORES = _octaves(-6, 20, signed=True)
_SPREADS = _octaves(-10, 30)
_COUNTS = _octaves(0, 30)
_UNIT = tuple(i / 100 for i in range(101))
_NATS = tuple(i / 8 for i in range(129))

# Histogram edges, the same on every machine, so that counts add. Bin i holds edges[i - 1] <= x < edges[i].
EDGES: dict[str, tuple[float, ...]] = {
    "lse": _SCORES,
    "max_logit": _SCORES,
    "max_score": _SCORES,
    "min_score": _SCORES,
    "mean": _SCORES,
    "std": _SPREADS,
    "var_p": _SPREADS,
    "max_prob": _UNIT,
    "entropy": _NATS,
    "normalized_entropy": _UNIT,
    "collision": _UNIT,
    "responsiveness": _UNIT,
    "effective_keys": _COUNTS,
    "count": _COUNTS,
    "sink_mass": _UNIT,
}
_PIECE = 1 << 13  # rows summarised at once, over all groups: few enough for a cache, enough for threads
_NAMES = tuple(EDGES)
_SCALES: dict[tuple[float, ...], list[str]] = {}  # the statistics that share their edges
for _name, _edges in EDGES.items():
    _SCALES.setdefault(_edges, []).append(_name)
_FORMAT = 1  # of ScoreSummary.to_dict; a change of EDGES or of the tables changes it


@dataclass(frozen=True, eq=False)
class ScoreSummary:
    """Sums, extremes and histograms of every statistic over rows; adds over batches, steps and machines by `merge`.

    Empty rows are left out of everything and counted in `empty_rows`. A NaN is left out of its statistic and counted in
    `nan_count`; `nan_rows` counts the rows whose lse is NaN. Tables are float64 and int64, cut off from autograd. The
    leading dims S are [H] when reduced by head, [B] by batch, [] over all.
    """

    by: str
    moments: dict[str, Tensor]  # name -> [*S, 4] float64: sum, sum of squares, minimum, maximum
    histograms: dict[str, Tensor]  # name -> [*S, edges + 1] int64; its sum is the number of values
    nans: dict[str, Tensor]  # name -> [*S] int64
    row_counts: Tensor  # [*S, 3] int64: all rows, empty rows, rows with a NaN lse

    def __repr__(self) -> str:
        return f"ScoreSummary(by={self.by!r}, shape={list(self.row_counts.shape[:-1])}, rows={int(self.rows.sum())})"

    @staticmethod
    @torch.no_grad()
    def of(values: Mapping[str, Tensor], by: str) -> ScoreSummary:
        """The summary of one call's rows from each statistic, [B, H, N], [H, N] or [N]; see ScoreStats.reduce."""
        axes: dict[str, int | None] = {"head": 1, "batch": 0, "layer": None, "all": None}
        if by not in axes:
            raise ValueError(f"reduce: by is {by!r}; pass one of {', '.join(axes)}")
        axis = axes[by]

        def grouped(value: Tensor) -> Tensor:
            value = value.reshape((1,) * (3 - value.dim()) + tuple(value.shape))  # [B, H, N]
            return value.reshape(-1) if axis is None else value.movedim(axis, 0).flatten(1)  # [*S, rows]

        empty, broken = grouped(values["count"] == 0), grouped(values["lse"].isnan())
        rows = torch.stack([torch.ones_like(empty).sum(-1), empty.sum(-1), broken.sum(-1)], -1)
        columns = [grouped(values[name]) for name in _NAMES]
        groups, device = columns[0].shape[:-1], empty.device
        tables = {edges: _thresholds(edges, columns[0]) for edges in _SCALES}
        moments = torch.zeros(len(_NAMES), *groups, 4, dtype=torch.float64, device=device)
        moments[..., 2], moments[..., 3] = math.inf, -math.inf
        nans = torch.zeros(len(_NAMES), *groups, dtype=torch.int64, device=device)
        counts = {
            edges: torch.zeros(len(names), *groups, len(edges) + 1, dtype=torch.int64, device=device)
            for edges, names in _SCALES.items()
        }
        piece = max(_PIECE // max(groups.numel(), 1), 1)
        for start in range(0, empty.shape[-1], piece):
            rows_here = slice(start, start + piece)
            part = torch.stack([column[..., rows_here] for column in columns])  # [15, *S, piece]
            missing, without = part.isnan(), empty[..., rows_here]
            nans += (missing & ~without).sum(-1)
            unused = missing | without
            exact, bounded = part.double().masked_fill_(unused, 0.0), part.masked_fill(unused, math.inf)
            moments[..., 0] += exact.sum(-1)
            moments[..., 1] += exact.square_().sum(-1)
            moments[..., 2] = torch.minimum(moments[..., 2], bounded.amin(-1).double())
            moments[..., 3] = torch.maximum(moments[..., 3], bounded.masked_fill_(unused, -math.inf).amax(-1).double())
            for edges, names in _SCALES.items():  # one search for all statistics of a scale
                places = [_NAMES.index(name) for name in names]
                bins = torch.bucketize(part[places], tables[edges], right=True)
                counts[edges].scatter_add_(-1, bins, (~unused[places]).to(torch.int64))
        histograms = {
            name: table for edges, names in _SCALES.items() for name, table in zip(names, counts[edges], strict=True)
        }
        return ScoreSummary(
            by,
            dict(zip(_NAMES, moments, strict=True)),
            {name: histograms[name] for name in _NAMES},
            dict(zip(_NAMES, nans, strict=True)),
            rows,
        )

    @property
    def rows(self) -> Tensor:
        """Number of rows summarised, empty ones included."""
        return self.row_counts[..., 0]

    @property
    def empty_rows(self) -> Tensor:
        """Number of rows without a visible key."""
        return self.row_counts[..., 1]

    @property
    def nan_rows(self) -> Tensor:
        """Number of rows whose lse is NaN: they attended a NaN or an infinity."""
        return self.row_counts[..., 2]

    def nan_count(self, name: str) -> Tensor:
        """How many values of a statistic were NaN and left out."""
        return self.nans[_known(name)]

    def number(self, name: str) -> Tensor:
        """How many values of a statistic the summary holds."""
        return self.histograms[_known(name)].sum(-1)

    def mean(self, name: str) -> Tensor:
        """Mean over rows. NaN if there are none; so for all below."""
        return self.moments[_known(name)][..., 0] / self.number(name)

    def std(self, name: str) -> Tensor:
        """Population standard deviation over rows (not the std of scores within a row: that is the statistic "std")."""
        second = self.moments[_known(name)][..., 1] / self.number(name)
        return (second - self.mean(name).square()).clamp_min(0.0).sqrt()

    def min(self, name: str) -> Tensor:
        """Smallest value."""
        return torch.where(self.number(name) == 0, math.nan, self.moments[name][..., 2])

    def max(self, name: str) -> Tensor:
        """Largest value; of "max_logit", what QK-clip looks at."""
        return torch.where(self.number(name) == 0, math.nan, self.moments[name][..., 3])

    def quantile(self, name: str, q: float) -> Tensor:
        """Value below which the share q of the rows lies: interpolated within its bin, clamped to the extremes."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"quantile: q is {q}; pass a number in [0, 1]")
        counts = self.histograms[_known(name)]
        least, most = self.moments[name][..., 2], self.moments[name][..., 3]
        edges = least.new_tensor(EDGES[name])
        below = counts.cumsum(-1)  # [*S, bins]
        rank = q * below[..., -1:].double()
        index = (below < rank).sum(-1, keepdim=True).clamp_max(counts.shape[-1] - 1)
        index = torch.where(rank == 0, (below == 0).sum(-1, keepdim=True).clamp_max(counts.shape[-1] - 1), index)
        inside = counts.gather(-1, index).squeeze(-1)
        before = below.gather(-1, index).squeeze(-1) - inside
        index = index.squeeze(-1)
        low = torch.maximum(torch.where(index == 0, least, edges[(index - 1).clamp_min(0)]), least)
        high = torch.minimum(torch.where(index == len(edges), most, edges[index.clamp_max(len(edges) - 1)]), most)
        part = (rank.squeeze(-1) - before) / inside.clamp_min(1)
        # Two-sided, so that an infinite extreme is returned as it is and not as a NaN difference.
        value = torch.where(low == high, low, low * (1 - part) + high * part)
        return torch.where(self.number(name) == 0, math.nan, value)

    def sink_share(self, epsilon: float = 0.3) -> Tensor:
        """Share of the entries (heads, when reduced by head) whose mean mass on the sink keys exceeds epsilon."""
        return (self.mean("sink_mass") > epsilon).double().mean()

    def merge(self, other: ScoreSummary) -> ScoreSummary:
        """The summary over the rows of both, as if they had come in one call."""
        if (self.by, self.row_counts.shape) != (other.by, other.row_counts.shape):
            raise ValueError(f"merge: cannot add {other!r} to {self!r}; reduce both the same way, over the same heads")
        moments = {}
        for name, mine in self.moments.items():
            theirs = other.moments[name]
            least, most = torch.minimum(mine[..., 2], theirs[..., 2]), torch.maximum(mine[..., 3], theirs[..., 3])
            moments[name] = torch.cat([mine[..., :2] + theirs[..., :2], torch.stack([least, most], -1)], -1)
        histograms = {name: mine + other.histograms[name] for name, mine in self.histograms.items()}
        nans = {name: mine + other.nans[name] for name, mine in self.nans.items()}
        return ScoreSummary(self.by, moments, histograms, nans, self.row_counts + other.row_counts)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers (infinities as floats), for json, pickle or another machine."""
        tables = {
            key: {name: tensor.tolist() for name, tensor in getattr(self, key).items()}
            for key in ("moments", "histograms", "nans")
        }
        return {"format": _FORMAT, "by": self.by, "row_counts": self.row_counts.tolist(), **tables}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ScoreSummary:
        """The inverse of to_dict."""
        if data.get("format") != _FORMAT:
            raise ValueError(f"from_dict: format is {data.get('format')}; this release reads format {_FORMAT}")
        return ScoreSummary(
            data["by"],
            {name: torch.tensor(table, dtype=torch.float64) for name, table in data["moments"].items()},
            {name: torch.tensor(table, dtype=torch.int64) for name, table in data["histograms"].items()},
            {name: torch.tensor(table, dtype=torch.int64) for name, table in data["nans"].items()},
            torch.tensor(data["row_counts"], dtype=torch.int64),
        )


def _thresholds(edges: tuple[float, ...], like: Tensor) -> Tensor:
    """The edges in the statistics' dtype: the smallest numbers of it not below them, so that no value changes sides."""
    exact = torch.tensor(edges, dtype=torch.float64, device=like.device)
    rounded = exact.to(like.dtype)
    up = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
    return torch.where(rounded.double() < exact, up, rounded)


def _known(name: str) -> str:
    if name not in EDGES:
        raise ValueError(f"no statistic is called {name!r}; the names are {', '.join(EDGES)}")
    return name
