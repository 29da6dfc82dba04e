"""BigBird: blocks of keys, a window of three, the first and the last, and a few at random (arXiv:2007.14062).

Who sees whom is a map of blocks, so that the operator skips the rest. A key counts once however many rules name it;
`hf_compat` counts as the Hugging Face implementation does in evaluation.

Letters: B batch, H query heads, N positions, P blocks, r random blocks a row.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from poise.mask import Blocks, Mask
from poise.nn.attention import Call
from poise.variants.calls import PLAIN, attend, check_self_attention, refuse


class BigBird:
    """Block-sparse attention; an attention choice of poise.nn, without parameters.

    block: positions in a block; the last may be shorter.
    random: r, random blocks that each row of blocks sees beyond its window and the global ones, chosen per head.
    seed: of that choice, which depends on nothing else but the number of heads and blocks; give each layer its own.
    hf_compat: what transformers computes in eval mode. Its random blocks are then all block 0, so that rows between
        the first and the last block count it 1 + r times; and sequences of up to (5 + 2 r) blocks are attended fully.

    >>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    >>> BigBird(64)(q, k, v).shape
    torch.Size([1, 8, 4096, 64])
    """

    def __init__(self, block: int = 64, random: int = 3, *, seed: int = 0, hf_compat: bool = False) -> None:
        if block < 1:
            raise ValueError(f"BigBird: block must be at least 1; got {block}")
        if random < 0:
            raise ValueError(f"BigBird: random must not be negative; got {random}")
        self.block, self.random, self.seed, self.hf_compat = block, random, seed, hf_compat

    def __repr__(self) -> str:
        compat = ", hf_compat=True" if self.hf_compat else ""
        return f"BigBird(block={self.block}, random={self.random}, seed={self.seed}{compat})"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN) -> Tensor:
        """[B, H, N, Dv] from q [B, H, N, D], k and v with as many positions."""
        check_self_attention("BigBird", q, k, v, call)
        if self.hf_compat:
            return self._as_transformers(q, k, v, call)
        mask = bigbird_mask(q.shape[2], self.block, q.shape[1], self.random, self.seed)
        return attend(q, k, v, call, call.visible.for_call(q, k, mask))

    def _as_transformers(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The first and the last block of queries see all keys; the others count block 0 more often, by a bias."""
        refuse("BigBird(hf_compat=True)", call, "causal", "mask", "bias", instead="Use hf_compat=False")
        length, size = q.shape[2], self.block
        padding = call.visible.joined
        if length <= (5 + 2 * self.random) * size:
            return attend(q, k, v, call, padding)
        last = (length - 1) // size * size
        mask = bigbird_mask(length, size, 1, 0, 0)
        mask = mask if padding is None else mask & padding
        counted = torch.zeros(length, device=q.device)
        counted[:size] = math.log(1 + self.random)
        middle = attend(q[:, :, size:last], k, v, call._replace(q_offset=size, bias=counted[None]), mask)
        first, final = (attend(x, k, v, call, padding) for x in (q[:, :, :size], q[:, :, last:]))
        return torch.cat([x.transpose(1, 2) for x in (first, middle, final)], 1).transpose(1, 2)


def bigbird_map(count: int, heads: int, random: int, seed: int) -> Tensor:
    """bool [H, P, P]: which blocks of keys each block of queries sees."""
    place = torch.arange(count)
    edge = (place == 0) | (place == count - 1)
    ruled = edge[:, None] | edge | ((place[:, None] - place).abs() <= 1)
    if random == 0:
        return ruled[None].expand(heads, -1, -1)
    draw = torch.rand(heads, count, count, generator=torch.Generator().manual_seed(seed))
    chosen = draw.masked_fill(ruled, -1.0).topk(min(random, count), -1)
    # Rows that have fewer than r blocks left see them all; what topk took beyond those was ruled in before.
    return ruled.expand(heads, -1, -1).clone().scatter_(2, chosen.indices, True)


@lru_cache(maxsize=64)
def bigbird_mask(length: int, block: int, heads: int, random: int, seed: int) -> Mask:
    """The mask of one layer. It follows from these numbers, which are its key, so that its lowering is cached."""
    count = -(-length // block)
    table = bigbird_map(count, heads, random, seed)
    return Blocks(table[None], block, ("bigbird", count, block, heads, random, seed))
