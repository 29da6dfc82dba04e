"""From a directory to a model and back: `load`, `save`, and the tokenizer that lies beside the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from poise.models.bert import Bert
from poise.models.checkpoint import collect, fill, read_config, read_tensors, write
from poise.models.gpt import GPT
from poise.models.llama import Llama
from poise.models.long import BigBirdModel, LongformerModel
from poise.models.model import Model
from poise.models.t5 import T5

# model_type in config.json -> what makes the model from that configuration and a head
FAMILIES: dict[str, Callable[..., Model]] = {
    "bert": Bert,
    "big_bird": BigBirdModel,
    "gpt2": GPT,
    "llama": Llama,
    "longformer": LongformerModel,
    "t5": T5,
}


def load(directory: str | Path, *, head: str | None = None, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """A model from a Hugging Face checkpoint: config.json and safetensors (or pytorch_model.bin), sharded or not.

    head: what the model gives, by default what `architectures` says: "masked_lm", "classification", "embedding" or
        "hidden" for BERT, "causal_lm", "seq2seq_lm".
    dtype: converts the weights; None leaves them as stored, mapped from the file.
    options: further arguments of the family's class.

    In eval mode, ready for inference; call `.train()` to train it.
    """
    config = read_config(directory)
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{directory}: model_type must be one of {', '.join(map(repr, FAMILIES))}; got {kind!r}")
    with torch.device("meta"):
        model = FAMILIES[kind](config, head, **options)
    generation = Path(directory) / "generation_config.json"
    if generation.is_file():  # what ends a text is told there, if at all
        told = json.loads(generation.read_text())
        keys = ("eos_token_id", "decoder_start_token_id")
        model.config.update({key: told[key] for key in keys if told.get(key) is not None})
    fill(model, read_tensors(directory), dtype, str(directory))
    return model.eval()


def save(model: Model, directory: str | Path) -> None:
    """Writes a checkpoint that `load` and transformers read. Tied weights are written once."""
    architecture = model.heads[model.head]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    kind = next(name for name, family in FAMILIES.items() if isinstance(family, type) and isinstance(model, family))
    config = {**model.given, "architectures": [architecture], "model_type": kind, "dtype": dtype}
    write(directory, config, collect(model, bare=architecture.endswith("Model")))


def tokenizer(directory: str | Path, *, longest: int | None = None) -> Any:
    """The `tokenizers.Tokenizer` in a checkpoint's tokenizer.json, without padding; longest: cuts off what follows."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError("tokenizers are read by the tokenizers package: pip install 'poise[models]'") from None
    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: only tokenizers in that form are read")
    made = tokenizers.Tokenizer.from_file(str(path))
    made.no_padding()
    if longest is None:
        made.no_truncation()
    else:
        made.enable_truncation(longest)
    return made
