"""The awkward calls of the case table: strides, numbers at the end of their range, NaN and infinities.

Importing this file adds them to `cases.CASES`.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from poise.mask import causal, keep, lengths, window
from poise.testing.cases import Arguments, Inputs, add


def _add_layouts() -> None:
    def sliced(make: Inputs) -> Arguments:
        q, k, v = make.normal(2, 65, 3, 2, 16).permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        return {"q": q, "k": k, "v": v}

    def sequence_first(make: Inputs) -> Arguments:
        return {"q": make.normal(2, 33, 4, 16), "k": make.normal(2, 65, 2, 16), "v": make.normal(2, 65, 2, 24)}

    def strided_last(make: Inputs) -> Arguments:
        return {
            "q": make.normal(2, 2, 16, 33).mT,
            "k": make.normal(2, 2, 65, 32)[..., ::2],
            "v": make.normal(2, 2, 16, 65).mT,
        }

    def broadcast(make: Inputs) -> Arguments:
        return {
            "k": make.normal(1, 1, 65, 16).expand(2, 2, -1, -1),
            "v": make.normal(1, 2, 1, 16).expand(2, -1, 65, -1),
        }

    def far_apart(make: Inputs) -> Arguments:
        # Two heads more than 2^31 bytes apart (for four-byte elements); the pages between are never touched.
        gap = 1 << 29
        wide = torch.empty(gap + 65 * 16, dtype=make.dtype).as_strided((1, 2, 65, 16), (0, gap, 16, 1))
        return {"k": wide.copy_(make.normal(1, 2, 65, 16))}

    def padded_rows(make: Inputs) -> Arguments:
        return {
            "q": make.normal(2, 2, 33, 1000)[..., 5:21],
            "k": make.normal(2, 2, 65, 19)[..., 3:],
            "v": make.normal(2, 2, 65, 17)[..., 1:],
        }

    def backwards(make: Inputs) -> Arguments:
        return {"q": make.normal(33, 2, 2, 16).permute(2, 1, 0, 3), "k": make.normal(65, 2, 2, 16).permute(1, 2, 0, 3)}

    add("layout-sliced-qkv", sliced, mask=causal())
    add("layout-bshd", sequence_first, layout="bshd", mask=causal(), q_offset="end")
    add(
        "layout-bshd-no-batch",
        lambda make: {"q": make.normal(33, 4, 16), "k": make.normal(65, 2, 16), "v": make.normal(65, 2, 16)},
        layout="bshd",
    )
    add(
        "layout-three-dims",
        lambda make: {"q": make.normal(4, 33, 16), "k": make.normal(2, 65, 16), "v": make.normal(2, 65, 16)},
    )
    add(
        "layout-two-dims",
        lambda make: {"q": make.normal(33, 16), "k": make.normal(65, 16), "v": make.normal(65, 7)},
        sink=torch.tensor([0.2]),
    )
    add("layout-strided-last-dim", strided_last)
    add("layout-broadcast", broadcast)
    add("layout-far-apart", far_apart, sizes={"b": 1})
    add("layout-padded-rows", padded_rows)
    add("layout-any-order", backwards)
    add("layout-aliased", lambda make: dict.fromkeys(("q", "k", "v"), make.normal(2, 2, 65, 16)), mask=causal())


def _add_extremes() -> None:
    def some(sign: float, make: Inputs) -> Arguments:
        return {"bias": torch.where(make.bools(33, 65), sign * make.largest, 0.0).to(make.dtype)}

    def every(sign: float, make: Inputs) -> Arguments:
        return {"bias": torch.full((33, 65), sign * make.largest, dtype=make.dtype)}

    add("extreme-scores-1e4", scale=1e4 / 16)
    add("extreme-scores-causal", scale=-1e4 / 16, mask=causal(), q_offset="end")
    add("extreme-equal-scores", lambda make: {"k": make.normal(2, 2, 1, 16).expand(2, 2, 65, 16).contiguous()})
    add(
        "extreme-equal-large-scores",
        lambda make: {"k": make.normal(2, 2, 1, 16).expand(2, 2, 65, 16).contiguous()},
        scale=50.0,
    )
    add("extreme-zero-queries", lambda make: {"q": torch.zeros(2, 2, 33, 16, dtype=make.dtype)})
    add(
        "extreme-ascending",
        lambda make: {"k": make.normal(2, 2, 65, 16) * torch.linspace(0, 8, 65).to(make.dtype)[:, None]},
    )
    for name, sign in (("largest", 1.0), ("smallest", -1.0)):
        add(f"extreme-bias-{name}", partial(some, sign))
        add(f"extreme-bias-all-{name}", partial(every, sign))
    add(
        "extreme-bias-both",
        lambda make: {
            "bias": torch.where(make.bools(33, 65), 0.88 * make.largest, -0.88 * make.largest).to(make.dtype)
        },
    )
    add(
        "extreme-bias-smallest-rows",
        lambda make: {"bias": torch.where(make.bools(33, 1), -make.largest, 0.0).expand(33, 65).to(make.dtype)},
        mask=causal(),
        q_offset="end",
    )
    add("extreme-bias-minus-1e4", lambda make: {"bias": torch.where(make.bools(2, 1, 1, 65), 0.0, -1e4).to(make.dtype)})
    add("extreme-values", lambda make: {"v": make.normal(2, 2, 65, 16) * 1e3})
    add(
        "extreme-tiny-values",
        lambda make: {"v": make.normal(2, 2, 65, 16) * 1e-4, "k": make.normal(2, 2, 65, 16) * 1e-4},
    )


def _poisoned(tensor: Tensor, at: Tensor, make: Inputs) -> Tensor:
    """NaN, inf and -inf in the keys chosen by `at` [B, H|1, M]."""
    values = torch.tensor([math.nan, math.inf, -math.inf], dtype=tensor.dtype)
    noise = values[torch.randint(0, 3, tensor.shape, generator=make.generator)]
    return torch.where(at[..., None], noise, tensor)


def _add_poison() -> None:
    """Masked NaN and infinities, which must not show, and attended ones, which must."""

    def masked_tail(make: Inputs) -> Arguments:
        given = make.qkv()
        hidden = torch.arange(65) >= torch.tensor([[[40]], [[7]]])  # [B, 1, M]
        return {
            **given,
            "k": _poisoned(given["k"], hidden, make),
            "v": _poisoned(given["v"], hidden, make),
            "mask": lengths([40, 7]),
        }

    def masked_tensor(make: Inputs) -> Arguments:
        given, visible = make.qkv(), make.bools(2, 1, 1, 65)
        hidden = ~visible[:, :, 0]
        return {
            **given,
            "k": _poisoned(given["k"], hidden, make),
            "v": _poisoned(given["v"], hidden, make),
            "mask": visible,
        }

    def masked_by_bias(make: Inputs) -> Arguments:
        given = masked_tensor(make)
        return {**given, "bias": torch.where(given.pop("mask"), 0.5, -math.inf).to(make.dtype)}

    def future(make: Inputs, where: str) -> Arguments:
        # The last keys are hidden from most rows and attended by a few: those show it, the others do not.
        given = make.qkv(n=65)
        given[where][:, :, 61] = math.nan
        return {**given, "mask": causal()}

    def masked_bias(make: Inputs) -> Arguments:
        visible = make.bools(2, 33, 65)
        return {"bias": torch.where(visible, make.normal(2, 33, 65), math.nan), "mask": visible}

    def attended_infinite_value(make: Inputs) -> Arguments:
        given = make.qkv(n=65)
        given["v"][0, 1, 50, 3], given["v"][1, 0, 60, 5] = math.inf, -math.inf
        return {**given, "mask": causal()}

    def attended(make: Inputs, where: str) -> Arguments:
        given = make.qkv(n=65)
        given[where][0, 1, 17, 2] = math.nan
        return {**given, "mask": window(3)}

    def scattered(make: Inputs) -> Arguments:
        given = make.qkv(n=130, m=130, b=1)
        for where in ("k", "v"):
            given[where][:, :, ::41] = math.nan
        return {
            **given,
            "mask": window(9, 9) & ~keep((torch.arange(130) % 41 == 0)[None, :] & make.bools(130, 1, p=0.7)),
        }

    add("poison-masked-tail", masked_tail)
    add("poison-masked-tensor", masked_tensor)
    add("poison-masked-by-bias", masked_by_bias)
    add("poison-masked-bias", masked_bias)
    add(
        "poison-empty-rows",
        lambda make: {"k": torch.full((2, 2, 65, 16), math.nan, dtype=make.dtype), "mask": lengths([0, 0])},
    )
    add("poison-future-k", lambda make: future(make, "k"))
    add("poison-future-v", lambda make: future(make, "v"))
    add("poison-attended-q", lambda make: attended(make, "q"))
    add("poison-attended-k", lambda make: attended(make, "k"))
    add("poison-attended-v", lambda make: attended(make, "v"))
    add("poison-attended-infinite-v", attended_infinite_value)
    add(
        "poison-attended-bias",
        lambda make: {"bias": make.normal(33, 65).masked_fill(make.bools(33, 65, p=0.01), math.nan)},
    )
    add("poison-scattered", scattered)
    add("poison-sink", lambda make: masked_tail(make), sink=torch.tensor([0.5, -1.0]))


_add_layouts()
_add_extremes()
_add_poison()
