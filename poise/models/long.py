"""Encoders for long documents, as assemblies of blocks: Longformer and BigBird, and their names in checkpoints.

Both are BERT with another attention, another head for classification and other habits about positions. Their layers
share one `Visible`, so that who sees whom is worked out once per call.

Letters: B batch, N positions, C width, V vocabulary, K classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise.models.checkpoint import Names
from poise.models.model import Model
from poise.nn import BlockConfig, Choice, Encoder, Learned, Linear, Visible, linear
from poise.variants import BigBird, Longformer, LongformerVisible

_BODY = {
    "tokens": "{}.embeddings.word_embeddings",
    "positions": "{}.embeddings.position_embeddings",
    "segments": "{}.embeddings.token_type_embeddings",
    "norm": "{}.embeddings.LayerNorm",
    "encoder.blocks.*.attention.projection": "{}.encoder.layer.*.attention.self.{{query,key,value}}",
    "encoder.blocks.*.attention.out": "{}.encoder.layer.*.attention.output.dense",
    "encoder.blocks.*.attention_norm": "{}.encoder.layer.*.attention.output.LayerNorm",
    "encoder.blocks.*.feedforward.up": "{}.encoder.layer.*.intermediate.dense",
    "encoder.blocks.*.feedforward.down": "{}.encoder.layer.*.output.dense",
    "encoder.blocks.*.feedforward_norm": "{}.encoder.layer.*.output.LayerNorm",
    "classifier_dense": "classifier.dense",
    "classifier": "classifier.out_proj",
}


def _body(prefix: str) -> dict[str, str]:
    return {ours: theirs.format(prefix) for ours, theirs in _BODY.items()}


class LongEncoder(Model):
    """What the two have in common: embeddings, the stack, and the heads "hidden", "masked_lm" and "classification"."""

    def __init__(self, config: Mapping[str, Any], head: str | None) -> None:
        super().__init__(config, head)
        c = self.config
        width, eps = c["hidden_size"], c["layer_norm_eps"]
        self.tokens = nn.Embedding(c["vocab_size"], width)
        self.positions = Learned(c["max_position_embeddings"], width)
        self.segments = nn.Embedding(c["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, eps)
        block = BlockConfig(
            width,
            c["num_attention_heads"],
            c["intermediate_size"],
            activation=self.activation("hidden_act"),
            eps=eps,
            pre_norm=False,
            bias=c["use_bias"],
            out_bias=True,
            hidden_bias=True,
            dropout=c["hidden_dropout_prob"],
            attention_dropout=c["attention_probs_dropout_prob"],
            choice=self._choices(),
        )
        self.encoder = Encoder(block, c["num_hidden_layers"])
        if self.head == "masked_lm":
            self.transform = Linear(width, width)
            self.transform_norm = nn.LayerNorm(width, eps)
            if c["tie_word_embeddings"]:
                self.prediction_bias = nn.Parameter(torch.zeros(c["vocab_size"]))
            else:
                self.unembed = Linear(width, c["vocab_size"])
        elif self.head == "classification":
            self.classifier_dense = Linear(width, width)
            self.classifier = Linear(width, len(c.get("id2label") or (0, 1)))

    @abstractmethod
    def _choices(self) -> Callable[[], Choice] | None:
        """Makes the attention of one layer after the other."""

    def _embed(self, ids: Tensor, places: Tensor, segments: Tensor | None, scale: float = 1.0) -> Tensor:
        """The sum of the embeddings, before norm and dropout."""
        kinds = self.segments.weight[0] if segments is None else self.segments(segments)
        x = self.tokens(ids)
        summed: Tensor = (x if scale == 1.0 else x * scale) + kinds + self.positions(places)
        return summed

    def _dropped(self, x: Tensor) -> Tensor:
        dropout = self.config["hidden_dropout_prob"]
        if self.head == "classification" and self.config.get("classifier_dropout") is not None:
            dropout = self.config["classifier_dropout"]
        return F.dropout(x, dropout, self.training)

    def _headed(self, y: Tensor, prediction: str, classification: str) -> Tensor:
        """Hidden states [B, N, C] to what the head gives; its activations by name."""
        if self.head == "masked_lm":
            y = self.transform_norm(linear(y, self.transform.weight, self.transform.bias, prediction))
            tied = self.config["tie_word_embeddings"]
            y = linear(y, self.tokens.weight, self.prediction_bias) if tied else self.unembed(y)
        elif self.head == "classification":
            dense = self.classifier_dense
            pooled = linear(self._dropped(y[:, 0]), dense.weight, dense.bias, classification)
            y = self.classifier(self._dropped(pooled))
        return y


class LongformerModel(LongEncoder):
    """ids [B, N] to hidden states [B, N, C], masked-LM logits [B, N, V] or classification logits [B, K].

    Positions are counted over tokens that are not the padding token, from its id + 1 on, as in RoBERTa.
    """

    names = Names(
        prefix="longformer.",
        table=_body("longformer")
        | {
            f"encoder.blocks.*.attention.choice.{part}": f"longformer.encoder.layer.*.attention.self.{part}_global"
            for part in ("query", "key", "value")
        }
        | {
            "pooler": "longformer.pooler.dense",
            "transform": "lm_head.dense",
            "transform_norm": "lm_head.layer_norm",
            "prediction_bias": "lm_head.bias",
            "unembed": "lm_head.decoder",
        },
        ignored=(r"longformer\.embeddings\.position_ids", r"lm_head\.decoder\.(weight|bias)"),
    )
    heads: ClassVar[Mapping[str, str]] = {
        "hidden": "LongformerModel",
        "masked_lm": "LongformerForMaskedLM",
        "classification": "LongformerForSequenceClassification",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_window": 512,
        "pad_token_id": 1,
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
        "use_bias": True,
    }

    def __init__(self, config: Mapping[str, Any], head: str | None = None) -> None:
        super().__init__(config, head)
        self.refuse(use_bias=True)

    def _choices(self) -> Callable[[], Choice]:
        c = self.config
        windows = c["attention_window"]
        layers = c["num_hidden_layers"]
        each = iter([windows] * layers if isinstance(windows, int) else windows)
        if not isinstance(windows, int) and len(windows) != layers:
            raise ValueError(f"config.json: attention_window names {len(windows)} layers, num_hidden_layers {layers}")
        return lambda: Longformer(next(each), width=c["hidden_size"], heads=c["num_attention_heads"])

    def forward(
        self,
        ids: Tensor,
        padding: Tensor | None = None,
        segments: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """padding, tokens: bool [B, N], True = a real token, a global one. segments [B, N]: 0 or 1.

        Without `tokens` classification makes the first token global, as transformers does, and the other heads none.
        """
        if tokens is None and self.head == "classification":
            tokens = torch.zeros_like(ids, dtype=torch.bool)
            tokens[:, 0] = True
        pad = self.config["pad_token_id"]
        counted = ids != pad
        places = counted.cumsum(1) * counted + pad
        x = self._embed(ids, places, segments)
        x = F.dropout(self.norm(x), self.config["hidden_dropout_prob"], self.training)
        y = self.encoder(x, visible=LongformerVisible(padding=padding, tokens=tokens))
        return self._headed(y, "gelu", "tanh")


class BigBirdModel(LongEncoder):
    """ids [B, N] to hidden states [B, N, C], masked-LM logits [B, N, V] or classification logits [B, K].

    hf_compat: counts blocks as transformers does in eval mode (see `poise.variants.BigBird`), for equal outputs. By
        default every layer has random blocks of its own, as in training, and no key counts twice.
    """

    names = Names(
        prefix="bert.",
        table=_body("bert")
        | {
            "pooler": "bert.pooler",
            "transform": "cls.predictions.transform.dense",
            "transform_norm": "cls.predictions.transform.LayerNorm",
            "prediction_bias": "cls.predictions.bias",
            "unembed": "cls.predictions.decoder",
        },
        ignored=(
            r"bert\.embeddings\.(position_ids|token_type_ids)",
            r"cls\.predictions\.decoder\.(weight|bias)",
            r"cls\.seq_relationship\..*",
        ),
    )
    heads: ClassVar[Mapping[str, str]] = {
        "hidden": "BigBirdModel",
        "masked_lm": "BigBirdForMaskedLM",
        "classification": "BigBirdForSequenceClassification",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_type": "block_sparse",
        "block_size": 64,
        "num_random_blocks": 3,
        "use_bias": True,
        "rescale_embeddings": False,
        "vocab_size": 50358,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": None,
        "max_position_embeddings": 4096,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    }

    def __init__(self, config: Mapping[str, Any], head: str | None = None, *, hf_compat: bool = False) -> None:
        self._hf_compat = hf_compat
        super().__init__(config, head)
        self.refuse(is_decoder=False)

    def _choices(self) -> Callable[[], Choice] | None:
        c = self.config
        if c["attention_type"] == "original_full":
            return None
        layer = count()
        return lambda: BigBird(c["block_size"], c["num_random_blocks"], seed=next(layer), hf_compat=self._hf_compat)

    def forward(self, ids: Tensor, padding: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """padding: bool [B, N], True = a real token. segments [B, N]: 0 or 1."""
        c = self.config
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self._embed(ids, places, segments, c["hidden_size"] ** 0.5 if c["rescale_embeddings"] else 1.0)
        x = self.norm(F.dropout(x, c["hidden_dropout_prob"], self.training))
        y = self.encoder(x, visible=Visible(padding=padding))
        activation = self.activation("hidden_act")
        return self._headed(y, activation, activation)
