"""What the benchmarks of forward and training share: options, header, the tables of one shape, and saving the result.

A benchmark is a dict of sections, each a generator of Markdown lines; `run` prints them as they come, so that Ctrl-C
keeps what is done. What is timed is in cases.py, how in timing.py.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import limits
import torch
from cases import Calls, Case
from timing import interleaved, per_call

import poise
from poise.kernels import ops

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
BY_NAME = {name: dtype for dtype, name in NAMES.items()}

Section = Callable[[argparse.Namespace], Iterator[str]]
Contest = Callable[[Case, torch.dtype], Calls]


def parser(description: str | None, sections: Mapping[str, Section]) -> argparse.ArgumentParser:
    """The options of every benchmark; its children get theirs from the benchmark itself."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each comparison")
    parser.add_argument("--least", type=int, default=7, help="rounds of each comparison, however long they take")
    parser.add_argument("--quick", action="store_true", help="half a second and three rounds on each")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--save", type=Path, help="file for the result (default: benchmarks/results/DATE-NAME.md)")
    parser.add_argument("--memory-child", nargs=2, help=argparse.SUPPRESS)
    return parser


def run(name: str, sections: Mapping[str, Section], options: argparse.Namespace) -> None:
    """Prints the sections asked for, and saves them if they are the whole report or --save names a file."""
    if not ops.available():
        sys.exit(ops.why_missing())
    if options.quick:
        options.seconds, options.least = 0.5, 3
    partial = options.only or options.quick or len(options.sections) < len(sections)
    path = options.save or Path(__file__).parent / "results" / f"{datetime.date.today().isoformat()}-{name}.md"
    lines: list[str] = []
    try:
        for title, section in sections.items():
            if title in options.sections:
                for line in section(options):
                    print(line, flush=True)
                    lines.append(line)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    if options.save or not partial:
        path.write_text("\n".join(lines) + "\n")
        print(f"saved to {path}", file=sys.stderr)


def header(title: str) -> Iterator[str]:
    peak = limits.measure()
    yield f"# {title}, {datetime.date.today().isoformat()}\n"
    yield f"- machine: {limits.machine()}; ISA {ops.isa()}"
    yield f"- poise {poise.__version__}, torch {torch.__version__}; medians, interleaved"
    yield (
        f"- peak of one core: fp32 FMA {peak.fp32:.0f} GF/s (512-bit {peak.fma512:.0f}, 256-bit {peak.fma256:.0f}), "
        f"bf16 dot product {peak.bf16:.0f} GF/s"
    )


def selected(cases: Sequence[Case], options: argparse.Namespace) -> list[Case]:
    return [case for case in cases if options.only in case.name]


def against_torch(
    options: argparse.Namespace, cases: Sequence[Case], contest: Contest, work: float = 1.0
) -> Iterator[str]:
    """Every case in fp32 and bf16, with its target ratio. `work`: flops of the call over those of the forward pass."""
    yield f"\n## Against torch, {options.threads} threads\n"
    yield "| case | " + " | ".join(f"{d} ms | {d} GF/s | {d} ratio | target" for d in ("fp32", "bf16")) + " |"
    yield "|---|" + "--:|" * 8
    torch.set_num_threads(options.threads)
    for case in selected(cases, options):
        cells = []
        for index, dtype in enumerate((FP32, BF16)):
            calls = contest(case, dtype)
            t = interleaved({"poise": calls.poise, "torch": calls.torch}, options.seconds, options.least)
            target = f"{case.targets[index]:g}" if case.targets else "–"
            speed = work * case.gigaflops / t["poise"]
            cells.append(f"{t['poise'] * 1e3:.2f} | {speed:.0f} | {t['torch'] / t['poise']:.2f} | {target}")
        yield f"| {case.name} | " + " | ".join(cells) + " |"


def statistics_cost(
    options: argparse.Namespace, cases: Sequence[Case], contest: Contest, allowed: Mapping[str, tuple[int, int]]
) -> Iterator[str]:
    """What observing adds to the cases of `allowed`, which has the percents for fp32 and bf16."""
    yield f"| case | dtype | {options.threads} threads | one thread | allowed |"
    yield "|---|---|--:|--:|--:|"
    for case in selected(cases, options):
        if case.name not in allowed:
            continue
        for index, dtype in enumerate((FP32, BF16)):
            calls = contest(case, dtype)
            cells = []
            for threads in (options.threads, 1):
                torch.set_num_threads(threads)
                t = interleaved({"plain": calls.poise, "observed": calls.observed}, 2 * options.seconds, options.least)
                cells.append(f"{100 * (t['observed'] / t['plain'] - 1):+.1f} %")
            yield f"| {case.name} | {NAMES[dtype]} | {cells[0]} | {cells[1]} | {allowed[case.name][index]} % |"


def overhead(calls: Mapping[str, Callable[[], object]], allowed: Mapping[str, str]) -> Iterator[str]:
    """Microseconds of calls too small to compute anything, the first of them torch's."""
    yield "| call | µs | of torch's | allowed |"
    yield "|---|--:|--:|--:|"
    t = per_call(calls)
    base = t[next(iter(calls))]
    for name, seconds in t.items():
        yield f"| {name} | {seconds * 1e6:.1f} | {seconds / base:.2f} | {allowed.get(name, '–')} |"


def one_core_peak(dtype: torch.dtype) -> float:
    """Gigaflop/s that one core can do at best right now in the arithmetic the kernels use for this dtype."""
    peak = limits.measure()
    return peak.bf16 if dtype == BF16 and peak.bf16 and ops.isa() == "avx512bf16" else peak.fp32


def in_child(script: str, options: argparse.Namespace, *which: str) -> str:
    """What `script --memory-child` prints: a fresh process knows its own largest size."""
    command = [sys.executable, script, "--threads", str(options.threads), "--memory-child", *which]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def growth(call: Callable[[], Sequence[torch.Tensor]]) -> float:
    """Megabytes by which the process's resident size grew at its largest during a call, beyond what it returns."""
    torch.ones(1 << 20).add_(1)  # wakes torch's threads
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _resident("VmRSS")
    results = call()
    return (_resident("VmHWM") - before - sum(result.nbytes for result in results)) / 2**20


def _resident(field: str) -> int:
    """VmRSS, the resident bytes now, or VmHWM, their largest number since forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))
