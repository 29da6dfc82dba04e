"""One step's record: plain numbers, the same for every sink, versioned.

    {"schema": "poise.watch/1", "step": 120, "time": 1763500000.0,
     "layers": {"model.layers.0.self_attn": {
         "heads": 12, "rows": 2048, "empty_rows": 0, "nan_rows": 0,
         "max_logit": {"max": [...], "mean": [...]},
         "entropy": {"mean": [...], "min": [...]}, ...}},
     "not_seen": {"model.vision.block": "why"},
     "alarms": [...]}

Every list has one number per head, None where there is none (no row, or NaN). `rows`, `empty_rows` (no visible key) and
`nan_rows` are the largest of the heads. Which reductions of which statistics a record holds is FIELDS; what they mean
is in stats.py. The largest score is "max_logit" max: after scale, before cap and bias. A change of meaning changes the
number in "schema"; additions do not. Summaries with histograms are not part of it (`ScoreSummary.to_dict`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from poise.summary import ScoreSummary

Record: TypeAlias = dict[str, Any]

SCHEMA = "poise.watch/1"
FIELDS = {
    "max_logit": ("max", "mean"),
    "max_score": ("max",),
    "min_score": ("min",),
    "mean": ("mean",),
    "std": ("mean",),
    "lse": ("mean",),
    "entropy": ("mean", "min"),
    "normalized_entropy": ("mean",),
    "effective_keys": ("mean",),
    "max_prob": ("mean",),
    "responsiveness": ("mean", "min"),
    "var_p": ("mean",),
    "sink_mass": ("mean",),
    "count": ("mean", "max"),
}


def make_record(step: int, summaries: Mapping[str, ScoreSummary], not_seen: Mapping[str, str]) -> Record:
    """The record of a step from its summaries by layer, each reduced by head."""
    return {
        "schema": SCHEMA,
        "step": step,
        "time": time.time(),
        "layers": {name: _layer(summary) for name, summary in summaries.items()},
        "not_seen": dict(not_seen),
    }


def scalars(record: Record, prefix: str = "attention") -> Iterator[tuple[str, float]]:
    """(name, number) pairs for sinks that know only numbers: per layer the worst head and the mean over heads.

    "attention/<layer>/max_logit.max" is the largest over heads; smallest for "min"; "mean" the mean over heads.
    """
    for layer, values in record["layers"].items():
        for statistic, reductions in values.items():
            name = f"{prefix}/{layer}/{statistic}"
            if not isinstance(reductions, dict):
                yield name, float(reductions)
                continue
            for reduction, heads in reductions.items():
                known = [value for value in heads if value is not None]
                if known:
                    reduce = {"max": max, "min": min}.get(reduction, lambda x: math.fsum(x) / len(x))
                    yield f"{name}.{reduction}", float(reduce(known))


def _layer(summary: ScoreSummary) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "heads": summary.rows.numel(),
        "rows": int(summary.rows.max()),
        "empty_rows": int(summary.empty_rows.max()),
        "nan_rows": int(summary.nan_rows.max()),
    }
    for statistic, reductions in FIELDS.items():
        layer[statistic] = {name: _numbers(getattr(summary, name)(statistic)) for name in reductions}
    return layer


def _numbers(values: Tensor) -> list[float | None]:
    """Finite numbers as they are; NaN as None; infinities as the largest floats, which JSON can hold."""
    largest = 1.7976931348623157e308
    return [None if math.isnan(x) else min(max(x, -largest), largest) for x in values.tolist()]
