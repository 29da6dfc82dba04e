"""What an inspection found: every head with its measures, statistics and classes; as a table, as JSON, as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from poise.inspection.heads import CLASSES, KEYS, classify, strength
from poise.inspection.maps import Pooled
from poise.summary import ScoreSummary

FORMAT = 1  # of to_dict
SHOWN = 3  # heads of each class in the table
# name: (of ScoreSummary, how it is reduced over rows)
STATISTICS = {
    "entropy": "mean",
    "normalized_entropy": "mean",
    "effective_keys": "mean",
    "max_prob": "mean",
    "responsiveness": "mean",
    "collision": "mean",
    "sink_mass": "mean",
    "max_logit": "max",
    "lse": "mean",
    "mean": "mean",
    "std": "mean",
    "var_p": "mean",
}


@dataclass(frozen=True)
class Layer:
    """An attention module, or one call of it where it is called several times."""

    number: int
    path: str
    summary: ScoreSummary = field(repr=False)  # over all rows of all texts, by head


@dataclass(frozen=True)
class Head:
    """One head, by the numbers of its layer and of itself."""

    layer: int
    head: int
    classes: tuple[str, ...]  # see heads.py; the most telling first
    measures: Mapping[str, float]  # that classes follow from; NaN where the texts are too short
    statistics: Mapping[str, float]  # of its rows, as in ScoreStats: means, of max_logit the largest

    @property
    def evidence(self) -> str:
        """Why it is of its classes, in one line."""
        return ", ".join(_EVIDENCE[name].format(self.measures[CLASSES[name][0]]) for name in self.classes)


_EVIDENCE = {
    "induction": "{:.2f} on what followed the same token before",
    "duplicate-token": "{:.2f} on the same token before",
    "previous-token": "{:.2f} on the previous token",
    "diagonal": "{:.2f} on itself",
    "local": "{:.2f} within 8 tokens",
    "uniform": "entropy {:.3f} of uniform",
    "saturated": "gradient gain {:.3f}",
    "sink": "{:.2f} on one token",
}


@dataclass(frozen=True)
class Text:
    """A text whose maps were kept, by the paths of their layers."""

    number: int  # among the texts
    text: str
    tokens: list[str]
    maps: Mapping[str, Tensor | Pooled] = field(repr=False)  # exact: [H, N, M]
    sinks: Mapping[str, Tensor] = field(repr=False)  # int64 [H]: the key that gets most
    cut: int  # tokens that the model does not read


@dataclass(frozen=True)
class Inspection:
    """What `poise.inspect` returns. `print` shows the notable heads."""

    model: str
    layers: list[Layer]
    heads: list[Head]
    texts: list[Text]
    read: int  # texts
    tokens: int  # in them
    cut: int  # left out, because the model reads no more
    rows: int  # by which heads are judged; 0: by the probe's, the texts being too short
    control: Mapping[str, int] | None  # heads of each class with shuffled tokens
    missed: Mapping[str, str]  # modules whose attention could not be seen, and why
    interrupted: bool

    def counts(self) -> dict[str, int]:
        """How many heads are of each class."""
        return {name: sum(name in head.classes for head in self.heads) for name in CLASSES}

    def notable(self, most: int = SHOWN) -> list[Head]:
        """The clearest heads of each class, each once, the more telling classes first."""
        found: dict[tuple[int, int], Head] = {}
        for name in CLASSES:
            of_class = [head for head in self.heads if name in head.classes]
            for head in sorted(of_class, key=lambda head: -strength(name, head.measures))[:most]:
                found.setdefault((head.layer, head.head), head)
        return list(found.values())

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.layers)} layers, {len(self.heads)} heads; {self._read()}", ""]
        lines += [*_table(["class", "heads", "shuffled", "", ""], self._class_rows()), ""]
        notable = [[str(head.layer), str(head.head), ", ".join(head.classes), head.evidence] for head in self.notable()]
        lines += _table(["layer", "head", "notable for", "evidence"], notable)
        lines += [f"not seen: {name}: {why}" for name, why in self.missed.items()]
        return "\n".join(lines)

    def _read(self) -> str:
        """What was read, and what was not."""
        of = f"{self.read} text{'s' * (self.read != 1)} of {self.tokens:,} tokens" if self.read else "no text"
        short = f" (too short to judge heads by: random tokens are; {KEYS} keys and more count)"
        return (
            of
            + ("" if self.rows or not self.read else short)
            + (f"; {self.cut:,} more than the model reads were left out" if self.cut else "")
            + ("; interrupted" if self.interrupted else "")
        )

    def _class_rows(self) -> list[list[str]]:
        rows = []
        for name, count in self.counts().items():
            measure, limit = CLASSES[name]
            shuffled = "–" if self.control is None else str(self.control[name])
            rows.append([name, str(count), shuffled, f"{measure} {'≤' if name == 'saturated' else '≥'} {limit}", ""])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values; NaN and infinities as None. `format` changes when a key's meaning does.

        model, texts, tokens, cut, rows and interrupted as above. layers: number and path. classes: each one's measure
        and limit, its heads, and as many with shuffled tokens. heads: the numbers of layer and head, classes, evidence,
        measures (heads.py) and statistics (ScoreStats). missed: module paths, and why.
        """
        return {
            "format": FORMAT,
            "model": self.model,
            "texts": self.read,
            "tokens": self.tokens,
            "cut": self.cut,
            "rows": self.rows,
            "interrupted": self.interrupted,
            "layers": [{"layer": layer.number, "path": layer.path} for layer in self.layers],
            "classes": {
                name: {
                    "measure": CLASSES[name][0],
                    "limit": CLASSES[name][1],
                    "heads": count,
                    "shuffled": None if self.control is None else self.control[name],
                }
                for name, count in self.counts().items()
            },
            "heads": [
                {
                    "layer": head.layer,
                    "head": head.head,
                    "classes": list(head.classes),
                    "evidence": head.evidence,
                    "measures": _finite(head.measures),
                    "statistics": _finite(head.statistics),
                }
                for head in self.heads
            ],
            "missed": dict(self.missed),
        }

    def json(self, path: str | Path) -> None:
        """Writes `to_dict`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def html(self, path: str | Path) -> None:
        """Writes one page with everything, maps included, that needs no network."""
        from poise.inspection.page import page

        Path(path).write_text(page(self), encoding="utf-8")


def head_of(layer: Layer, head: int, measures: Mapping[str, float]) -> Head:
    statistics = {name: float(getattr(layer.summary, how)(name)[head]) for name, how in STATISTICS.items()}
    return Head(layer.number, head, tuple(classify(measures)), measures, statistics)


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _table(names: list[str], rows: list[list[str]]) -> list[str]:
    """Lines; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    right = [all(row[i].isdigit() or row[i] == "–" for row in rows) for i in range(len(names))]
    return [
        "  ".join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [names, *rows]
    ]
