"""BERT, as an assembly of blocks: encoder with one of four heads, and its names in checkpoints.

A padded batch is packed before the first block, so that no padding is computed, and unpacked after the last.

Letters: B batch, N positions, T real tokens of a batch, C width, V vocabulary, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise.models.checkpoint import Names
from poise.models.model import Model
from poise.nn import BlockConfig, Choice, Encoder, Learned, Linear, Packing, Visible, linear

NAMES = Names(
    prefix="bert.",
    table={
        "tokens": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "segments": "bert.embeddings.token_type_embeddings",
        "norm": "bert.embeddings.LayerNorm",
        "encoder.blocks.*.attention.projection": "bert.encoder.layer.*.attention.self.{query,key,value}",
        "encoder.blocks.*.attention.out": "bert.encoder.layer.*.attention.output.dense",
        "encoder.blocks.*.attention_norm": "bert.encoder.layer.*.attention.output.LayerNorm",
        "encoder.blocks.*.feedforward.up": "bert.encoder.layer.*.intermediate.dense",
        "encoder.blocks.*.feedforward.down": "bert.encoder.layer.*.output.dense",
        "encoder.blocks.*.feedforward_norm": "bert.encoder.layer.*.output.LayerNorm",
        "pooler": "bert.pooler.dense",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "prediction_bias": "cls.predictions.bias",
        "unembed": "cls.predictions.decoder",
        "classifier": "classifier",
    },
    ignored=(
        r"bert\.embeddings\.position_ids",
        r"cls\.predictions\.decoder\.(weight|bias)",
        r"cls\.seq_relationship\..*",
    ),
)


class Bert(Model):
    """ids [B, N] to: "masked_lm" logits [B, N, V], "classification" logits [B, K], "embedding" the normalised mean of
    the last hidden states [B, C], "hidden" those themselves [B, N, C].

    choice: makes each layer's attention, if not the exact one; padding is then computed and masked, not packed away.
    """

    names = NAMES
    heads: ClassVar[Mapping[str, str]] = {
        "hidden": "BertModel",
        "embedding": "BertModel",
        "masked_lm": "BertForMaskedLM",
        "classification": "BertForSequenceClassification",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
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
        "classifier_dropout": None,
        "tie_word_embeddings": True,
    }

    def __init__(
        self, config: Mapping[str, Any], head: str | None = None, choice: Callable[[], Choice] | None = None
    ) -> None:
        super().__init__(config, head)
        self.refuse(position_embedding_type="absolute", is_decoder=False)
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
            dropout=c["hidden_dropout_prob"],
            attention_dropout=c["attention_probs_dropout_prob"],
            choice=choice,
        )
        self.encoder = Encoder(block, c["num_hidden_layers"])
        self.packs = choice is None
        self._dropout = c["hidden_dropout_prob"] if c["classifier_dropout"] is None else c["classifier_dropout"]
        if self.head == "masked_lm":
            self.transform = Linear(width, width)
            self.transform_norm = nn.LayerNorm(width, eps)
            if c["tie_word_embeddings"]:
                self.prediction_bias = nn.Parameter(torch.zeros(c["vocab_size"]))
            else:
                self.unembed = Linear(width, c["vocab_size"])
        elif self.head == "classification":
            self.pooler = Linear(width, width)
            self.classifier = Linear(width, len(c.get("id2label") or (0, 1)))

    def forward(
        self,
        ids: Tensor | Sequence[Sequence[int] | Tensor],
        padding: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """ids [B, N], padding bool [B, N], True = real; or a list of rows of any lengths. segments [B, N]: 0 or 1."""
        if not isinstance(ids, Tensor):
            if padding is not None or segments is not None:
                raise ValueError("padding and segments go with a tensor of ids, not with a list of rows")
            ids, padding = padded(ids, self.tokens.weight.device)
        y, packing = self._encoded(ids, padding, segments)
        if self.head == "embedding":
            return F.normalize(packing.mean(y), dim=-1)
        if self.head == "classification":
            logits: Tensor = self.classifier(F.dropout(self._pooled(packing.first(y)), self._dropout, self.training))
            return logits
        if self.head == "masked_lm":
            y = self.transform_norm(
                linear(y, self.transform.weight, self.transform.bias, self.activation("hidden_act"))
            )
            tied = self.config["tie_word_embeddings"]
            y = linear(y, self.tokens.weight, self.prediction_bias) if tied else self.unembed(y)
        return packing.unpack(y)

    def embed(self, rows: Sequence[Sequence[int] | Tensor], tokens: int = 4096) -> Tensor:
        """The forward pass on rows of token ids, as many as there are, in packs of about so many tokens: [B, ...].

        For heads that give one vector per row. A pack that fits the last cache is the fastest.
        """
        if self.head not in ("embedding", "classification"):
            raise ValueError(f"embed needs head 'embedding' or 'classification'; this model has {self.head!r}")
        packs: list[list[Sequence[int] | Tensor]] = [[]]
        held = 0
        for row in rows:
            if packs[-1] and held + len(row) > tokens:
                packs.append([])
                held = 0
            packs[-1].append(row)
            held += len(row)
        return torch.cat([self(pack) for pack in packs])

    def _encoded(self, ids: Tensor, padding: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Packing]:
        """Hidden states of the real tokens, side by side: [1, T, C]."""
        if padding is None or bool(padding.all()) or not self.packs:
            places = torch.arange(ids.shape[1], device=ids.device)
            y = self.encoder(self._embed(ids, places, segments), visible=Visible(padding=padding), places=places)
            packing = Packing(torch.ones_like(ids, dtype=torch.bool) if padding is None else padding)
            return packing.pack(y), packing
        packing = Packing(padding)
        x = self._embed(packing.pack(ids), packing.places, None if segments is None else packing.pack(segments))
        return self.encoder(x, visible=packing.visible, places=packing.places), packing

    def _embed(self, ids: Tensor, places: Tensor, segments: Tensor | None) -> Tensor:
        kinds = self.segments.weight[0] if segments is None else self.segments(segments)
        x = self.norm(self.tokens(ids) + kinds + self.positions(places))
        return F.dropout(x, self.config["hidden_dropout_prob"], self.training)

    def _pooled(self, first: Tensor) -> Tensor:
        return linear(first, self.pooler.weight, self.pooler.bias, "tanh")


def padded(rows: Sequence[Sequence[int] | Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of token ids of any lengths as ids [B, N] and what of it is real, bool [B, N]."""
    tensors = [torch.as_tensor(row, dtype=torch.int64, device=device) for row in rows]
    if not tensors or any(row.dim() != 1 for row in tensors):
        raise ValueError("ids must be a tensor [B, N] or a list of rows of token ids, at least one")
    ids = nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    lengths = torch.tensor([len(row) for row in tensors], device=device)
    return ids, torch.arange(ids.shape[1], device=device) < lengths[:, None]
