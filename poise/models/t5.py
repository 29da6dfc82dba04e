"""T5 (1.0, 1.1, gated or not), as an assembly of blocks: encoder and decoder with bucketed relative positions.

The bias of either stack is a table of distances that all its layers share; no [N, M] matrix is made of it.

Letters: B batch, M positions of the source, N of the target, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from poise.models.checkpoint import Names
from poise.models.model import ACTIVATION_NAMES, Model, places_after
from poise.nn import (
    EVERYTHING,
    BlockConfig,
    Decoder,
    Encoder,
    KeyValues,
    Linear,
    Packing,
    RelativeBuckets,
    Visible,
    linear,
)
from poise.nn.cache import Cache

_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"


def _stack(name: str, cross: bool) -> dict[str, str]:
    """The names of one stack; `feedforward.up` has one or two of theirs, which only the configuration tells."""
    last = 2 if cross else 1
    return {
        f"{name}.blocks.*.attention_norm": f"{name}.block.*.layer.0.layer_norm",
        f"{name}.blocks.*.attention.projection": f"{name}.block.*.{_SELF}.{{q,k,v}}",
        f"{name}.blocks.*.attention.out": f"{name}.block.*.{_SELF}.o",
        f"{name}.blocks.*.cross_norm": f"{name}.block.*.layer.1.layer_norm",
        f"{name}.blocks.*.cross.projection": f"{name}.block.*.{_CROSS}.{{q,k,v}}",
        f"{name}.blocks.*.cross.out": f"{name}.block.*.{_CROSS}.o",
        f"{name}.blocks.*.feedforward_norm": f"{name}.block.*.layer.{last}.layer_norm",
        f"{name}.blocks.*.feedforward.down": f"{name}.block.*.layer.{last}.DenseReluDense.wo",
        f"{name}.norm": f"{name}.final_layer_norm",
        f"{name}.positions": f"{name}.block.0.{_SELF}.relative_attention_bias",
    }


def names(gated: bool) -> Names:
    inner = "DenseReluDense.{wi_0,wi_1}" if gated else "DenseReluDense.wi"
    return Names(
        table={
            "tokens": "shared",
            "unembed": "lm_head",
            **_stack("encoder", cross=False),
            **_stack("decoder", cross=True),
            "encoder.blocks.*.feedforward.up": f"encoder.block.*.layer.1.{inner}",
            "decoder.blocks.*.feedforward.up": f"decoder.block.*.layer.2.{inner}",
        },
        ignored=(r"(encoder|decoder)\.embed_tokens\.weight",),
    )


class T5(Model):
    """Source ids [B, M] and target ids [B, N] to logits [B, N, V]; head "hidden": the encoder alone, [B, M, C]."""

    heads: ClassVar[Mapping[str, str]] = {"seq2seq_lm": "T5ForConditionalGeneration", "hidden": "T5EncoderModel"}
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": None,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu",
        "tie_word_embeddings": True,
        "decoder_start_token_id": 0,
    }

    def __init__(self, config: Mapping[str, Any], head: str | None = None) -> None:
        super().__init__(config, head)
        c = self.config
        activation, gated = _feed_forward(c["feed_forward_proj"])
        self.names = names(gated)
        block = BlockConfig(
            c["d_model"],
            c["num_heads"],
            c["d_ff"],
            head_dim=c["d_kv"],
            activation=activation,
            gated=gated,
            norm="rms",
            eps=c["layer_norm_epsilon"],
            bias=False,
            scale=1.0,
            dropout=c["dropout_rate"],
            attention_dropout=c["dropout_rate"],
            hidden_dropout=c["dropout_rate"],
        )

        def positions(bidirectional: bool) -> RelativeBuckets:
            return RelativeBuckets(
                c["num_heads"],
                buckets=c["relative_attention_num_buckets"],
                furthest=c["relative_attention_max_distance"],
                bidirectional=bidirectional,
            )

        self.tokens = nn.Embedding(c["vocab_size"], c["d_model"])
        self.encoder = Encoder(block, c["num_layers"], positions=positions(True))
        if self.head == "hidden":
            return
        layers = c["num_layers"] if c["num_decoder_layers"] is None else c["num_decoder_layers"]
        self.decoder = Decoder(block, layers, positions=positions(False), cross=True)
        tied = c["tie_word_embeddings"]
        # What transformers 5 writes: always tied, and whether the tied weights are scaled by a key of its own.
        self.out_scale = c["d_model"] ** -0.5 if c.get("scale_decoder_outputs", tied) else 1.0
        if not tied:
            self.unembed = Linear(c["d_model"], c["vocab_size"], bias=False)

    def forward(self, ids: Tensor, padding: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        """padding: bool [B, M], True = real, of the source."""
        context = self.encode(ids, padding)
        if self.head == "hidden":
            return context
        if target is None:
            raise ValueError("target is needed: the decoder's ids [B, N], which begin with decoder_start_token_id")
        return self.decode(target, context, padding)

    def encode(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        """[B, M, C], zeros where there is padding, which is packed away if each row's real tokens are one run."""
        if padding is not None and not bool(padding.all()):
            packing = Packing(padding)
            if packing.runs:
                x = self._embed(packing.pack(ids))
                return packing.unpack(self._dropped(self.encoder(x, visible=packing.visible, places=packing.places)))
        return self._dropped(self.encoder(self._embed(ids), visible=Visible(padding=padding)))

    def decode(
        self,
        target: Tensor,
        context: Tensor | Sequence[KeyValues],
        padding: Tensor | None = None,
        *,
        cache: Cache | None = None,
        last: bool = False,
    ) -> Tensor:
        """context: from `encode`, or `decoder.remember` of that, with its padding. last: of the last position only."""
        visible = EVERYTHING if padding is None else Visible(padding=padding)
        places = places_after(cache, target)
        y = self.decoder(self._embed(target), context, context_visible=visible, places=places, cache=cache)
        y = self._dropped(y[:, -1:] if last else y) * self.out_scale
        return linear(y, self.tokens.weight) if self.config["tie_word_embeddings"] else self.unembed(y)

    def _embed(self, ids: Tensor) -> Tensor:
        return self._dropped(self.tokens(ids))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.config["dropout_rate"], self.training)


def _feed_forward(told: str) -> tuple[str, bool]:
    """The activation, and whether it gates: "relu", "gated-gelu" (which means the tanh form), "gated-silu", ..."""
    gated = told.startswith("gated-")
    name = "gelu_new" if told == "gated-gelu" else told.removeprefix("gated-")
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"config.json: feed_forward_proj must be an activation, or gated-activation; got {told!r}")
    return ACTIVATION_NAMES[name], gated
