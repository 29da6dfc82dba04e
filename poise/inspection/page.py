"""An inspection as one HTML file: style, script and numbers inside it, nothing fetched.

The script is the ES modules of web/, joined in the order in which they need each other: each becomes a function of its
own that returns what the module exports, and an `import` takes it from there. Types, which are comments, are left out.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from poise.inspection.heads import CLASSES, KEYS
from poise.inspection.maps import Pooled
from poise.inspection.result import STATISTICS, Inspection, Text

_IMPORT = re.compile(r"^import (\{[^}]*\}) from \"\./(\w+)\.js\";\n", re.M)
_TYPES = re.compile(r" */\*\*.*?\*/\n?", re.S)  # in comments, for tsc
_EXPORT = re.compile(r"^export ((?:async )?function|const) (\w+)", re.M)
# key: label, meaning; of measures and statistics, in the order of choices and columns
_FIGURES = {
    "sink": ("sink", "mean weight of the one key that gets most"),
    "previous": ("previous token", "mean weight of the key before"),
    "diagonal": ("itself", "mean weight of the query's own token"),
    "local": ("within 8 tokens", "mean weight within 8 tokens to either side"),
    "duplicate": ("duplicate token", "on random tokens repeated once: mean weight of the same token before"),
    "induction": ("induction", "on random tokens repeated once: mean weight of what followed the same token before"),
    "flatness": ("flatness", "entropy over that of a uniform row, where many keys are seen"),
    "response": ("gradient gain", "1 - sum of p², how much gradient passes the softmax, where many keys are seen"),
    "entropy": ("entropy", "mean entropy of a row, in nats"),
    "effective_keys": ("effective keys", "mean of 1 / sum of p²"),
    "max_prob": ("largest weight", "mean over rows of the largest weight"),
    "sink_mass": ("first key", "mean weight of the first key"),
    "max_logit": ("largest logit", "the largest scaled score of any row"),
    "std": ("std of scores", "mean over rows of the standard deviation of visible scores"),
    "var_p": ("var under p", "mean variance of the score under the weights: the sensitivity to temperature"),
    "mean": ("mean score", "mean of visible scores"),
    "lse": ("lse", "mean log of the sum of the scores' exponentials"),
}
_CLASSES = {
    "induction": "looks at what followed the same token before",
    "duplicate-token": "looks at the same token before",
    "previous-token": "looks at the token before",
    "diagonal": "looks at its own token",
    "local": "looks at its neighbourhood",
    "uniform": "averages all it sees",
    "saturated": "one key takes everything, and no gradient passes",
    "sink": "rests on one key",
}


def page(found: Inspection) -> str:
    """The whole document."""
    texts, blobs = [], []
    numbers = {layer.path: index for index, layer in enumerate(found.layers)}
    for text in found.texts:
        described, packed = _packed(text, numbers)
        texts.append(described)
        blobs.append(base64.b64encode(gzip.compress(packed, 5, mtime=0)).decode())
    report = {
        "model": found.model,
        "about": _about(found),
        "note": _note(found),
        "classes": [
            {
                "name": name,
                "heads": count,
                "shuffled": None if found.control is None else found.control[name],
                "rule": f"{CLASSES[name][0]} {'≤' if name == 'saturated' else '≥'} {CLASSES[name][1]}",
                "meaning": f"{_CLASSES[name]}; heads of this class, and as many with shuffled tokens",
            }
            for name, count in found.counts().items()
        ],
        "figures": [{"key": key, "label": label, "meaning": meaning} for key, (label, meaning) in _FIGURES.items()],
        "layers": [
            {"number": layer.number, "path": layer.path, "heads": layer.summary.rows.numel()} for layer in found.layers
        ],
        "heads": _heads(found),
        "start": _start(found),
        "texts": texts,
    }
    # "<" never stands in the data as such: no text can end the element that holds it.
    told = json.dumps(report, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    maps = "\n".join(
        f'<script type="text/plain" id="maps-{number}">{blob}</script>' for number, blob in enumerate(blobs)
    )
    parts = {"STYLE": _read("page.css"), "REPORT": told, "MAPS": maps, "SCRIPT": script()}
    return re.sub(r"/\*([A-Z]+)\*/", lambda place: parts[place[1]], _read("page.html"))


def script() -> str:
    """All modules as one."""
    joined: dict[str, str] = {}

    def add(name: str) -> None:
        source = _read(f"{name}.js")
        for _, needed in _IMPORT.findall(source):
            if needed not in joined:
                add(needed)
        exports = ", ".join(name for _, name in _EXPORT.findall(source))
        body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = $\2;\n", _TYPES.sub("", source)))
        joined[name] = f"const ${name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"

    add("main")
    return "\n".join(joined.values())


def _read(name: str) -> str:
    return (files("poise.inspection") / "web" / name).read_text("utf-8")


def _about(found: Inspection) -> str:
    heads = {layer.summary.rows.numel() for layer in found.layers}
    of_each = f" of {heads.pop()} heads" if len(heads) == 1 else f", {len(found.heads)} heads"
    read = f"{found.read} text{'s' * (found.read != 1)}, {found.tokens:,} tokens" if found.read else "no text"
    return f"{len(found.layers)} layers{of_each} · {read}"


def _note(found: Inspection) -> str:
    notes = []
    if found.interrupted:
        notes.append("Interrupted: this is what was done until then.")
    if found.read and not found.rows:
        notes.append(
            f"The texts are too short to judge heads by (rows of {KEYS} keys and more count): random tokens are."
        )
    if found.cut:
        notes.append(f"{found.cut:,} tokens more than the model reads were left out.")
    if found.read > len(found.texts):
        notes.append(f"{len(found.texts)} of {found.read} texts have maps here: their size is limited.")
    notes += [f"Not seen: {name}: {why}." for name, why in found.missed.items()]
    return " ".join(notes)


def _heads(found: Inspection) -> list[dict[str, Any]]:
    index = {layer.number: index for index, layer in enumerate(found.layers)}
    return [
        {
            "layer": index[head.layer],
            "head": head.head,
            "classes": head.classes,
            "evidence": head.evidence,
            "values": [_figure(key, head.measures, head.statistics) for key in _FIGURES],
        }
        for head in found.heads
    ]


def _start(found: Inspection) -> tuple[int, int]:
    """The head to show first: the clearest."""
    head = next(iter(found.notable() or found.heads))
    return next(index for index, layer in enumerate(found.layers) if layer.number == head.layer), head.head


def _figure(key: str, measures: Mapping[str, float], statistics: Mapping[str, float]) -> float | None:
    value = statistics[key] if key in STATISTICS else measures[key]
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _packed(text: Text, numbers: Mapping[str, int]) -> tuple[dict[str, Any], bytes]:
    """A text as the page knows it, and its maps, layer by layer, as numbers of 4 bytes."""
    parts: list[bytes] = []
    places, offset = {}, 0
    common: dict[str, Any] = {}
    for path, found in text.maps.items():
        exact = isinstance(found, Tensor)
        arrays = [found] if isinstance(found, Tensor) else _arrays(found)
        queries, keys = found.shape[-2:]
        sides = (1, 1) if isinstance(found, Tensor) else found.side
        size = dict(zip(("rows", "columns"), arrays[0].shape[1:], strict=True))
        mine = {"exact": exact, "queries": queries, "keys": keys, "side": sides, **size}
        if mine != (common := common or mine):
            continue  # of another size than the first layer's (cross-attention): a text is shown with one
        places[str(numbers[path])] = {"offset": offset, "sinks": text.sinks[path].tolist()}
        for array in arrays:
            parts.append(array.contiguous().numpy().astype("<u4" if array.dtype is torch.int64 else "<f4").tobytes())
            offset += array.numel()
    names = {
        "queryTokens": _names(text, common["queries"], "query"),
        "keyTokens": _names(text, common["keys"], "key"),
    }
    return {"title": _title(text), **common, **names, "places": places}, b"".join(parts)


def _names(text: Text, size: int, axis: str) -> list[str]:
    """The text's tokens, or numbers where what attends are not they (learned queries, a summary as keys)."""
    return text.tokens if size == len(text.tokens) else [f"{axis} {number}" for number in range(size)]


def _arrays(found: Pooled) -> list[Tensor]:
    return [found.mean, found.largest, found.mean_without, found.largest_without, found.place]


def _title(text: Text) -> str:
    words = " ".join((text.text or f"{len(text.tokens)} token ids").split())
    size = f" ({len(text.tokens):,} tokens)" if len(text.tokens) > 40 else ""
    return f"{text.number + 1}  {words[:48]}{'…' * (len(words) > 48)}{size}"
