"""Whole models against transformers (sdpa) on the same weights: throughput by packing, encoders, prefill and decoding.

    python benchmarks/models.py [--rounds 3] [embedding|bert|prefill|decode|t5 ...]

Two threads; all take turns in one process, medians are compared, and what they return must agree. MiniLM is compared
with onnxruntime too where that is installed; it is no dependency of poise. MiniLM and SmolLM2 are the
real ones (`make weights`), BERT-base and T5-small random at their published sizes.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from timing import interleaved
from torch import Tensor

from poise import models
from poise.nn.cache import GrowingCache
from poise.testing import weights

THREADS = 2
SENTENCES, SHORTEST, LONGEST = 256, 5, 200
PROMPT, NEW = 2048, 128
Encode = Callable[[Tensor, Tensor], Tensor]  # ids and mask [B, N] -> hidden states [B, N, C]
Row = tuple[str, float, float, float | None]  # what, the other's seconds, ours, target ratio


def agree(ours: Tensor, theirs: Tensor, within: float) -> None:
    off = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not off <= within:
        raise AssertionError(f"outputs differ by {off:.1e} of their scale, allowed {within:.1e}")


def timed(contestants: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of each, and what each returned last."""
    last: dict[str, Any] = {}

    def remembering(name: str, call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            last[name] = call()

        return run

    return interleaved({n: remembering(n, call) for n, call in contestants.items()}, 0.0, rounds), last


def both(kind: str, config: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Their model of that configuration, random, and ours from what it saves."""
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours = models.load(directory, **options)
        ours.load_state_dict({name: p.clone() for name, p in ours.state_dict().items()}, assign=True)
    return theirs, ours


def exported(model: Any) -> Encode:
    """Their encoder as an ONNX graph that onnxruntime optimised: ids and mask [B, N] to hidden states [B, N, C]."""
    import onnxruntime

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, real: Tensor) -> Tensor:
            return self.model(input_ids=ids, attention_mask=real).last_hidden_state

    sizes = {name: {0: "batch", 1: "length"} for name in ("ids", "real", "hidden")}
    names = {"input_names": ["ids", "real"], "output_names": ["hidden"], "dynamic_axes": sizes}
    example = torch.ones(2, 8, dtype=torch.int64)
    attends = model.config._attn_implementation
    model.set_attn_implementation("eager")  # plain operations, which the optimiser fuses
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about shapes it fixes where they are fixed
        torch.onnx.export(Exported().eval(), (example, example), f"{directory}/model.onnx", dynamo=False, **names)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        session = onnxruntime.InferenceSession(f"{directory}/model.onnx", options, providers=["CPUExecutionProvider"])
    model.set_attn_implementation(attends)
    return lambda ids, real: torch.from_numpy(session.run(None, {"ids": ids.numpy(), "real": real.numpy()})[0])


def embedding(rounds: int) -> Iterator[Row]:
    path = weights.minilm()
    theirs = transformers.AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()
    ours = models.load(path, head="embedding")
    torch.manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (SENTENCES,)).tolist()
    rows = [torch.randint(1000, 30000, (length,)) for length in lengths]

    def hidden(ids: Tensor, real: Tensor) -> Tensor:
        return theirs(input_ids=ids, attention_mask=real).last_hidden_state

    def padded(encode: Encode, chosen: list[Tensor]) -> Tensor:
        ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        real = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in chosen])[:, None]
        mean = (encode(ids, real.long()) * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)

    def batches(encode: Encode, order: list[int]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out = torch.empty(SENTENCES, 384)
            for start in range(0, SENTENCES, 32):
                some = order[start : start + 32]
                out[some] = padded(encode, [rows[i] for i in some])
            return out

        return run

    by_length = sorted(range(SENTENCES), key=lambda i: lengths[i])
    contestants = {
        "plain": batches(hidden, list(range(SENTENCES))),
        "sorted": batches(hidden, by_length),
        "ours": lambda: ours.embed(rows),
    }
    if find_spec("onnxruntime") is None:
        print("onnxruntime is not compared: pip install onnx onnxruntime")
    else:
        contestants["onnxruntime"] = batches(exported(theirs), by_length)
    took, out = timed(contestants, rounds)
    agree(out["ours"], out["plain"], 1e-5)
    what = f"MiniLM, {SENTENCES} sentences of {SHORTEST}–{LONGEST} tokens, fp32; transformers in batches of 32"
    yield f"{what} as they come", took["plain"], took["ours"], 2.0
    yield f"{what} sorted by length", took["sorted"], took["ours"], None
    if "onnxruntime" in contestants:
        agree(out["ours"], out["onnxruntime"], 1e-4)
        what = what.replace("transformers", "onnxruntime's CPU on the exported model")
        yield f"{what} sorted by length", took["onnxruntime"], took["ours"], None


def bert(rounds: int) -> Iterator[Row]:
    ids = torch.randint(1000, 30000, (8, 512))
    for dtype, within, target in ((torch.float32, 1e-5, 1.15), (torch.bfloat16, 5e-2, 1.2)):
        theirs, ours = both("BertModel", transformers.BertConfig(), dtype)
        contestants = {"theirs": partial(theirs, ids), "ours": partial(ours, ids)}
        took, out = timed(contestants, rounds)
        agree(out["ours"], out["theirs"].last_hidden_state, within)
        yield f"BERT-base encoder, 8 × 512, {name(dtype)}", took["theirs"], took["ours"], target


def t5(rounds: int) -> Iterator[Row]:
    ids = torch.randint(1000, 30000, (1, 2048))
    theirs, ours = both("T5EncoderModel", transformers.T5Config(), torch.float32)
    took, out = timed({"theirs": lambda: theirs(ids), "ours": lambda: ours(ids)}, rounds)
    agree(out["ours"], out["theirs"].last_hidden_state, 1e-5)
    yield "T5-small encoder, 1 × 2048, fp32", took["theirs"], took["ours"], 1.5


def smollm2(dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
    path = weights.smollm2()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=dtype).eval()
    torch.manual_seed(0)
    return theirs, models.load(path, dtype=dtype), torch.randint(1000, 40000, (1, PROMPT))


def prefill(rounds: int) -> Iterator[Row]:
    theirs, ours, ids = smollm2(torch.float32)
    contestants = {
        "theirs": lambda: theirs(ids, logits_to_keep=1, past_key_values=transformers.DynamicCache()),
        "ours": lambda: ours(ids, cache=GrowingCache(), last=True),
    }
    took, out = timed(contestants, rounds)
    agree(out["ours"], out["theirs"].logits, 1e-5)
    yield f"SmolLM2 prefill of {PROMPT}, fp32", took["theirs"], took["ours"], 1.2


def decode(rounds: int) -> Iterator[Row]:
    theirs, ours, ids = smollm2(torch.bfloat16)
    their_cache, our_cache = transformers.DynamicCache(), GrowingCache()
    theirs(ids, past_key_values=their_cache, logits_to_keep=1)
    ours(ids, cache=our_cache, last=True)
    follows = torch.randint(1000, 40000, (NEW, 1, 1))

    def their_steps() -> Tensor:
        if their_cache.get_seq_length() > PROMPT:
            their_cache.crop(PROMPT - their_cache.get_seq_length())
        for token in follows:
            out = theirs(token, past_key_values=their_cache).logits
        return out

    def our_steps() -> Tensor:
        our_cache.truncate(PROMPT)
        for token in follows:
            out = ours(token, cache=our_cache, last=True)
        return out

    took, out = timed({"theirs": their_steps, "ours": our_steps}, rounds)
    agree(out["ours"], out["theirs"], 5e-2)
    yield f"SmolLM2 decoding of {NEW} tokens after {PROMPT}, bf16", took["theirs"], took["ours"], 1.3


def name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


CASES = {"embedding": embedding, "bert": bert, "prefill": prefill, "decode": decode, "t5": t5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[], metavar="case", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="how often each contestant is timed")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {THREADS} threads\n")
    print("| case | their ms | poise ms | ratio | target |\n|---|--:|--:|--:|--:|", flush=True)
    for case in options.cases or CASES:
        with torch.no_grad():
            for what, theirs, ours, target in CASES[case](options.rounds):
                goal = "–" if target is None else f"{target:g}"
                print(f"| {what} | {theirs * 1e3:.1f} | {ours * 1e3:.1f} | {theirs / ours:.2f} | {goal} |", flush=True)


if __name__ == "__main__":
    main()
