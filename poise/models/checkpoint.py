"""Hugging Face checkpoints, read and written without transformers: files, shards, and names translated by tables.

Files are mapped into memory, so a weight that is neither converted nor joined with others is never copied. A model
brings a table of names (`names`, data) and says which of its family's parts it has; this file knows no model.

A table maps our modules to theirs, without the last part (`weight`, `bias`). `*` is a number, `{a,b}` several of their
tensors that are one of ours, row by row, and `^T` at the end marks weights that they store transposed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor, nn

CONFIG, SINGLE, INDEX, PICKLED = "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
_SHOWN = 20  # names listed in an error


@dataclass(frozen=True)
class Names:
    """How a family's tensors are called in its checkpoints."""

    table: Mapping[str, str]  # our module -> theirs
    prefix: str = ""  # what begins their names, except in checkpoints of the bare model
    ignored: tuple[str, ...] = ()  # regular expressions of their names that hold no weights, or the same ones again

    def theirs(self, ours: str) -> tuple[tuple[str, ...], bool] | None:
        """Their names of the tensors that make up our parameter, in order, and whether they are transposed."""
        module, _, leaf = ours.rpartition(".")
        for key, value in ((module, leaf), (ours, "")):
            numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", key)
            pattern = self.table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key))
            if pattern is not None:
                stem = pattern.removesuffix("^T")
                for number in numbers:
                    stem = stem.replace("*", number, 1)
                found = tuple(f"{name}.{value}" if value else name for name in _alternatives(stem))
                return found, pattern.endswith("^T") and leaf == "weight"
        return None

    def known(self, theirs: str) -> bool:
        """Whether the family has a tensor of this name, be it in this model or in another of the family."""
        return self._expression.fullmatch(theirs) is not None

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        stems = [name for pattern in self.table.values() for name in _alternatives(pattern.removesuffix("^T"))]
        forms = [re.escape(stem).replace(r"\*", r"\d+") + r"(\.(weight|bias))?" for stem in stems]
        return re.compile("|".join([*forms, *self.ignored]))


class Named(nn.Module):
    """A module that knows its names in checkpoints."""

    names: Names


def read_config(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a checkpoint is a directory with {CONFIG} and weights in it")
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their stored names, mapped into memory."""
    directory = Path(directory)
    if (directory / INDEX).is_file():
        places = json.loads((directory / INDEX).read_text())["weight_map"]
        files = [directory / name for name in sorted(set(places.values()))]
        missing = [str(path) for path in files if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"{directory / INDEX} names shards that are missing: {_listed(missing)}")
        return {name: tensor for path in files for name, tensor in _read_safetensors(path)}
    if (directory / SINGLE).is_file():
        return dict(_read_safetensors(directory / SINGLE))
    if (directory / f"{PICKLED}.index.json").is_file():
        places = json.loads((directory / f"{PICKLED}.index.json").read_text())["weight_map"]
        return {
            name: tensor for path in sorted(set(places.values())) for name, tensor in _read_pickled(directory / path)
        }
    if (directory / PICKLED).is_file():
        return dict(_read_pickled(directory / PICKLED))
    raise FileNotFoundError(f"{directory} holds no weights: looked for {SINGLE}, {INDEX} and {PICKLED}")


def _read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    library = _safetensors()
    try:
        file = library.safe_open(path, framework="pt")
    except library.SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}): fetch it again") from None
    with file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def _read_pickled(path: Path) -> Iterator[tuple[str, Tensor]]:
    # Before torch 1.6 such files were no archives; those cannot be mapped.
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except (UnpicklingError, RuntimeError, EOFError) as error:
        # Without what torch then advises, which is to run the code in it.
        told = str(error).partition(". ")[0] or type(error).__name__
        raise ValueError(f"{path} is not a whole file of tensors and nothing else: {told}") from None
    yield from tensors.items()


def fill(model: Named, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, where: str) -> None:
    """Gives a model, built on the meta device, its parameters; raises with all names that do not fit."""
    names = model.names
    # BERT's first converted checkpoints call a norm's weight and bias gamma and beta.
    tensors = {re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name)): x for name, x in tensors.items()}
    bare = names.prefix and not any(name.startswith(names.prefix) for name in tensors)
    used: set[str] = set()
    missing: list[str] = []
    misfits: list[str] = []
    for ours, parameter in dict(model.named_parameters()).items():
        found = names.theirs(ours)
        assert found is not None, f"no name in checkpoints for {ours}"
        theirs, transposed = found
        if bare:
            theirs = tuple(name.removeprefix(names.prefix) for name in theirs)
        used.update(theirs)
        absent = [name for name in theirs if name not in tensors]
        if absent:
            missing += absent
            continue
        parts = [tensors[name].t() if transposed else tensors[name] for name in theirs]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if tensor.shape != parameter.shape:
            misfits.append(f"{theirs[0]} {list(tensor.shape)}, by {CONFIG} {list(parameter.shape)}")
            continue
        tensor = tensor.contiguous() if dtype is None else tensor.to(dtype).contiguous()
        _assign(model, ours, nn.Parameter(tensor, requires_grad=True))
    full = (names.prefix + name if bare and not names.known(name) else name for name in tensors)
    unexpected = [
        name for name, known in zip(tensors, full, strict=True) if name not in used and not names.known(known)
    ]
    if missing or unexpected or misfits:
        told = [("missing", missing), ("unexpected", unexpected), ("of another shape", misfits)]
        parts_told = "; ".join(f"{word}: {_listed(sorted(which))}" for word, which in told if which)
        raise ValueError(f"the checkpoint {where} does not fit its {CONFIG}. Tensors {parts_told}")


def collect(model: Named, bare: bool) -> dict[str, Tensor]:
    """The model's parameters by their names in checkpoints."""
    names, collected = model.names, dict[str, Tensor]()
    for ours, parameter in model.named_parameters():
        found = names.theirs(ours)
        assert found is not None, f"no name in checkpoints for {ours}"
        theirs, transposed = found
        tensor = parameter.detach()
        sizes = _rows(model, ours, len(theirs), tensor)
        for name, part in zip(theirs, torch.split(tensor, sizes), strict=True):
            key = name.removeprefix(names.prefix) if bare else name
            collected[key] = (part.t() if transposed else part).contiguous()
    return collected


def write(directory: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    from importlib import import_module

    _safetensors()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # Saved as copies of their own: the file format holds no views, and what is written may be what is mapped.
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    import_module("safetensors.torch").save_file(own, directory / (SINGLE + ".new"), metadata={"format": "pt"})
    (directory / (SINGLE + ".new")).replace(directory / SINGLE)
    (directory / CONFIG).write_text(json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n")


def _rows(model: nn.Module, ours: str, count: int, tensor: Tensor) -> list[int]:
    """How many rows of our parameter each of their tensors has."""
    owner = model.get_submodule(ours.rpartition(".")[0])
    rows = getattr(owner, "rows", None)
    if isinstance(rows, list) and len(rows) == count:
        return rows
    return [tensor.shape[0] // count] * count


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, parameter)


def _alternatives(pattern: str) -> list[str]:
    """a.{b,c}.d -> a.b.d, a.c.d"""
    before, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    inside, _, after = rest.partition("}")
    return [before + choice + after for choice in inside.split(",")]


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        raise ImportError("checkpoints need the safetensors package: pip install 'poise[models]'") from None
    return safetensors
