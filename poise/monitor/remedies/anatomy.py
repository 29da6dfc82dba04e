"""Where queries and keys come from: the attention modules of a model, and the rows of which weights make each head.

Knows Hugging Face's attention by what its modules have (`is_causal`, a configuration that names the implementation) and
their projections by name, poise's own `MultiHeadAttention` and torch's. Rows of a fused matrix can't be told from its
shape, so those layouts are a table of known classes; an unknown one is refused, never guessed. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Projections that are modules of their own: queries, keys, values.
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)
# One matrix for all three: class, projection, and whether its rows go head by head (q, k, v of the first, ...) or all
# queries first. In a class that is not here the order is not known.
_FUSED = {
    "GPT2Attention": ("c_attn", False),
    "GPTNeoXAttention": ("query_key_value", True),
    "ModernBertAttention": ("Wqkv", False),
    "Phi3Attention": ("qkv_proj", False),
}
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_NORMS = (("q_norm", "k_norm"), ("query_norm", "key_norm"), ("q_layernorm", "k_layernorm"), ("qk_norm", "qk_norm"))

Kind = Literal["hf", "own", "torch"]


@dataclass(frozen=True, eq=False)
class Part:
    """The outputs of a projection that are the queries (or keys, or values) of each head."""

    owner: nn.Module
    rows: Tensor  # int64 [heads, dims]: places along the projection's outputs
    weight: str = "weight"
    bias: str | None = "bias"
    axis: int = 0  # of the weight, along the outputs
    bias_start: int = 0  # where the part begins in a bias that joins what weights keep apart

    def tensors(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """(parameter, axis, rows) of the weight and, if there is one, the bias."""
        if (weight := trained(self.owner, self.weight)) is not None:
            yield weight, self.axis, self.rows
        if self.bias is not None and (bias := trained(self.owner, self.bias)) is not None:
            yield bias, 0, self.rows + self.bias_start


@dataclass(frozen=True, eq=False)
class Anatomy:
    """One attention module."""

    name: str
    module: nn.Module
    kind: Kind
    query: Part
    key: Part
    value: Part
    # How many dims of a head, from the first, have keys that belong to this head alone: all for plain heads, none for
    # grouped ones, those without positions in multi-head latent attention (DeepSeek).
    private: int

    @property
    def heads(self) -> int:
        return self.query.rows.shape[0]

    @property
    def head_dim(self) -> int:
        return self.query.rows.shape[1]

    @property
    def norms(self) -> tuple[nn.Module, nn.Module] | None:
        """The norms of its queries and keys that it came with."""
        for names in _NORMS:
            pair = tuple(self.module._modules.get(name) for name in names)
            if pair[0] is not None and pair[1] is not None and not getattr(pair[0], "from_a_remedy", False):
                return pair[0], pair[1]
        return None


def trained(owner: nn.Module, name: str) -> nn.Parameter | None:
    """A module's parameter as an optimizer holds it, also under a parametrization."""
    own = owner._parameters.get(name)
    made = owner._modules.get("parametrizations")
    if own is None and isinstance(made, nn.ModuleDict) and name in made:
        own = made[name].original  # type: ignore[assignment]
    return own


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every attention module of the model, by its path."""
    return {
        path or type(module).__name__: module
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) or is_own(module) or is_hugging_face(module)
    }


def anatomy(name: str, module: nn.Module) -> Anatomy:
    if isinstance(module, nn.MultiheadAttention):
        return _of_torch(name, module)
    return _own(name, module) if is_own(module) else _hugging_face(name, module)


def is_own(module: nn.Module) -> bool:
    return any((c.__module__, c.__name__) == ("poise.nn.attention", "MultiHeadAttention") for c in type(module).__mro__)


def is_hugging_face(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return hasattr(config, "_attn_implementation") and isinstance(module.__dict__.get("is_causal"), bool)


def _rows(start: int, heads: int, dims: int) -> Tensor:
    return torch.arange(start, start + heads * dims).view(heads, dims)


def _of_torch(name: str, module: nn.MultiheadAttention) -> Anatomy:
    heads, dim, width = module.num_heads, module.head_dim, module.embed_dim
    if module._qkv_same_embed_dim:
        parts = [
            Part(module, _rows(i * width, heads, dim), weight="in_proj_weight", bias="in_proj_bias") for i in range(3)
        ]
    else:
        parts = [
            Part(module, _rows(0, heads, dim), f"{part}_proj_weight", "in_proj_bias", bias_start=i * width)
            for i, part in enumerate("qkv")
        ]
    return Anatomy(name, module, "torch", parts[0], parts[1], parts[2], private=dim)


def _own(name: str, module: Any) -> Anatomy:
    projection = module.projection
    heads, groups = projection.heads, projection.kv_heads
    dim, value_dim = projection.head_dim, projection.value_dim
    parts = (
        Part(projection, _rows(0, heads, dim)),
        Part(projection, _rows(heads * dim, groups, dim)),
        Part(projection, _rows((heads + groups) * dim, groups, value_dim)),
    )
    return Anatomy(name, module, "own", *parts, private=dim if heads == groups else 0)


def _hugging_face(name: str, module: Any) -> Anatomy:
    if getattr(module, "kv_b_proj", None) is not None:
        return _latent(name, module)
    dim = next((value for key in _HEAD_DIMS if type(value := getattr(module, key, None)) is int), None)
    if dim is None:
        raise _unknown(name, module, f"it has none of {', '.join(_HEAD_DIMS)}")
    fused, by_head = _FUSED.get(type(module).__name__, (None, False))
    if type(module).__name__ == "GPT2Attention" and getattr(module, "is_cross_attention", False):
        width = module.split_size
        parts = (
            Part(module.q_attn, _rows(0, width // dim, dim), axis=1),
            Part(module.c_attn, _rows(0, width // dim, dim), axis=1),
            Part(module.c_attn, _rows(width, width // dim, dim), axis=1),
        )
        return Anatomy(name, module, "hf", *parts, private=dim)
    if fused is not None:
        projection = getattr(module, fused)
        axis = int(any(made.__name__ == "Conv1D" for made in type(projection).__mro__))  # stores the transpose
        outputs = _outputs(projection, axis) // dim  # heads of all three kinds
        groups = getattr(module, "num_key_value_heads", None) or outputs // 3
        heads = outputs - 2 * groups
        if by_head:
            at = _rows(0, heads, 3 * dim).view(heads, 3, dim).unbind(1)
        else:
            at = (
                _rows(0, heads, dim),
                _rows(heads * dim, groups, dim),
                _rows((heads + groups) * dim, groups, dim),
            )
        q, k, v = (Part(projection, rows.contiguous(), axis=axis) for rows in at)
    else:
        for names in _SEPARATE:
            if all(isinstance(getattr(module, part, None), nn.Module) for part in names):
                break
        else:
            raise _unknown(name, module, "its projections have none of the known names")
        made = [getattr(module, part) for part in names]
        q, k, v = (Part(x, _rows(0, _outputs(x) // dim, dim)) for x in made)
    return Anatomy(name, module, "hf", q, k, v, private=dim if len(q.rows) == len(k.rows) else 0)


def _outputs(projection: nn.Module, axis: int = 0) -> int:
    weight = trained(projection, "weight")
    assert weight is not None
    return weight.shape[axis]


def _latent(name: str, module: Any) -> Anatomy:
    """Multi-head latent attention: of a head's query dims the first have keys of its own, the rest share one key."""
    heads, plain, dim, value_dim = module.num_heads, module.qk_nope_head_dim, module.qk_head_dim, module.v_head_dim
    queries = module.q_proj if getattr(module, "q_lora_rank", None) is None else module.q_b_proj
    both = _rows(0, heads, plain + value_dim)
    parts = (
        Part(queries, _rows(0, heads, dim)),
        Part(module.kv_b_proj, both[:, :plain].contiguous()),
        Part(module.kv_b_proj, both[:, plain:].contiguous()),
    )
    return Anatomy(name, module, "hf", *parts, private=plain)


def _unknown(name: str, module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"model: {name} ({type(module).__name__}) makes its queries and keys in a way that is not known here: {why}. "
        "Leave it out with layers=..., or treat the weights by hand"
    )
