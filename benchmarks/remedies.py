"""What remedies cost: a training step of a small Llama, with each of them and without, in turns in one process.

Figures are times over that of the step without a remedy, which also runs as another contestant: how far from 1 that one
is, is noise. `python benchmarks/remedies.py`; alone on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from timing import interleaved

import poise

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "qk-clip": {"tau": 100.0},
    "qk-norm": {},
    "soft-cap": {},
    "sigma-reparam": {},
    "scale": {"policy": "log-n", "length": 256},
    "sink": {},
    "qk-lr": {},
    "clip-qkv": {},
    "z-loss": {},
    "entropy-floor": {},
    "none, once more": {},
}


def training_step(name: str) -> Callable[[], None]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, attn_implementation="poise",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if not name.startswith("none"):
        poise.remedy(model, name, optimizer=optimizer if name == "qk-lr" else None, **CASES[name])
    ids = torch.randint(0, 512, (4, 256))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


def main() -> None:
    poise.hf.register()
    times = interleaved({name: training_step(name) for name in CASES}, seconds=40.0)
    print("4 layers, width 256, 8 query and 4 key/value heads x 32, batch 4 x 256, float32, AdamW:")
    print(f"a step takes {1e3 * times['none']:.0f} ms; with a remedy, as a multiple of that\n")
    print("| remedy | time |\n|---|--:|")
    for name in list(CASES)[1:]:
        print(f"| {name} | {times[name] / times['none']:.3f} |")


if __name__ == "__main__":
    main()
