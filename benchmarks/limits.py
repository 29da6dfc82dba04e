"""What the machine can do at best (peaks of its arithmetic, measured now), and which machine it is.

Compiles peak.cpp with the system's compiler into a temporary library. Knows nothing of attention.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np


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


def read_bandwidth(threads: int) -> float:
    """Gigabytes per second that so many threads read together, of memory that no cache holds; under a second."""
    library = _library()
    library.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    library.read_memory.restype = None
    words = max(4 * last_level_cache(), 1 << 28) // 8 // threads // 32 * 32
    memory = np.ones(words * threads, dtype=np.uint64)

    def read(thread: int, ahead: int) -> None:
        library.read_memory(memory.ctypes.data + 8 * words * thread, words, ahead)  # without Python's lock

    took = []
    with ThreadPoolExecutor(threads) as pool:
        for ahead in (0, 256, 1024, 4096) * 5:
            start = time.perf_counter()
            list(pool.map(read, range(threads), [ahead] * threads))
            took.append(time.perf_counter() - start)
    return float(memory.nbytes / min(took) / 1e9)


def last_level_cache() -> int:
    """Bytes of the largest cache that the first core reaches; 32 MB where the system does not tell."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=32 << 20)


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
