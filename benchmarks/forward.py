"""Forward speed, memory and overhead of poise against torch, in one run: `make bench`.

Every ratio is torch's median time over ours, measured in turns in one process on the same tensors, threads and dtype;
peaks are measured in the same run. Prints Markdown as it goes and saves it to benchmarks/results/; Ctrl-C keeps what
is done. Run it alone on the machine. `--only TEXT` restricts the cases, `--quick` spends less time on each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator

import limits
import peers
import report
import torch
import torch.nn.functional as F
from cases import CASES, calls, inputs
from report import BF16, BY_NAME, FP16, FP32, NAMES
from timing import interleaved

import poise
from poise.kernels import ops

STATISTICS = {  # name of case: allowed percent, fp32 and bf16
    "(1,16,2048,128)": (4, 8),
    "(1,12,2048,64)": (6, 12),
    "(8,12,128,64)": (12, 20),
}


def header(options: argparse.Namespace) -> Iterator[str]:
    return report.header("Forward")


def against_torch(options: argparse.Namespace) -> Iterator[str]:
    return report.against_torch(options, CASES, calls)


def one_thread(options: argparse.Namespace) -> Iterator[str]:
    found, missing = peers.installed()
    yield "\n## One thread: gigaflop/s, and the share of the peak measured next to it\n"
    yield from (f"{line}  " for line in missing)
    names = ["torch", *found, "blockwise"]
    yield "| case | dtype | poise | of peak | " + " | ".join(names) + " |"
    yield "|---|---|" + "--:|" * (2 + len(names))
    torch.set_num_threads(1)
    plain = [case for case in report.selected(CASES, options) if case.kind in ("full", "causal") and not case.kv_heads]
    for case in plain:
        for dtype in (FP32, BF16, FP16):
            contest = calls(case, dtype)
            contestants = {"poise": contest.poise, "torch": contest.torch}
            tensors = inputs(case, dtype)
            for name, peer in found.items():
                call = peer(*tensors, case.kind == "causal", 1) if dtype != FP16 else None
                if call is not None:
                    contestants[name] = call
            if case.gigaflops < 30:
                contestants["blockwise"] = contest.blockwise
            top = report.one_core_peak(dtype)
            t = interleaved(contestants, options.seconds, options.least)
            speed = {name: case.gigaflops / seconds for name, seconds in t.items()}
            rest = [f"{speed[name]:.0f}" if name in speed else "–" for name in names]
            share = f"{100 * speed['poise'] / top:.0f} %"
            yield f"| {case.name} | {NAMES[dtype]} | {speed['poise']:.0f} | {share} | " + " | ".join(rest) + " |"


def instruction_sets(options: argparse.Namespace) -> Iterator[str]:
    yield "\n## Other instruction sets, one thread, (1,16,2048,128)\n"
    yield "| POISE_ISA | fp32 GF/s | of its peak | bf16 GF/s | fp16 GF/s |"
    yield "|---|--:|--:|--:|--:|"
    for isa in ("avx512bf16", "avx512", "avx2", "base"):
        effort = ["--seconds", str(options.seconds), "--least", str(options.least)]
        command = [sys.executable, __file__, "--isa-child", *effort]
        done = subprocess.run(command, env={**os.environ, "POISE_ISA": isa}, capture_output=True, text=True)
        if done.returncode:
            yield f"| {isa} | not on this machine: {done.stderr.strip().splitlines()[-1]} | | | |"
        else:
            yield f"| {isa} | {done.stdout.strip()} |"


def isa_child(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    case = next(case for case in CASES if case.name == "(1,16,2048,128)")
    peak = limits.measure()
    top = peak.fma512 if ops.isa().startswith("avx512") else peak.fma256
    speeds = []
    for dtype in (FP32, BF16, FP16):
        speeds.append(
            case.gigaflops / interleaved({"poise": calls(case, dtype).poise}, options.seconds, options.least)["poise"]
        )
    share = "–" if ops.isa() == "base" else f"{100 * speeds[0] / top:.0f} %"  # base has no FMA to compare with
    print(f"{speeds[0]:.0f} | {share} | {speeds[1]:.0f} | {speeds[2]:.0f}")


def statistics_cost(options: argparse.Namespace) -> Iterator[str]:
    yield f"\n## All statistics per row: extra time, {options.threads} threads and one\n"
    yield from report.statistics_cost(options, CASES, calls, STATISTICS)


def overhead(options: argparse.Namespace) -> Iterator[str]:
    torch.set_num_threads(options.threads)
    yield "\n## Overhead of a call: (1,1,4,8), microseconds\n"
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    causal = poise.causal()
    contestants = {
        "torch scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v),
        "poise.attention": lambda: poise.attention(q, k, v),
        "poise.attention, causal": lambda: poise.attention(q, k, v, mask=causal),
        "poise.observe": lambda: poise.observe(q, k, v),
        "poise.scaled_dot_product_attention": lambda: poise.scaled_dot_product_attention(q, k, v),
    }
    yield from report.overhead(contestants, {"poise.attention": "1.3", "poise.observe": "2"})


def memory(options: argparse.Namespace) -> Iterator[str]:
    yield f"\n## Memory beyond inputs and outputs: (1,12,16384,64) causal, {options.threads} threads\n"
    yield "| dtype | attention MB | observe MB, its statistics aside | allowed |"
    yield "|---|--:|--:|--:|"
    for dtype in ("fp32", "bf16"):
        cells = (report.in_child(__file__, options, dtype, which) for which in ("attention", "observe"))
        yield f"| {dtype} | " + " | ".join(cells) + " | 8 |"


def memory_child(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    dtype, which = options.memory_child
    q, k, v = (torch.ones(1, 12, 16384, 64, dtype=BY_NAME[dtype]) for _ in range(3))
    poise.attention(*(torch.ones(1, 1, 4, 8) for _ in range(3)))  # the first call ever prepares

    def call() -> list[torch.Tensor]:
        if which == "attention":
            return [poise.attention(q, k, v, mask=poise.causal())]
        out, stats = poise.observe(q, k, v, mask=poise.causal())
        return [out, stats.packed]

    print(f"{report.growth(call):.1f}")


SECTIONS = {
    "header": header,
    "torch": against_torch,
    "one": one_thread,
    "isa": instruction_sets,
    "statistics": statistics_cost,
    "overhead": overhead,
    "memory": memory,
}


def main() -> None:
    parser = report.parser(__doc__, SECTIONS)
    parser.add_argument("--isa-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.isa_child:
        return isa_child(options)
    if options.memory_child:
        return memory_child(options)
    report.run("forward", SECTIONS, options)


if __name__ == "__main__":
    main()
