"""Draws docs/scaling.svg: what the scale of the scores does as the head dim grows, measured with poise.observe.

For queries and keys of unit variance and head dims from 4 to 512, the mean entropy and gradient gain (1 - sum p^2, the
trace of the softmax's Jacobian) of 256 queries over 256 keys, unscaled, by 1/sqrt(d) and by 1/d. Writes SVG by
hand: one picture is no reason for a plotting library.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

import poise

DIMS = [4, 8, 16, 32, 64, 128, 256, 512]
SCALES = {"unscaled": lambda d: 1.0, "1/√d": lambda d: d**-0.5, "1/d": lambda d: 1.0 / d}
COLOURS = {"unscaled": "#c0392b", "1/√d": "#1f7a4d", "1/d": "#2c5f9e"}
KEYS = 256
WIDTH, HEIGHT, LEFT, TOP = 300, 190, 56, 40


def measure() -> dict[str, list[tuple[float, float]]]:
    """Per scaling, (entropy / log n, gradient gain) for each head dim."""
    generator = torch.Generator().manual_seed(0)
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in SCALES}
    for dim in DIMS:
        q, k, v = (torch.randn(1, 8, KEYS, dim, generator=generator) for _ in range(3))
        for name, scale in SCALES.items():
            _, stats = poise.observe(q, k, v, scale=scale(dim))
            curves[name].append((float(stats.normalized_entropy.mean()), float(stats.responsiveness.mean())))
    return curves


def panel(x0: int, title: str, values: dict[str, list[float]]) -> list[str]:
    """One chart: head dim on a logarithmic axis, a share from 0 to 1 above it."""

    def at(index: int, value: float) -> tuple[float, float]:
        return x0 + WIDTH * index / (len(DIMS) - 1), TOP + HEIGHT * (1 - value)

    parts = [f'<text x="{x0}" y="{TOP - 16}" class="title">{title}</text>']
    for tick in (0, 0.5, 1):
        y = at(0, tick)[1]
        parts.append(f'<line x1="{x0}" y1="{y}" x2="{x0 + WIDTH}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{x0 - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for index, dim in enumerate(DIMS):
        parts.append(f'<text x="{at(index, 0)[0]}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{dim}</text>')
    parts.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 36}" text-anchor="middle">head dim d</text>')
    for name, curve in values.items():
        points = [at(index, value) for index, value in enumerate(curve)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" stroke="{COLOURS[name]}" class="curve"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[name]}"/>' for x, y in points]
    return parts


def draw(curves: dict[str, list[tuple[float, float]]]) -> str:
    second = LEFT + WIDTH + 70
    entropy = {name: [point[0] for point in curve] for name, curve in curves.items()}
    gain = {name: [point[1] for point in curve] for name, curve in curves.items()}
    body = panel(LEFT, f"entropy, as a share of log {KEYS}", entropy)
    body += panel(second, "gradient gain, 1 − Σp²", gain)
    for index, (name, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 190 * index, TOP + HEIGHT + 62
        body.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 24}" y2="{y - 4}" stroke="{colour}" class="curve"/>')
        body.append(f'<text x="{x + 32}" y="{y}">scores {name if name == "unscaled" else "× " + name}</text>')
    width, height = math.ceil(second + WIDTH + 24), TOP + HEIGHT + 76
    style = (
        "text{font:13px system-ui,sans-serif;fill:#333}.title{font-weight:600}"
        ".grid{stroke:#ddd}.curve{fill:none;stroke-width:2.2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>' + "".join(body) + "</svg>\n"
    )


if __name__ == "__main__":
    target = Path(__file__).parent.parent / "docs" / "scaling.svg"
    target.write_text(draw(measure()), encoding="utf-8")
    print(f"wrote {target}")
