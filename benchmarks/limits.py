"""What the machine can do at best (peaks of its arithmetic, measured now), and which machine it is.

Compiles peak.cpp with the system's compiler into a temporary library. Knows nothing of attention.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """Gigaflop/s of one core; 0 where the machine lacks the instructions."""

    fma512: float
    fma256: float
    bf16: float

    @property
    def fp32(self) -> float:
        return max(self.fma512, self.fma256)


def measure() -> Limits:
    """Takes about a second. Run it next to what is compared with it: clocks change."""
    library = _library()
    functions = {}
    for name in ("peak_fma512", "peak_fma256", "peak_bf16"):
        function = getattr(library, name)
        function.restype = ctypes.c_double
        functions[name] = function() / 1e9
    return Limits(functions["peak_fma512"], functions["peak_fma256"], functions["peak_bf16"])


def machine() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    cores = sum(line.startswith("processor") for line in lines)
    family = f"family {facts.get('cpu family', '?')} model {facts.get('model', '?')}"
    return f"{facts.get('model name', platform.machine())} ({family}), {cores} cores"


_loaded: ctypes.CDLL | None = None


def _library() -> ctypes.CDLL:
    global _loaded
    if _loaded is None:
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "peak.so"
            source = Path(__file__).with_name("peak.cpp")
            command = ["c++", "-O2", "-shared", "-fPIC", "-std=gnu++17", "-w", str(source), "-o", str(built)]
            subprocess.run(command, check=True)
            _loaded = ctypes.CDLL(str(built))
    return _loaded
