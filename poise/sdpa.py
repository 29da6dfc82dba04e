"""torch's scaled_dot_product_attention by poise: its signature, its conventions, and none of its accidents.

Conventions only: shapes that broadcast, a mask that may be bool or additive, causality from the top left, autocast. The
work is op.py's.
"""

from __future__ import annotations

import sys
from numbers import Real

import torch
from torch import Tensor

from poise import op
from poise.algebra import broadcasts
from poise.arguments import ScaleLike, check_ordinary
from poise.dispatch import EVERYTHING, REFUSALS, attend, is_plain, wants_grad
from poise.kernels import training
from poise.mask import UNBOUNDED, Mask, causal, keep
from poise.op import attention
from poise.problem import autocast

_LARGEST = sys.float_info.max
_CAUSAL = causal()
_FROM_THE_START = (UNBOUNDED, 0, 0)  # left, right, offset


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, same arguments, same results.

    query [..., H, L, E], key [..., H, S, E], value [..., H, S, Ev], whose leading dims broadcast; with enable_gqa key
    and value may have fewer heads that divide H. attn_mask: bool (True = may attend) or added to the scores, and
    broadcastable to [..., H, L, S]. is_causal: query i sees keys j <= i (top left), also when L != S. scale: None for
    1/√E.

    Where torch's own backends contradict each other, this is what it does:
    - attn_mask and is_causal together: both hold, as in torch's fused CPU kernel (torch's documentation promises an
      error, and its other backends raise one);
    - attn_mask of any number of dims broadcasts, as in torch's unfused path (its fused kernel wants two or more);
    - a query that sees no key, whether by bools or by -inf, gives 0; finfo.min is a finite number, so a row full of it
      gives the mean of the values;
    - a scale of NaN or infinity gives NaN for every query that sees a key (in torch's fused kernel a NaN gives 0).
    And here it departs from torch:
    - NaN or Inf in masked keys and values never reaches the output (in torch it does);
    - 0 < dropout_p < 1 draws another mask than torch would from the same seed;
    - dropout_p outside [0, 1], keys and values of different lengths, and no key head for some query head raise (one or
      another of torch's backends computes something).

    >>> poise.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    try:
        if (
            attend is not None
            and attn_mask is None
            and dropout_p == 0.0
            and type(is_causal) is bool
            and (scale is None or (type(scale) is float and -_LARGEST <= scale <= _LARGEST))
            # Without enable_gqa torch lets a single key head broadcast, and refuses other ratios.
            and (enable_gqa is True or (enable_gqa is False and query.size(1) == key.size(1)))
            and op._observer is None
            and is_plain(query, key, value)
        ):
            band = _FROM_THE_START if is_causal else EVERYTHING
            attending = training.attend if wants_grad(query, key, value) else attend
            return attending(query, key, value, scale, *band, False)
    except REFUSALS:
        pass
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_ordinary(name, tensor)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False; got {type(flag).__name__}")
    dropout_p = _number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be a probability, 0 <= dropout_p <= 1; got {dropout_p}")
    factor: ScaleLike | None = None
    if scale is not None:
        factor = _number("scale", scale)
        if not -_LARGEST <= factor <= _LARGEST:
            factor = torch.tensor(factor, device="cpu")  # as a number it would be refused
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    query, key, value = _broadcast(query, key, value, enable_gqa)
    *lead, length, _ = query.shape
    mask: Mask | None = _CAUSAL if is_causal else None
    bias: Tensor | None = None
    if attn_mask is not None:
        _check_mask(attn_mask, query, (*lead, length, key.shape[-2]))
        if query.dim() > 4 and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead[:-1], *attn_mask.shape[-3:]).flatten(0, -4)
        if attn_mask.dtype is torch.bool:
            mask = keep(attn_mask) if mask is None else keep(attn_mask) & mask
        else:
            bias = attn_mask
    if query.dim() > 4:
        query, key, value = (tensor.flatten(0, -4) for tensor in (query, key, value))
    dropped = dropout_p == 1.0
    out = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=factor,
        dropout=0.0 if dropped else dropout_p,
        q_offset="start",
    )
    if dropped:
        out = out * 0.0  # as torch: 0, and 0 to the gradients, but NaN stays NaN; and no random number is drawn
    return out.reshape(*lead, *out.shape[-2:])


def _number(name: str, value: object) -> float:
    """What torch takes for a float: any real number, also a bool, one of numpy, or a 0-D tensor without a gradient."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad and not value.is_complex():
        return float(value)
    raise TypeError(f"{name} must be a number; got {type(value).__name__}")


def _broadcast(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Leading dims expanded to common ones, without a copy; with enable_gqa all but the heads."""
    tensors = (query, key, value)
    fixed = 3 if enable_gqa else 2
    if any(tensor.dim() < fixed for tensor in tensors):
        need = "3 dims [heads, sequence, dim] for enable_gqa=True" if enable_gqa else "2 dims [sequence, dim]"
        raise ValueError(f"query, key and value must have at least {need}; got {_shapes(*tensors)}")
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-fixed] for x in tensors))  # type: ignore[no-untyped-call]
    except RuntimeError:
        hint = "" if enable_gqa else ". For fewer key than query heads pass enable_gqa=True"
        raise ValueError(
            f"the leading dims of query, key and value must broadcast; got {_shapes(*tensors)}{hint}"
        ) from None
    query, key, value = (tensor.expand(*lead, *tensor.shape[-fixed:]) for tensor in tensors)
    if enable_gqa and key.shape[-3] != value.shape[-3]:
        # torch repeats keys and values each by its own factor; poise groups both alike.
        heads = query.shape[-3]
        if 0 in (key.shape[-3], value.shape[-3]) or heads % key.shape[-3] or heads % value.shape[-3]:
            raise ValueError(f"the heads of key and of value must divide those of query; got {_shapes(*tensors)}")
        key, value = (tensor.repeat_interleave(heads // tensor.shape[-3], -3) for tensor in (key, value))
    return query, key, value


def _check_mask(attn_mask: object, query: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(attn_mask, Tensor):
        way_out = ". poise.attention takes it as mask=" if isinstance(attn_mask, Mask) else ""
        raise TypeError(f"attn_mask must be a tensor or None; got {type(attn_mask).__name__}{way_out}")
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(
            f"attn_mask must be bool, float32 or of query's dtype {query.dtype}; got {attn_mask.dtype}. "
            "Convert it: .bool() if it says who may attend, .to(query.dtype) if it is added to the scores"
        )
    fits = attn_mask.dim() <= len(shape) and all(
        broadcasts(got, want) for got, want in zip(reversed(attn_mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask must broadcast to [..., query heads, queries, keys], here {list(shape)}; "
            f"got {list(attn_mask.shape)}"
        )


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
