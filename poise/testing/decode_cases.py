"""The calls of generation: a few queries at the end of many keys, one or more query heads per key/value head.

Importing this file adds them to `cases.CASES`.
"""

from __future__ import annotations

import math

import torch

from poise.mask import causal, keep, lengths, prefix, window
from poise.score import Dense, alibi, relative
from poise.testing.cases import Arguments, Inputs, add


def _add_sizes() -> None:
    for ratio in (1, 2, 3, 4, 5, 8, 16):
        add(f"decode-ratio-{ratio}", sizes={"n": 1, "m": 300, "d": 64, "h": 2 * ratio, "g": 2})
        add(
            f"decode-causal-ratio-{ratio}",
            sizes={"n": 3, "m": 77, "d": 40, "h": 2 * ratio, "g": 2},
            mask=causal(),
            q_offset="end",
        )
    for queries in (1, 2, 3, 7, 8, 9, 16):
        sizes = {"n": queries, "m": 130, "d": 32, "h": 4, "g": 2}
        add(f"decode-{queries}-queries", sizes=sizes, mask=causal(), q_offset="end")
    for keys in (1, 2, 15, 17, 63, 64, 65, 255, 257, 3001):
        add(f"decode-{keys}-keys", sizes={"n": 1, "m": keys, "d": 32, "h": 3, "g": 1})
    for dim in (1, 8, 40, 80, 128, 255, 256):
        add(f"decode-head-dim-{dim}", sizes={"n": 1, "m": 70, "d": dim, "h": 4, "g": 2})
        add(f"decode-head-dim-{dim}-ratio-1", sizes={"n": 1, "m": 70, "d": dim})
    add("decode-head-dims-differ", sizes={"n": 2, "m": 70, "d": 72, "dv": 24, "h": 6, "g": 2})


def _add_masks() -> None:
    sizes = {"n": 7, "m": 200, "d": 32, "h": 6, "g": 2}
    ends = torch.tensor([200, 60])

    def tree(make: Inputs) -> Arguments:
        """Drafted tokens that see what was there before, themselves and their ancestors."""
        ancestors = torch.eye(7, dtype=torch.bool)
        for token, parent in enumerate((-1, 0, 0, 1, 1, 2, 5)):
            if parent >= 0:
                ancestors[token] |= ancestors[parent]
        visible = torch.cat([torch.ones(7, 193, dtype=torch.bool), ancestors], 1)
        return {"mask": keep(visible) & lengths([200, 199])}

    def hidden_nan(make: Inputs) -> Arguments:
        k, v = make.normal(2, 2, 200, 32), make.normal(2, 2, 200, 32)
        k[:, :, 60:63], v[:, :, 61] = math.nan, math.inf
        mask = torch.ones(1, 200, dtype=torch.bool)
        mask[:, 60:63] = False
        return {"k": k, "v": v, "mask": mask}

    def seen_nan(make: Inputs) -> Arguments:
        v = make.normal(2, 2, 200, 32)
        v[1, 1, 198, 5] = math.nan
        return {"v": v}

    add("decode-tree", tree, sizes=sizes)
    add("decode-lengths", sizes=sizes, mask=lengths(ends) & causal(), q_offset=ends - 7)
    add("decode-no-keys", sizes=sizes, mask=lengths(torch.tensor([0, 3])))
    add("decode-window", sizes=sizes, mask=window(40), q_offset="end")
    add("decode-window-one-query", sizes={**sizes, "n": 1}, mask=window(70), q_offset="end")
    add("decode-causal-or-prefix", sizes=sizes, mask=causal() | prefix(9), q_offset=20)
    add("decode-mask-per-head", lambda make: {"mask": make.bools(6, 7, 200)}, sizes=sizes)
    add("decode-mask-of-keys", lambda make: {"mask": make.bools(2, 1, 1, 200)}, sizes={**sizes, "n": 1})
    add("decode-two-masks", lambda make: {"mask": keep(make.bools(7, 200)) & make.bools(2, 1, 1, 200)}, sizes=sizes)
    add("decode-sparse", lambda make: {"mask": make.bools(2, 6, 7, 200, p=0.01)}, sizes=sizes)
    add("decode-hidden-nan", hidden_nan, sizes=sizes)
    add("decode-seen-nan", seen_nan, sizes=sizes, mask=causal(), q_offset="end")


def _add_scores() -> None:
    sizes = {"n": 2, "m": 150, "d": 48, "h": 6, "g": 2}
    add("decode-scale-per-row", lambda make: {"scale": make.normal(2, 6, 2)}, sizes=sizes)
    add("decode-scale-zero-and-negative", sizes=sizes, scale=torch.tensor([0.0, -1.0, 0.5, 1.5, 0.0, -1.5]))
    add("decode-softcap", sizes=sizes, softcap=5.0, scale=1.0)
    add("decode-sink", sizes=sizes, sink=torch.tensor([0.0, 2.0, -math.inf, 50.0, -1e4, 1.0]), sink_keys=(0, 16, 149))
    add("decode-alibi", sizes=sizes, bias=alibi([0.5, 0.1, 0.02, -0.1, 0.0, 1.0]), q_offset="end", mask=causal())
    add("decode-relative", lambda make: {"bias": relative(make.normal(6, 41))}, sizes=sizes, q_offset="end")
    add("decode-bias", lambda make: {"bias": Dense(make.normal(6, 2, 150)) + make.normal(150)}, sizes=sizes)
    add(
        "decode-bias-minus-infinity",
        lambda make: {"bias": make.normal(2, 150).masked_fill(make.bools(2, 150), -math.inf)},
        sizes=sizes,
    )
    add(
        "decode-everything",
        lambda make: {
            "bias": make.normal(2, 1, 2, 150) + alibi([0.1] * 6) + relative(make.normal(9)),
            "mask": keep(make.bools(1, 150, p=0.8)) & causal(),
            "scale": make.normal(1, 6, 1),
        },
        sizes=sizes,
        softcap=20.0,
        sink=torch.linspace(-1, 1, 6),
        q_offset="end",
    )
    add("decode-large-scores", lambda make: {"q": 1e4 * make.normal(2, 6, 2, 48).clamp(-3, 3)}, sizes=sizes)


_add_sizes()
_add_masks()
_add_scores()
