"""Batches of ragged rows laid side by side in one row, so that no padding is computed; and back.

Attention keeps to its own row by `documents`, everything else in an encoder acts on each token alone.

Letters: B rows, N positions, T real tokens in all, C width.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from poise.mask import documents
from poise.nn.attention import Visible


class Packing:
    """Where the real tokens of a batch [B, N] go: `real` bool [B, N], in any pattern.

    places [1, T]: each token's column in the batch, its position. visible: a token sees the real ones of its own row.
    """

    def __init__(self, real: Tensor) -> None:
        if real.dtype is not torch.bool or real.dim() != 2:
            raise TypeError(
                f"padding must be bool [batch, positions], True = real; got {real.dtype} {list(real.shape)}"
            )
        self.real = real
        self.rows, columns = real.nonzero(as_tuple=True)
        self.places = columns[None]
        self.counts = real.sum(1)
        self.bounds = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0))

    @cached_property
    def visible(self) -> Visible:
        return Visible(mask=documents(cu_seqlens=self.bounds))

    @property
    def runs(self) -> bool:
        """Whether the tokens of every row stand next to each other, so that distances are the same when packed."""
        return not bool(((self.places[0].diff() != 1) & (self.rows.diff() == 0)).any())

    def pack(self, x: Tensor) -> Tensor:
        """[B, N, ...] to [1, T, ...]."""
        return x[self.real][None]

    def unpack(self, y: Tensor) -> Tensor:
        """[1, T, ...] to [B, N, ...], zeros where there is padding."""
        out = y.new_zeros(*self.real.shape, *y.shape[2:])
        out[self.real] = y[0]
        return out

    def mean(self, y: Tensor) -> Tensor:
        """The mean over each row's tokens: [1, T, C] to [B, C]; a row without tokens gives zeros."""
        sums = y.new_zeros(self.real.shape[0], y.shape[2]).index_add(0, self.rows, y[0])
        return sums / self.counts.clamp(min=1)[:, None]

    def first(self, y: Tensor) -> Tensor:
        """The first token of each row: [1, T, C] to [B, C]."""
        if not self.counts.all():
            raise ValueError("padding hides every token of a row: give each row at least one")
        return y[0, self.bounds[:-1]]
