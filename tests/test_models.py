"""Models: logits and gradients equal transformers' from checkpoints that transformers itself saved, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from poise import models
from poise.models.checkpoint import collect

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BERT = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 40,
}  # fmt: skip
GPT = {"vocab_size": 61, "n_positions": 40, "n_embd": 48, "n_layer": 2, "n_head": 4}
LLAMA = {
    "vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 80, "max_position_embeddings": 40, "rms_norm_eps": 1e-5,
}  # fmt: skip
T5 = {"vocab_size": 61, "d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 2, "num_heads": 4}
ROPE = {"rope_theta": 500.0, "factor": 4.0}

# name -> (their class, their configuration)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert masked lm": ("BertForMaskedLM", BERT),
    "bert masked lm, untied": ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    "bert masked lm, tanh gelu": ("BertForMaskedLM", {**BERT, "hidden_act": "gelu_new"}),
    "bert masked lm, relu, odd sizes": (
        "BertForMaskedLM",
        {**BERT, "hidden_act": "relu", "hidden_size": 33, "num_attention_heads": 3, "intermediate_size": 51},
    ),
    "bert classification": ("BertForSequenceClassification", {**BERT, "num_labels": 5}),
    "bert": ("BertModel", BERT),
    "gpt": ("GPT2LMHeadModel", GPT),
    "gpt, untied": ("GPT2LMHeadModel", {**GPT, "tie_word_embeddings": False}),
    "gpt, erf gelu, odd sizes": (
        "GPT2LMHeadModel",
        {**GPT, "activation_function": "gelu", "n_embd": 33, "n_head": 3, "n_inner": 51},
    ),
    "gpt, scaled by layer": ("GPT2LMHeadModel", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt, unscaled": ("GPT2LMHeadModel", {**GPT, "scale_attn_weights": False}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama, tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama, one key head, wide heads": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 1, "head_dim": 26}),
    "llama, linear rope": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {"rope_type": "linear", **ROPE}}),
    "llama, dynamic rope": (
        "LlamaForCausalLM",
        {**LLAMA, "max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", **ROPE}},
    ),
    "llama, yarn": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 10, **ROPE}},
    ),
    "llama, yarn by mscale": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "rope_parameters": {
                "rope_type": "yarn",
                "original_max_position_embeddings": 10,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "truncate": False,
                **ROPE,
            },
        },
    ),
    "llama, llama3 rope": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "rope_parameters": {
                "rope_type": "llama3",
                "original_max_position_embeddings": 20,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **ROPE,
            },
        },
    ),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 1.1": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5, gated silu, few buckets, lopsided": (
        "T5ForConditionalGeneration",
        {
            **T5,
            "feed_forward_proj": "gated-silu",
            "relative_attention_num_buckets": 8,
            "num_decoder_layers": 1,
            "relative_attention_max_distance": 12,
            "d_kv": 11,
        },
    ),
    "t5 encoder": ("T5EncoderModel", T5),
}


def saved(name: str, directory: Path, **how: Any) -> Any:
    """Their model, every parameter random, saved."""
    kind, config = CASES[name]
    made = getattr(transformers, kind)
    model = made(made.config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms begin as zeros and ones, which would hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, **how)
    return model


def inputs(kind: str) -> tuple[Tensor, Tensor]:
    """Token ids and what of them is real: causal models without padding, whose rows they compute otherwise."""
    ids = torch.randint(1, 61, (3, 19))
    real = torch.ones(3, 19, dtype=torch.bool)
    if not kind.endswith(("CausalLM", "LMHeadModel")):
        real[1, 7:], real[2, 18:] = False, False
    return ids, real


def theirs(model: Any, ids: Tensor, real: Tensor, target: Tensor) -> Tensor:
    extra = {"decoder_input_ids": target} if type(model).__name__ == "T5ForConditionalGeneration" else {}
    out = model(input_ids=ids, attention_mask=real.long(), **extra)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def ours(model: Any, ids: Tensor, real: Tensor, target: Tensor) -> Tensor:
    if isinstance(model, models.T5) and model.head == "seq2seq_lm":
        return model(ids, real, target)
    return model(ids, real)


def compared(got: Tensor, want: Tensor, real: Tensor) -> None:
    """Within 1e-5 of their scale, at real tokens."""
    assert got.shape == want.shape
    if got.shape[:2] == real.shape:
        got, want = got[real], want[real]
    assert float((got - want).detach().abs().max()) <= 1e-5 * float(want.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path)
    model = models.load(tmp_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    ids, real = inputs(CASES[name][0])
    target = torch.randint(1, 61, (3, 11))
    with torch.no_grad():
        want = theirs(reference, ids, real, target)
        compared(ours(model, ids, real, target), want, real)
    compared(ours(model, ids, real, target), want, real)


GRADED = ["bert masked lm", "bert classification", "gpt", "llama", "llama, biases", "t5", "t5 1.1"]


@pytest.mark.parametrize("name", GRADED)
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path)
    model = models.load(tmp_path)
    ids, real = inputs(CASES[name][0])
    target = torch.randint(1, 61, (3, 11))
    weights = None
    for made, call in ((reference, theirs), (model, ours)):
        out = call(made, ids, real, target)
        weights = torch.randn_like(out) if weights is None else weights
        chosen = out[real] * weights[real] if out.shape[:2] == real.shape else out * weights
        chosen.sum().backward()
    grads = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        parameter.data = parameter.grad
    # The gradient of keys' biases is zero but for rounding, so each is held against its queries' and values' scale.
    scale: dict[str, float] = {}
    for key, want in grads.items():
        group = key.replace(".key.", ".query.").replace(".value.", ".query.")
        scale[group] = max(scale.get(group, 0.0), float(want.abs().max()))
    for key, got in collect(model, bare=False).items():
        group = key.replace(".key.", ".query.").replace(".value.", ".query.")
        assert float((got - grads[key]).abs().max()) <= 2e-5 * scale[group], key


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_loads_in_transformers_with_the_same_outputs(name: str, tmp_path: Path) -> None:
    reference = saved(name, tmp_path / "theirs")
    models.save(models.load(tmp_path / "theirs"), tmp_path / "ours")
    again = type(reference).from_pretrained(tmp_path / "ours").eval()
    ids, real = inputs(CASES[name][0])
    target = torch.randint(1, 61, (3, 11))
    with torch.no_grad():
        assert torch.equal(theirs(again, ids, real, target), theirs(reference, ids, real, target))


def test_shards_and_pickles_load_as_one_file_does(tmp_path: Path) -> None:
    reference = saved("llama", tmp_path / "one")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "pickled").mkdir()
    torch.save(reference.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    first, *others = (models.load(tmp_path / kind).state_dict() for kind in ("one", "shards", "pickled"))
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"a": Path("b")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="Weights only load failed"):
        models.load(tmp_path)


def test_a_pickle_from_before_archives_loads(tmp_path: Path) -> None:
    reference = saved("llama", tmp_path)
    want = models.load(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    torch.testing.assert_close(models.load(tmp_path).state_dict(), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_cut_short_is_named(name: str, tmp_path: Path) -> None:
    reference = saved("llama", tmp_path)
    if name != "model.safetensors":
        (tmp_path / "model.safetensors").unlink()
        torch.save(reference.state_dict(), tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{name} is not a whole"):
        models.load(tmp_path)


def test_weights_stay_mapped_from_the_file(tmp_path: Path) -> None:
    saved("llama, tied", tmp_path)
    model = models.load(tmp_path)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux tells what is mapped where")
    address = model.tokens.weight.data_ptr()
    spans = [line.split() for line in maps.read_text().splitlines() if "model.safetensors" in line]
    bounds = [tuple(int(x, 16) for x in span[0].split("-")) for span in spans]
    assert any(low <= address < high for low, high in bounds)


def test_the_dtype_is_as_stored_or_as_asked(tmp_path: Path) -> None:
    reference = saved("llama", tmp_path / "a")
    reference.bfloat16().save_pretrained(tmp_path / "b")
    for directory, dtype, want in (("a", torch.bfloat16, torch.bfloat16), ("b", None, torch.bfloat16)):
        assert {p.dtype for p in models.load(tmp_path / directory, dtype=dtype).parameters()} == {want}


def test_an_error_lists_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.extra.weight"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit") as error:
        models.load(tmp_path)
    told = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in told
    assert "unexpected: model.layers.0.extra.weight" in told
    assert "of another shape: model.norm.weight [7], by config.json [48]" in told


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "mamba"}, "model_type must be one of .*'llama'.*; got 'mamba'"),
        ({"hidden_act": "relu6"}, "hidden_act must be one of"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type must be"),
    ],
)
def test_a_configuration_that_cannot_be_honoured_is_refused(change: dict, told: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=told):
        models.load(tmp_path)


def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        models.load(tmp_path)


def test_another_head_takes_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    reference = saved("bert masked lm", tmp_path)
    ids, real = inputs("BertForMaskedLM")
    with torch.no_grad():
        want = reference.bert(ids, attention_mask=real.long()).last_hidden_state
        mean = (want * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        compared(models.load(tmp_path, head="hidden")(ids, real), want, real)
        got = models.load(tmp_path, head="embedding")(ids, real)
    torch.testing.assert_close(got, torch.nn.functional.normalize(mean), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"missing: .*classifier"):
        models.load(tmp_path, head="classification")
    with pytest.raises(ValueError, match="head must be one of"):
        models.load(tmp_path, head="causal_lm")


def test_rows_of_any_lengths_are_a_padded_batch(tmp_path: Path) -> None:
    saved("bert classification", tmp_path)
    model = models.load(tmp_path)
    ids, real = inputs("BertForSequenceClassification")
    rows = [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]
    torch.testing.assert_close(model(rows), model(ids, real))
    for row, alone in zip(rows, model(rows), strict=True):
        torch.testing.assert_close(model([row])[0], alone, rtol=1e-5, atol=1e-6)


def test_segments_count(tmp_path: Path) -> None:
    reference = saved("bert", tmp_path)
    model = models.load(tmp_path)
    ids, real = inputs("BertModel")
    kinds = torch.randint(0, 2, ids.shape)
    with torch.no_grad():
        want = reference(ids, attention_mask=real.long(), token_type_ids=kinds).last_hidden_state
        compared(model(ids, real, kinds), want, real)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_padded_prompts_of_causal_models_are_as_alone(name: str, side: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    model = models.load(tmp_path)
    ids = torch.randint(1, 61, (2, 9))
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1] = torch.arange(9) >= 4 if side == "left" else torch.arange(9) < 5
    with torch.no_grad():
        together, alone = model(ids, real), model(ids[1:, real[1]])
    torch.testing.assert_close(together[1][real[1]], alone[0], rtol=1e-5, atol=1e-5)


def test_too_long_an_input_is_refused(tmp_path: Path) -> None:
    saved("gpt", tmp_path)
    with pytest.raises(ValueError, match="the model knows 40 positions; got a token at position 40"):
        models.load(tmp_path)(torch.ones(1, 41, dtype=torch.int64))
