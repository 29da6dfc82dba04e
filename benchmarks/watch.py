"""What watching costs: models of real sizes, watched and not, against torch's own attention; targets beside figures.

The weights are random (speed does not depend on them): a Llama of SmolLM2-135M's sizes and a BERT-base. Contestants
take turns in one process. `python benchmarks/watch.py prefill|train|memory`; run it alone on the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from collections.abc import Callable
from typing import Any

import torch
from timing import interleaved
from torch import nn

import poise
from poise.kernels import ops

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def llama(attention: str, layers: int = 30) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SMOLLM2, "num_hidden_layers": layers}, attn_implementation=attention)
    )
    assert isinstance(model, nn.Module)
    return model.eval()


def row(what: str, figure: float, target: str, met: bool) -> None:
    print(f"| {what} | {figure:.3f} | {target} | {'met' if met else 'missed'} |")


def prefill(options: argparse.Namespace) -> None:
    """Figures of merit: time of torch sdpa unwatched over ours watched; what watching adds."""
    ids = torch.randint(3, 49152, (1, options.length))
    models = {name: llama(name) for name in ("sdpa", "poise")}

    def forward(name: str, watch: poise.Watch | None = None) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                models[name](input_ids=ids, use_cache=False, logits_to_keep=1)
            if watch is not None:
                watch.step()

        return run

    def watched(name: str, every: int) -> Callable[[], None]:
        def run() -> None:  # opened and closed inside: the others must run unwatched
            with poise.watch(models[name], every=every, first_step=int(every > 1)) as w:
                forward(name, w)()

        return run

    contest = {
        "sdpa": forward("sdpa"),
        "poise": forward("poise"),
        "watched": watched("poise", 1),
        "between": watched("poise", 10),
        "sdpa watched": watched("sdpa", 1),
    }
    t = interleaved(contest, options.seconds, least=5)
    print(f"\nPrefill of {options.length} tokens, 135M parameters, fp32, {options.threads} threads; median ms:")
    print(", ".join(f"{name} {value * 1e3:.0f}" for name, value in t.items()))
    every_10 = (t["watched"] + 9 * t["between"]) / 10
    print("\n| what | measured | target | |\n|---|--:|--:|---|")
    row("sdpa unwatched / poise watched, every=1", t["sdpa"] / t["watched"], ">= 1.1", t["sdpa"] >= 1.1 * t["watched"])
    row("poise watched / unwatched, every=1", t["watched"] / t["poise"], "<= 1.05", t["watched"] <= 1.05 * t["poise"])
    row("poise watched / unwatched, every=10", every_10 / t["poise"], "<= 1.01", every_10 <= 1.01 * t["poise"])
    row("sdpa watched / sdpa unwatched", t["sdpa watched"] / t["sdpa"], "–", True)


def train(options: argparse.Namespace) -> None:
    """One AdamW step of BERT-base, batch 8 of 128 tokens."""
    import transformers

    ids = torch.randint(3, 30000, (8, 128))
    contest = {}
    for name, attention, watching in (("sdpa", "sdpa", False), ("poise", "poise", False), ("watched", "poise", True)):
        torch.manual_seed(0)
        config = transformers.BertConfig(
            attn_implementation=attention, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        model = transformers.BertModel(config, add_pooling_layer=False).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            model(input_ids=ids).last_hidden_state.square().mean().backward()
            optimizer.step()

        def run(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, on: bool = watching) -> None:
            if not on:
                step(model, optimizer)
                return
            with poise.watch(model):
                step(model, optimizer)

        contest[name] = run
    t = interleaved(contest, options.seconds, least=3)
    print(f"\nTraining step of BERT-base, batch 8 x 128, fp32, {options.threads} threads; median ms:")
    print(", ".join(f"{name} {value * 1e3:.0f}" for name, value in t.items()))
    print("\n| what | measured | target | |\n|---|--:|--:|---|")
    row("sdpa unwatched / poise watched", t["sdpa"] / t["watched"], ">= 1", t["sdpa"] >= t["watched"])
    row("poise watched / unwatched", t["watched"] / t["poise"], "–", True)


def peak(watching: bool, length: int, results: Any) -> None:
    """The largest resident memory of this process, in MB, after a prefill."""
    poise.hf.register()
    model = llama("poise", 6)  # layers run one after another: more of them change nothing
    ids = torch.randint(3, 49152, (1, length))
    with torch.no_grad():
        model(input_ids=ids[:, :64], use_cache=False, logits_to_keep=1)
        if watching:
            with poise.watch(model):
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
        else:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    results.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def memory(options: argparse.Namespace) -> None:
    """Peak memory of a prefill of 8192 tokens, each in a process of its own."""
    length, spawn, peaks = 8192, multiprocessing.get_context("spawn"), []
    for watching in (False, True):
        results = spawn.Queue()
        process = spawn.Process(target=peak, args=(watching, length, results))
        process.start()
        peaks.append(results.get())
        process.join()
    plain, watched = peaks
    eager = 30 * SMOLLM2["num_attention_heads"] * length**2 * 4 / 2**20
    print(f"\nPeak memory at {length} tokens: unwatched {plain:.0f} MB, watched {watched:.0f} MB")
    print(f"(eager with output_attentions=True would keep {eager / 1024:.0f} GiB of weights)")
    print("\n| what | measured | target | |\n|---|--:|--:|---|")
    row("MB that watching adds", watched - plain, "< 20", watched - plain < 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=("prefill", "train", "memory"))
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    poise.hf.register()
    print(f"poise {poise.__version__} ({ops.isa()}), torch {torch.__version__}")
    {"prefill": prefill, "train": train, "memory": memory}[options.case](options)


if __name__ == "__main__":
    main()
