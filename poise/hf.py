"""Hugging Face transformers on poise: `register()`, then `attn_implementation="poise"`.

Works for every family that asks transformers' attention interface for its attention (BERT, GPT-2, Llama, Gemma 2 and
3, gpt-oss, DeepSeek-V3, T5, BART, Whisper, ViT, CLIP, ...), with every cache, `generate()`, packing, gradient
checkpointing, dropout and `output_attentions=True`. Families that compute attention by hand (Longformer, BigBird,
DeBERTa, Bloom, MPT, Falcon) never ask; continuous batching accepts only transformers' own names.

Masks are not materialised: the model is handed a tensor of shape [B, 1, N, M] without memory, which says what it stands
for (causal, window, padding, packing), and turns into an ordinary bool tensor the moment anything but poise reads it.
So no family needs an exception: those that pass the mask on untouched (all named above) never see the dense one.

What becomes of a mask:

| from transformers | here |
|---|---|
| plain causal, or everything visible | None, as for "sdpa" |
| causal, sliding window, both directions, packed documents, padding on the left or right | mask objects, O(n) |
| padding with holes | one bool per key, read in place |
| masks joined with a caller's own function, chunks, image blocks, and everything under torch.compile | dense bool |
| a 4-D mask of the caller's | as given: bool is a mask, float is added to the scores |

A query that may see no key (left padding) gives 0, as "sdpa" does; "eager" gives it the mean of all values.
Imports transformers only in `register` and in what transformers calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import cache, reduce
from operator import and_, or_
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from poise.mask import UNBOUNDED, Mask, Window, causal, documents, keep, lengths, window
from poise.op import attention, scores
from poise.problem import autocast

NAME = "poise"
REMEDIES = "poise_remedies"  # the submodule of an attention module that may change its calls (monitor/remedies)

_attention_layers: frozenset[int] | None = None
_warn_bytes = 1 << 30


def register(*, attention_layers: Collection[int] | None = None, warn_bytes: int = 1 << 30) -> None:
    """Makes "poise" a value of `attn_implementation` and of `model.set_attn_implementation`.

    attention_layers: the layers (`layer_idx`) whose weights `output_attentions=True` returns; None for all. Weights
        take N × M values per head and layer, and the tuple of attentions holds the chosen layers only.
    warn_bytes: the size of one layer's weights above which a warning is given.

    Calling it again changes these choices.

    >>> poise.hf.register()
    >>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="poise")
    """
    global _attention_layers, _warn_bytes
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "poise.hf needs transformers with the attention interface (>= 5): pip install -U transformers"
        ) from error
    if attention_layers is not None and not all(type(layer) is int for layer in attention_layers):
        raise TypeError(f"attention_layers must hold layer numbers; got {attention_layers!r}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_for)
    _attention_layers = None if attention_layers is None else frozenset(attention_layers)
    _warn_bytes = warn_bytes


class StructuredMask(Tensor):
    """A [B, 1, N, M] bool tensor that is a mask object until somebody reads it, and then a dense one."""

    mask: Mask
    offset: int

    @staticmethod
    def __new__(cls, mask: Mask, offset: int, shape: tuple[int, int, int], device: torch.device) -> StructuredMask:
        batch, queries, keys = shape
        made: StructuredMask = Tensor._make_wrapper_subclass(
            cls, (batch, 1, queries, keys), dtype=torch.bool, device=device
        )
        made.mask, made.offset = mask, offset
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def dense(self) -> Tensor:
        """The bools it stands for, True = may attend."""
        batch, _, queries, keys = self.shape
        rows, columns = (torch.arange(size, device=self.device) for size in (queries, keys))
        return self.mask.evaluate(rows, columns, self.offset, (batch, 1, queries, keys)).expand(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StructuredMask({self.mask!r}, offset={self.offset}, shape={list(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            (one,) = args
            batch, _, queries, keys = one.shape
            return cls(one.mask, one.offset, (batch, queries, keys), one.device)
        plain = [x.dense() if isinstance(x, StructuredMask) else x for x in args]
        named = {name: x.dense() if isinstance(x, StructuredMask) else x for name, x in (kwargs or {}).items()}
        return func(*plain, **named)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: [B, H, N, D] in, ([B, N, H, Dv], weights or None) out."""
    query, key, value = autocast(query, key, value)
    call: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink": s_aux}
    bias = position_bias
    if attention_mask is None:
        causally = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causally and query.shape[2] > 1:  # as torch aligns it, from the top left
            call.update(mask=causal(), q_offset="start")
    elif isinstance(attention_mask, StructuredMask):
        call.update(mask=attention_mask.mask, q_offset=attention_mask.offset)
    elif attention_mask.dtype is torch.bool:
        call.update(mask=attention_mask)
    else:
        bias = attention_mask if bias is None else bias + attention_mask
    call["bias"] = bias
    attend: Any = attention
    if (remedies := module._modules.get(REMEDIES)) is not None:
        attend = remedies
        query, key, call = attend.adjusted(query, key, call)
    swapped = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out = attend(*swapped, **call, dropout=dropout, layout="bshd")
    if not _wants_weights(output_attentions, module):
        return out, None
    size = 4 * query.shape[:3].numel() * key.shape[2]
    if size > _warn_bytes:
        warnings.warn(
            f"output_attentions=True: the weights of this layer take {size / 2**20:.0f} MiB. "
            "Ask for fewer by poise.hf.register(attention_layers=...), or watch the model with poise.watch, "
            "which needs none of them",
            stacklevel=2,
        )
    return out, scores(query, key, stage="prob", **call).to(query.dtype)


def _wants_weights(asked: bool | None, module: torch.nn.Module) -> bool:
    """Whether this layer's weights are to be returned: some families pass the wish on, others only record outputs."""
    if not asked and not torch.compiler.is_compiling():
        from transformers.utils import output_capturing

        recording = getattr(output_capturing, "_active_collector", None)
        wishes = recording.get() if recording is not None else None
        asked = wishes is not None and any(name.endswith("attentions") for name in wishes)
    if not asked or _attention_layers is None:
        return bool(asked)
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(
            f"attention_layers: {type(module).__name__} does not know its number; "
            "call poise.hf.register() to get the weights of all layers"
        )
    return layer in _attention_layers


def mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Tensor | None:
    """transformers' mask function: None where no mask is needed, else a StructuredMask, or a dense bool tensor."""
    from transformers import masking_utils

    function = mask_function if mask_function is not None else masking_utils.causal_mask_function
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
    structure = _OPAQUE if tracing else _structure(function)
    if structure is _OPAQUE or (_has_documents(structure) and (q_length != kv_length or kv_offset)):
        dense: Tensor | None = masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,  # type: ignore[arg-type]
            kv_offset,
            function,
            attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **rest,
        )
        return dense
    offset = int(q_offset) - kv_offset  # a static cache keeps its length in a tensor
    device = torch.device(device)
    band = structure if isinstance(structure, Window) else None
    if band is not None:
        structure = band = _within(band, offset, q_length, kv_length)
    last = offset + q_length - 1  # where the last query stands
    padding = None
    if attention_mask is not None:
        seen_last = band is not None and band.right == 0
        padding = _padding(attention_mask, kv_offset, kv_length, min(last + 1, kv_length) if seen_last else kv_length)
    if padding is None:
        if structure is None and allow_is_bidirectional_skip:
            return None
        if allow_is_causal_skip and (
            (band == causal() and offset == 0 and q_length == kv_length)
            or (q_length == 1 and (structure is None or (band == causal() and last >= kv_length - 1)))
        ):
            return None
    mask = _intersection((structure, padding))
    mask = window(None, None) if mask is None else mask
    if mask.key is None and device.type == "cpu":  # once for all layers
        mask = mask.lower(q_length, kv_length, batch_size, 1, offset)
    return StructuredMask(mask, offset, (batch_size, q_length, kv_length), device)


_OPAQUE: Any = object()  # a mask function that nobody here knows


def _structure(function: Callable[..., Any], documents_hold: bool = False) -> Any:
    """The mask object for one of transformers' mask functions, None for all visible, _OPAQUE for an unknown one.

    `documents_hold`: a packed document's ids are joined by "and" beside it; only then may positions be remapped.
    """
    code: Any = getattr(function, "__code__", None)
    kind = _known_functions().get(code)
    if kind is None:
        return _OPAQUE
    cells = dict(zip(code.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))
    if kind == "causal":
        return causal()
    if kind == "everything":
        return None
    if kind == "window":
        return Window(cells["sliding_window"] - 1, UNBOUNDED)
    if kind == "both ways":
        return Window(cells["sliding_window"], cells["sliding_window"])
    if kind == "packed":
        return documents(cells["packed_sequence_mask"])
    if kind == "remapped":
        # Within a document positions grow one by one, so what depends on their differences alone stays as it is.
        inner = _structure(cells["mask_function"])
        return inner if documents_hold and (inner is None or isinstance(inner, Window)) else _OPAQUE
    functions = cells["mask_functions"]
    packed = kind == "and" and any(_known_functions().get(getattr(f, "__code__", None)) == "packed" for f in functions)
    parts = [_structure(f, packed) for f in functions]
    if _OPAQUE in parts:
        return _OPAQUE
    if kind == "or":
        return None if None in parts else reduce(or_, parts)
    return _intersection(parts)


@cache
def _known_functions() -> dict[CodeType | None, str]:
    """The code of transformers' mask functions; those of closures are compared with an exemplar's."""
    from transformers import masking_utils as made

    nothing = torch.zeros(1, 1)
    exemplars = {
        "causal": lambda: made.causal_mask_function,
        "everything": lambda: made.bidirectional_mask_function,
        "window": lambda: made.sliding_window_overlay(1),
        "both ways": lambda: made.sliding_window_bidirectional_overlay(1),
        "packed": lambda: made.packed_sequence_mask_function(nothing),
        "remapped": lambda: made.remap_positions_for_packed_sequence(made.causal_mask_function, nothing),
        "and": lambda: made.and_masks(made.causal_mask_function),
        "or": lambda: made.or_masks(made.causal_mask_function),
    }
    known: dict[CodeType | None, str] = {}
    for kind, exemplar in exemplars.items():
        try:
            known[exemplar().__code__] = kind  # type: ignore[no-untyped-call]
        except AttributeError:  # another release names it differently: its masks will be dense
            continue
    return known


def _intersection(parts: Collection[Mask | None]) -> Mask | None:
    """The masks joined by "and", bands as one band; None stands for all visible."""
    bands = [part for part in parts if isinstance(part, Window)]
    others: list[Mask] = [part for part in parts if part is not None and not isinstance(part, Window)]
    if bands:
        others.insert(0, Window(min(band.left for band in bands), min(band.right for band in bands)))
    return reduce(and_, others) if others else None


def _within(band: Window, offset: int, queries: int, keys: int) -> Window | None:
    """The same band for these lengths, without sides that cut nothing off."""
    left = UNBOUNDED if offset + queries - 1 - band.left <= 0 else band.left
    right = UNBOUNDED if offset + band.right >= keys - 1 else band.right
    return None if left == right == UNBOUNDED else Window(left, right)


def _has_documents(structure: Mask | None) -> bool:
    return structure is not None and structure.key is None


def _padding(attention_mask: Tensor, kv_offset: int, keys: int, needed: int) -> Mask | None:
    """The mask that [B, seen] bools (True = a token) put on the keys; None if they hide none of the first `needed`."""
    part = attention_mask[:, kv_offset : kv_offset + keys].to(torch.bool)
    part = torch.nn.functional.pad(part, (0, keys - part.shape[1]))  # a static cache is longer than what was seen
    if bool(part[:, :needed].all()):
        return None
    visible, number = part.to(torch.uint8), part.sum(1)
    start = visible.argmax(1)
    end = torch.where(number > 0, keys - visible.flip(1).argmax(1), start)
    if bool((end - start == number).all()):
        return lengths(end, start)
    return keep(part[:, None, None])
