"""Tiny random models of every family that routes through transformers' attention interface, and inputs for them.

Two or three layers, heads small and grouped where the family groups them, windows of 5 so that they cut something off.
Nothing is downloaded. No assertions here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH = 64, 2, 12

_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZE, "num_key_value_heads": 2}
_WINDOWED = {**_GROUPED, "head_dim": 8, "sliding_window": 5}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_NO_DROPOUT = {"attention_dropout": 0.0, "dropout": 0.0, "activation_dropout": 0.0}
_BERT_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True, eq=False)
class Family:
    """How to build one family's model, and what kind of inputs it takes."""

    name: str
    config: str
    model: str
    kind: str  # encoder, decoder, seq2seq, vision, contrastive or audio
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES = (
    Family("bert", "BertConfig", "BertForMaskedLM", "encoder", {**_SIZE, **_BERT_NO_DROPOUT}),
    Family("roberta", "RobertaConfig", "RobertaForMaskedLM", "encoder", {**_SIZE, **_BERT_NO_DROPOUT}),
    Family(
        "distilbert",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        "encoder",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    Family(
        "modernbert",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        "encoder",
        {**_SIZE, "num_hidden_layers": 3, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1},
    ),
    Family(
        "vit",
        "ViTConfig",
        "ViTForImageClassification",
        "vision",
        {**{k: v for k, v in _SIZE.items() if "token" not in k}, "image_size": 16, "patch_size": 4, **_BERT_NO_DROPOUT},
    ),
    Family("clip", "CLIPConfig", "CLIPModel", "contrastive"),
    Family(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        "decoder",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
    ),
    Family(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        "decoder",
        {
            **{k: v for k, v in _SIZE.items() if k != "intermediate_size"},
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
    ),
    Family("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", "decoder", _SIZE),
    Family("llama", "LlamaConfig", "LlamaForCausalLM", "decoder", _GROUPED),
    Family("granite", "GraniteConfig", "GraniteForCausalLM", "decoder", {**_GROUPED, "attention_multiplier": 0.2}),
    Family("mistral", "MistralConfig", "MistralForCausalLM", "decoder", _WINDOWED),
    Family(
        "qwen3",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        "decoder",
        {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 1},
    ),
    Family("phi3", "Phi3Config", "Phi3ForCausalLM", "decoder", {k: v for k, v in _WINDOWED.items() if k != "head_dim"}),
    Family(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        "decoder",
        {**_WINDOWED, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0},
    ),
    Family(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        "decoder",
        {**_WINDOWED, "query_pre_attn_scalar": 10, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Family(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        "decoder",
        {**_WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        "decoder",
        {
            **_SIZE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "experts_implementation": "eager",
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
        },
    ),
    Family("t5", "T5Config", "T5ForConditionalGeneration", "seq2seq", _T5),
    Family("umt5", "UMT5Config", "UMT5ForConditionalGeneration", "seq2seq", _T5),
    Family("bart", "BartConfig", "BartForConditionalGeneration", "seq2seq", {**_BART, **_NO_DROPOUT}),
    Family(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "audio",
        {
            **_BART,
            **_NO_DROPOUT,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 40,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
)


def build(family: Family, attention: str, **extra: Any) -> nn.Module:
    """A model with seeded random weights, large enough in scale that attention is far from uniform."""
    import transformers

    options = dict(family.options)
    if family.kind == "contrastive":
        layers = {k: _SIZE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        options = {
            "projection_dim": 16,
            "text_config": {**_SIZE, "eos_token_id": VOCABULARY - 1},
            "vision_config": {**layers, "image_size": 16, "patch_size": 4},
        }
    config = getattr(transformers, family.config)(**options, **extra)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = getattr(transformers, family.model)(config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
                if "Attention.q." in name:
                    parameter.mul_(8**-0.5)  # T5 has its scale in these weights
            elif name.endswith("bias") or "sinks" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    assert isinstance(model, nn.Module)
    return model.eval()


@cache
def model_of(family: Family, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """`build`, once per process."""
    return build(family, attention).to(dtype)


def inputs(family: Family, case: str) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of one call, and which positions of the logits count, [B, N] bool: padding's own outputs do not."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    padding = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if case == "left padding":
        padding[0, :5] = 0
    elif case == "right padding":
        padding[0, -5:] = 0
    elif case == "holes":
        padding[0, 3:6] = 0
    everywhere = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if family.kind in ("vision", "contrastive"):
        pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
        if family.kind == "vision":
            return {"pixel_values": pixels}, everywhere[:, 0]
        ids[:, 6] = VOCABULARY - 1  # the end of the text, where CLIP looks, is a token in every case
        return {"pixel_values": pixels, "input_ids": ids, "attention_mask": padding}, everywhere[:, 0]
    if family.kind == "audio":
        features = torch.randn(BATCH, 8, 24, generator=generator)
        call = {"input_features": features, "decoder_input_ids": ids}
        return {**call, "decoder_attention_mask": padding}, padding.bool()
    call = {"input_ids": ids}
    if case == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])
        return {**call, "position_ids": positions.expand(BATCH, -1)}, everywhere
    if case != "no mask":
        call["attention_mask"] = padding
    if family.kind == "seq2seq":
        call["decoder_input_ids"] = ids.flip(1)[:, :9]
        return call, everywhere[:, :9]
    return call, padding.bool()


def cases(family: Family) -> tuple[str, ...]:
    """The kinds of masks that make sense for a family."""
    if family.kind == "vision":
        return ("no mask",)
    usual = ("no mask", "left padding", "right padding", "holes")
    return (*usual, "packed") if family.kind == "decoder" else usual
