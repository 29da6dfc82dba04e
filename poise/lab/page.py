"""All results on one self-contained HTML page, in five languages to switch between; the table of verdicts on top.

Every verdict is computed anew from the stored rows. What differs between languages is rendered once for each.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from poise.lab import plots
from poise.lab.evidence import Check, Verdict
from poise.lab.experiment import LEVELS, Experiment, Rows, experiments
from poise.lab.results import Results
from poise.lab.texts import fill, localised, speaker
from poise.report.texts import LANGUAGES, Say


class Entry(NamedTuple):
    """An experiment and what it gave."""

    experiment: Experiment
    record: dict[str, Any]
    verdict: Verdict

    @property
    def rows(self) -> Rows:
        rows: Rows = self.record["rows"]
        return rows


def entries(results: Results) -> list[Entry]:
    """What has been run, each at its fullest level."""
    found = [(experiment, results.record(experiment)) for experiment in experiments()]
    ready = [Entry(own, record, own.judge(record["rows"])) for own, record in found if record is not None]
    if not ready:
        raise ValueError(f"out: no finished experiment in {results.out}; run `poise lab run --all --quick` first")
    return ready


def page(found: Sequence[Entry], language: str) -> str:
    """The document; `language` is the one it opens in."""
    switch = "".join(
        f'<button type="button" lang="{each}" data-to="{each}">{escape(NAMES[each])}</button>' for each in LANGUAGES
    )
    bodies = "\n".join(_body(found, each) for each in LANGUAGES)
    hidden = ", ".join(f'html[lang="{each}"] main:not([lang="{each}"])' for each in LANGUAGES)
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(speaker_of_page(language)('page.title'))}</title>\n"
        f"<style>{_STYLE}\n{hidden} {{ display: none }}</style>\n</head>\n<body>\n"
        f"<nav>{switch}</nav>\n{bodies}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


NAMES = {"en": "English", "es": "Español", "de": "Deutsch", "fr": "Français", "zh": "中文"}


def speaker_of_page(language: str) -> Say:
    return speaker("lab", language)


def shown(found: Sequence[Entry], say: Say) -> str:
    """Which levels the numbers come from."""
    levels = [level for level in LEVELS if any(entry.record["level"] == level for entry in found)]
    return " ".join(say(f"level.{level}") for level in levels) + (" " + say("level.mixed") if len(levels) > 1 else "")


def missing(found: Sequence[Entry], say: Say) -> str:
    """What has not been run; empty if nothing is missing."""
    run = {entry.experiment.number for entry in found}
    names = [f"{own.number} {own.name}" for own in experiments() if own.number not in run]
    return say("page.missing", names=", ".join(names)) if names else ""


def made_on(found: Sequence[Entry], say: Say) -> list[str]:
    """The machines, each once, and the time all took."""
    machines = {tuple(entry.record["machine"].items()): None for entry in found}
    seconds = sum(entry.record["seconds"] for entry in found)
    texts = [say("page.machine", **dict(each)) for each in machines]
    return [*texts, say("page.time", count=len(found), minutes=localised(f"{seconds / 60:.1f}", say))]


def limits(check: Check, say: Say) -> str:
    low, high = (localised(f"{limit:.4g}", say) for limit in (check.low, check.high))
    if check.low == -float("inf"):
        return say("check.most", high=high)
    if check.high == float("inf"):
        return say("check.least", low=low)
    return say("check.between", low=low, high=high)


def measured(check: Check, say: Say) -> str:
    return localised(str(check.measured), say)


def quantity(check: Check, say: Say) -> str:
    return fill(say, check.label, check.values)


def parameters(entry: Entry) -> list[str]:
    names = list(dict.fromkeys(name for row in entry.rows for name in row.cell))
    return [f"{name} = {', '.join(map(str, entry.rows.parameter(name)))}" for name in names]


def run_of(entry: Entry, say: Say) -> str:
    record = entry.record
    return say(
        "page.run",
        level=say(f"name.{record['level']}"),
        seeds=record["seeds"],
        seed=record["seed"],
        measurements=len(entry.rows),
        seconds=f"{record['seconds']:.0f}",
        date=record["written"],
    )


def _body(found: Sequence[Entry], language: str) -> str:
    say = speaker_of_page(language)
    rows = "\n".join(_line(entry, language) for entry in found)
    sections = "\n".join(_section(entry, language) for entry in found)
    heads = "".join(
        f'<th scope="col">{escape(head)}</th>' for head in ("", say("page.claim"), say("page.verdict"), say("page.why"))
    )
    absent = missing(found, say)
    return (
        f'<main lang="{language}">\n<h1>{escape(say("page.title"))}</h1>\n{_p(say("page.intro"))}\n'
        f'<p class="level">{escape(shown(found, say))}</p>\n'
        f'<div class="scroll" tabindex="0"><table class="verdicts"><thead><tr>{heads}</tr></thead>'
        f"<tbody>\n{rows}\n</tbody></table></div>\n{_p(absent) if absent else ''}"
        + "".join(f'<p class="faint">{escape(text)}</p>' for text in (say("page.kinds"), *made_on(found, say)))
        + f"\n{sections}\n</main>"
    )


def _line(entry: Entry, language: str) -> str:
    own, say = entry.experiment, speaker(entry.experiment.name, language)
    return (
        f'<tr><td>{own.number}</td><th scope="row"><a href="#{own.name}-{language}">{escape(say("claim"))}</a></th>'
        f"<td>{_badge(entry.verdict, say)}</td>"
        f"<td>{escape(fill(say, entry.verdict.finding, entry.verdict.values))}</td></tr>"
    )


def _section(entry: Entry, language: str) -> str:
    own, verdict, say = entry.experiment, entry.verdict, speaker(entry.experiment.name, language)
    picture = base64.b64encode(plots.svg(own, entry.rows, language).encode()).decode()
    heads = "".join(
        f'<th scope="col">{escape(say(key))}</th>'
        for key in ("check.quantity", "check.measured", "check.limits", "check.answer")
    )
    checks = "\n".join(
        f'<tr class="{check.answer}"><th scope="row">{escape(quantity(check, say))}</th><td>{measured(check, say)}</td>'
        f"<td>{escape(limits(check, say))}</td><td>{escape(say(f'answer.{check.answer}'))}</td></tr>"
        for check in verdict.checks
    )
    finding = fill(say, verdict.finding, verdict.values)
    grid = "".join(f"<li><code>{escape(text)}</code></li>" for text in parameters(entry))
    return (
        f'<section id="{own.name}-{language}">\n<h2>{own.number}  {escape(say("title"))}</h2>\n'
        f"<blockquote>{escape(say('claim'))}<cite>{escape(own.source)}</cite></blockquote>\n"
        f'<p class="finding">{_badge(verdict, say)} {escape(finding)}</p>\n'
        f'<img loading="lazy" alt="{escape(finding, quote=True)}" src="data:image/svg+xml;base64,{picture}">\n'
        f'<div class="scroll" tabindex="0"><table class="checks"><thead><tr>{heads}</tr></thead>'
        f"<tbody>\n{checks}\n</tbody></table></div>\n"
        f"<details><summary>{escape(say('page.how'))}</summary>\n"
        f"<h3>{escape(say('page.method'))}</h3>{_p(say('method'))}\n<h3>{escape(say('page.rule'))}</h3>{_p(say('rule'))}\n"
        f"<h3>{escape(say('page.parameters'))}</h3><ul>{grid}</ul>{_p(run_of(entry, say))}</details>\n</section>"
    )


def _badge(verdict: Verdict, say: Say) -> str:
    return f'<strong class="badge {verdict.kind}">{escape(say(f"kind.{verdict.kind}"))}</strong>'


def _p(text: str) -> str:
    return f"<p>{escape(text)}</p>"


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --faint: #5b5b5b; --line: #d9d9d9; --soft: #f5f6f8;
  --yes: #0b6b3a; --if: #8a5a00; --no: #a3260f; --open: #55606e; --link: #0b5394 }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e8e8; --faint: #a8a8a8; --line: #3a3d44;
  --soft: #1e2127; --yes: #6fd19c; --if: #f0c060; --no: #ff9a85; --open: #b3bdca; --link: #8ec1f5 } }
* { box-sizing: border-box }
html { scroll-behavior: smooth } @media (prefers-reduced-motion) { html { scroll-behavior: auto } }
body { margin: 0 auto; padding: 1rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif }
nav { display: flex; flex-wrap: wrap; gap: .4rem; justify-content: flex-end }
nav button { font: inherit; font-size: .85rem; padding: .15rem .7rem; border-radius: 1rem;
  border: 1px solid var(--line); background: none; color: inherit; cursor: pointer }
nav button[aria-pressed=true] { background: var(--ink); color: var(--paper); border-color: var(--ink) }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 } h2 { font-size: 1.25rem; margin: 0 0 .5rem }
h3 { font-size: .95rem; margin: .8rem 0 .1rem }
p, li { max-width: 48rem } p { margin: .4rem 0 } .faint { color: var(--faint); font-size: .85rem }
.level { border-left: 4px solid var(--link); padding-left: .7rem }
a { color: var(--link) } .verdicts a { color: inherit; text-decoration-color: var(--faint) }
section { margin-top: 2.5rem; padding-top: 1.5rem; border-top: 1px solid var(--line) }
blockquote { margin: 0 0 .6rem; font-size: 1.05rem } cite { display: block; font-style: normal; font-size: .85rem;
  color: var(--faint) }
img { display: block; width: 100%; max-width: 54rem; aspect-ratio: 86 / 42; margin: .8rem 0; background: #fff;
  border: 1px solid var(--line); border-radius: .4rem }
.scroll { overflow-x: auto; margin: .8rem 0 }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums }
th, td { padding: .4rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
thead th { color: var(--faint); font-weight: normal } tbody th { font-weight: normal }
.verdicts tbody th { min-width: 15rem } .verdicts td:last-child { min-width: 16rem; color: var(--faint) }
.badge { white-space: nowrap; font-size: .82rem; padding: .1rem .55rem; border-radius: 1rem; border: 1.5px solid }
.badge.holds { color: var(--yes) } .badge.holds_if { color: var(--if) } .badge.does_not_hold { color: var(--no) }
.badge.inconclusive { color: var(--open) }
.checks td { white-space: nowrap }
.yes td:last-child { color: var(--yes) } .no td:last-child { color: var(--no) }
.open td:last-child { color: var(--open) }
details { background: var(--soft); border-radius: .4rem; padding: .5rem .9rem } summary { cursor: pointer }
details ul { padding-left: 1.1rem; margin: .2rem 0 } code { font-size: .85rem; overflow-wrap: anywhere }
@media (max-width: 44rem) {
  .verdicts, .verdicts tbody { display: block } .verdicts thead { display: none }
  .verdicts tr { display: grid; grid-template-columns: 1.8rem 1fr; padding: .5rem 0 }
  .verdicts tr + tr { border-top: 1px solid var(--line) }
  .verdicts td, .verdicts tbody th { border: 0; padding: .1rem .3rem; grid-column: 2; min-width: 0 }
  .verdicts td:first-child { grid-column: 1 }
}
:focus-visible { outline: 3px solid var(--link); outline-offset: 1px }
"""

# A language change keeps the reader at the same experiment.
_SCRIPT = """
const buttons = [...document.querySelectorAll('nav button')];
const to = lang => {
  const at = [...document.querySelectorAll('main:not([hidden]) section')]
    .filter(s => s.offsetParent && s.getBoundingClientRect().top < 100).pop();
  document.documentElement.lang = lang;
  for (const button of buttons) button.setAttribute('aria-pressed', button.dataset.to === lang);
  if (at) document.getElementById(at.id.replace(/-[a-z]+$/, '-' + lang)).scrollIntoView({ behavior: 'instant' });
};
for (const button of buttons) button.onclick = () => to(button.dataset.to);
const asked = document.getElementById(location.hash.slice(1));
to(asked ? asked.closest('main').lang : document.documentElement.lang);
if (asked) asked.scrollIntoView({ behavior: 'instant' });
"""
