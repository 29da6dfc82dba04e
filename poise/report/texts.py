"""The words of reports in five languages: catalogues in `texts/`, JSON from key to text, all with the same keys.

Which language: `preferred`. No text is put together from pieces; what varies is a placeholder in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files

LANGUAGES = ("en", "es", "de", "fr", "zh")

Say = Callable[..., str]  # key, placeholders -> text


@cache
def catalogue(language: str) -> Mapping[str, str]:
    if language not in LANGUAGES:
        raise ValueError(f"lang must be one of {', '.join(LANGUAGES)}; got {language!r}")
    texts: dict[str, str] = json.loads((files("poise.report") / "texts" / f"{language}.json").read_text("utf-8"))
    return texts


def speaker(language: str) -> Say:
    """What says a text of that language, by its key."""
    texts = catalogue(language)
    return lambda key, **values: texts[key].format(**values)


def preferred(environment: Mapping[str, str] = os.environ) -> str:
    """The language of the locale if there is a catalogue for it, else English."""
    locale = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    language = locale.replace("-", "_").split("_")[0].split(".")[0].lower()
    return language if language in LANGUAGES else "en"
