"""What a user may write for each argument of a call: one check for each, which also brings it to normal form.

Every error message about arguments is here, but for those of masks, biases and caches, which know their own (mask.py,
score.py, kvview.py). A message names the argument, what was got and what to do. Nothing is computed or chosen here, and
no q, k or v is copied.

Letters: B batch, H query heads, G key/value heads, N queries, M keys, Dk and Dv head dims.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from numbers import Real
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from poise.algebra import broadcasts
from poise.kvview import FLOATS, KVView
from poise.mask import Lowered, Mask, Shape, keep
from poise.score import Bias, terms

MaskLike: TypeAlias = Mask | Tensor
BiasLike: TypeAlias = Bias | Tensor
ScaleLike: TypeAlias = float | Tensor
OffsetLike: TypeAlias = int | Tensor | Literal["start", "end"]
Layout: TypeAlias = Literal["bhsd", "bshd"]

LAYOUTS = ("bhsd", "bshd")
# Positions reach kernels as 32-bit numbers.
MAX_OFFSET = 2**31 - 1
_LARGEST = sys.float_info.max


def check_view(q: Tensor, view: KVView, v: Tensor | None, layout: str) -> tuple[Tensor, KVView]:
    """q as a [B, H, N, D] view, and the cache's view without unfilled places."""
    if v is not None:
        raise TypeError(f"v must be left out where k is a KVView, which has the values; got {type(v).__name__}")
    _check_layout(layout)
    _check_tensor("q", q, layout)
    q = _four_dims(q, layout)
    view.check(q)
    return q, view.trimmed()


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(
            "layout must be 'bhsd' (batch, heads, sequence, dim) or 'bshd' (batch, sequence, heads, dim); "
            f"got {layout!r}"
        )


def check_ordinary(name: str, tensor: object) -> Tensor:
    """A tensor whose elements lie in memory by strides."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(
            f"{name} must be an ordinary dense tensor; got a {kind} one. "
            "Pad it and pass mask=poise.lengths(...), or pack it and pass mask=poise.documents(...)"
        )
    return tensor


def _check_tensor(name: str, given: object, layout: str) -> None:
    tensor = check_ordinary(name, given)
    if not 2 <= tensor.dim() <= 4:
        raise ValueError(
            f"{name} must have 2 to 4 dims, {_expected(layout)} (batch, or batch and heads, may be left out); "
            f"got {_dims(tensor)}"
        )
    if name == "q" and tensor.dtype not in FLOATS:
        raise TypeError(
            f"q must be float32, bfloat16, float16 or float64; got {_name(tensor.dtype)}. Convert q, k and v"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [B, H|G, N|M, D] views."""
    _check_layout(layout)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, layout)
    assert v is not None
    if not q.dim() == k.dim() == v.dim():
        raise ValueError(f"q, k and v must have the same number of dims; got {_three(q, k, v)}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype; got q {_name(q.dtype)}, k {_name(k.dtype)}, v {_name(v.dtype)}. "
            "Convert them to the same dtype first"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device; got q on {q.device}, k on {k.device}, v on {v.device}. "
            "Move them with .to(q.device)"
        )
    given = (q, k, v)
    q, k, v = (_four_dims(tensor, layout) for tensor in given)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v must have the same batch size; got {_three(*given)}. Expand the smaller one with .expand"
        )
    if k.shape[1] != v.shape[1]:
        raise ValueError(
            f"k and v must have the same number of heads; got {k.shape[1]} and {v.shape[1]}: {_three(*given)}"
        )
    if k.shape[2] != v.shape[2]:
        raise ValueError(
            f"k and v must hold the same number of keys; got {k.shape[2]} and {v.shape[2]}: {_three(*given)}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dim; got {q.shape[3]} and {k.shape[3]}: {_three(*given)}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"the heads of q must be a multiple of the heads of k and v; got {heads} and {kv_heads}: {_three(*given)}"
            + _layout_hint(q, k, layout)
        )
    return q, k, v


def _four_dims(tensor: Tensor, layout: str) -> Tensor:
    """A [B, H, N, D] view of [N, D], [H, N, D] ([N, H, D] for bshd) or four dims."""
    if tensor.dim() == 2:
        return tensor[None, None]
    if tensor.dim() == 3:
        tensor = tensor[None]
    return tensor.transpose(1, 2) if layout == "bshd" else tensor


def _layout_hint(q: Tensor, k: Tensor, layout: str) -> str:
    """Heads that do not divide are most often a sequence axis read as heads."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads or q.shape[1] == 1:
        return ""
    other = "bshd" if layout == "bhsd" else "bhsd"
    return f". If these are {_expected(other)} tensors, pass layout={other!r}"


def check_mask(mask: object, shape: Shape, device: torch.device) -> Mask | None:
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        if mask.dtype is not torch.bool:
            way_out = "as bias=, it is added to the scores" if mask.is_floating_point() else "as mask.bool()"
            raise TypeError(
                "mask must be a bool tensor (True = may attend) or a mask object; "
                f"got {_name(mask.dtype)}. Pass it {way_out}"
            )
        mask = keep(mask)
    if not isinstance(mask, Mask):
        name = getattr(mask, "__name__", "")
        hint = f". Call it: poise.{name}(...)" if callable(mask) and name else ""
        raise TypeError(
            f"mask must be a mask object such as poise.causal(), a bool tensor or None; got {type(mask).__name__}{hint}"
        )
    mask.validate(shape, device)
    return mask


def check_bias(bias: BiasLike | None, shape: Shape, q: Tensor) -> tuple[Bias, ...]:
    checked = terms(bias)
    for term in checked:
        term.validate(shape, q.device)
    return checked


def check_scale(scale: ScaleLike | None, shape: Shape, q: Tensor, dim: int) -> float | Tensor:
    batch, heads, queries, _ = shape
    if scale is None:
        return 1.0 / math.sqrt(dim) if dim else 1.0
    if not isinstance(scale, Tensor):
        factor = None if isinstance(scale, bool) else _number(scale)
        if factor is None:
            raise TypeError(
                f"scale must be None, a number or a tensor; got {type(scale).__name__}. "
                "Pass None for 1 / sqrt(head dim)"
            )
        if not -_LARGEST <= factor <= _LARGEST:  # math.isfinite takes no symbolic number of a compiler
            raise ValueError(f"scale must be finite; got {factor}. Pass None for 1 / sqrt(head dim)")
        return float(factor)
    if not scale.is_floating_point():
        raise TypeError(f"scale must be a floating-point tensor; got {_name(scale.dtype)}. Convert it with .float()")
    if scale.dim() == 0:
        # A CPU scalar is a number wherever q lives, as in torch's own arithmetic.
        return scale.to(q.device, _statistic_dtype(q)).reshape(1, 1, 1)
    fits = tuple(scale.shape) == (heads,) or (
        scale.dim() == 3
        and all(broadcasts(size, full) for size, full in zip(scale.shape, (batch, heads, queries), strict=True))
    )
    if not fits:
        raise ValueError(
            "scale must be 0-D, [heads] or [batch|1, heads|1, queries|1], "
            f"here [{heads}] or [{batch}|1, {heads}|1, {queries}|1]; got {list(scale.shape)}"
        )
    _same_device("scale", scale, q.device)
    per_row = scale[None, :, None] if scale.dim() == 1 else scale
    return per_row.to(_statistic_dtype(q))


def check_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    cap = None if isinstance(softcap, bool) else _number(softcap)
    if cap is None:
        raise TypeError(f"softcap must be None or a number; got {type(softcap).__name__}. Pass None for no cap")
    if not 0 < cap <= _LARGEST:
        raise ValueError(f"softcap must be positive and finite; got {cap}. Pass None for no cap")
    return float(cap)


def check_sink(sink: Tensor | None, heads: int, q: Tensor) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        raise TypeError(
            f"sink must be a tensor of one logit per query head; got {type(sink).__name__}. "
            f"For the same logit everywhere pass torch.full(({heads},), logit)"
        )
    if tuple(sink.shape) != (heads,):
        raise ValueError(f"sink must hold one logit per query head, [{heads}]; got {list(sink.shape)}")
    if not sink.is_floating_point():
        raise TypeError(f"sink must be a floating-point tensor; got {_name(sink.dtype)}. Convert it with .float()")
    _same_device("sink", sink, q.device)
    return sink.to(_statistic_dtype(q))


def check_dropout(dropout: float) -> float:
    # False is 0, as in `dropout=self.training and 0.1`; True is 1, and refused as that is.
    p = _number(dropout)
    if p is None:
        raise TypeError(f"dropout must be a number; got {type(dropout).__name__}. Pass 0.0 for none")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout must be a probability, 0 <= dropout < 1; got {p}. Pass 0.0 for none")
    return float(p)


def check_offset(
    q_offset: OffsetLike | None,
    shape: Shape,
    device: torch.device,
    mask: Mask | None,
    bias: tuple[Bias, ...],
) -> int | Tensor:
    batch, _, queries, keys = shape
    if q_offset is None:
        if isinstance(mask, Lowered):
            return mask.offset
        if queries != keys and ((mask is not None and mask.positional) or any(term.positional for term in bias)):
            raise ValueError(
                f"q_offset is needed: q has {queries} positions, k has {keys}, and the mask or bias depends on "
                'positions. Pass q_offset="end" if the last query stands at the last key (decoding with a cache), '
                '"start" if the first query stands at the first key, or the position of the first query'
            )
        return 0
    if isinstance(q_offset, Tensor):
        if q_offset.dtype is torch.bool or q_offset.is_floating_point() or q_offset.is_complex():
            raise TypeError(f"q_offset must hold integers; got {_name(q_offset.dtype)}. Convert it with .long()")
        if q_offset.dim() != 0 and tuple(q_offset.shape) != (batch,):
            raise ValueError(
                f"q_offset must be one position per sequence, [{batch}], or 0-D; got {list(q_offset.shape)}"
            )
        if q_offset.numel() and _readable(q_offset):
            for extreme in q_offset.aminmax():
                _check_position(int(extreme))
        if q_offset.dim() == 0:
            return q_offset.to(device, torch.int64).expand(batch)
        _same_device("q_offset", q_offset, device)
        return q_offset.to(torch.int64)
    if isinstance(q_offset, str):
        if q_offset == "start":
            return 0
        if q_offset == "end":
            return keys - queries
        raise ValueError(f'q_offset must be "start", "end", an int or a tensor [batch]; got {q_offset!r}')
    position = _integer(q_offset)
    if position is None:
        raise TypeError(f'q_offset must be "start", "end", an int or a tensor [batch]; got {type(q_offset).__name__}')
    _check_position(position)
    return position


def _check_position(position: int) -> None:
    if abs(position) > MAX_OFFSET:
        raise ValueError(f"q_offset must fit 32 bits; got {position}. Positions count from the first key, which is 0")


def _readable(tensor: Tensor) -> bool:
    """Whether its values may be looked at here: in a CPU's memory, and nobody traces or transforms."""
    functorch = torch._C._are_functorch_transforms_active()
    return tensor.device.type == "cpu" and not functorch and not torch.compiler.is_compiling()


def _number(value: object) -> float | None:
    """The number, also one of numpy, or None if it is none. A compiler's symbolic number stays symbolic."""
    if isinstance(value, int | float):
        return value
    return float(value) if isinstance(value, Real) else None


def _integer(value: object) -> int | None:
    """The number, also one of numpy, or None if it is no integer. A compiler's symbolic number is an int, and stays."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else value
    try:
        return None if isinstance(value, Tensor) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_sink_keys(sink_keys: Iterable[int], keys: int) -> tuple[int, ...]:
    """Sorted and unique. A key beyond the last is dropped: it has no mass, and a growing cache will have it later."""
    if isinstance(sink_keys, (int, str, Tensor)) or not isinstance(sink_keys, Iterable):
        raise TypeError(f"sink_keys must be a tuple of key positions such as (0,); got {type(sink_keys).__name__}")
    checked: set[int] = set()
    for key in sink_keys:
        position = _integer(key)
        if position is None:
            raise TypeError(f"sink_keys must hold integers; got {type(key).__name__}. Pass positions such as (0,)")
        if position < 0:
            raise ValueError(f"sink_keys must not be negative; got {position}. Count from the first key, which is 0")
        if position < keys:
            checked.add(position)
    return tuple(sorted(checked))


def _same_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name} must be on the device of q, {device}; got {tensor.device}. Move it with .to(q.device)"
        )


def _statistic_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _expected(layout: str) -> str:
    return "[batch, heads, sequence, dim]" if layout == "bhsd" else "[batch, sequence, heads, dim]"


def _dims(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _three(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {_dims(q)}, k {_dims(k)}, v {_dims(v)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
