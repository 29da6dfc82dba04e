"""The numbers of attention on one sentence, stage by stage: of a model's layer and head, or of seeded embeddings.

All are poise's own, from `scores` and `observe` on the same queries and keys. Nothing is shown here.

Letters: N tokens, C width, H query heads, G key/value heads, D and Dv head dims.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from poise.explanation import explain
from poise.models import Model, load, tokenizer
from poise.nn import EXACT, Call, MultiHeadAttention, Stack
from poise.op import attention, observe, scores
from poise.stats import ScoreStats

SEED, WIDTH, DIM, HEADS = 0, 16, 64, 4  # of the seeded embeddings
MOST_TOKENS = 1024  # every stage is N × N numbers
# Words and punctuation marks; each Han or kana character stands for itself.
_WORDS = re.compile(r"[぀-ヿ㐀-鿿]|[^\W぀-ヿ㐀-鿿]+|[^\w\s]")


class Scale(NamedTuple):
    """The chosen head under one scale."""

    name: str  # "unscaled", "1/√d", "1/d", or the model's own factor
    weights: Tensor  # [N, N]
    stats: ScoreStats  # of all heads, [1, H, N]


@dataclass(frozen=True)
class Lesson:
    """Every stage of attention on one sentence; q to `out` are those of one head."""

    tokens: list[str]
    model: str | None  # what it calls itself; None for seeded embeddings
    layer: int
    layers: int
    head: int
    groups: int  # G
    causal: bool
    rotary: bool  # q and k are shown turned
    biased: bool  # the scores include a bias of positions
    x: Tensor  # [N, C] what is projected
    q: Tensor  # [N, D]
    k: Tensor  # [N, D]
    v: Tensor  # [N, Dv]
    visible: Tensor  # bool [N, N]
    raw: Tensor  # [N, N] q kᵀ, -inf where not visible
    scale: float
    scaled: Tensor  # [N, N] what the softmax sees, -inf where not visible
    weights: Tensor  # [H, N, N] of every head
    outs: Tensor  # [H, N, Dv] weights v, of every head
    y: Tensor  # [N, C] the heads joined and projected
    stats: ScoreStats  # [1, H, N]
    scales: list[Scale]
    impl: str
    difference: float  # largest, between `outs` and poise.attention

    @property
    def focus(self) -> int:
        """The token that is looked at closely: the second, or, where only the past is visible, the last."""
        return len(self.tokens) - 1 if self.causal else min(1, len(self.tokens) - 1)


def words(sentence: str) -> list[str]:
    """Words and punctuation marks."""
    return _WORDS.findall(unicodedata.normalize("NFC", sentence))


def seeded(sentence: str, layer: int = 0, head: int = 0) -> Lesson:
    """Untrained: embeddings and matrices from a fixed seed, of unit variance; a repeated word repeats its own."""
    tokens = words(sentence)
    _check(sentence, tokens, layer, 1, head, HEADS)
    generator = torch.Generator().manual_seed(SEED)
    matrices = torch.randn(3, HEADS, WIDTH, DIM, generator=generator) / math.sqrt(WIDTH)
    join = torch.randn(HEADS * DIM, WIDTH, generator=generator) / math.sqrt(HEADS * DIM)
    known = list(dict.fromkeys(tokens))
    x = torch.randn(len(known), WIDTH, generator=generator)[[known.index(token) for token in tokens]]
    q, k, v = (x @ matrices).unsqueeze(1)
    y = attention(q, k, v)[0].transpose(0, 1).flatten(1) @ join
    return _lesson(_Seen(q, k, v, Call(hidden=x[None]), y[None]), tokens, None, layer, 1, head, rotary=False)


@torch.no_grad()
def of_model(directory: str | Path, sentence: str, layer: int = 0, head: int = 0, name: str | None = None) -> Lesson:
    """What a checkpoint's layer and head make of a sentence, in float32."""
    model: Model = load(directory, dtype=torch.float32)
    encoding = tokenizer(directory).encode(sentence)
    tokens = [
        _shown(sentence[start:end], token)
        for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True)
    ]
    stack = next(part for part in model.modules() if isinstance(part, Stack))  # an encoder comes before its decoder
    blocks = [block.attention for block in stack.blocks]
    own: Any = blocks[layer if 0 <= layer < len(blocks) else 0]
    assert isinstance(own, MultiHeadAttention)
    _check(sentence, tokens, layer, len(blocks), head, own.projection.heads)
    if own.choice is not EXACT:
        raise ValueError(
            f"model must attend exactly to be walked through; {name or directory} has {type(own.choice).__name__}"
        )
    rotary = stack.positions is not None and stack.positions.place(torch.arange(1)).rotate is not None
    seen = _watch(model, own, torch.tensor([encoding.ids]))
    return _lesson(seen, tokens, name or str(directory), layer, len(blocks), head, rotary=rotary)


class _Seen(NamedTuple):
    """One attention's inputs and output: q [1, H, N, D], k [1, G, N, D], v [1, G, N, Dv], y [1, N, C]."""

    q: Tensor
    k: Tensor
    v: Tensor
    call: Call
    y: Tensor


def _watch(model: Model, own: MultiHeadAttention, ids: Tensor) -> _Seen:
    """Runs the model with a choice that remembers what it is given."""
    given: list[tuple[Tensor, Tensor, Tensor, Call]] = []
    outputs: list[Tensor] = []

    def remember(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        given.append((q.clone(), k.clone(), v.clone(), call._replace(hidden=torch.clone(_hidden(call)))))
        return EXACT(q, k, v, call)

    hook = own.register_forward_hook(lambda module, inputs, output: outputs.append(output.clone()))
    own.choice = remember
    try:
        encode = getattr(model, "encode", model)  # an encoder-decoder is walked through at its encoder
        encode(ids)
    finally:
        own.choice = EXACT
        hook.remove()
    return _Seen(*given[0], outputs[0])


def _lesson(
    seen: _Seen, tokens: list[str], model: str | None, layer: int, layers: int, head: int, *, rotary: bool
) -> Lesson:
    q, k, v, call, y = seen
    heads, groups, dim = q.shape[1], k.shape[1], q.shape[-1]
    scale = 1 / math.sqrt(dim) if call.scale is None else float(call.scale)
    scoring: dict[str, Any] = {
        "mask": call.visible.joined,
        "bias": call.bias,
        "softcap": call.softcap,
        "sink": call.sink,
    }
    scaled = scores(q, k, scale=scale, **scoring)[0]
    visible = scaled[head] > -torch.inf
    weights = scores(q, k, scale=scale, stage="prob", **scoring)[0]
    outs = weights @ v[0].repeat_interleave(heads // groups, 0)
    out, stats = observe(q, k, v, scale=scale, **scoring)
    factors = {"unscaled": 1.0, "1/√d": 1 / math.sqrt(dim), "1/d": 1 / dim}
    if not any(math.isclose(scale, factor, rel_tol=1e-6) for factor in factors.values()):
        factors[f"× {scale:.3g}"] = scale
    scales = []
    for name, factor in factors.items():
        _, found = observe(q, k, v, scale=factor, **scoring)
        prob = scores(q, k, scale=factor, stage="prob", lse=found.lse, **scoring)
        scales.append(Scale(name, prob[0, head], found))
    ran = explain(q, k, v, scale=scale, **scoring)
    return Lesson(
        tokens=tokens,
        model=model,
        layer=layer,
        layers=layers,
        head=head,
        groups=groups,
        causal=call.visible.causal,
        rotary=rotary,
        biased=call.bias is not None,
        x=_hidden(call)[0],
        q=q[0, head],
        k=k[0, head * groups // heads],
        v=v[0, head * groups // heads],
        visible=visible,
        raw=scores(q, k, scale=1.0, stage="raw")[0, head].masked_fill(~visible, -torch.inf),
        scale=scale,
        scaled=scaled[head],
        weights=weights,
        outs=outs,
        y=y[0],
        stats=stats,
        scales=scales,
        impl=f"{ran.impl} ({ran.isa})" if ran.isa else ran.impl,
        difference=float((out[0] - outs).abs().max()),
    )


def _hidden(call: Call) -> Tensor:
    assert call.hidden is not None
    return call.hidden


def _shown(piece: str, token: str) -> str:
    """A token as its part of the sentence, or by its own name if it has none."""
    return "".join(char if char.isprintable() else "␣" for char in piece.strip() or token)


def _check(sentence: str, tokens: list[str], layer: int, layers: int, head: int, heads: int) -> None:
    if not tokens or not sentence.strip():
        raise ValueError(f"sentence must contain a word; got {sentence!r}")
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"sentence must have at most {MOST_TOKENS} tokens; got {len(tokens)}: shorten it")
    for name, value, count in (("layer", layer, layers), ("head", head, heads)):
        if not 0 <= value < count:
            raise ValueError(f"{name} must be {f'0 to {count - 1}' if count > 1 else 'its only one, 0'}; got {value}")
