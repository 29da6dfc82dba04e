"""The words of the lab in five languages: `texts/NAME.json` of each experiment, and `lab.json` of the page itself.

A file maps each key to the same text in every language, side by side.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from poise.lab.evidence import Said
from poise.report.texts import LANGUAGES, Say

PAGE = "lab"


@cache
def texts(name: str) -> Mapping[str, Mapping[str, str]]:
    """key -> language -> text"""
    found: dict[str, dict[str, str]] = json.loads((files("poise.lab") / "texts" / f"{name}.json").read_text("utf-8"))
    return found


def speaker(name: str, language: str) -> Say:
    """What says the texts of an experiment, and those of the page, in a language."""
    if language not in LANGUAGES:
        raise ValueError(f"lang must be one of {', '.join(LANGUAGES)}; got {language!r}")
    own = {**texts(PAGE), **texts(name)}
    return lambda key, **values: own[key][language].format(**values)


def fill(say: Say, key: str, values: Said) -> str:
    """A text whose placeholders are numbers, or lists of other texts."""
    separator = say("list.separator") if any(isinstance(value, tuple) for value in values.values()) else ""
    said = {
        name: separator.join(map(say, value)) if isinstance(value, tuple) else localised(value, say)
        for name, value in values.items()
    }
    return say(key, **said)


def localised(numbers: str, say: Say) -> str:
    """Numbers and intervals with the decimal point of the language."""
    point = say("number.point")
    if point == ".":
        return numbers
    return re.sub(r"(?<=\d)\.(?=\d)", point, re.sub(r"\[([^],]*), ([^],]*)\]", r"[\1; \2]", numbers))
