"""A validated call as plain data and back: what a compiler's graph can hold of it.

A graph holds tensors, integers that may be symbolic (lengths, offsets) and constants, but no mask objects. `written`
takes a problem apart into those, `read` puts it together again inside the operator (traced.py), where sizes are known.
The text says what the tensors and integers are, in prefix order: "And:2 Window:nn Keep:t" is a window & a bool tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from poise.dropout import as_number
from poise.kernels.tiles import kinds, operands
from poise.kvview import KVView
from poise.mask import And, Blocks, Dilated, Documents, GlobalTokens, Keep, Lengths, Lowered, Mask, Not, Or, Window
from poise.problem import Problem
from poise.score import Alibi, Dense, Relative

_LEAVES: dict[str, tuple[type[Mask], tuple[str, ...]]] = {
    "Window": (Window, ("left", "right")),
    "Lengths": (Lengths, ("end", "start")),
    "Documents": (Documents, ("ids",)),
    "GlobalTokens": (GlobalTokens, ("idx",)),
    "Dilated": (Dilated, ("w", "d")),
    "Blocks": (Blocks, ("map", "size")),
    "Keep": (Keep, ("tensor",)),
}
_JOINS: dict[str, type[And] | type[Or]] = {"And": And, "Or": Or}
_TERMS: dict[str, type[Dense] | type[Alibi] | type[Relative]] = {"tensor": Dense, "slopes": Alibi, "table": Relative}


class Program(NamedTuple):
    """One problem, in pieces: the first arguments of the operators in traced.py."""

    operands: list[Tensor]  # whatever a gradient may flow to: q, k, v, then as in `tiles.operands`
    tensors: list[Tensor]  # the others: of the mask, the offset, the seed, the cache
    numbers: list[int]
    scale: float
    softcap: float
    dropout: float
    text: str


def written(problem: Problem) -> Program:
    """Takes a problem apart."""
    tensors: list[Tensor] = []
    numbers: list[int] = []

    def argument(value: int | Tensor | None) -> str:
        if value is None:
            return "-"
        if isinstance(value, Tensor):
            tensors.append(value)
            return "t"
        numbers.append(value)
        return "n"

    def mask(each: Mask) -> str:
        if isinstance(each, Lowered):
            each.check_offset(problem.offset)
            return mask(each.mask)
        if isinstance(each, Not):
            return f"Not {mask(each.mask)}"
        if isinstance(each, And | Or):
            return " ".join([f"{type(each).__name__}:{len(each.masks)}", *[mask(part) for part in each.masks]])
        name = type(each).__name__
        return name + ":" + "".join([argument(getattr(each, field)) for field in _LEAVES[name][1]])

    words = [
        "offset:" + argument(problem.offset),
        "mask " + mask(problem.mask) if problem.mask is not None else "everything",
        "seed:" + argument(problem.seed) if isinstance(problem.seed, Tensor) else "undropped",
        "view:" + "".join([argument(x) for x in _fields(problem.view)]) if problem.view is not None else "direct",
        ",".join(kinds(problem)),
    ]
    return Program(
        operands(problem),
        tensors,
        [*numbers, *problem.sink_keys],
        1.0 if isinstance(problem.scale, Tensor) else problem.scale,
        problem.softcap or 0.0,
        problem.dropout,
        " ".join(words),
    )


def constants(problem: Problem) -> list[Tensor]:
    """Tensors that a backward pass reads again but passes no gradient to: saved through autograd, which then notices
    when they were changed in place."""
    if (problem.mask is None or problem.mask.key is not None) and not isinstance(problem.offset, Tensor):
        return []
    return written(problem).tensors


def read(program: Program) -> Problem:
    """Puts a problem together; only here a seed becomes a number."""
    words, tensors, numbers = iter(program.text.split()), iter(program.tensors), iter(program.numbers)

    def arguments(word: str) -> list[Any]:
        forms = word.partition(":")[2]
        return [None if form == "-" else next(tensors if form == "t" else numbers) for form in forms]

    def mask(word: str) -> Mask:
        if word == "Not":
            return Not(mask(next(words)))
        name, _, forms = word.partition(":")
        if name in _JOINS:
            return _JOINS[name](tuple([mask(next(words)) for _ in range(int(forms))]))
        return _LEAVES[name][0](*arguments(word))

    (offset,) = arguments(next(words))
    visible = mask(next(words)) if next(words) == "mask" else None
    seeds, view = arguments(next(words)), arguments(next(words))
    q, k, v, *rest = program.operands
    kinds_of_rest = next(words).split(",")[3:]
    named = dict(zip(kinds_of_rest, rest, strict=True))
    return Problem(
        q=q,
        k=k,
        v=v,
        mask=visible,
        bias=tuple(_TERMS[kind](tensor) for kind, tensor in zip(kinds_of_rest, rest, strict=True) if kind in _TERMS),
        scale=named.get("scale", program.scale),
        softcap=program.softcap or None,
        sink=named.get("sink"),
        dropout=program.dropout,
        seed=as_number(seeds[0]) if seeds else 0,
        offset=offset,
        sink_keys=tuple(numbers),
        view=KVView(k, v, *view) if view else None,
    )


def _fields(view: KVView) -> tuple[int | Tensor | None, ...]:
    """What a view has beside k and v, in the order of its fields."""
    return view.lengths, view.keys, int(view.even), view.pages, view.k_scale, view.v_scale
