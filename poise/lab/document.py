"""The same results as Markdown, a file per language, with the plots beside them: what docs/lab.md is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from poise.lab import plots
from poise.lab.page import (
    NAMES,
    Entry,
    limits,
    made_on,
    measured,
    missing,
    parameters,
    quantity,
    run_of,
    shown,
    speaker_of_page,
)
from poise.lab.texts import fill, speaker
from poise.report.texts import LANGUAGES


def write(found: Sequence[Entry], folder: Path) -> list[Path]:
    """lab.md in English, lab.LANG.md in the others, and lab/NAME.svg."""
    pictures = folder / "lab"
    pictures.mkdir(parents=True, exist_ok=True)
    for entry in found:
        drawn = plots.svg(entry.experiment, entry.rows, "en")
        (pictures / f"{entry.experiment.name}.svg").write_text(drawn, encoding="utf-8")
    written = []
    for language in LANGUAGES:
        written.append(folder / _name(language))
        written[-1].write_text(document(found, language), encoding="utf-8")
    return written


def document(found: Sequence[Entry], language: str) -> str:
    say = speaker_of_page(language)
    others = " · ".join(NAMES[each] if each == language else f"[{NAMES[each]}]({_name(each)})" for each in LANGUAGES)
    head = [say("page.claim"), say("page.verdict"), say("page.why")]
    lines = [f"# {say('page.title')}", others, say("page.intro"), f"**{shown(found, say)}**"]
    table = [_row(["", *head]), _row(["--:", "---", "---", "---"])]
    for entry in found:
        own = speaker(entry.experiment.name, language)
        verdict = entry.verdict
        finding = fill(own, verdict.finding, verdict.values)
        table.append(_row([str(entry.experiment.number), own("claim"), f"**{own(f'kind.{verdict.kind}')}**", finding]))
    absent = missing(found, say)
    lines += [
        "\n".join(table),
        *([absent] if absent else []),
        say("page.kinds"),
        *made_on(found, say),
        say("page.made"),
    ]
    for entry in found:
        lines += _section(entry, language)
    return "\n\n".join(lines) + "\n"


def _section(entry: Entry, language: str) -> list[str]:
    experiment, verdict = entry.experiment, entry.verdict
    say = speaker(experiment.name, language)
    head = [say(f"check.{key}") for key in ("quantity", "measured", "limits", "answer")]
    checks = [_row(head), _row(["---"] * 4)]
    for check in verdict.checks:
        answer = say(f"answer.{check.answer}")
        checks.append(_row([quantity(check, say), measured(check, say), limits(check, say), answer]))
    finding = fill(say, verdict.finding, verdict.values)
    return [
        f"## {experiment.number}. {say('title')}",
        f"> {say('claim')} ({experiment.source})",
        f"**{say(f'kind.{verdict.kind}')}**: {finding}",
        f"![{say('title')}](lab/{experiment.name}.svg)",
        f"**{say('page.method')}** {say('method')}",
        f"**{say('page.rule')}** {say('rule')}",
        "\n".join(checks),
        f"**{say('page.parameters')}** " + "; ".join(f"`{text}`" for text in parameters(entry)),
        run_of(entry, say),
    ]


def _name(language: str) -> str:
    return "lab.md" if language == "en" else f"lab.{language}.md"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
