"""Forward speed, memory and overhead of poise against torch, in one run: `make bench`.

Every ratio is torch's median time over ours, measured in turns in one process on the same tensors, threads and dtype;
peaks are measured in the same run. Prints Markdown as it goes and saves it to benchmarks/results/; Ctrl-C keeps what
is done. Run it alone on the machine. `--only TEXT` restricts the cases, `--quick` spends less time on each.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import limits
import peers
import torch
import torch.nn.functional as F
from cases import CASES, Case, calls, inputs
from timing import interleaved, per_call

import poise
from poise.kernels import ops

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
STATISTICS = {  # name of case: allowed percent, fp32 and bf16
    "(1,16,2048,128)": (4, 8),
    "(1,12,2048,64)": (6, 12),
    "(8,12,128,64)": (12, 20),
}


def against_torch(options: argparse.Namespace) -> Iterator[str]:
    yield f"\n## Against torch, {options.threads} threads\n"
    yield "| case | " + " | ".join(f"{d} ms | {d} GF/s | {d} ratio | target" for d in ("fp32", "bf16")) + " |"
    yield "|---|" + "--:|" * 8
    torch.set_num_threads(options.threads)
    for case in selected(options):
        cells = []
        for index, dtype in enumerate((FP32, BF16)):
            contest = calls(case, dtype)
            t = interleaved({"poise": contest.poise, "torch": contest.torch}, options.seconds)
            target = f"{case.targets[index]:g}" if case.targets else "–"
            speed = case.gigaflops / t["poise"]
            cells.append(f"{t['poise'] * 1e3:.2f} | {speed:.0f} | {t['torch'] / t['poise']:.2f} | {target}")
        yield f"| {case.name} | " + " | ".join(cells) + " |"


def one_thread(options: argparse.Namespace) -> Iterator[str]:
    found, missing = peers.installed()
    yield "\n## One thread: gigaflop/s, and the share of the peak measured next to it\n"
    yield from (f"{line}  " for line in missing)
    yield "| case | dtype | poise | of peak | torch | " + " | ".join(found) + " | blockwise |"
    yield "|---|---|" + "--:|" * (4 + len(found))
    torch.set_num_threads(1)
    plain = [case for case in selected(options) if case.kind in ("full", "causal") and not case.kv_heads]
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
            peak = limits.measure()
            t = interleaved(contestants, options.seconds)
            top = peak.bf16 if dtype == BF16 and peak.bf16 and ops.isa() == "avx512bf16" else peak.fp32
            speed = {name: case.gigaflops / seconds for name, seconds in t.items()}
            rest = [f"{speed[name]:.0f}" if name in speed else "–" for name in ("torch", *found, "blockwise")]
            share = f"{100 * speed['poise'] / top:.0f} %"
            yield f"| {case.name} | {NAMES[dtype]} | {speed['poise']:.0f} | {share} | " + " | ".join(rest) + " |"


def instruction_sets(options: argparse.Namespace) -> Iterator[str]:
    yield "\n## Other instruction sets, one thread, (1,16,2048,128)\n"
    yield "| POISE_ISA | fp32 GF/s | of its peak | bf16 GF/s | fp16 GF/s |"
    yield "|---|--:|--:|--:|--:|"
    for isa in ("avx512bf16", "avx512", "avx2", "base"):
        command = [sys.executable, __file__, "--isa-child", "--seconds", str(options.seconds)]
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
        speeds.append(case.gigaflops / interleaved({"poise": calls(case, dtype).poise}, options.seconds)["poise"])
    share = "–" if ops.isa() == "base" else f"{100 * speeds[0] / top:.0f} %"  # base has no FMA to compare with
    print(f"{speeds[0]:.0f} | {share} | {speeds[1]:.0f} | {speeds[2]:.0f}")


def statistics_cost(options: argparse.Namespace) -> Iterator[str]:
    yield f"\n## All statistics per row: extra time, {options.threads} threads and one\n"
    yield f"| case | dtype | {options.threads} threads | one thread | allowed |"
    yield "|---|---|--:|--:|--:|"
    for case in selected(options):
        if case.name not in STATISTICS:
            continue
        for index, dtype in enumerate((FP32, BF16)):
            contest = calls(case, dtype)
            cells = []
            for threads in (options.threads, 1):
                torch.set_num_threads(threads)
                t = interleaved({"plain": contest.poise, "observed": contest.observed}, 2 * options.seconds)
                cells.append(f"{100 * (t['observed'] / t['plain'] - 1):+.1f} %")
            allowed = STATISTICS[case.name][index]
            yield f"| {case.name} | {NAMES[dtype]} | {cells[0]} | {cells[1]} | {allowed} % |"


def overhead(options: argparse.Namespace) -> Iterator[str]:
    torch.set_num_threads(options.threads)
    yield "\n## Overhead of a call: (1,1,4,8), microseconds\n"
    yield "| call | µs | of torch's | allowed |"
    yield "|---|--:|--:|--:|"
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    causal = poise.causal()
    t = per_call(
        {
            "torch scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v),
            "poise.attention": lambda: poise.attention(q, k, v),
            "poise.attention, causal": lambda: poise.attention(q, k, v, mask=causal),
            "poise.observe": lambda: poise.observe(q, k, v),
            "poise.scaled_dot_product_attention": lambda: poise.scaled_dot_product_attention(q, k, v),
        }
    )
    base = t["torch scaled_dot_product_attention"]
    allowed = {"poise.attention": "1.3", "poise.observe": "2"}
    for name, seconds in t.items():
        yield f"| {name} | {seconds * 1e6:.1f} | {seconds / base:.2f} | {allowed.get(name, '–')} |"


def memory(options: argparse.Namespace) -> Iterator[str]:
    yield f"\n## Memory beyond inputs and outputs: (1,12,16384,64) causal, {options.threads} threads\n"
    yield "| dtype | attention MB | observe MB, its statistics aside | allowed |"
    yield "|---|--:|--:|--:|"
    for dtype in (FP32, BF16):
        cells = []
        for observed in ("0", "1"):
            command = [
                sys.executable,
                __file__,
                "--memory-child",
                NAMES[dtype],
                observed,
                "--threads",
                str(options.threads),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            cells.append(done.stdout.strip())
        yield f"| {NAMES[dtype]} | {cells[0]} | {cells[1]} | 8 |"


def memory_child(options: argparse.Namespace) -> None:
    """Growth of the process's resident size at its largest during one call, the first, beyond what it returns."""
    torch.set_num_threads(options.threads)
    dtype = {name: dtype for dtype, name in NAMES.items()}[options.memory_child[0]]
    q, k, v = (torch.ones(1, 12, 16384, 64, dtype=dtype) for _ in range(3))
    torch.ones(1 << 20).add_(1)  # wakes torch's threads
    poise.attention(*(torch.ones(1, 1, 4, 8) for _ in range(3)))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    if options.memory_child[1] == "1":
        out, stats = poise.observe(q, k, v, mask=poise.causal())
        result = out.nbytes + stats.packed.nbytes
    else:
        result = poise.attention(q, k, v, mask=poise.causal()).nbytes
    print(f"{(resident('VmHWM') - before - result) / 2**20:.1f}")


def resident(field: str) -> int:
    """VmRSS, the resident bytes now, or VmHWM, their largest number since forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def selected(options: argparse.Namespace) -> list[Case]:
    return [case for case in CASES if options.only in case.name]


def header(options: argparse.Namespace) -> Iterator[str]:
    peak = limits.measure()
    yield f"# Forward, {datetime.date.today().isoformat()}\n"
    yield f"- machine: {limits.machine()}; ISA {ops.isa()}"
    yield f"- poise {poise.__version__}, torch {torch.__version__}; medians, interleaved"
    yield (
        f"- peak of one core: fp32 FMA {peak.fp32:.0f} GF/s (512-bit {peak.fma512:.0f}, 256-bit {peak.fma256:.0f}), "
        f"bf16 dot product {peak.bf16:.0f} GF/s"
    )


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each comparison")
    parser.add_argument("--quick", action="store_true", help="half a second on each")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--save", type=Path, help="file for the result (default: benchmarks/results/DATE.md)")
    parser.add_argument("--isa-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory-child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.seconds = 0.5
    torch.set_grad_enabled(False)
    if options.isa_child:
        return isa_child(options)
    if options.memory_child:
        return memory_child(options)
    if not ops.available():
        sys.exit(ops.why_missing())
    partial = options.only or options.quick or len(options.sections) < len(SECTIONS)
    path = options.save or Path(__file__).parent / "results" / f"{datetime.date.today().isoformat()}.md"
    lines: list[str] = []
    try:
        for name in SECTIONS:
            if name in options.sections:
                for line in SECTIONS[name](options):
                    print(line, flush=True)
                    lines.append(line)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    if options.save or not partial:
        path.write_text("\n".join(lines) + "\n")
        print(f"saved to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
