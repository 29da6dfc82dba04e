"""What the variants share: refusing what they cannot honour, and exact attention over a mask of their own.

Nothing that a caller asked for is dropped silently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poise.mask import Mask
from poise.nn.attention import Call
from poise.op import attention

PLAIN = Call()


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, mask: Mask | None) -> Tensor:
    """Exact attention over `mask`, which already holds what is visible; all else as the call says."""
    out = attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        mask=mask,
        bias=call.bias,
        scale=call.scale,
        softcap=call.softcap,
        sink=call.sink,
        dropout=call.dropout,
        q_offset=call.q_offset,
        layout="bshd",
    )
    return out.transpose(1, 2)


def refuse(variant: str, call: Call, *parts: str, instead: str = "Use exact attention") -> None:
    """Raises ValueError if one of these parts is set: "causal", "mask", or a field of Call."""
    given = {
        "causal": call.visible.causal,
        "mask": call.visible.mask is not None,
        "bias": call.bias is not None,
        "softcap": call.softcap is not None,
        "sink": call.sink is not None,
        "dropout": call.dropout != 0,
        "q_offset": call.q_offset is not None,
    }
    for part in parts:
        if given[part]:
            raise ValueError(f"{variant} cannot honour {part}. {instead}, or leave {part} out")


def check_heads(variant: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [B, H, N, D], k [B, G, M, D], v [B, G, M, Dv], H a multiple of G."""
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"{variant}: q, k and v must be [batch, heads, sequence, dim]; got {q.dim()}, {k.dim()} and {v.dim()} dims"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{variant}: k and v must agree but in head dim; got {list(k.shape)} and {list(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{variant}: the heads of q must be a multiple of those of k; got {q.shape[1]} and {k.shape[1]}"
        )


def check_self_attention(variant: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
    """The same number of queries and keys, and a padding [B, N] or none."""
    check_heads(variant, q, k, v)
    check_padding(variant, call.visible.padding, k)
    refuse(variant, call, "q_offset", instead="It is a form of self-attention")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"{variant} is a form of self-attention: q has {q.shape[2]} positions, k has {k.shape[2]}")


def check_padding(variant: str, padding: Tensor | None, k: Tensor) -> None:
    """bool [B, M] or None."""
    if padding is not None and (padding.dtype is not torch.bool or padding.shape != (k.shape[0], k.shape[2])):
        raise ValueError(
            f"{variant}: padding must be bool [{k.shape[0]}, {k.shape[2]}], True for real keys; "
            f"got {padding.dtype} {list(padding.shape)}"
        )
