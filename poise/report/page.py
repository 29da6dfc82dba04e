"""The walk through attention as one HTML page: no network, light and dark, for phones, keyboards and screen readers.

Every number stands in a table, colour only underlines it: blue for positive, orange for negative, deeper for larger,
which all kinds of colour vision tell apart. The words are those of walk.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from torch import Tensor

from poise.report import walk
from poise.report.lesson import Lesson
from poise.report.texts import Say

SHOWN = 40  # tokens
_SHOWN_NUMBERS = 6  # of a vector

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --faint: #5b5b5b; --line: #d9d9d9;
  --blue: #08306b; --orange: #7f2704; --deep: #fff }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e8e8; --faint: #a8a8a8; --line: #3a3d44;
  --blue: #9ecae1; --orange: #fdae6b; --deep: #000 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem }
h2 code { font-weight: normal; color: var(--faint); font-size: .9em } h3 { font-size: 1rem; margin: 1rem 0 .25rem }
p { max-width: 42rem; margin: .35rem 0 } blockquote { margin: .75rem 0; font-size: 1.2rem }
.scroll { overflow-x: auto; margin: .5rem 0 } .maps { display: flex; flex-wrap: wrap; gap: 0 2rem }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .4rem; text-align: right; white-space: nowrap } th { font-weight: normal; color: var(--faint) }
th[scope=row] { position: sticky; left: 0; background: var(--paper); text-align: left; color: var(--ink) }
tr + tr td, tr + tr th { border-top: 1px solid var(--line) } td.text { text-align: left }
tr.chosen > * { font-weight: bold }
.heat td { --mix: calc(var(--p) * 100%); min-width: 2.6rem; border: 1px solid var(--paper);
  background: color-mix(in srgb, var(--blue) var(--mix), var(--paper)) }
.heat td.minus { background: color-mix(in srgb, var(--orange) var(--mix), var(--paper)) }
.heat td.deep { color: var(--deep) } .heat td.hidden { color: var(--faint) }
.heat td:hover, .heat td:focus { outline: 3px solid var(--ink); outline-offset: -1px }
.heat caption { caption-side: bottom; text-align: left; min-height: 1.6em; padding-top: .2rem }
:focus-visible { outline: 3px solid var(--ink) }
"""

# One tab stop per heat map; arrow keys move within it. What a cell says appears below it and is read out.
_SCRIPT = """
for (const table of document.querySelectorAll('.heat')) {
  const rows = [...table.tBodies[0].rows].map(row => [...row.querySelectorAll('td')]);
  const told = table.querySelector('output');
  const tell = cell => { told.textContent = cell.getAttribute('aria-label') };
  rows.forEach((cells, i) => cells.forEach((cell, j) => {
    cell.tabIndex = i || j ? -1 : 0;
    cell.onmouseenter = cell.onfocus = () => tell(cell);
    cell.onclick = () => cell.focus();
    cell.onkeydown = event => {
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const [down, right] = moves[event.key] || [];
      const next = down === undefined ? null : (rows[i + down] || [])[j + right];
      if (down !== undefined) event.preventDefault();
      if (next) { cell.tabIndex = -1; next.tabIndex = 0; next.focus() }
    };
  }));
}
"""


def page(lesson: Lesson, sentence: str, say: Say, language: str) -> str:
    """All of it, as one document."""
    tokens = lesson.tokens[:SHOWN]
    n, i = len(tokens), lesson.focus
    own = lesson.weights[lesson.head]
    seen = lesson.visible[i]
    powers = (lesson.scaled[i][seen] - lesson.scaled[i][seen].max()).exp()
    here = [j for j in range(n) if seen[j]]
    columns, limits, effects = walk.effects(lesson, say)
    heads, looks = walk.heads_table(lesson, say)
    worked = [
        [_name(lesson.tokens, j), f"{lesson.scaled[i, j]:.2f}", f"{power:.3f}", f"{own[i, j]:.3f}"]
        for j, power in zip(here, powers.tolist(), strict=False)
    ]
    taken = [[_name(lesson.tokens, j), f"{own[i, j]:.3f}", *_cut(lesson.v[j])] for j in here]
    total = [[say("values.out"), "", *_cut(lesson.outs[lesson.head, i])]]
    parts = [
        *map(_p, walk.introduction(lesson, say, SHOWN)),
        _p(say("page.hint")),
        _h(1, say("projection.title"), f"Q = X·Wq   K = X·Wk   V = X·Wv   {walk.sizes(lesson)}"),
        *map(_p, walk.projection_texts(lesson, say)),
        _table(
            ["", *(name for name in "xqkv" for _ in range(3))],
            [
                [_name(tokens, j), *(cell for m in (lesson.x, lesson.q, lesson.k, lesson.v) for cell in _cut(m[j], 3))]
                for j in range(n)
            ],
        ),
        _h(2, say("scores.title"), "Q·Kᵀ"),
        _p(walk.scores_text(lesson, say)),
        _heat(tokens, lesson.raw, say, 1),
        _h(3, say("scaling.title"), "Q·Kᵀ / √d"),
        *map(_p, walk.scaling_texts(lesson, say)),
        _heat(tokens, lesson.scaled, say, 2),
        _h(4, say("softmax.title"), "exp(s) / Σ exp(s)"),
        _p(say("softmax.text")),
        _heat(tokens, own.masked_fill(~lesson.visible, -math.inf), say, 3),
        _p(say("softmax.row", token=lesson.tokens[i])),
        _table(
            [
                "",
                say("softmax.score"),
                f"exp(s − max s), {say('softmax.sum', sum=f'{powers.sum():.2f}')}",
                say("softmax.weight"),
            ],
            worked,
        ),
        _h(5, say("values.title"), "P·V"),
        _p(say("values.text", token=lesson.tokens[i])),
        _table(["", say("softmax.weight"), *["v"] * len(_cut(lesson.v[0]))], taken + total, chosen=len(taken)),
        _h(6, say("heads.title"), walk.joined(lesson)),
        *map(_p, walk.heads_texts(lesson, say)),
        _table(heads, looks, chosen=lesson.head),
        _p(say("heads.joined", token=lesson.tokens[i])),
        _p(" ".join(_cut(lesson.y[i], 12))),
        _h(None, say("why.title"), ""),
        _p(say("why.text")),
        '<div class="maps">',
        *(
            f"<div><h3>{escape(walk.scale_name(name, say))}</h3>"
            + _heat(tokens, weights.masked_fill(~lesson.visible, -math.inf), say, 2)
            + "</div>"
            for name, weights, _ in lesson.scales
        ),
        "</div>",
        _p(say("why.means")),
        _table(["", *columns], [["", *limits], *([name, *row] for name, row in effects)]),
        *map(_p, walk.why_texts(lesson, say)),
        _p(walk.check(lesson, say)),
    ]
    title = escape(f"poise: {say('title')}")
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
        f"<blockquote>{escape(sentence)}</blockquote>\n"
        + "\n".join(parts)
        + f"\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _p(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _h(number: int | None, title: str, formula: str) -> str:
    numbered = title if number is None else f"{number}  {title}"
    return f"<h2>{escape(numbered)}" + (f" <code>{escape(formula)}</code>" if formula else "") + "</h2>"


def _name(tokens: Sequence[str], j: int) -> str:
    return f"{j + 1} {tokens[j]}"


def _cut(values: Tensor, shown: int = _SHOWN_NUMBERS) -> list[str]:
    """The first numbers of a vector; the last of them says that there are more."""
    cells = [f"{x:.2f}" for x in values[:shown].tolist()]
    return [*cells[:-1], cells[-1] + " …"] if len(values) > shown else cells


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]], chosen: int | None = None) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "\n".join(
        f'<tr{_CHOSEN if place == chosen else ""}><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for place, (first, *cells) in enumerate(rows)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


_CHOSEN = ' class="chosen"'


def _heat(tokens: Sequence[str], values: Tensor, say: Say, digits: int) -> str:
    """A table whose cells are coloured by their share of the largest absolute value; weights by themselves."""
    n = len(tokens)
    rows = values[:n, :n].tolist()
    largest = max(1.0, *(abs(x) for row in rows for x in row if x > -math.inf))
    head = "".join(f'<th scope="col">{escape(_name(tokens, j))}</th>' for j in range(n))
    body = "\n".join(
        f'<tr><th scope="row">{escape(_name(tokens, j))}</th>'
        + "".join(_cell(tokens[j], tokens[key], x, x / largest, say, digits) for key, x in enumerate(row))
        + "</tr>"
        for j, row in enumerate(rows)
    )
    corner = f"{say('looks')} {say('looked')}"
    return (
        f'<div class="scroll"><table class="heat"><caption><output></output></caption><thead><tr>'
        f'<th scope="col">{escape(corner)}</th>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _cell(query: str, key: str, x: float, share: float, say: Say, digits: int) -> str:
    hidden = x == -math.inf
    shown = say("page.hidden") if hidden else f"{x:.{digits}f}"
    told = escape(f"{query} → {key}: {shown}", quote=True)
    if hidden:
        return f'<td class="hidden" style="--p:0" aria-label="{told}">·</td>'
    classes = " ".join(["minus"] * (x < 0) + ["deep"] * (abs(share) > 0.62))
    kind = f' class="{classes}"' if classes else ""
    return f'<td{kind} style="--p:{abs(share):.3f}" aria-label="{told}">{shown}</td>'
