"""The table of named calls: sizes, masks, biases, scales, sinks and offsets. The awkward ones are in edge_cases.py,
those of generation in decode_cases.py.

`CASES` maps a name to a function that makes the arguments of one `attention` call from seeded random inputs of a dtype.
No expected answers here: those are computed (see budget.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from poise.mask import blocks, causal, dilated, documents, global_tokens, keep, lengths, prefix, window
from poise.score import Dense, alibi, alibi_slopes, relative

Arguments: TypeAlias = dict[str, Any]


class Inputs:
    """Seeded random tensors of one dtype; the values are the same for every dtype up to rounding."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    @property
    def largest(self) -> float:
        """A magnitude at the end of the dtype's range, but no more than float32's: half a step below 3.4e38."""
        return min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def bools(self, *shape: int, p: float = 0.5) -> Tensor:
        """True with probability p."""
        return torch.rand(shape, generator=self.generator) < p

    def qkv(
        self, n: int = 33, m: int = 65, d: int = 16, dv: int | None = None, b: int = 2, h: int = 2, g: int | None = None
    ) -> Arguments:
        """q [b, h, n, d], k [b, g, m, d], v [b, g, m, dv]."""
        g, dv = g or h, dv or d
        return {"q": self.normal(b, h, n, d), "k": self.normal(b, g, m, d), "v": self.normal(b, g, m, dv)}


Build: TypeAlias = Callable[[Inputs], Arguments]
CASES: dict[str, Build] = {}


def arguments(name: str, dtype: torch.dtype) -> Arguments:
    """The arguments of one case, for `attention(**arguments)`; `observe` takes sink_keys as well."""
    return CASES[name](Inputs(name, dtype))


def add(name: str, extra: Build | None = None, /, *, sizes: Arguments | None = None, **fixed: Any) -> None:
    """A case of random q, k, v with `sizes`, plus what `extra` makes, plus fixed arguments."""

    def build(make: Inputs) -> Arguments:
        return {**make.qkv(**(sizes or {})), **(extra(make) if extra else {}), **fixed}

    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    CASES[name] = build


def _add_sizes() -> None:
    pairs = [(0, 5), (5, 0), (1, 1), (1, 257), (257, 1), (15, 16), (16, 15), (17, 31), (31, 17), (33, 63), (63, 33)]
    pairs += [(64, 64), (65, 127), (127, 65), (129, 255), (255, 129), (257, 257), (64, 1), (1, 64)]
    for n, m in pairs:
        add(f"size-{n}x{m}", sizes={"n": n, "m": m, "b": 1})
        add(f"size-causal-{n}x{m}", sizes={"n": n, "m": m, "b": 1}, mask=causal(), q_offset="end")
    for d in (1, 3, 7, 8, 33, 40, 64, 80, 96, 100, 128, 255, 256, 511, 512):
        add(f"head-dim-{d}", sizes={"d": d, "b": 1})
    for d, dv in ((64, 32), (8, 40), (3, 128), (128, 3), (192, 128), (16, 1)):
        add(f"head-dims-{d}-{dv}", sizes={"d": d, "dv": dv, "b": 1}, mask=causal(), q_offset="end")
    for h, g in ((4, 1), (6, 2), (8, 4)):
        add(f"grouped-{h}-over-{g}", sizes={"h": h, "g": g}, mask=causal(), q_offset="end")
    add("one-head-many-keys", sizes={"n": 3, "m": 2500, "b": 1, "h": 1})
    add("one-query-many-keys", sizes={"n": 1, "m": 3001, "d": 64, "b": 1, "h": 4, "g": 1})
    add("many-small", sizes={"n": 9, "m": 9, "b": 16, "h": 4})
    add("no-batch", sizes={"b": 0})


def _add_masks() -> None:
    ids = torch.tensor([[0] * 20 + [1] * 1 + [2] * 79, [3] * 70 + [1] * 30])
    mixed = torch.arange(100)[None] * 7 % 5 + torch.tensor([[0], [1]])
    idx = torch.tensor([[0, 17, 64, -1], [5, -1, -1, -1]])
    table = torch.rand(2, 2, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    ends, starts = torch.tensor([100, 37]), torch.tensor([3, 37])
    longformer = window(6, 6) | global_tokens([0, 50])
    masks = {
        "causal": causal(),
        "window-0": window(0),
        "window-left-5": window(5),
        "window-both": window(9, 4),
        "window-wide": window(1000, 1000),
        "window-left-unbounded": window(None, 3),
        "window-right-unbounded": window(3, None),
        "prefix": prefix(13),
        "prefix-zero": prefix(0),
        "causal-or-prefix": causal() | prefix(40),
        "documents": documents(ids),
        "documents-unsorted": documents(mixed),
        "documents-cu-seqlens": documents(cu_seqlens=[0, 1, 33, 64, 64, 100]),
        "documents-and-causal": documents(ids) & causal(),
        "lengths": lengths(ends),
        "lengths-with-start": lengths(ends, starts),
        "lengths-zero": lengths(torch.tensor([0, 65])),
        "global-tokens": global_tokens(idx),
        "longformer": longformer,
        "longformer-causal": longformer & causal(),
        "dilated": dilated(4, 3),
        "dilated-and-causal": dilated(9, 7) & causal(),
        "blocks": blocks(table[0, 0], 16),
        "blocks-per-head": blocks(table[0], 16),
        "blocks-odd-size": blocks(table, 15),
        "bigbird": blocks(table[0], 16) | window(16, 16) | global_tokens([0, 1]),
        "not-causal": ~causal(),
        "not-window": ~window(20, 20),
        "not-documents-and-lengths": ~documents(ids) & lengths(ends),
        "everything": (causal() | prefix(9)) & (documents(ids) | global_tokens([3])) & lengths(ends) & ~dilated(2, 9),
        "contradiction": causal() & ~causal(),
    }
    for name, mask in masks.items():
        add(f"mask-{name}", sizes={"n": 100, "m": 100}, mask=mask)
    add("mask-tensor", lambda make: {"mask": make.bools(33, 65)})
    add("mask-tensor-per-head", lambda make: {"mask": make.bools(2, 33, 65)})
    add("mask-tensor-per-batch", lambda make: {"mask": make.bools(2, 1, 33, 65)})
    add("mask-tensor-full", lambda make: {"mask": make.bools(2, 2, 33, 65)})
    add("mask-tensor-of-keys", lambda make: {"mask": make.bools(2, 1, 1, 65)})
    add("mask-tensor-of-rows", lambda make: {"mask": make.bools(2, 1, 33, 1)})
    add(
        "mask-tensor-strided",
        lambda make: {
            "mask": make.bools(2, 65, 2, 33).permute(0, 2, 3, 1)[..., ::2, :].expand(2, 2, 17, 65),
            "q": make.normal(2, 2, 17, 16),
        },
    )
    add("mask-tensor-sparse", lambda make: {"mask": make.bools(2, 1, 33, 65, p=0.02)})
    add("mask-tensor-and-causal", lambda make: {"mask": keep(make.bools(33, 65)) & causal()}, q_offset="end")
    add("mask-tensor-or-window", lambda make: {"mask": keep(make.bools(33, 65)) | window(3)}, q_offset="start")
    add("mask-not-tensor", lambda make: {"mask": ~keep(make.bools(2, 33, 65)) & lengths([60, 9])})
    add(
        "mask-three-tensors",
        lambda make: {
            "mask": keep(make.bools(33, 65, p=0.8)) & make.bools(2, 1, 1, 65, p=0.8) & make.bools(2, 33, 1, p=0.8)
        },
    )
    add("mask-lowered", lambda make: {"mask": longformer.lower(100, 100)}, sizes={"n": 100, "m": 100})
    add("mask-one-visible-key", lambda make: {"mask": torch.arange(65) == torch.arange(33)[:, None]})
    add("mask-nothing-visible", lambda make: {"mask": torch.zeros(33, 65, dtype=torch.bool)})
    add("mask-some-rows-empty", lambda make: {"mask": make.bools(33, 1).expand(33, 65)})
    for offset in (-40, -1, 0, 7, 32, 64, 1000):
        add(f"offset-causal-{offset}", mask=causal(), q_offset=offset)
        add(f"offset-window-{offset}", mask=window(11, 2), q_offset=offset)
    add("offset-start", mask=causal(), q_offset="start")
    add("offset-tensor", mask=causal() | prefix(3), q_offset=torch.tensor([-5, 40]))
    add("offset-tensor-window", mask=window(11, 2), q_offset=torch.tensor([-5, 40]), bias=alibi([0.5, 0.1]))
    add("offset-tensor-documents", mask=documents(ids) & causal(), q_offset=torch.tensor([0, 32]))
    add("offset-tensor-blocks", mask=blocks(table, 15), q_offset=torch.tensor([64, 3]))


def _add_scores() -> None:
    def table(radius: int, make: Inputs) -> Arguments:
        return {"bias": relative(make.normal(2, 2 * radius + 1))}

    half = alibi(alibi_slopes(2))
    add("bias-matrix", lambda make: {"bias": make.normal(33, 65)})
    add("bias-full", lambda make: {"bias": make.normal(2, 2, 33, 65)})
    add("bias-per-head", lambda make: {"bias": make.normal(2, 33, 65)}, sizes={"b": 3})
    add("bias-per-batch", lambda make: {"bias": make.normal(2, 1, 33, 65)})
    add("bias-of-keys", lambda make: {"bias": make.normal(2, 1, 1, 65)})
    add("bias-of-rows", lambda make: {"bias": make.normal(33, 1)})
    add("bias-float32", lambda make: {"bias": make.normal(1, 2, 33, 65, dtype=torch.float32)})
    add("bias-transposed", lambda make: {"bias": make.normal(2, 2, 65, 33).mT})
    add("bias-sum-of-two", lambda make: {"bias": Dense(make.normal(33, 65)) + make.normal(2, 1, 1, 65)})
    add(
        "bias-sum-of-four",
        lambda make: {
            "bias": sum((make.normal(2, 33, 65), make.normal(65), make.normal(2, 2, 1, 1)), Dense(make.normal(33, 65)))
        },
    )
    add("bias-alibi", sizes={"n": 65}, bias=half)
    add("bias-alibi-end", bias=half, q_offset="end")
    add("bias-alibi-causal", bias=half, q_offset="end", mask=causal())
    for radius in (0, 1, 20, 200):
        add(f"bias-relative-{radius}", partial(table, radius), q_offset="end")
    add("bias-relative-shared", lambda make: {"bias": relative(make.normal(17))}, q_offset=3)
    add("bias-relative-window", lambda make: {"bias": relative(make.normal(2, 17))}, q_offset=3, mask=window(30, 30))
    add(
        "bias-relative-long",
        lambda make: {"bias": relative(make.normal(2, 65))},
        sizes={"n": 257, "m": 257, "b": 1},
        mask=causal(),
    )
    add(
        "bias-everything",
        lambda make: {
            "bias": make.normal(2, 1, 33, 65)
            + half
            + relative(make.normal(2, 9))
            + relative(make.normal(1, 21))
            + alibi([0.3, -0.1])
        },
        q_offset="end",
        mask=causal(),
    )
    add(
        "bias-minus-infinity",
        lambda make: {"bias": make.normal(2, 33, 65).masked_fill(make.bools(2, 33, 65), -math.inf)},
    )
    add(
        "bias-minus-infinity-rows", lambda make: {"bias": make.normal(33, 65).masked_fill(make.bools(33, 1), -math.inf)}
    )
    add(
        "bias-relative-minus-infinity",
        lambda make: {"bias": relative(torch.tensor([-math.inf, 0.0, 1.0, 0.5, -math.inf]))},
        q_offset="end",
    )

    for scale in (0.0, 1.0, -0.7, 3):
        add(f"scale-{scale}", scale=float(scale))
    add("scale-0-d", scale=torch.tensor(0.4))
    add("scale-per-head", scale=torch.tensor([0.1, -0.5]))
    add("scale-per-row", lambda make: {"scale": make.normal(1, 1, 33)})
    add("scale-full", lambda make: {"scale": make.normal(2, 2, 33)}, mask=causal(), q_offset="end")
    add("scale-per-batch-softcap", lambda make: {"scale": make.normal(2, 1, 1)}, softcap=2.0)
    add("scale-zero-tensor", scale=torch.zeros(2))
    add("softcap-small", softcap=0.5, scale=1.0)
    add("softcap-50", softcap=50.0, scale=4.0, mask=causal(), q_offset="end")
    add("softcap-bias", lambda make: {"bias": make.normal(33, 65)}, softcap=3.0, scale=1.0)
    add("softcap-saturated", softcap=30.0, scale=1e3)
    add("sink", sink=torch.tensor([0.0, 1.5]))
    add("sink-large", sink=torch.tensor([1e4, 60.0]))
    add("sink-very-negative", sink=torch.tensor([-1e4, -60.0]))
    add("sink-absent", sink=torch.tensor([-math.inf, 0.5]))
    add("sink-empty-rows", lambda make: {"mask": make.bools(33, 65, p=0.02)}, sink=torch.tensor([-3.0, 0.5]))
    add(
        "sink-grouped", sizes={"h": 4, "g": 2}, sink=torch.tensor([0.0, 1.0, -1.0, 3.0]), mask=window(9), q_offset="end"
    )
    add("sink-keys", sink_keys=(1, 5, 31, 64), sink=torch.tensor([0.5, -0.5]), mask=window(20), q_offset="end")
    add("sink-keys-none", sink_keys=())
    add("t5", lambda make: {"bias": relative(make.normal(4, 33))}, sizes={"n": 65, "h": 4}, scale=1.0)
    add("gemma", sizes={"n": 130, "m": 130, "d": 32, "h": 4, "g": 2, "b": 1}, mask=window(63), softcap=50.0, scale=0.3)
    add(
        "gpt-oss",
        sizes={"n": 130, "m": 130, "d": 64, "h": 8, "g": 2, "b": 1},
        mask=window(63),
        sink=torch.linspace(-2, 2, 8),
    )


_add_sizes()
_add_masks()
_add_scores()
