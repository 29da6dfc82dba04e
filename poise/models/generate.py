"""Generation: greedy, at random, or by beams; batches of different prompts; all at once or token by token.

`generate` returns what was written, `stream` yields it as it comes, `stream_text` goes from a directory and a prompt to
pieces of text. Letters: B prompts, K beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from poise.models.decoding import Decoding
from poise.models.loading import load, tokenizer
from poise.models.model import Model
from poise.models.sampling import GREEDY, Sampling
from poise.nn.cache import Cache, GrowingCache, PagedCache

Ending = Literal["token", "string", "length"]
_PAGE = 16


class Piece(NamedTuple):
    """One more token of one sequence."""

    row: int  # which prompt
    token: int
    text: str  # what it adds to the text, "" without a tokenizer; text that may yet become a stop string waits
    ended: Ending | None  # why this is the last one: a stop token, a stop string, or `new` tokens are there


@dataclass(frozen=True)
class Generated:
    """What followed a prompt."""

    ids: list[int]  # a stop token included
    text: str | None  # None without a tokenizer; a stop string, and what came with it, cut off
    ended: Ending
    score: float | None = None  # with beams: the sum of log probabilities / length ** length_penalty


@torch.no_grad()
def stream(
    model: Model,
    prompts: Any,
    *,
    new: int = 128,
    sampling: Sampling = GREEDY,
    stop_tokens: Iterable[int] | None = None,
    stop_strings: Iterable[str] = (),
    tokenizer: Any = None,
    cache: Cache | None = None,
) -> Iterator[Piece]:
    """Yields every token as it is chosen; a finished sequence leaves the batch.

    prompts: one or several: token ids (a tensor [B, N] too) or, with a `tokenizers.Tokenizer`, texts.
    new: the most tokens to write after each prompt.
    stop_tokens: end a sequence; None for what the model's configuration says (eos_token_id).
    stop_strings: likewise, wherever they end among tokens; they need a tokenizer.
    cache: an empty one; None for a GrowingCache.
    """
    task = _Task.of(model, prompts, new, stop_tokens, stop_strings, tokenizer)
    decoding = Decoding(model, GrowingCache() if cache is None else cache)
    generators = sampling.generators(len(task.prompts))
    transcripts = [Transcript(tokenizer, task.stop_strings) for _ in task.prompts]
    seen = [[] if sampling.repetition_penalty == 1.0 else task.start(model, row) for row in range(len(task.prompts))]
    active = list(range(len(task.prompts)))
    logits = decoding.begin(task.prompts)
    for count in range(1, new + 1):
        if sampling.temperature == 0 and sampling.repetition_penalty == 1.0:
            tokens: list[int] = logits.argmax(-1).tolist()
        else:
            rows = zip(logits, active, strict=True)
            tokens = [sampling.choose(row, seen[b], generators[b]) for row, b in rows]
        going: list[int] = []  # places in this batch
        for place, (b, token) in enumerate(zip(active, tokens, strict=True)):
            seen[b].append(token)
            piece, matched = transcripts[b].add(token)
            ended: Ending | None = (
                "token" if token in task.stop_tokens else "string" if matched else "length" if count == new else None
            )
            if ended is None:
                going.append(place)
            else:
                piece += transcripts[b].rest()
            yield Piece(b, token, piece, ended)
        if not going:
            return
        if len(going) < len(active):
            decoding.select(going)
            active, tokens = [active[i] for i in going], [tokens[i] for i in going]
        logits = decoding.step(tokens)


@torch.no_grad()
def generate(
    model: Model,
    prompts: Any,
    *,
    new: int = 128,
    sampling: Sampling = GREEDY,
    beams: int = 1,
    length_penalty: float = 1.0,
    stop_tokens: Iterable[int] | None = None,
    stop_strings: Iterable[str] = (),
    tokenizer: Any = None,
    cache: Cache | None = None,
) -> list[Generated]:
    """What follows each prompt. Arguments as in `stream`, and:

    beams: more than 1 keeps that many candidates and returns the likeliest finished one; greedy, no stop strings.
    length_penalty: candidates' log probabilities are divided by their length to this power.
    """
    strings = _several(stop_strings)
    if beams == 1:
        rows: dict[int, tuple[list[int], list[str], list[Ending]]] = {}
        for piece in stream(
            model,
            prompts,
            new=new,
            sampling=sampling,
            stop_tokens=stop_tokens,
            stop_strings=strings,
            tokenizer=tokenizer,
            cache=cache,
        ):
            ids, texts, endings = rows.setdefault(piece.row, ([], [], []))
            ids.append(piece.token)
            texts.append(piece.text)
            endings += [] if piece.ended is None else [piece.ended]
        return [
            Generated(ids, None if tokenizer is None else "".join(texts), endings[0])
            for _, (ids, texts, endings) in sorted(rows.items())
        ]
    if beams < 1:
        raise ValueError(f"beams must be at least 1; got {beams}")
    if sampling.temperature != 0:
        raise ValueError(f"beams are searched greedily: pass temperature 0 with beams; got {sampling.temperature}")
    if strings:
        raise ValueError("stop_strings are not looked for with beams; pass stop_tokens")
    task = _Task.of(model, prompts, new, stop_tokens, (), tokenizer)
    if cache is None:
        longest = max(map(len, task.prompts)) + new
        cache = PagedCache((-(-longest // _PAGE) + 1) * beams * len(task.prompts), _PAGE)
    found = _beam_search(Decoding(model, cache), task, beams, length_penalty, sampling)
    return [
        Generated(
            beam.ids,
            None if tokenizer is None else tokenizer.decode(beam.ids, skip_special_tokens=True),
            "token" if beam.ids[-1] in task.stop_tokens else "length",
            beam.score,
        )
        for beam in found
    ]


def stream_text(
    directory: str | Path,
    prompt: str,
    *,
    dtype: torch.dtype | None = None,
    new: int = 128,
    sampling: Sampling = GREEDY,
    stop_strings: Iterable[str] = (),
) -> Iterator[str]:
    """What the checkpoint in a directory writes after a prompt, in pieces as they come."""
    model, words = load(directory, dtype=dtype), tokenizer(directory)
    for piece in stream(model, prompt, new=new, sampling=sampling, stop_strings=stop_strings, tokenizer=words):
        if piece.text:
            yield piece.text


class Transcript:
    """The text of one sequence as its tokens come: whole characters only, watching for stop strings."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._anchor = self._read = 0  # decoding starts at the anchor; what is before `_read` is in the text
        self.text = ""
        self._shown = 0

    def add(self, token: int) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string is complete; the text then ends before it."""
        if self._tokenizer is None:
            return "", False
        self._ids.append(token)
        added = self._decoded()
        if added.endswith("\ufffd"):  # a character whose bytes are not all there
            return "", False
        return self._extend(added)

    def rest(self) -> str:
        """What was held back, at the end of the sequence."""
        if self._tokenizer is None:
            return ""
        if self._read < len(self._ids):
            self._extend(self._decoded())
        held, self._shown = self.text[self._shown :], len(self.text)
        return held

    def _decoded(self) -> str:
        # With one token before: some tokenizers drop a space at the beginning.
        before = self._tokenizer.decode(self._ids[self._anchor : self._read], skip_special_tokens=True)
        whole: str = self._tokenizer.decode(self._ids[self._anchor :], skip_special_tokens=True)
        return whole[len(before) :]

    def _extend(self, added: str) -> tuple[str, bool]:
        start = len(self.text)
        self.text += added
        self._anchor, self._read = self._read, len(self._ids)
        places = [self.text.find(stop, max(start - len(stop) + 1, 0)) for stop in self._stops]
        if any(place >= 0 for place in places):
            self.text = self.text[: min(place for place in places if place >= 0)]
            return "", True
        waiting = max((_overlap(self.text, stop) for stop in self._stops), default=0)
        piece = self.text[self._shown : len(self.text) - waiting]
        self._shown += len(piece)
        return piece, False


def _overlap(text: str, stop: str) -> int:
    """How much of the text's end may be the beginning of a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class _Task:
    """What is asked for, checked."""

    prompts: list[list[int]]
    new: int
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]

    @staticmethod
    def of(
        model: Model,
        prompts: Any,
        new: int,
        stop_tokens: Iterable[int] | None,
        stop_strings: Iterable[str],
        tokenizer: Any,
    ) -> _Task:
        strings = _several(stop_strings)
        if strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: pass tokenizer=poise.models.tokenizer(directory)")
        if any(not stop for stop in strings):
            raise ValueError("stop_strings must not hold an empty string")
        if new < 1:
            raise ValueError(f"new must be at least 1 token; got {new}")
        if stop_tokens is None:
            told = model.config.get("eos_token_id")
            stop_tokens = [] if told is None else [told] if isinstance(told, int) else told
        listed = _as_ids(prompts, tokenizer)
        if not listed or not all(listed):
            raise ValueError("prompts must hold at least one, and every prompt at least one token")
        longest, limit = max(map(len, listed), default=0), model.longest
        if limit is not None and longest + new > limit:
            raise ValueError(f"prompt and new tokens must fit the model's {limit} positions; got {longest} + {new}")
        return _Task(listed, new, frozenset(stop_tokens), strings)

    def start(self, model: Model, row: int) -> list[int]:
        """The tokens that a repetition would repeat from the start: the prompt, or the decoder's first token."""
        return (
            [model.config["decoder_start_token_id"]]
            if "decoder_start_token_id" in model.defaults
            else list(self.prompts[row])
        )


def _several(strings: Iterable[str]) -> tuple[str, ...]:
    if isinstance(strings, str):  # which is an iterable of its characters
        raise TypeError(f"stop_strings must be several strings; got one: pass [{strings!r}]")
    return tuple(strings)


def _as_ids(prompts: Any, tokenizer: Any) -> list[list[int]]:
    if isinstance(prompts, Tensor):
        if prompts.dim() not in (1, 2) or prompts.is_floating_point():
            raise ValueError(f"prompts must be ids [B, N] or [N]; got {list(prompts.shape)} of {prompts.dtype}")
        return [list(map(int, row)) for row in prompts.reshape(-1, prompts.shape[-1]).tolist()]
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        prompts = [prompts]
    if any(isinstance(prompt, str) for prompt in prompts):
        if tokenizer is None:
            raise ValueError("texts need a tokenizer: pass tokenizer=poise.models.tokenizer(directory), or token ids")
        return [list(tokenizer.encode(prompt).ids) for prompt in prompts]
    return [[int(token) for token in prompt] for prompt in prompts]


@dataclass
class _Beam:
    """A candidate: its tokens, and the sum of their log probabilities (by its length, once finished)."""

    ids: list[int]
    score: float
    row: int = 0  # its place in the batch


@dataclass
class _Search:
    """The candidates of one prompt."""

    running: list[_Beam] = field(default_factory=lambda: [_Beam([], 0.0)])
    finished: list[_Beam] = field(default_factory=list)

    def advance(self, candidates: list[_Beam], task: _Task, beams: int, length_penalty: float) -> None:
        """From the best continuations, in order, to those that go on and those that are finished."""
        self.running = []
        for rank, beam in enumerate(candidates):
            if beam.ids[-1] not in task.stop_tokens and len(beam.ids) < task.new:
                self.running.append(beam)
            elif rank < beams:  # one that ends is kept only if it is among the best, ended or not
                self.finished.append(_Beam(beam.ids, beam.score / len(beam.ids) ** length_penalty))
        self.running = self.running[:beams]
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:beams]
        if self.running and len(self.finished) == beams:
            best = self.running[0]
            if best.score / len(best.ids) ** length_penalty <= self.finished[-1].score:
                self.running = []


def _beam_search(decoding: Decoding, task: _Task, beams: int, length_penalty: float, sampling: Sampling) -> list[_Beam]:
    """The best finished candidate of each prompt."""
    searches = [_Search() for _ in task.prompts]
    for row, search in enumerate(searches):
        search.running[0].row = row
    width = max(2, 1 + len(task.stop_tokens)) * beams
    logits = decoding.begin(task.prompts)
    while True:
        scores = logits.float().log_softmax(-1)
        for b, search in enumerate(searches):
            if not search.running:
                continue
            start = task.start(decoding.model, b)
            rows = [sampling.penalised(scores[beam.row], [*start, *beam.ids]) + beam.score for beam in search.running]
            best, index = torch.cat(rows).topk(min(width, len(rows) * scores.shape[1]))
            candidates = [
                _Beam(
                    [*search.running[i // scores.shape[1]].ids, i % scores.shape[1]],
                    score,
                    search.running[i // scores.shape[1]].row,
                )
                for score, i in zip(best.tolist(), index.tolist(), strict=True)
            ]
            search.advance(candidates, task, beams, length_penalty)
        running = [beam for search in searches for beam in search.running]
        if not running:
            return [search.finished[0] for search in searches]
        decoding.select([beam.row for beam in running])
        for row, beam in enumerate(running):
            beam.row = row
        logits = decoding.step([beam.ids[-1] for beam in running])
