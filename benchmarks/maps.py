"""What the pooled map of a long text costs: one head, D 64, statistics included; targets beside figures.

`python benchmarks/maps.py`; run it alone on the machine. The peer is the dense map, which shorter texts still allow.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from report import growth
from timing import interleaved

import poise
from poise.inspection.maps import Pooled, Scores, pooled
from poise.kernels import ops

LENGTH, PEER = 32768, 8192


def row(what: str, figure: float, target: str, met: bool | None) -> None:
    print(f"| {what} | {figure:.2f} | {target} | {'–' if met is None else 'met' if met else 'missed'} |")


def inputs(length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 1, length, 64, generator=generator) for _ in range(3))


def mapped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: poise.Mask | None) -> Pooled:
    options: dict[str, Any] = {"mask": mask}
    _, stats = poise.observe(q, k, v, mask=mask)
    return pooled(Scores(q, k, stats.lse, options), torch.zeros(1, dtype=torch.int64))


def dense(q: torch.Tensor, k: torch.Tensor, _: torch.Tensor, mask: poise.Mask | None) -> list[torch.Tensor]:
    """The same cells of a softmax over the whole matrix."""
    scores = q[0] @ k[0].mT / 8
    if mask is not None:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu_(1), -torch.inf)
    side = -(-q.shape[2] // 64)
    cells = scores.softmax(-1).unflatten(1, (-1, side)).unflatten(3, (-1, side))
    return [cells.mean((2, 4)), cells.amax((2, 4))]


def tensors(found: Pooled) -> list[torch.Tensor]:
    return [found.mean, found.largest, found.place, found.mean_without, found.largest_without]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"poise {poise.__version__} ({ops.isa()}), torch {torch.__version__}, {options.threads} threads\n")
    print("| pooled map, one head, D 64 | measured | target | |\n|---|--:|--:|---|")
    long, short = inputs(LENGTH), inputs(PEER)
    for name, mask in (("causal", poise.causal()), ("all keys", None)):
        added = growth(lambda mask=mask: tensors(mapped(*long, mask)))  # type: ignore[misc]
        took = interleaved({"map": lambda mask=mask: mapped(*long, mask)}, 0.0, 3)["map"]  # type: ignore[misc]
        row(f"{LENGTH} tokens, {name}, s", took, "< 6", took < 6)
        row(f"{LENGTH} tokens, {name}, MB", added, "< 200", added < 200)
        peers = interleaved(
            {"map": lambda mask=mask: mapped(*short, mask), "dense": lambda mask=mask: dense(*short, mask)},  # type: ignore[misc]
            0.0,
            3,
        )
        row(f"{PEER} tokens, {name}: time of the dense map over that", peers["dense"] / peers["map"], "–", None)


if __name__ == "__main__":
    main()
