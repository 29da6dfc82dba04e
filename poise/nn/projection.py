"""Queries, keys and values from their inputs: one matrix product where inputs are shared, and either form of weights.

No attention here, and no positions. Letters: B batch, N positions, C width, H query heads, G key/value heads, Dk and Dv
head dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from poise.nn.linear import linear

_PARTS = ("query", "key", "value")


class Projection(nn.Module):
    """W_Q, W_K and W_V as one matrix, `weight` [H Dk + G Dk + G Dv, C], whose rows are queries, then keys, then values.

    A state dict may hold that matrix, or three: `query.weight`, `key.weight`, `value.weight` (and biases; one that is
    missing counts as zeros). What is saved is fused.

    clip: components of queries, keys and values are clamped to [-clip, clip] (clip_qkv in OLMo, MPT and DBRX).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.clip = clip
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {heads} and {kv_heads}")
        if head_dim is None:
            if width % heads:
                raise ValueError(f"width must be a multiple of heads; got {width} and {heads}. Or pass head_dim")
            head_dim = width // heads
        self.width, self.heads, self.kv_heads = width, heads, kv_heads
        self.head_dim, self.value_dim = head_dim, head_dim if value_dim is None else value_dim
        self.rows = [heads * head_dim, kv_heads * head_dim, kv_heads * self.value_dim]
        self.weight = nn.Parameter(torch.empty(sum(self.rows), width))
        self.bias = nn.Parameter(torch.zeros(sum(self.rows))) if bias else None
        for part in torch.split(self.weight, self.rows):
            nn.init.xavier_uniform_(part)

    def extra_repr(self) -> str:
        return (
            f"{self.width}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
            f"value_dim={self.value_dim}, bias={self.bias is not None}"
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, N, C] to queries and keys [B, N, H + G, Dk], side by side, and values [B, N, G, Dv]."""
        together = self._clipped(linear(x, self.weight, self.bias))
        keyed = self.rows[0] + self.rows[1]
        return _heads(together[..., :keyed], self.head_dim), _heads(together[..., keyed:], self.value_dim)

    def queries(self, x: Tensor) -> Tensor:
        """x [B, N, C] to queries [B, N, H, Dk]."""
        end = self.rows[0]
        bias = None if self.bias is None else self.bias[:end]
        return _heads(self._clipped(linear(x, self.weight[:end], bias)), self.head_dim)

    def keys_values(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """context [B, M, C] to keys [B, M, G, Dk] and values [B, M, G, Dv]."""
        start, keyed = self.rows[0], self.rows[1]
        bias = None if self.bias is None else self.bias[start:]
        together = self._clipped(linear(context, self.weight[start:], bias))
        return _heads(together[..., :keyed], self.head_dim), _heads(together[..., keyed:], self.value_dim)

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "query.weight" in state_dict:
            weights = [
                state_dict.pop(f"{prefix}{part}.weight") for part in _PARTS if f"{prefix}{part}.weight" in state_dict
            ]
            state_dict[prefix + "weight"] = torch.cat(weights)
            biases = [state_dict.pop(f"{prefix}{part}.bias", None) for part in _PARTS]
            if any(bias is not None for bias in biases):
                like = weights[0]
                state_dict[prefix + "bias"] = torch.cat(
                    [
                        like.new_zeros(rows) if bias is None else bias
                        for bias, rows in zip(biases, self.rows, strict=True)
                    ]
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _heads(x: Tensor, dim: int) -> Tensor:
    """[B, N, heads · D] as [B, N, heads, D]."""
    return x.view(*x.shape[:-1], x.shape[-1] // dim, dim)
