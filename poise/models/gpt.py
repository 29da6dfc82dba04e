"""GPT-2, as an assembly of blocks: decoder with learned positions, and its names in checkpoints.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from poise.models.checkpoint import Names
from poise.models.model import CausalModel
from poise.nn import BlockConfig, Decoder, Learned, Linear, MultiHeadAttention


class GPT(CausalModel):
    """ids [B, N] to logits [B, N, V]."""

    names = Names(
        prefix="transformer.",
        table={
            "tokens": "transformer.wte",
            "positions": "transformer.wpe",
            "decoder.blocks.*.attention_norm": "transformer.h.*.ln_1",
            "decoder.blocks.*.attention.projection": "transformer.h.*.attn.c_attn^T",
            "decoder.blocks.*.attention.out": "transformer.h.*.attn.c_proj^T",
            "decoder.blocks.*.feedforward_norm": "transformer.h.*.ln_2",
            "decoder.blocks.*.feedforward.up": "transformer.h.*.mlp.c_fc^T",
            "decoder.blocks.*.feedforward.down": "transformer.h.*.mlp.c_proj^T",
            "decoder.norm": "transformer.ln_f",
            "unembed": "lm_head",
        },
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    )
    heads: ClassVar[Mapping[str, str]] = {"causal_lm": "GPT2LMHeadModel"}
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: Mapping[str, Any], head: str | None = None) -> None:
        super().__init__(config, head)
        self.refuse(add_cross_attention=False)
        c = self.config
        width = c["n_embd"]
        self.tokens = nn.Embedding(c["vocab_size"], width)
        self.positions = Learned(c["n_positions"], width)
        block = BlockConfig(
            width,
            c["n_head"],
            c["n_inner"] or 4 * width,
            activation=self.activation("activation_function"),
            eps=c["layer_norm_epsilon"],
            dropout=c["resid_pdrop"],
            attention_dropout=c["attn_pdrop"],
            scale=None if c["scale_attn_weights"] else 1.0,
        )
        self.decoder = Decoder(block, c["n_layer"])
        if c["scale_attn_by_inverse_layer_idx"]:
            for layer, module in enumerate(self.decoder.blocks):
                attention: MultiHeadAttention = module.attention  # type: ignore[assignment]
                plain = attention.projection.head_dim**-0.5 if c["scale_attn_weights"] else 1.0
                attention.scale = plain / (layer + 1)
        if not c["tie_word_embeddings"]:
            self.unembed = Linear(width, c["vocab_size"], bias=False)

    @property
    def longest(self) -> int | None:
        return int(self.config["n_positions"])

    def embed(self, ids: Tensor, places: Tensor) -> Tensor:
        return F.dropout(self.tokens(ids) + self.positions(places), self.config["embd_pdrop"], self.training)
