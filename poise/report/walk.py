"""A walk through the six steps of attention, and why √d, in a terminal."""

from __future__ import annotations

import math

from torch import Tensor

from poise.report.lesson import Lesson
from poise.report.terminal import FROM, LABEL, SHADES, WIDE, Terminal, fit, label, numbers
from poise.report.texts import Say

SHOWN = 16  # tokens: more would not fit a terminal


def walk(lesson: Lesson, sentence: str, say: Say, terminal: Terminal) -> None:
    """Prints all of it."""
    terminal.print(f"poise: {say('title')}", "1")
    terminal.print(f"\n   {sentence}\n")
    for text in introduction(lesson, say, SHOWN):
        terminal.say(text)
    _projection(lesson, say, terminal)
    _scores(lesson, say, terminal)
    _softmax(lesson, say, terminal)
    _values(lesson, say, terminal)
    _heads(lesson, say, terminal)
    _why(lesson, say, terminal)
    terminal.say(check(lesson, say))


def introduction(lesson: Lesson, say: Say, shown: int) -> list[str]:
    """Where the numbers come from, who sees whom, and how much of it is shown."""
    heads = len(lesson.weights)
    if lesson.model is None:
        texts = [say("seeded", heads=heads)]
    else:
        last = {"last_layer": lesson.layers - 1, "last_head": heads - 1}
        texts = [say("model", model=lesson.model, layer=lesson.layer, head=lesson.head, **last)]
    texts.append(say("causal" if lesson.causal else "bidirectional"))
    if len(lesson.tokens) > shown:
        texts.append(say("shown", n=len(lesson.tokens), shown=shown))
    return texts


def projection_texts(lesson: Lesson, say: Say) -> list[str]:
    texts = [say("projection.text", width=lesson.x.shape[-1], dim=lesson.q.shape[-1])]
    return [*texts, say("projection.rotary")] if lesson.rotary else texts


def scores_text(lesson: Lesson, say: Say) -> str:
    dim = lesson.q.shape[-1]
    return say("scores.text", dim=dim, root=root(dim), size=f"{typical(lesson.raw):.1f}")


def scaling_texts(lesson: Lesson, say: Say) -> list[str]:
    size = f"{typical(lesson.scaled):.2f}"
    text = say("scaling.none", size=size) if lesson.scale == 1 else say("scaling.text", scale=scale(lesson), size=size)
    return [text, say("scaling.bias")] if lesson.biased else [text]


def why_texts(lesson: Lesson, say: Say) -> list[str]:
    if len(lesson.tokens) == 1:
        return [say("why.single")]
    dim = lesson.q.shape[-1]
    flat = say("why.flat", dim=dim, root=root(dim))
    return [say("why.gain"), say("why.unscaled"), say("why.root"), flat]


def effects(lesson: Lesson, say: Say) -> tuple[list[str], list[str], list[tuple[str, list[str]]]]:
    """The table of scales: names of the columns, what their values could be at most, and a row per scale."""
    names = [say(f"stat.{key}") for key in ("std", "top", "entropy", "keys", "gain", "least")]
    count = lesson.visible.sum(-1).double()
    most = (1.0, float(count.log().mean()), float(count.mean()), float((1 - 1 / count).mean()))
    limits = ["", *(say("limit.of", limit=f"{limit:.2f}".removesuffix(".00")) for limit in most), say("limit.row")]
    rows = []
    for name, _, stats in lesson.scales:
        shown = (stats.std, stats.max_prob, stats.entropy, stats.effective_keys, stats.responsiveness)
        means = [f"{statistic[0, lesson.head].mean():.2f}" for statistic in shown]
        choosing = count >= count.max().clamp(max=2)  # a row that sees one key has nothing to choose
        gains = stats.responsiveness[0, lesson.head][choosing]
        rows.append((scale_name(name, say), [*means, f"{gains.min():.4f}"]))
    return names, limits, rows


def scale_name(name: str, say: Say) -> str:
    return say("stat.unscaled") if name == "unscaled" else name


def heads_table(lesson: Lesson, say: Say) -> tuple[list[str], list[list[str]]]:
    """Where the token in focus looks in every head: names of the columns, and a row per head."""
    i, stats = lesson.focus, lesson.stats
    names = [say(key) for key in ("heads.head", "stat.entropy", "stat.top", "stat.keys", "heads.most")]
    rows = []
    for head, weights in enumerate(lesson.weights):
        found = (stats.entropy, stats.max_prob, stats.effective_keys)
        most = int(weights[i].argmax())
        values = [f"{statistic[0, head, i]:.2f}" for statistic in found]
        rows.append([str(head), *values, f"{most + 1} {lesson.tokens[most]}"])
    return names, rows


def heads_texts(lesson: Lesson, say: Say) -> list[str]:
    heads = len(lesson.weights)
    shared = [say("heads.shared", groups=lesson.groups)] if lesson.groups < heads else []
    return [*shared, say("heads.text", heads=heads, token=lesson.tokens[lesson.focus])]


def check(lesson: Lesson, say: Say) -> str:
    return say("check", impl=lesson.impl, difference=f"{lesson.difference:.1e}")


def scale(lesson: Lesson) -> str:
    dim = lesson.q.shape[-1]
    return f"1/√{dim} = {lesson.scale:.3g}" if math.isclose(lesson.scale, dim**-0.5) else f"{lesson.scale:.3g}"


def typical(scores: Tensor) -> float:
    """Root mean square of what is visible."""
    return float(scores[scores > -math.inf].square().mean().sqrt())


def root(dim: int) -> str:
    return f"{math.sqrt(dim):.1f}".removesuffix(".0")


def joined(lesson: Lesson) -> str:
    """The formula of the last step."""
    return f"[h0; …; h{len(lesson.weights) - 1}]·Wo"


def sizes(lesson: Lesson) -> str:
    return f"[{len(lesson.tokens)} × {lesson.q.shape[-1]}]"


def _projection(lesson: Lesson, say: Say, terminal: Terminal) -> None:
    title = f"1  {say('projection.title')}   Q = X·Wq, K = X·Wk, V = X·Wv   {sizes(lesson)}"
    terminal.step(title, *projection_texts(lesson, say))
    heads = "".join(fit(f"  {name}", size) for name, size in (("x", 22), ("q", 22), ("k", 22), ("v", 20)))
    terminal.print(" " * LABEL + heads.rstrip(), "2")
    for j in range(min(len(lesson.tokens), SHOWN)):
        rows = (numbers(m[j], 3) for m in (lesson.x, lesson.q, lesson.k, lesson.v))
        terminal.print(label(lesson.tokens, j) + "".join(fit(row, 22) for row in rows).rstrip())


def _scores(lesson: Lesson, say: Say, terminal: Terminal) -> None:
    tokens, corner = lesson.tokens[:SHOWN], (say("looks"), say("looked"))
    terminal.step(f"2  {say('scores.title')}   Q·Kᵀ", scores_text(lesson, say))
    terminal.matrix(tokens, lesson.raw[:SHOWN, :SHOWN], 1, corner, shaded=False)
    terminal.step(f"3  {say('scaling.title')}   Q·Kᵀ / √d", *scaling_texts(lesson, say))
    terminal.matrix(tokens, lesson.scaled[:SHOWN, :SHOWN], 2, corner, shaded=False)


def _softmax(lesson: Lesson, say: Say, terminal: Terminal) -> None:
    tokens, i = lesson.tokens[:SHOWN], lesson.focus
    shades = "   ".join(f"{shade} ≥ {100 * p:.0f} %" for shade, p in zip(SHADES[1:], FROM, strict=True))
    texts = [say("softmax.text"), shades] + ([] if len(tokens) <= WIDE else [say("softmax.percent")])
    terminal.step(f"4  {say('softmax.title')}   exp(s) / Σ exp(s)", *texts)
    weights = lesson.weights[lesson.head].masked_fill(~lesson.visible, -math.inf)
    terminal.matrix(tokens, weights[:SHOWN, :SHOWN], 2, (say("looks"), say("looked")), shaded=True)
    seen = lesson.scaled[i][lesson.visible[i]]
    powers = (seen - seen.max()).exp()
    terminal.print()
    terminal.say(say("softmax.row", token=lesson.tokens[i]))
    rows = (
        (say("softmax.score"), seen, ""),
        ("exp(s − max s)", powers, say("softmax.sum", sum=f"{powers.sum():.2f}")),
        (say("softmax.weight"), lesson.weights[lesson.head, i][lesson.visible[i]], ""),
    )
    for name, values, end in rows:
        terminal.print("   " + fit(name, 16) + numbers(values, 10) + (f"   {end}" if end else ""))


def _values(lesson: Lesson, say: Say, terminal: Terminal) -> None:
    i = lesson.focus
    weights, out = lesson.weights[lesson.head, i], lesson.outs[lesson.head, i]
    terminal.step(f"5  {say('values.title')}   P·V", say("values.text", token=lesson.tokens[i]))
    for j in range(min(len(lesson.tokens), SHOWN)):
        if lesson.visible[i, j]:
            terminal.print(f"{weights[j]:9.2f} × {label(lesson.tokens, j)}{numbers(lesson.v[j], 8)}")
    if len(lesson.tokens) > SHOWN:
        terminal.print(" " * 8 + "…")
    terminal.print(fit(say("values.out"), 9, right=True) + f"   {label(lesson.tokens, i)}{numbers(out, 8)}", "1")


def _heads(lesson: Lesson, say: Say, terminal: Terminal) -> None:
    token = lesson.tokens[lesson.focus]
    terminal.step(f"6  {say('heads.title')}   {joined(lesson)}", *heads_texts(lesson, say))
    names, rows = heads_table(lesson, say)
    chosen = {lesson.head: "36"}
    for cells, code in [(names, "1"), *((row, chosen.get(head, "")) for head, row in enumerate(rows))]:
        line = "   " + fit(cells[0], 7) + "".join(fit(cell, 16, right=True) for cell in cells[1:4]) + "   " + cells[4]
        terminal.print(line, code)
    terminal.print()
    terminal.say(say("heads.joined", token=token))
    terminal.print("   " + numbers(lesson.y[lesson.focus], 12))


def _why(lesson: Lesson, say: Say, terminal: Terminal) -> None:
    terminal.step(say("why.title"), say("why.text"))
    names = {scale_name(name, say): weights[:SHOWN, :SHOWN] for name, weights, _ in lesson.scales}
    terminal.maps(lesson.tokens[:SHOWN], names)
    terminal.say(say("why.means"), "2")
    columns, limits, rows = effects(lesson, say)
    for first, cells, code in [("", columns, "1"), ("", limits, "2"), *((name, row, "") for name, row in rows)]:
        terminal.print(fit(first, 10) + terminal.paint("".join(fit(cell, 15, right=True) for cell in cells), code))
    terminal.print()
    for text in why_texts(lesson, say):
        terminal.say(text, "2")
    terminal.print()
