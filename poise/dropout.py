"""Which attention weights dropout keeps: a pure function of the seed and of (batch, head, query, key).

Philox4x32-10 (Salmon et al., 2011) in torch integer ops, on any device. A decision depends on nothing but absolute
indices, so every implementation draws the same mask whatever its blocks, and a backward pass draws it again instead of
storing it. This file does not apply the mask: who multiplies weights with V divides the kept ones by 1 - p.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


Seed = int | Tensor  # 64 bits, unsigned; as a tensor its two words, int64 [2], the lower first
UNDRAWN = -1


def draw_seed() -> Seed:
    """64 bits from torch's default generator: one draw per call, so torch.manual_seed reproduces a run.

    A tensor where a compiler or torch.func looks on: the first would keep a number as a constant, the second has none.
    """
    words = torch.randint(0, 1 << 32, (2,), dtype=torch.int64, device="cpu")
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return words
    return as_number(words)


def as_number(seed: Tensor) -> int:
    low, high = seed.tolist()
    return int(low) | int(high) << 32


def philox(counter: Words, seed: Seed) -> Words:
    """Four words (int64 tensors in [0, 2^32)) of Philox4x32-10 for a counter of four words that broadcast together."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed.unbind() if isinstance(seed, Tensor) else (seed & _MASK, (seed >> 32) & _MASK)
    for _ in range(_ROUNDS):
        # The 64-bit products wrap around the sign; masking after the (arithmetic) shift makes that harmless.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ key0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ key1
        c1, c3 = product1 & _MASK, product0 & _MASK
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def keep(seed: Seed, b: int | Tensor, h: int | Tensor, heads: int, rows: Tensor, keys: Tensor, p: float) -> Tensor:
    """True where the weight of (b, h, i, j) survives dropout with probability p.

    rows: int64 [n], keys: int64 [m], the absolute indices i and j of this call (q_offset plays no part). b and h are
    ints or int64 tensors of one shape S after broadcasting, for instance [B, 1] and [1, H]. Returns bool [*S, n, m].

    The counter is (b * heads + h, i, j // 4, 0), the word number j % 4, and a weight is kept if word >= floor(p 2^32).
    """
    device = rows.device
    head = torch.as_tensor(b, device=device) * heads + torch.as_tensor(h, device=device)
    quads, inverse = torch.unique(keys // 4, return_inverse=True)  # one Philox call serves four neighbouring keys
    counter0 = head.to(torch.int64)[..., None, None]  # [*S, 1, 1]
    counter1 = rows.to(torch.int64)[:, None]  # [n, 1]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = torch.stack(philox((counter0, counter1, quads, zero), seed), dim=-1)
    return words[..., inverse, keys % 4] >= int(p * 2.0**32)  # [*S, n, m]


def all_heads(seed: Seed, batch: int, heads: int, rows: Tensor, keys: Tensor, p: float) -> Tensor:
    """`keep` for every batch element and head at once: bool [B, H, n, m]."""
    b = torch.arange(batch, device=rows.device)[:, None]
    h = torch.arange(heads, device=rows.device)[None, :]
    return keep(seed, b, h, heads, rows, keys, p)
