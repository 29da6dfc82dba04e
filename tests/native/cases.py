"""Cases for the native driver, and the judgement of what it computed.

    python tests/native/cases.py dump cases.bin
    driver cases.bin results.bin            (another machine, an emulator, a sanitizer's build)
    python tests/native/cases.py check results.bin

`dump` writes the arguments that poise::forward would get for every case of poise.testing, each tensor with its own
strides and no byte more than it reaches, and what comes back to the results in a backward call. `check` compares
results and gradients with the exact ones, within the error budget. The native library is not needed for either. The
format is described in driver.cpp.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from poise import testing
from poise.dispatch import lowered
from poise.kernels import ops
from poise.problem import Problem, prepare
from poise.score import Alibi, Dense, Relative
from poise.stats import FIELDS

NAMES = (
    *("q", "k", "v", "scale", "scale_rows", "softcap", "sink", "dropout", "seed", "left", "right"),
    *(
        "offset",
        "offsets",
        "start",
        "end",
        "rows",
        "tile_ptr",
        "tile_runs",
        "patterns",
        "mask0",
        "mask1",
        "bias0",
        "bias1",
        "table",
        "slopes",
    ),
    *("sink_keys", "pages", "k_scale", "v_scale", "keys"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4, torch.bool: 5}
FLOAT64, TEXT = 6, 7
LONGEST = 1 << 24  # elements; a case with a tensor that reaches further, to prove 64-bit strides, is left out


def dump(path: Path) -> None:
    count = left_out = 0
    with path.open("wb") as file:
        for name, dtype in _cases():
            call = _call(name, dtype)
            problem = prepare(**call)
            arguments = ops.arguments(problem, lowered(problem), True)
            if any(isinstance(value, Tensor) and _reach(value) > LONGEST for value in arguments):
                left_out += 1
                continue
            _write(file, "case", TEXT, b"", f"{name}/{str(dtype).removeprefix('torch.')}".encode())
            for argument, value in zip(NAMES, arguments, strict=True):
                _write_argument(file, argument, value)
            incoming = _incoming(problem)
            _write_argument(file, "d_out", incoming.out)
            _write_argument(file, "d_stats", incoming.packed)
            count += 1
    print(f"{count} cases in {path}; {left_out} with enormous strides left out")


def check(path: Path) -> int:
    failures = count = 0
    for case, results in _results(path):
        name, dtype_name = case.rsplit("/", 1)
        dtype = getattr(torch, dtype_name)
        call = _call(name, dtype)
        layout = call.get("layout", "bhsd")
        truth = testing.truth(**call)
        count += 1
        try:
            for output in ("out", "plain_out"):
                out = torch.frombuffer(results[output], dtype=dtype) if results[output] else torch.empty(0, dtype=dtype)
                out = out.reshape(truth.out.shape)
                testing.check_out(out.transpose(-3, -2) if layout == "bshd" else out, truth)
            packed = torch.frombuffer(results["stats"], dtype=torch.float32) if results["stats"] else torch.empty(0)
            testing.check_stats(packed.reshape(truth.packed.shape), truth)
            exact = testing.gradient_truth(incoming=_incoming(truth.problem), **call)
            testing.check_gradients(_gradients(results, exact), exact)
        except AssertionError as error:
            failures += 1
            print(f"FAIL {case}: {error}")
    print(f"{count - failures} of {count} cases within the error budget")
    return 1 if failures or not count else 0


def _cases() -> Iterator[tuple[str, torch.dtype]]:
    return ((name, dtype) for name in testing.CASES for dtype in DTYPES)


def _call(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {"sink_keys": (0,), **testing.arguments(name, dtype)}


def _incoming(problem: Problem) -> testing.Incoming:
    """What comes back to a call's output, and to those packed statistics that have a derivative."""
    generator = torch.Generator().manual_seed(7)
    rows = problem.shape[:3]
    out = torch.randn((*rows, problem.v.shape[-1]), generator=generator).to(problem.q.dtype)
    fields = {name: torch.randn(rows, generator=generator) for name in FIELDS}
    fields |= {name: torch.zeros(rows) for name in ("max_logit", "min_score", "count")}
    # Fields that count from the largest score: what they say does not depend on it, nor may the whole.
    fields["max_score"] = fields["log_sum"] + fields["shift"]
    return testing.Incoming(out, {}, torch.stack([fields[name] for name in FIELDS]))


def _gradients(results: dict[str, bytearray], truth: testing.GradientTruth) -> dict[str, Tensor]:
    """The driver's results as gradients of the operands; the exact one where a plan has merged several into one."""
    problem, gradients = truth.problem, {}
    tensors = dict(zip(truth.exact, (tensor for _, tensor in problem.differentiable()), strict=True))
    kinds = [type(term) for term in problem.bias]
    dense = 0
    for name, tensor in tensors.items():
        kind = kinds[int(name.removeprefix("bias"))] if name.startswith("bias") else None
        record = {Alibi: "d_slopes", Relative: "d_table", None: f"d_{name}"}.get(kind, f"d_bias{dense}")
        dense += kind is Dense
        dtype = tensor.dtype if name in ("q", "k", "v") else torch.float32
        data = results.get(record, bytearray())
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        if name == "scale":
            flat = flat.reshape(problem.shape[:3]).sum_to_size(tensor.shape)
        elif name == "sink":
            flat = flat.reshape(problem.shape[:3]).sum((0, 2))
        elif kind is not None and (kinds.count(kind) > (2 if kind is Dense else 1) or flat.numel() != tensor.numel()):
            flat = truth.exact[name]  # replayed all the same; test_gradients.py compares such
        gradients[name] = flat.reshape(tensor.shape).to(tensor.dtype)
    return gradients


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last, holes included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _write_argument(file: BinaryIO, name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        memory = value.as_strided((_reach(value),), (1,)).contiguous()
        layout = struct.pack(f"<{2 * value.dim()}q", *value.shape, *value.stride())
        _write(file, name, TYPES[value.dtype], layout, memory.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, float):
        _write(file, name, FLOAT64, b"", struct.pack("<d", value))
    elif value is not None:
        _write(file, name, TYPES[torch.int64], b"", struct.pack("<q", value))


def _write(file: BinaryIO, name: str, kind: int, layout: bytes, data: bytes) -> None:
    file.write(struct.pack("<3I", len(name), kind, len(layout) // 16) + name.encode() + layout)
    file.write(struct.pack("<Q", len(data)) + data)


def _results(path: Path) -> Iterator[tuple[str, dict[str, bytearray]]]:
    data, at = path.read_bytes(), 0
    case, records = "", dict[str, bytearray]()
    while at < len(data):
        length, _, dims = struct.unpack_from("<3I", data, at)
        at += 12
        name = data[at : at + length].decode()
        at += length + 16 * dims
        (size,) = struct.unpack_from("<Q", data, at)
        at += 8
        content = bytearray(data[at : at + size])
        at += size
        if name != "case":
            records[name] = content
            continue
        if records:
            yield case, records
        case, records = content.decode(), {}
    if records:
        yield case, records


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("dump", "check"):
        sys.exit(__doc__)
    if sys.argv[1] == "dump":
        dump(Path(sys.argv[2]))
    else:
        sys.exit(check(Path(sys.argv[2])))
