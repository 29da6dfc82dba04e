"""Where results lie: `OUT/cells/NAME.jsonl`, a line per finished measurement, and `OUT/LEVEL/NAME.json`, the records.

Lines are appended as soon as a measurement ends and serve every level that holds the cell. A line cut short by an
interruption, or of another version of the experiment, does not count.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import poise
from poise.lab.evidence import Verdict
from poise.lab.experiment import LEVELS, Cell, Experiment, Level, Row, Rows
from poise.lab.texts import texts


class Results:
    """A directory of results."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def finished(self, experiment: Experiment) -> dict[str, Row]:
        """The stored measurements of the experiment's present version, by `key`."""
        found: dict[str, Row] = {}
        path = self._cells(experiment)
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                try:
                    stored = json.loads(line)
                except json.JSONDecodeError:  # an interrupted write
                    continue
                if stored["version"] == experiment.version:
                    row = Row(stored["cell"], stored["seed"], _decoded(stored["values"]), stored["seconds"])
                    found[key(row.cell, row.seed)] = row
        return found

    def store(self, experiment: Experiment, row: Row) -> None:
        path = self._cells(experiment)
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"version": experiment.version, "seed": row.seed, "seconds": row.seconds}
        line = json.dumps({**stored, "cell": row.cell, "values": _encoded(row.values)}, allow_nan=False)
        with path.open("ab+") as file:
            if file.tell():  # at the end, where an interrupted write may have left no newline
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write((line + "\n").encode())

    def write(self, experiment: Experiment, level: Level, seed: int, rows: Rows, verdict: Verdict) -> Path:
        """The record of a complete run, replaced whole or not at all."""
        checks = [
            {
                "label": check.label,
                "of": dict(check.values),
                "measured": [check.measured.low, check.measured.mean, check.measured.high],
                "limits": [check.low, check.high],
                "answer": check.answer,
            }
            for check in verdict.checks
        ]
        record = {
            "experiment": experiment.name,
            "number": experiment.number,
            "claim": texts(experiment.name)["claim"]["en"],
            "source": experiment.source,
            "rule": texts(experiment.name)["rule"]["en"],
            "version": experiment.version,
            "level": level,
            "seed": seed,
            "seeds": experiment.seeds[level],
            "verdict": {"kind": verdict.kind, "values": dict(verdict.values), "checks": checks},
            "seconds": sum(row.seconds for row in rows),
            "written": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "rows": [
                {"cell": row.cell, "seed": row.seed, "values": row.values, "seconds": row.seconds} for row in rows
            ],
        }
        path = self.out / level / f"{experiment.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".json.new")
        unfinished.write_text(json.dumps(_encoded(record), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
        return path

    def record(self, experiment: Experiment, only: Level | None = None) -> dict[str, Any] | None:
        """That of one level, or of the fullest there is, if its version is the present one; `rows` as Rows."""
        for level in reversed(LEVELS) if only is None else (only,):
            path = self.out / level / f"{experiment.name}.json"
            if path.exists():
                record: dict[str, Any] = _decoded(json.loads(path.read_text("utf-8")))
                if record["version"] == experiment.version:
                    record["rows"] = Rows(Row(**row) for row in record["rows"])
                    return record
        return None

    def _cells(self, experiment: Experiment) -> Path:
        return self.out / "cells" / f"{experiment.name}.jsonl"


def key(cell: Cell, seed: int) -> str:
    return json.dumps([sorted(cell.items()), seed])


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "poise": poise.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# JSON has no infinities and no NaN, and diverged runs do: they are written as these words.
_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _encoded(each) for name, each in value.items()}
    return [_encoded(each) for each in value] if isinstance(value, (list, tuple)) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {name: _decoded(each) for name, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value
