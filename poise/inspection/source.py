"""From what a user calls a model to one that runs, and from texts to tokens. transformers does the loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poise import hf

HELP = "a directory with a Hugging Face checkpoint, a .gguf file, a name on the Hugging Face hub, or smollm2 or minilm"
_ENDLESS = 1 << 30  # what tokenizers without a limit call one


@dataclass(frozen=True)
class Tokens:
    """One text as the model reads it."""

    ids: list[int]
    shown: list[str]  # the piece of text that each stands for, or its own name
    text: str
    own: slice  # those that are the text's, not put around it
    cut: int = 0  # tokens left out, because the model reads no more


class Source:
    """A model in eval mode that runs on ids [1, N], and its tokenizer."""

    def __init__(self, name: str, model: nn.Module, tokenizer: Any = None) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.config: Any = getattr(model, "config", None)
        encode = getattr(model, "encode", None)  # of poise's own encoder-decoder
        if encode is None and self._told("is_encoder_decoder") and hasattr(model, "get_encoder"):
            encode = model.get_encoder()  # type: ignore[operator]
        self.part = "" if encode is None else "encoder"
        # Heads that make logits are left out: they attend to nothing, and take N · vocabulary numbers.
        self._run: Any = getattr(model, "base_model", model) if encode is None else encode

    def run(self, ids: Sequence[int]) -> None:
        cached = hasattr(self.config, "use_cache") and not self.part  # transformers': nothing would read it
        uncached = {"use_cache": False} if cached else {}
        device = next((x.device for x in self.model.parameters()), None)
        self._run(torch.tensor([list(ids)], device=device), **uncached)

    @property
    def longest(self) -> int:
        """How many tokens the model reads."""
        limits = (
            self._told("max_position_embeddings"),
            self._told("n_positions"),
            getattr(self.tokenizer, "model_max_length", None),
            getattr(self.model, "longest", None),
        )
        return min((x for x in limits if isinstance(x, int) and 0 < x < _ENDLESS), default=_ENDLESS)

    @property
    def vocabulary(self) -> int:
        size = self._told("vocab_size")
        if isinstance(size, int):
            return size
        embedding = next((x for x in self.model.modules() if isinstance(x, nn.Embedding)), None)
        if embedding is None:
            raise ValueError("model: it has no embedding of tokens; only models of text can be inspected")
        return embedding.num_embeddings

    def read(self, text: str | Sequence[int]) -> Tokens:
        """A text, or token ids as they are, cut off where the model ends."""
        if not isinstance(text, str):
            ids = [int(x) for x in text][: self.longest]
            return Tokens(ids, [str(x) for x in ids], "", slice(0, len(ids)), len(text) - len(ids))
        if self.tokenizer is None:
            raise ValueError("tokenizer is needed to read texts with a model that is passed as a module; or pass ids")
        ids, names, spans = self._encoded(text)
        ends = [0, *(end for _, end in spans)]  # the space before a token is shown with it, whoever's it is
        shown = [
            text[before if text[before:a].isspace() else a : b] or str(name)
            for name, before, (a, b) in zip(names, ends, spans, strict=False)
        ]
        leading, after = self.around()
        cut = max(0, len(ids) - self.longest)
        kept = slice(0, len(ids) - len(after) - cut)  # what closes a text stays
        ids, shown = ids[kept] + after, shown[kept] + shown[len(shown) - len(after) :]
        return Tokens(ids, shown, text, slice(len(leading), len(ids) - len(after)), cut)

    def around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after every text."""
        if self.tokenizer is None:
            return [], []
        inner, _, _ = self._encoded("a", special=False)
        outer, _, _ = self._encoded("a")
        at = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), None)
        return ([], []) if at is None else (outer[:at], outer[at + len(inner) :])

    def _encoded(self, text: str, special: bool = True) -> tuple[list[int], list[str], list[tuple[int, int]]]:
        """Ids, their names, and where each stands in the text."""
        tokenizer = self.tokenizer
        if not callable(tokenizer):  # of the tokenizers package, as poise.models.tokenizer returns it
            read = tokenizer.encode(text, add_special_tokens=special)
            return read.ids, read.tokens, read.offsets
        fast = bool(getattr(tokenizer, "is_fast", False))
        told = tokenizer(text, add_special_tokens=special, return_offsets_mapping=fast, verbose=False)
        ids = list(told["input_ids"])
        return ids, tokenizer.convert_ids_to_tokens(ids), told["offset_mapping"] if fast else [(0, 0)] * len(ids)

    def _told(self, key: str) -> Any:
        return self.config.get(key) if isinstance(self.config, dict) else getattr(self.config, key, None)


def find(model: str | Path | nn.Module, tokenizer: Any = None) -> Source:
    if isinstance(model, nn.Module):
        return Source(type(model).__name__, model, tokenizer)
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a torch.nn.Module or {HELP}; got {type(model).__name__}")
    name = str(model)
    from poise.testing import weights

    place, options = _place(name)
    try:
        import transformers
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:
        raise ImportError("models are loaded by transformers: pip install 'poise[inspect]'") from None
    if hf.NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():  # a user's own registration is not disturbed
        hf.register()
    quiet: Any = transformers.utils.logging
    shows, level = quiet.is_progress_bar_enabled(), quiet.get_verbosity()
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options) if tokenizer is None else tokenizer
        loaded = transformers.AutoModel.from_pretrained(
            place, attn_implementation=hf.NAME, dtype=torch.float32, **options
        )
    except (OSError, ValueError, ImportError) as error:
        raise _refusal(name, place == name, error) from error
    finally:
        quiet.set_verbosity(level)
        if shows:
            quiet.enable_progress_bar()
    return Source(name if name in weights.NAMED else Path(name).name, loaded, tokenizer)


def _place(name: str) -> tuple[str, dict[str, str]]:
    """Where to load from, and what transformers must be told beside."""
    from poise.testing import weights

    path = Path(name)
    if name in weights.NAMED:
        return str(weights.directory(name)), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model: there is no file {name}")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(weights.directory(name)), {}
    if path.is_absolute() or name.count("/") > 1 or not name.strip():
        raise FileNotFoundError(f"model must be {HELP}; got {name!r}, which does not exist")
    _ask_hub(name)
    return name, {}


def _ask_hub(name: str) -> None:
    """Raises at once if a model is neither in the local cache nor on a hub that answers: loading would try for long."""
    try:
        import huggingface_hub
    except ImportError:
        return  # transformers, which needs it, is missing as well, and will be asked for
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        huggingface_hub.HfApi().model_info(name, timeout=10)
    except Exception as error:  # of the network or of the hub: their libraries have many
        raise _refusal(name, True, error) from error


def _refusal(name: str, from_hub: bool, error: Exception) -> Exception:
    told = str(error).strip().split("\n")[0]
    if isinstance(error, ImportError):
        return ImportError(f"model {name!r} needs a package that is not installed: {told}")
    if from_hub:
        return FileNotFoundError(
            f"model must be {HELP}. There is no directory {name!r} here, and as a name on the hub: {told}"
        )
    return ValueError(f"model {name!r} cannot be loaded: {told}")
