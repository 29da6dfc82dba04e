"""From a BERT or RoBERTa checkpoint to a Longformer, by the published recipe (arXiv:2004.05150, section 5).

Position embeddings are copied over and over until they reach the new length, the global projections begin as copies of
the local ones, all else stays. The result answers as before on texts that fit the window, and reads longer ones; it
should then be trained on some.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from poise.models.checkpoint import fill, read_config, read_tensors
from poise.models.long import LongformerModel

# Beginnings of names in BERT's checkpoints, and the same in Longformer's; RoBERTa's heads are called as Longformer's.
_RENAMED = (
    ("bert.", "longformer."),
    ("roberta.", "longformer."),
    ("cls.predictions.transform.dense.", "lm_head.dense."),
    ("cls.predictions.transform.LayerNorm.", "lm_head.layer_norm."),
    ("cls.predictions.decoder.", "lm_head.decoder."),
    ("cls.predictions.bias", "lm_head.bias"),
)
_DROPPED = ("cls.seq_relationship.", "longformer.embeddings.position_ids")
_KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "layer_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "sep_token_id",
)
_PAD = {"bert": 0, "roberta": 1}  # where config.json leaves it out


def extend(directory: str | Path, window: int, max_len: int, *, dtype: torch.dtype | None = None) -> LongformerModel:
    """A Longformer of up to max_len tokens with this total window in every layer, in eval mode; `save` writes it.

    Its head is "masked_lm" if the checkpoint has one, else "hidden".
    """
    config, tensors = read_config(directory), read_tensors(directory)
    kind = config.get("model_type")
    if kind not in _PAD:
        raise ValueError(f"{directory}: extend takes a BERT or RoBERTa checkpoint; model_type is {kind!r}")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"{directory}: extend needs absolute positions; got {config['position_embedding_type']!r}")
    pad = config.get("pad_token_id")
    pad = _PAD[kind] if pad is None else pad
    renamed = {_renamed(name): tensor for name, tensor in tensors.items()}
    renamed = {name: tensor for name, tensor in renamed.items() if not name.startswith(_DROPPED)}
    masked_lm = any(name.startswith("lm_head.") for name in renamed)
    if masked_lm and kind == "bert" and config.get("hidden_act", "gelu") != "gelu":
        raise ValueError(
            f"{directory}: Longformer's masked-LM head has the activation 'gelu', this one {config['hidden_act']!r}"
        )
    known = LongformerModel.names.known
    full = {
        name if known(name) else f"longformer.{name}": tensor for name, tensor in renamed.items()
    }  # bare checkpoints have no prefix
    full = {name: x for name, x in full.items() if not name.startswith("classifier.")}
    table = "longformer.embeddings.position_embeddings.weight"
    full[table] = _repeated(full[table], pad + 1, 0 if kind == "bert" else pad + 1, max_len)
    for name, tensor in list(full.items()):
        for part in ("query", "key", "value"):
            if f".attention.self.{part}." in name:
                full[name.replace(f".self.{part}.", f".self.{part}_global.")] = tensor.clone()
    extended = {key: config[key] for key in _KEPT if key in config} | {
        "model_type": "longformer",
        "attention_window": [window] * config["num_hidden_layers"],
        "max_position_embeddings": max_len + pad + 1,
        "pad_token_id": pad,
    }
    with torch.device("meta"):
        model = LongformerModel(extended, "masked_lm" if masked_lm else "hidden")
    fill(model, full, dtype, str(directory))
    model.eval()
    return model


def _renamed(name: str) -> str:
    name = name.replace(".gamma", ".weight").replace(".beta", ".bias")  # in BERT's first converted checkpoints
    return next((new + name.removeprefix(old) for old, new in _RENAMED if name.startswith(old)), name)


def _repeated(old: Tensor, first: int, skipped: int, max_len: int) -> Tensor:
    """Row `first` + i is row `skipped` + i of the old table, which begins anew where it ends: [first + max_len, C].

    Rows before stand for padding: those of the old table, or zeros.
    """
    usable = old[skipped:]
    before = old[:first] if skipped == first else old.new_zeros(first, old.shape[1])
    return torch.cat([before, usable[torch.arange(max_len) % len(usable)]])
