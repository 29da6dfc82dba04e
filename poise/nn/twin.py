"""The twin of torch.nn.MultiheadAttention: same state dict, same arguments, same polarity of masks, computed by poise.

`from_torch(module)` makes one that shares the module's parameters. Where torch gives NaN, for a query that sees no key,
the output is that of no attention at all. Letters: B batch, N queries, M keys, C width, H heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from poise.mask import Mask, causal, keep
from poise.nn.linear import linear
from poise.op import attention, scores
from poise.score import Bias


class TorchMultiheadAttention(nn.MultiheadAttention):
    """torch's module, and its forward pass by `poise.attention`; a subclass so that whoever looks for it finds it."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch documents it: in the masks True means "may not attend", floats are added. need_weights costs
        a pass over dense scores, in N × M memory; without it, none of either.
        """
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask is needed with is_causal=True, which is a hint about it, as in torch")
        q, k, v = self._projected(query, key, value)
        added = k.shape[2] - key.shape[1]  # rows of bias_k and zeros, which everybody sees
        if is_causal and need_weights is False and key_padding_mask is None and not added:
            mask: Mask | None = causal()
            bias: Tensor | Bias | None = None
            offset: str | None = "start"
        else:
            mask, bias = self._masked(key_padding_mask, attn_mask, query, added)
            offset = None
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            weights = scores(q, k, mask=mask, bias=bias, stage="prob").to(query.dtype)
            weights = nn.functional.dropout(weights, dropout)
            out = weights @ v
        else:
            weights = None
            out = attention(q, k, v, mask=mask, bias=bias, dropout=dropout, q_offset=offset)  # type: ignore[arg-type]
        out = linear(out.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, N, D], [B, H, M, D] and [B, H, M, D], with what add_bias_kv and add_zero_attn add."""
        width = self.embed_dim
        if self._qkv_same_embed_dim:
            parts = torch.split(self.in_proj_weight, width)
        else:
            parts = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = [None] * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, width)
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = torch.split(linear(query, self.in_proj_weight, self.in_proj_bias), width, -1)
        else:
            q, k, v = (linear(x, w, b) for x, w, b in zip((query, key, value), parts, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self.bias_k.expand(k.shape[0], -1, -1)), 1)
            v = torch.cat((v, self.bias_v.expand(v.shape[0], -1, -1)), 1)
        if self.add_zero_attn:
            k, v = nn.functional.pad(k, (0, 0, 0, 1)), nn.functional.pad(v, (0, 0, 0, 1))
        shape = (self.num_heads, self.head_dim)
        return tuple(x.view(*x.shape[:2], *shape).transpose(1, 2) for x in (q, k, v))  # type: ignore[return-value]

    def _masked(
        self, padding: Tensor | None, hidden: Tensor | None, query: Tensor, added: int
    ) -> tuple[Mask | None, Tensor | None]:
        """torch's two masks, True = may not attend or floats to add, as our mask and bias."""
        masks: list[Tensor] = []
        biases: list[Tensor] = []
        if padding is not None:
            masks, biases = _sorted(padding[:, None, None], masks, biases)
        if hidden is not None:
            if hidden.dim() == 3:
                hidden = hidden.view(query.shape[0], self.num_heads, *hidden.shape[1:])
            masks, biases = _sorted(hidden, masks, biases)
        mask: Mask | None = None
        for one in masks:
            kept = keep(nn.functional.pad(~one, (0, added), value=True))
            mask = kept if mask is None else mask & kept
        bias = None
        for term in biases:
            term = nn.functional.pad(term, (0, added))
            bias = term if bias is None else bias + term
        return mask, bias


def _sorted(given: Tensor, masks: list[Tensor], biases: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return ([*masks, given], biases) if given.dtype is torch.bool else (masks, [*biases, given])


def from_torch(module: nn.MultiheadAttention) -> TorchMultiheadAttention:
    """A twin that shares the parameters of a torch.nn.MultiheadAttention."""
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module must be a torch.nn.MultiheadAttention; got {type(module).__name__}")
    twin = TorchMultiheadAttention.__new__(TorchMultiheadAttention)
    twin.__dict__ = {**module.__dict__, "_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    return twin
