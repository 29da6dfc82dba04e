"""What the lab's small models learn: bytes of the running Python's standard library, or what another `Task` draws.

Letters: B batch, N positions.
"""

from __future__ import annotations

import sysconfig
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BYTES = 256
IGNORED = -100  # a target that counts nowhere
HELD_OUT = 20  # one file of so many is kept from training


class Batch(NamedTuple):
    ids: Tensor  # int64 [B, N]
    targets: Tensor  # int64 [B, N], or [B, N, questions]; IGNORED where nothing is asked


class Task(Protocol):
    """What is learned. `ceiling` is the loss of one who knows the frequencies of the answers and no more."""

    vocabulary: int
    ceiling: float

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Batch:
        """A batch to learn from."""

    def examine(self, batch: int, length: int, generator: torch.Generator) -> Batch:
        """A batch that was never learned from."""


class Text:
    """The next byte of Python's standard library, file by file, without its tests."""

    vocabulary = BYTES

    def __init__(self) -> None:
        self.learnt, self.held_out = _library()
        self.ceiling = entropy(torch.bincount(self.learnt.long(), minlength=BYTES))

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Batch:
        return _windows(self.learnt, batch, length, generator)

    def examine(self, batch: int, length: int, generator: torch.Generator) -> Batch:
        return _windows(self.held_out, batch, length, generator)

    @cached_property
    def bigram(self) -> float:
        """Loss on the held-out bytes of one who knows how often each byte follows each other one, counting from 1."""
        learnt, held_out = (
            torch.bincount(pairs(bytes_), minlength=BYTES**2).view(BYTES, BYTES)
            for bytes_ in (self.learnt, self.held_out)
        )
        share = (learnt + 1.0) / (learnt + 1.0).sum(1, keepdim=True)
        return float(-(held_out * share.log()).sum() / held_out.sum())


def pairs(source: Tensor) -> Tensor:
    """A number for each byte and the one after it."""
    return source[:-1].long() * BYTES + source[1:].long()


@cache
def text() -> Text:
    return Text()


@cache
def _library() -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and bytes held out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    if len(files) < 2 * HELD_OUT:
        raise FileNotFoundError(f"there are no source files of the standard library in {root}: nothing to train on")
    parts = ([path for i, path in enumerate(files) if (i % HELD_OUT == 0) == held_out] for held_out in (False, True))
    learnt, held_out = (bytearray(b"".join(path.read_bytes() for path in part)) for part in parts)
    return torch.frombuffer(learnt, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def _windows(source: Tensor, batch: int, length: int, generator: torch.Generator) -> Batch:
    """Random stretches, and the byte that follows each of their bytes."""
    starts = torch.randint(len(source) - length, (batch, 1), generator=generator)
    taken = source[starts + torch.arange(length + 1)].long()
    return Batch(taken[:, :-1], taken[:, 1:])


def entropy(counts: Tensor) -> float:
    """Of the frequencies, in nats."""
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log()).sum())
