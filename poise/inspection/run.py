"""`poise.inspect`: a model is run over texts, and every head of it is measured, classified and mapped.

Attention is met as a watch meets it (torch_hook.py), with the queries and keys of each call, which are looked at while
it runs and kept no longer. What is measured is heads.py's business, maps are maps.py's, what is shown result.py's.

Two more runs tell what the figures mean. The probe, random tokens repeated once, is the standard test of induction. The
control, the same texts with their tokens shuffled and the probe with its second half shuffled, is what heads do
without any text to read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from poise import torch_hook
from poise.inspection import heads, maps
from poise.inspection.heads import Evidence
from poise.inspection.maps import Pooled, Scores
from poise.inspection.result import Head, Inspection, Layer, Text, head_of
from poise.inspection.source import Source, Tokens, find
from poise.op import Scored
from poise.stats import ScoreStats
from poise.summary import ScoreSummary

Layers: TypeAlias = Iterable[int] | str
Progress: TypeAlias = Callable[[float, str], object]  # the share that is done, and what is being done

EXACT = 128  # tokens up to which maps are exact
MAP_BYTES = 24 << 20  # of all maps together
_COARSEST = 12  # cells to a side: fewer show nothing
_HALF = 64  # tokens of the probe before they repeat
_CONTROL = 2048  # tokens of the texts that are shuffled
_ENOUGH = 64  # rows that texts must have to be judged by


def inspect(
    model: str | Path | nn.Module,
    texts: str | Iterable[str | Sequence[int]] = (),
    *,
    tokenizer: Any = None,
    layers: Layers | None = None,
    maps: bool = True,
    control: bool = True,
    progress: Progress | None = None,
) -> Inspection:
    """Runs a model over texts and tells what each of its attention heads does.

    model: a directory with a Hugging Face checkpoint, a GGUF file, a name on the hub, "smollm2" or "minilm" (after
        `make weights`), or any torch module of text whose attention `poise.watch` can see. Of an encoder-decoder the
        encoder is run.
    texts: one text or many, each read on its own; with a module and no tokenizer, sequences of token ids.
    tokenizer: where the model is a module: transformers', or one of the tokenizers package (`poise.models.tokenizer`).
    layers: which attentions, by number in the order in which they run, or as "0,4-7"; None for all.
    maps: whether to keep attention maps for the page: exact up to 128 tokens, else pooled, as many as fit 24 MB.
    control: whether to run the shuffled texts as well.
    progress: called with the share that is done and with what is being done.

    Ctrl-C ends it early, with the texts that are done (`interrupted`); before any is, it is raised.

    >>> found = poise.inspect("smollm2", open("long.txt").read())
    >>> print(found)  # the notable heads, with evidence
    >>> found.html("report.html"), found.json("report.json")
    """
    source = find(model, tokenizer)
    several = [texts] if isinstance(texts, str) else list(texts)
    for text in several:
        if not isinstance(text, str | Sequence):
            raise TypeError(
                f"texts must be a text, or several, or several sequences of token ids; got {text!r} among them"
            )
    tokens = [source.read(text) for text in several]
    for number, read in enumerate(tokens):
        if not read.ids:
            raise ValueError(f"texts must have at least one token each; text {number} is {read.text!r}")
    job = _Job(source, _chosen(layers), maps, progress, sum(len(read.ids) for read in tokens))
    with _at_rest(source.model), torch.no_grad():
        return job.run(tokens, control)


@dataclass
class _Found:
    """What one run, or several, tell of a layer."""

    evidence: Evidence
    summary: ScoreSummary


@dataclass
class _Run:
    """One run of the model, as it is met."""

    keep: Callable[[Scores, Tensor], Tensor | Pooled] | None  # makes a map, of the scores and the sink of each head
    repeated: tuple[int, int] | None = None  # start and length, of the probe
    found: dict[str, _Found] = field(default_factory=dict)
    repetition: dict[str, Evidence] = field(default_factory=dict)
    maps: dict[str, Tensor | Pooled] = field(default_factory=dict)
    sinks: dict[str, Tensor] = field(default_factory=dict)


class _Job:
    """A listener of torch_hook, and what it has heard."""

    def __init__(
        self, source: Source, layers: Callable[[int], bool], keep_maps: bool, progress: Progress | None, tokens: int
    ) -> None:
        self._source, self._chosen, self._keep_maps, self._progress = source, layers, keep_maps, progress
        self._names = {id(module): name or type(module).__name__ for name, module in source.model.named_modules()}
        self._numbers: dict[str, int] = {}  # of modules that attend, in the order in which they run
        self._missed: dict[str, str] = {}
        self._now = _Run(None)
        self._work, self._done, self._doing, self._share = tokens, 0.0, "", 0.0

    # What torch_hook asks for.

    def name_of(self, module: nn.Module) -> str | None:
        return self._names.get(id(module))

    def wants(self, name: str) -> bool:
        return self._chosen(self._numbers.setdefault(name, len(self._numbers)))

    def miss(self, name: str, why: str) -> None:
        self._missed.setdefault(name, why)

    def receive(self, name: str, stats: ScoreStats, scored: Scored) -> None:
        run, call = self._now, 2
        if stats.packed.dim() == 4 and stats.packed.shape[1] != 1:
            self.miss(name, "it attends in a batch of pieces, where one text was given")
            return
        path = name
        while path in run.found:  # a module that is run several times is several layers
            path, call = f"{name} (call {call})", call + 1
        scores = Scores(scored.q, scored.k, stats.lse, scored.options)
        evidence, sink = heads.of_text(scores, stats)
        run.found[path] = _Found(evidence, stats.reduce("head"))
        run.sinks[path] = sink
        if run.repeated is not None:
            run.repetition[path] = heads.of_repetition(scores, *run.repeated)
        if run.keep is not None:
            run.maps[path] = run.keep(scores, sink)
        if self._progress is not None and self._numbers:
            part = min(1.0, len(run.found) / max(sum(map(self._chosen, self._numbers.values())), 1))
            self._progress(min(1.0, (self._done + part * self._share) / max(self._work, 1)), self._doing)

    # The runs.

    def run(self, texts: Sequence[Tokens], control: bool) -> Inspection:
        probe, repeated, shuffled = self._probe()
        some = _at_most(texts, _CONTROL) if control else []
        # Counted in tokens, though one of a long text takes longer than one of a short text.
        self._work += len(probe) * (1 + control) + sum(len(read.ids) for read in some)
        probed = self._one(probe, "probe", None, repeated)
        if not probed.found:
            raise ValueError(f"model: none of its attention can be seen{self._reasons()}")
        total: dict[str, _Found] = {}
        kept: list[Text] = []
        interrupted, read_texts, spent, controlled = False, 0, 0, None
        try:
            for number, read in enumerate(texts):
                make, size = self._map_for(read, probed, MAP_BYTES - spent)
                run = self._one(read.ids, f"text {number + 1} of {len(texts)}", make, None)
                total = _joined(total, run.found)
                read_texts += 1
                if make is not None:
                    spent += size
                    kept.append(Text(number, read.text, read.shown, run.maps, run.sinks, read.cut))
            if control:
                controlled = self._control(some, shuffled, repeated)
        except KeyboardInterrupt:
            if texts and not read_texts:
                raise
            interrupted = True
        rows = max((found.evidence.rows for found in total.values()), default=0)
        return self._result(total or probed.found, probed, rows, kept, texts[:read_texts], controlled, interrupted)

    def _one(
        self,
        ids: Sequence[int],
        doing: str,
        keep: Callable[[Scores, Tensor], Tensor | Pooled] | None,
        repeated: tuple[int, int] | None,
    ) -> _Run:
        self._now, self._doing, self._share = _Run(keep, repeated), doing, float(len(ids))
        torch_hook.listen(self)
        try:
            self._source.run(ids)
        finally:
            torch_hook.stop_listening(self)
        self._done += self._share
        return self._now

    def _probe(self) -> tuple[list[int], tuple[int, int], list[int]]:
        """Random tokens twice; where; and the same with the second half in another order."""
        before, after = self._source.around()
        half = min(_HALF, (min(self._source.longest, 1 << 20) - len(before) - len(after)) // 2)
        special = set(getattr(self._source.tokenizer, "all_special_ids", ()) or ())
        order = torch.randperm(self._source.vocabulary, generator=torch.Generator().manual_seed(0)).tolist()
        chosen = [x for x in order if x not in special][:half]
        other = random.Random(0).sample(chosen, len(chosen))
        return [*before, *chosen, *chosen, *after], (len(before), len(chosen)), [*before, *chosen, *other, *after]

    def _control(
        self, texts: Sequence[Tokens], shuffled: list[int], repeated: tuple[int, int]
    ) -> tuple[dict[str, _Found], _Run]:
        probed = self._one(shuffled, "control", None, repeated)
        total: dict[str, _Found] = {}
        for number, read in enumerate(texts):
            ids = list(read.ids)
            ids[read.own] = random.Random(number).sample(ids[read.own], len(ids[read.own]))
            total = _joined(total, self._one(ids, "control", None, None).found)
        return total, probed

    def _map_for(
        self, read: Tokens, probed: _Run, left: int
    ) -> tuple[Callable[[Scores, Tensor], Tensor | Pooled] | None, int]:
        """What makes this text's maps, and how many bytes they take; None if they do not fit."""
        if not self._keep_maps:
            return None, 0
        count = sum(x.numel() for x in probed.sinks.values())  # heads
        n = len(read.ids)
        if n <= EXACT and (size := 4 * count * n * n) <= left:
            return lambda scores, _: maps.exact(scores), size
        cells = min(maps.CELLS, n, int((min(left, MAP_BYTES // 2) / (maps.CELL_BYTES * count)) ** 0.5))
        if cells < min(_COARSEST, n):
            return None, 0
        return lambda scores, sink: maps.pooled(scores, sink, cells), maps.CELL_BYTES * count * cells * cells

    def _result(
        self,
        found: dict[str, _Found],
        probed: _Run,
        rows: int,
        kept: list[Text],
        texts: Sequence[Tokens],
        controlled: tuple[dict[str, _Found], _Run] | None,
        interrupted: bool,
    ) -> Inspection:
        judged = rows >= _ENOUGH
        once = found.keys() <= self._numbers.keys()  # no module is run twice
        layers = [
            Layer(self._numbers[path] if once else place, path, each.summary)
            for place, (path, each) in enumerate(found.items())
        ]
        classified = [
            head
            for layer in layers
            for head in _heads(layer, found if judged else probed.found, probed.repetition[layer.path])
        ]
        shuffled: dict[str, int] | None = None
        if controlled is not None:
            positional = controlled[0] if judged else controlled[1].found
            others = [
                head
                for layer in layers
                if layer.path in positional
                for head in _heads(layer, positional, controlled[1].repetition[layer.path])
            ]
            shuffled = {name: sum(name in head.classes for head in others) for name in heads.CLASSES}
        name = self._source.name + (f" ({self._source.part})" if self._source.part else "")
        return Inspection(
            model=name,
            layers=layers,
            heads=classified,
            texts=kept,
            read=len(texts),
            tokens=sum(len(read.ids) for read in texts),
            cut=sum(read.cut for read in texts),
            rows=rows if judged else 0,
            control=shuffled,
            missed=dict(self._missed),
            interrupted=interrupted,
        )

    def _reasons(self) -> str:
        if not self._missed and self._numbers:
            return f": layers must be among its attentions, 0 to {len(self._numbers) - 1}"
        return "".join(f"; {name}: {why}" for name, why in list(self._missed.items())[:3])


def _heads(layer: Layer, found: dict[str, _Found], repetition: Evidence) -> Iterator[Head]:
    means = {**found[layer.path].evidence.means(), **repetition.means()}
    for head in range(layer.summary.rows.numel()):
        yield head_of(layer, head, {name: float(value[head]) for name, value in means.items()})


def _joined(total: dict[str, _Found], more: dict[str, _Found]) -> dict[str, _Found]:
    if not total:
        return dict(more)
    joined = dict(total)
    for path, each in more.items():
        mine = total.get(path)
        joined[path] = each if mine is None else _Found(mine.evidence + each.evidence, mine.summary.merge(each.summary))
    return joined


def _at_most(texts: Sequence[Tokens], tokens: int) -> list[Tokens]:
    """The first of them, the last one cut, up to so many tokens."""
    some: list[Tokens] = []
    for read in texts:
        if tokens <= 1:
            break
        end = min(len(read.ids), tokens)
        some.append(Tokens(read.ids[:end], [], "", slice(read.own.start, min(read.own.stop, end))))
        tokens -= end
    return some


def _chosen(layers: Layers | None) -> Callable[[int], bool]:
    if layers is None:
        return lambda number: True
    numbers: set[int] = set()
    for part in layers.split(",") if isinstance(layers, str) else layers:
        first, dash, last = str(part).strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"layers must be numbers and ranges of them, such as 0,4-7; got {layers!r}")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return numbers.__contains__


@contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """In eval mode, and afterwards each module as it was."""
    was = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was:
            module.training = training
