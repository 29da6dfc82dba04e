"""Efficient variants against the implementations people use, in one run: `python benchmarks/variants.py`.

Longformer and BigBird encoders against transformers', from the same random checkpoint, two base-size layers; the causal
Performer against performer-pytorch, with the same features. A ratio is the peer's median time over ours, both in turns
in one process. The difference is that of the outputs, by the largest: where blocks are random it is large; and
performer-pytorch adds constants to its features and sums, which outweigh many of them (docs/variants.md). The peers are
no dependency of poise; what is not installed is said and left out.

    pip install transformers
    pip install --no-deps performer-pytorch local-attention hyper-connections torch-einops-utils \
        axial-positional-embedding einops
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import limits
import torch
from timing import interleaved

import poise
from poise.kernels import ops
from poise.models import load
from poise.nn import CAUSAL, Call
from poise.variants import Performer

LENGTH = 4096
SIZES = {"vocab_size": 1000, "num_hidden_layers": 2, "max_position_embeddings": LENGTH + 2}
Contest = dict[str, Callable[[], torch.Tensor]]


def longformer(dtype: torch.dtype) -> Contest:
    import transformers

    config = transformers.LongformerConfig(attention_window=512, **SIZES)
    theirs = transformers.LongformerModel(config, add_pooling_layer=False).eval().to(dtype)
    ours = _loaded(theirs)
    ids = torch.randint(3, 1000, (1, LENGTH))
    tokens = torch.zeros(1, LENGTH, dtype=torch.bool)
    tokens[:, [0, 100]] = True
    return {
        "poise": lambda: ours(ids, tokens=tokens),
        "peer": lambda: theirs(ids, global_attention_mask=tokens.long()).last_hidden_state,
    }


def bigbird(dtype: torch.dtype, hf_compat: bool) -> Contest:
    import transformers

    config = transformers.BigBirdConfig(block_size=64, num_random_blocks=3, **SIZES)
    theirs = transformers.BigBirdModel(config, add_pooling_layer=False).eval().to(dtype)
    ours = _loaded(theirs, hf_compat=hf_compat)
    ids = torch.randint(3, 1000, (1, LENGTH))
    return {"poise": lambda: ours(ids), "peer": lambda: theirs(ids).last_hidden_state}


def performer(dtype: torch.dtype) -> Contest:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from performer_pytorch import FastAttention

        theirs = FastAttention(64, causal=True)
    ours = Performer(64, theirs.nb_features).eval()
    ours.omega.copy_(theirs.projection_matrix)
    q, k, v = (torch.randn(1, 8, 8192, 64, dtype=dtype) for _ in range(3))
    return {"poise": lambda: ours(q, k, v, Call(visible=CAUSAL)), "peer": lambda: theirs(q, k, v)}


def _loaded(theirs: Any, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        theirs.save_pretrained(folder)
        return load(folder, **options)


# name: (what makes the contest, the peer, the target ratio)
CASES: dict[str, tuple[Callable[[], Contest], str, float | None]] = {
    "Longformer, 1 x 4096, window 512, 2 global": (lambda: longformer(torch.float32), "transformers", 4.0),
    "BigBird, 1 x 4096, block 64, as transformers counts": (lambda: bigbird(torch.float32, True), "transformers", 3.0),
    "BigBird, 1 x 4096, block 64, 3 random blocks": (lambda: bigbird(torch.float32, False), "transformers", 3.0),
    "Performer, causal, 1 x 8 x 8192 x 64, 266 features": (lambda: performer(torch.float32), "performer_pytorch", 2.0),
}


def rows(options: argparse.Namespace) -> Iterator[str]:
    yield f"- machine: {limits.machine()}; ISA {ops.isa()}; {options.threads} threads, fp32"
    yield f"- poise {poise.__version__}, torch {torch.__version__}; medians, in turns\n"
    yield "| case | poise ms | peer | peer ms | ratio | target | difference |"
    yield "|---|--:|---|--:|--:|--:|--:|"
    for name, (make, peer, target) in CASES.items():
        if options.only not in name:
            continue
        if importlib.util.find_spec(peer) is None:
            yield f"| {name} | | {peer} is not installed | | | | |"
            continue
        torch.manual_seed(0)
        with torch.inference_mode():
            contest = make()
            got, expected = contest["poise"](), contest["peer"]()
            difference = float((got - expected).abs().max() / expected.abs().max())
            t = interleaved(contest, options.seconds, least=3)
        goal = "–" if target is None else f"{target:g}"
        ratio = t["peer"] / t["poise"]
        times = f"{t['poise'] * 1e3:.0f} | {peer} | {t['peer'] * 1e3:.0f}"
        yield f"| {name} | {times} | {ratio:.2f} | {goal} | {difference:.0e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent on each comparison")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for line in rows(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
