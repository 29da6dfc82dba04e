"""Decoding speed: one query per sequence and a long cache, as a share of what memory can deliver, and against torch.

Ratios are torch's median time over ours, in turns in one process; the read bandwidth is measured in the same run, with
as many threads. Rows about bandwidth go round distinct caches that together are at least four times the last-level
cache, so that nothing is read from it. Prints Markdown and saves it to benchmarks/results/; `make bench` runs it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import limits
import torch
import torch.nn.functional as F
from timing import interleaved, per_call
from torch import Tensor

import poise
from poise.kernels import ops

FP32, BF16 = torch.float32, torch.bfloat16
NAMES = {FP32: "fp32", BF16: "bf16"}
PAGE = 16
LENGTHS = (100, 500, 1000, 2000, 3000, 4096, 6000, 8192)


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    kv_heads: int
    length: int
    dim: int
    share: tuple[int, int] | None  # of the read bandwidth, percent: fp32, bf16; None: it fits into a cache
    ratio: tuple[float, float]  # to torch


CASES = (
    Case("(1,32,1 × 8192,128)", 32, 32, 8192, 128, (85, 85), (2, 10)),
    Case("32 query / 8 KV heads, 8192 × 128", 32, 8, 8192, 128, (70, 80), (4, 30)),
    Case("9 query / 3 KV heads, 2048 × 64", 9, 3, 2048, 64, None, (4, 4)),
)
MHA, GROUPED, _ = CASES


@dataclass(frozen=True)
class Cache:
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def caches(case: Case, dtype: torch.dtype) -> list[Cache]:
    """Enough distinct ones that none is in a processor's cache when its turn comes, or one that is meant to be."""
    made: list[Cache] = []
    while not made or (case.share and sum(cache.bytes for cache in made) < 4 * limits.last_level_cache()):
        made.append(
            Cache(
                torch.randn(1, case.heads, 1, case.dim).to(dtype),
                torch.randn(1, case.kv_heads, case.length, case.dim).to(dtype),
                torch.randn(1, case.kv_heads, case.length, case.dim).to(dtype),
            )
        )
    return made


def going_round(call: Callable[[Cache], object], over: list[Cache]) -> Callable[[], object]:
    turns = itertools.cycle(over)
    return lambda: call(next(turns))


def ours(cache: Cache) -> Tensor:
    return poise.attention(cache.q, cache.k, cache.v)


def theirs(cache: Cache) -> Tensor:
    return F.scaled_dot_product_attention(cache.q, cache.k, cache.v, enable_gqa=cache.q.shape[1] != cache.k.shape[1])


def in_pages(cache: Cache) -> Callable[[], object]:
    """The same keys in pages of a shuffled pool."""
    groups, length, dim = cache.k.shape[1:]
    order = torch.randperm(length // PAGE)

    def pool(rows: Tensor) -> Tensor:
        made = torch.empty(length // PAGE, groups, PAGE, dim, dtype=rows.dtype)
        made[order] = rows[0].unflatten(1, (-1, PAGE)).transpose(0, 1)
        return made

    view = poise.KVView(
        k=pool(cache.k),
        v=pool(cache.v),
        lengths=torch.tensor([length], dtype=torch.int32),
        keys=length,
        even=True,
        pages=order.to(torch.int32)[None],
    )
    return lambda: poise.attention(cache.q, view)


def in_int8(cache: Cache) -> Callable[[], object]:
    """The same keys rounded to int8 with a factor each."""
    length = cache.k.shape[2]

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = rows.float().abs().amax(-1) / 127
        return (rows.float() / scale[..., None]).round().to(torch.int8), scale

    (k, k_scale), (v, v_scale) = rounded(cache.k), rounded(cache.v)
    lengths = torch.tensor([length], dtype=torch.int32)
    view = poise.KVView(k=k, v=v, lengths=lengths, keys=length, even=True, k_scale=k_scale, v_scale=v_scale)
    return lambda: poise.attention(cache.q, view)


def alternating(calls: list[Callable[[], object]]) -> Callable[[], object]:
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def against_torch(options: argparse.Namespace) -> Iterator[str]:
    yield "| case | dtype | ms | KV GB/s | of read bandwidth | target | ratio to torch | target |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for case in CASES:
        for index, dtype in enumerate((FP32, BF16)):
            made = caches(case, dtype)
            t = interleaved({"poise": going_round(ours, made), "torch": going_round(theirs, made)}, options.seconds)
            gigabytes = made[0].bytes / t["poise"] / 1e9
            share = target = "–"
            if case.share:
                share = f"{100 * gigabytes / limits.read_bandwidth(options.threads):.0f} %"
                target = f"{case.share[index]} %"
            yield (
                f"| {case.name} | {NAMES[dtype]} | {t['poise'] * 1e3:.3f} | {gigabytes:.1f} | {share} | {target} "
                f"| {t['torch'] / t['poise']:.1f} | {case.ratio[index]:g} |"
            )


def in_other_forms(options: argparse.Namespace) -> Iterator[str]:
    yield "\n| case | dtype | ms | of the plain cache's speed | target |"
    yield "|---|---|--:|--:|--:|"
    for case in (MHA, GROUPED):
        for dtype in (FP32, BF16):
            made = caches(case, dtype)
            contest = {"plain": going_round(ours, made), "pages": alternating([in_pages(cache) for cache in made])}
            t = interleaved(contest, options.seconds)
            yield (
                f"| {case.name}, pages of {PAGE} | {NAMES[dtype]} | {t['pages'] * 1e3:.3f} "
                f"| {100 * t['plain'] / t['pages']:.0f} % | 90 % |"
            )
        made = caches(case, BF16)
        made += caches(case, BF16)  # int8 ones are half as large
        t = interleaved(
            {"plain": going_round(ours, made), "int8": alternating([in_int8(cache) for cache in made])}, options.seconds
        )
        speed = f"{t['plain'] / t['int8']:.2f} × bf16"
        yield f"| {case.name}, int8 | bf16 queries | {t['int8'] * 1e3:.3f} | {speed} | 1.6 × |"


def different_lengths(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Eight sequences in one call; torch gets the same padded tensors and a mask."""
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    q = torch.randn(len(LENGTHS), 32, 1, 128).to(dtype)
    k, v = (torch.randn(len(LENGTHS), 8, max(LENGTHS), 128).to(dtype) for _ in range(2))
    view = poise.KVView(k=k, v=v, lengths=lengths, keys=max(LENGTHS), even=False)
    mask = torch.arange(max(LENGTHS)) < lengths[:, None, None, None]
    return {
        "poise": lambda: poise.attention(q, view),
        "torch": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
    }


def in_one_batch(options: argparse.Namespace) -> Iterator[str]:
    yield "\n| batch of 8 lengths 100 … 8192, 32 / 8 heads × 128 | poise ms | torch ms | ratio | target |"
    yield "|---|--:|--:|--:|--:|"
    for dtype, target in ((FP32, "–"), (BF16, "10")):
        t = interleaved(different_lengths(dtype), options.seconds)
        times = f"{t['poise'] * 1e3:.2f} | {t['torch'] * 1e3:.1f} | {t['torch'] / t['poise']:.1f}"
        yield f"| {NAMES[dtype]} | {times} | {target} |"


def tiny(options: argparse.Namespace) -> Iterator[str]:
    yield "\n| (1,12,1 × 64,64) | poise µs | torch µs | of torch's | allowed |"
    yield "|---|--:|--:|--:|--:|"
    for dtype in (FP32, BF16):
        cache = Cache(*(torch.randn(1, 12, length, 64).to(dtype) for length in (1, 64, 64)))
        t = per_call({"poise": partial(ours, cache), "torch": partial(theirs, cache)})
        times = f"{t['poise'] * 1e6:.1f} | {t['torch'] * 1e6:.1f} | {t['poise'] / t['torch']:.2f}"
        yield f"| {NAMES[dtype]} | {times} | 1 |"


def header(options: argparse.Namespace) -> Iterator[str]:
    yield f"# Decoding, {datetime.date.today().isoformat()}\n"
    yield f"- machine: {limits.machine()}; ISA {ops.isa()}; {options.threads} threads"
    yield f"- poise {poise.__version__}, torch {torch.__version__}; medians, interleaved"
    yield (
        f"- read bandwidth {limits.read_bandwidth(options.threads):.0f} GB/s, of one core "
        f"{limits.read_bandwidth(1):.0f} GB/s; last-level cache {limits.last_level_cache() >> 20} MB\n"
    )


SECTIONS = {
    "header": header,
    "torch": against_torch,
    "forms": in_other_forms,
    "lengths": in_one_batch,
    "tiny": tiny,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each comparison")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--save", type=Path, help="file for the result (default: benchmarks/results/DATE-decode.md)")
    options = parser.parse_args()
    if not ops.available():
        sys.exit(ops.why_missing())
    torch.set_grad_enabled(False)
    torch.set_num_threads(options.threads)
    path = options.save or Path(__file__).parent / "results" / f"{datetime.date.today().isoformat()}-decode.md"
    lines: list[str] = []
    try:
        for name in SECTIONS:
            if name in options.sections:
                for line in SECTIONS[name](options):
                    print(line, flush=True)
                    lines.append(line)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    if options.save or len(options.sections) == len(SECTIONS):
        path.write_text("\n".join(lines) + "\n")
        print(f"saved to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
