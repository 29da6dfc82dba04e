"""Which instruction sets of the native kernels this machine can run, read from the operating system."""

from __future__ import annotations

import platform
from pathlib import Path

# What each value of POISE_ISA needs, in the words of /proc/cpuinfo; each set contains the one before.
_X86 = {
    "base": set[str](),
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"},
    "avx512bf16": {"avx512_bf16"},
}


def isas() -> tuple[str, ...]:
    """Values of POISE_ISA that must work here, the plainest first; "base" alone where x86 does not tell."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return ("neon",)
    if machine not in ("x86_64", "amd64"):
        return ("base",)
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ("base",)
    flags = next((set(line.split(":", 1)[1].split()) for line in info.splitlines() if line.startswith("flags")), set())
    found = []
    for name, needed in _X86.items():
        if not needed <= flags:
            break
        found.append(name)
    return tuple(found)
