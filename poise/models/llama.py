"""Llama, as an assembly of blocks: decoder with grouped heads, rotary positions, RMSNorm and a gated SiLU layer.

Covers what shares its checkpoint form, SmolLM2 among them. Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from poise.models.checkpoint import Names
from poise.models.model import CausalModel
from poise.nn import (
    BlockConfig,
    Decoder,
    Linear,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    YaRNScaling,
)


class Llama(CausalModel):
    """ids [B, N] to logits [B, N, V]."""

    names = Names(
        prefix="model.",
        table={
            "tokens": "model.embed_tokens",
            "decoder.blocks.*.attention_norm": "model.layers.*.input_layernorm",
            "decoder.blocks.*.attention.projection": "model.layers.*.self_attn.{q_proj,k_proj,v_proj}",
            "decoder.blocks.*.attention.out": "model.layers.*.self_attn.o_proj",
            "decoder.blocks.*.feedforward_norm": "model.layers.*.post_attention_layernorm",
            "decoder.blocks.*.feedforward.up": "model.layers.*.mlp.{gate_proj,up_proj}",
            "decoder.blocks.*.feedforward.down": "model.layers.*.mlp.down_proj",
            "decoder.norm": "model.norm",
            "unembed": "lm_head",
        },
        ignored=(r".*\.rotary_emb\.inv_freq",),
    )
    heads: ClassVar[Mapping[str, str]] = {"causal_lm": "LlamaForCausalLM"}
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_theta": 10000.0,
    }

    def __init__(self, config: Mapping[str, Any], head: str | None = None) -> None:
        super().__init__(config, head)
        c = self.config
        width = c["hidden_size"]
        head_dim = c["head_dim"] or width // c["num_attention_heads"]
        self.tokens = nn.Embedding(c["vocab_size"], width)
        block = BlockConfig(
            width,
            c["num_attention_heads"],
            c["intermediate_size"],
            kv_heads=c["num_key_value_heads"],
            head_dim=head_dim,
            activation=self.activation("hidden_act"),
            gated=True,
            norm="rms",
            eps=c["rms_norm_eps"],
            bias=c["attention_bias"],
            hidden_bias=c["mlp_bias"],
            attention_dropout=c["attention_dropout"],
        )
        self.decoder = Decoder(block, c["num_hidden_layers"], positions=rotary(c, head_dim))
        if not c["tie_word_embeddings"]:
            self.unembed = Linear(width, c["vocab_size"], bias=False)

    def embed(self, ids: Tensor, places: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids)
        return x


def rotary(config: Mapping[str, Any], head_dim: int) -> Rotary:
    """The scheme that `rope_parameters` (or the older `rope_theta` and `rope_scaling`) describe."""
    told: dict[str, Any] = {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }
    kind = told.get("rope_type", told.get("type", "default"))
    trained = config["max_position_embeddings"]
    scaling: LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling | None
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(told["factor"])
    elif kind == "dynamic":
        scaling = NTKScaling(told["factor"], trained)
    elif kind == "yarn":
        original = told.get("original_max_position_embeddings") or trained
        scaling = YaRNScaling(
            told.get("factor") or trained / original,
            original,
            fast=told.get("beta_fast") or 32.0,
            slow=told.get("beta_slow") or 1.0,
            attention=told.get("attention_factor") or _sharpening(told),
            truncate=told.get("truncate", True),
        )
    elif kind == "llama3":
        scaling = Llama3Scaling(
            told["factor"],
            told["original_max_position_embeddings"],
            low=told["low_freq_factor"],
            high=told["high_freq_factor"],
        )
    else:
        raise ValueError(
            f"config.json: rope_type must be 'default', 'linear', 'dynamic', 'yarn' or 'llama3'; got {kind!r}"
        )
    dim = int(head_dim * told.get("partial_rotary_factor", 1.0))
    return Rotary(head_dim, base=told["rope_theta"], dim=dim, scaling=scaling)


def _sharpening(told: Mapping[str, Any]) -> float | None:
    """YaRN's factor for cos and sin where a configuration gives it by two others."""
    over, under = told.get("mscale"), told.get("mscale_all_dim")
    if not (over and under):
        return None
    return YaRNScaling.sharpening(told["factor"], over) / YaRNScaling.sharpening(told["factor"], under)
