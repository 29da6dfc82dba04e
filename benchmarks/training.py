"""Speed, memory and overhead of a forward and backward pass against torch, in one run: `make bench`.

A step is the forward pass and the gradients of everything that learns, from a given gradient of the output; ratios,
peaks and options are those of forward.py. Gigaflop/s count 3.5 times the forward pass, as is usual, although whoever
recomputes the scores does more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import report
import torch
import torch.nn.functional as F
from cases import TRAINING, steps
from report import BF16, BY_NAME, FP32, NAMES
from timing import interleaved

import poise

WORK = 3.5
STATISTICS = {"(1,16,2048,128)": (10, 10), "(1,12,2048,64)": (10, 10), "(8,12,128,64)": (10, 10)}
# One core: torch with its matrix library's vendor check lifted did 202 and 293 GF/s, on cores of a peak of 290.
ONE_CORE = {"(1,12,2048,64)": (1.25 * 202, 1.6 * 293)}
OF_PEAK = {"(1,16,2048,128)": 85, "(1,16,2048,128) causal": 85}


def header(options: argparse.Namespace) -> Iterator[str]:
    return report.header("Forward and backward")


def against_torch(options: argparse.Namespace) -> Iterator[str]:
    yield from report.against_torch(options, TRAINING, steps, WORK)
    yield (
        "\nLearned relative: the gradient reaches 32 learned values a head, T5's buckets. torch gathers them into a "
        "dense bias [1, H, N, N] in every step, as T5 does, and is given the matrix of buckets; poise gathers them "
        "into a table [H, 257] for `relative`. Both times include the gathering and its gradient, both scale by 1."
    )


def one_thread(options: argparse.Namespace) -> Iterator[str]:
    yield "\n## One thread: gigaflop/s, and the share of the peak measured next to it\n"
    yield "| case | dtype | poise | of peak | torch | ratio | required |"
    yield "|---|---|--:|--:|--:|--:|---|"
    torch.set_num_threads(1)
    for case in report.selected(TRAINING, options):
        if case.kind not in ("full", "causal") or case.dropout:
            continue
        for index, dtype in enumerate((FP32, BF16)):
            contest = steps(case, dtype)
            top = report.one_core_peak(dtype)
            t = interleaved({"poise": contest.poise, "torch": contest.torch}, options.seconds, options.least)
            ours, theirs = (WORK * case.gigaflops / t[name] for name in ("poise", "torch"))
            required = "–"
            if case.name in ONE_CORE:
                required = f"{ONE_CORE[case.name][index]:.0f} GF/s"
            elif case.name in OF_PEAK:
                required = f"{OF_PEAK[case.name]} % of peak"
            row = (case.name, NAMES[dtype], f"{ours:.0f}", f"{100 * ours / top:.0f} %", f"{theirs:.0f}")
            yield "| " + " | ".join((*row, f"{ours / theirs:.2f}", required)) + " |"


def statistics_cost(options: argparse.Namespace) -> Iterator[str]:
    yield f"\n## Statistics and the gradient of an entropy penalty: extra time, {options.threads} threads and one\n"
    yield from report.statistics_cost(options, TRAINING, steps, STATISTICS)


def overhead(options: argparse.Namespace) -> Iterator[str]:
    torch.set_num_threads(options.threads)
    yield "\n## Overhead of a step: (1,1,4,8), microseconds\n"
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    d_out, causal = torch.randn(1, 1, 4, 8), poise.causal()

    def step(attention: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(), (q, k, v), d_out)

    contestants = {
        "torch scaled_dot_product_attention": step(lambda: F.scaled_dot_product_attention(q, k, v)),
        "poise.attention": step(lambda: poise.attention(q, k, v)),
        "poise.attention, causal": step(lambda: poise.attention(q, k, v, mask=causal)),
        "poise.observe": step(lambda: poise.observe(q, k, v)[0]),
        "poise.scaled_dot_product_attention": step(lambda: poise.scaled_dot_product_attention(q, k, v)),
    }
    yield from report.overhead(contestants, {"poise.attention": "1.3"})


def memory(options: argparse.Namespace) -> Iterator[str]:
    yield f"\n## Memory beyond inputs, output and gradients: (1,12,16384,64), {options.threads} threads\n"
    yield "| dtype | full MB | causal MB | allowed |"
    yield "|---|--:|--:|--:|"
    for dtype in ("fp32", "bf16"):
        cells = (report.in_child(__file__, options, dtype, which) for which in ("full", "causal"))
        yield f"| {dtype} | " + " | ".join(cells) + " | 64 |"


def memory_child(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    dtype, which = options.memory_child
    q, k, v = (torch.ones(1, 12, 16384, 64, dtype=BY_NAME[dtype], requires_grad=True) for _ in range(3))
    d_out = torch.ones_like(q)
    mask = poise.causal() if which == "causal" else None
    small = [torch.ones(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
    poise.attention(*small).sum().backward()  # the first call ever prepares

    def call() -> list[torch.Tensor]:
        out = poise.attention(q, k, v, mask=mask)
        return [out, *torch.autograd.grad(out, (q, k, v), d_out)]

    print(f"{report.growth(call):.1f}")


SECTIONS = {
    "header": header,
    "torch": against_torch,
    "one": one_thread,
    "statistics": statistics_cost,
    "overhead": overhead,
    "memory": memory,
}


def main() -> None:
    options = report.parser(__doc__, SECTIONS).parse_args()
    if options.memory_child:
        return memory_child(options)
    report.run("training", SECTIONS, options)


if __name__ == "__main__":
    main()
