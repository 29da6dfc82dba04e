"""Hugging Face models on poise against the same models on eager attention: outputs, gradients, caches, generation.

What is compared are the positions that mean something: eager gives queries without any visible key the mean of all
values, poise (as torch's own operator) gives them 0, and no real token ever looks at them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_families import BATCH, FAMILIES, LENGTH, VOCABULARY, Family, build, cases, inputs, model_of
from torch import Tensor, nn

import poise
from poise import hf

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install poise[test]")
transformers.logging.set_verbosity_error()

BOUND = 2e-6
BY_NAME = {family.name: family for family in FAMILIES}
DECODERS = [family for family in FAMILIES if family.kind == "decoder"]
GENERATORS = [family for family in FAMILIES if family.kind in ("decoder", "seq2seq", "audio")]
EVERY_CASE = [
    pytest.param(family, case, id=f"{family.name}-{case.replace(' ', '_')}")
    for family in FAMILIES
    for case in cases(family)
]


def named(families: list[Family]) -> list[Any]:
    return [pytest.param(family, id=family.name) for family in families]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    hf.register()
    yield
    hf.register()


def logits_of(family: Family, model: nn.Module, case: str, **extra: Any) -> Tensor:
    """The logits that count, as one tensor."""
    call, valid = inputs(family, case)
    if family.kind == "decoder":
        extra = {"use_cache": False, **extra}
    if next(model.parameters()).dtype is torch.float64:
        call = {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    out = model(**call, **extra)
    logits = out.logits_per_text if family.kind == "contrastive" else out.logits
    assert isinstance(logits, Tensor)
    return logits[valid] if logits.dim() == 3 else logits


def logits_and_gradients(family: Family, model: nn.Module, case: str) -> dict[str, Tensor]:
    model.zero_grad()
    logits = logits_of(family, model, case)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def scale_of(name: str, tensors: dict[str, Tensor]) -> float:
    """The tensor's largest entry; a key bias has no gradient in truth: its weight's stands for it."""
    for suffix in ("k_proj.bias", "key.bias", "k_lin.bias"):
        if name.endswith(suffix):
            name = name.removesuffix("bias") + "weight"
    return tensors[name].abs().max().item()


@pytest.mark.parametrize(("family", "case"), EVERY_CASE)
def test_logits_and_all_gradients_equal_eagers(family: Family, case: str) -> None:
    eager = logits_and_gradients(family, model_of(family, "eager"), case)
    ours = logits_and_gradients(family, model_of(family, "poise"), case)
    exact = logits_and_gradients(family, model_of(family, "eager", torch.float64), case)
    assert ours.keys() == eager.keys()
    for name, value in ours.items():
        # Held against eager in float64, with the kernels' budget on top, twice the error eager makes in float32: both
        # are roundings of one thing. (Some families give NaN in float64: they take its smallest number for a
        # mask, and a float32 softmax. They are held against eager in float32, by the bound alone.)
        known = bool(exact[name].isfinite().all())
        truth = exact[name] if known else eager[name].double()
        bound = BOUND * scale_of(name, eager) + (2 * (eager[name] - truth).abs().max().item() if known else 0.0)
        assert (value - truth).abs().max().item() <= bound, name


@pytest.mark.parametrize(("family", "case"), EVERY_CASE)
def test_no_mask_is_ever_materialised(family: Family, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mask: hf.StructuredMask) -> Tensor:
        raise AssertionError(f"{mask} was made dense")

    monkeypatch.setattr(hf.StructuredMask, "dense", refuse)
    original, given = hf.attention_forward, []

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        given.append(type(mask))
        return original(module, query, key, value, mask, **rest)

    transformers.AttentionInterface.register("poise", record)
    with torch.no_grad():
        logits_of(family, model_of(family, "poise"), case)
    assert given
    assert set(given) <= {type(None), hf.StructuredMask}


@pytest.mark.parametrize("family", named([BY_NAME["t5"], BY_NAME["umt5"]]))
def test_the_position_table_gets_its_gradient(family: Family) -> None:
    gradients = logits_and_gradients(family, model_of(family, "poise"), "left padding")
    tables = [value for name, value in gradients.items() if "relative_attention_bias" in name]
    assert len(tables) >= 2
    assert all(bool(table.any()) for table in tables)


def generated(family: Family, attention: str, cache: str | None, **extra: Any) -> Tensor:
    call, _ = inputs(family, "left padding" if family.kind == "decoder" else "right padding")
    call = {name: value for name, value in call.items() if not name.startswith("decoder")}
    torch.manual_seed(5)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, **extra}
    if cache is not None:
        options["cache_implementation"] = cache
    tokens = model_of(family, attention).generate(**call, **options)
    assert isinstance(tokens, Tensor)
    return tokens


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", named(GENERATORS))
def test_greedy_generation_equals_eagers(family: Family, cache: str | None) -> None:
    assert torch.equal(generated(family, "poise", cache), generated(family, "eager", cache))


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "temperature": 0.7}], ids=["beams", "sampling"]
)
@pytest.mark.parametrize("family", named([BY_NAME["llama"], BY_NAME["gpt_oss"], BY_NAME["t5"]]))
def test_beams_and_sampling_generate_what_eager_does(family: Family, options: dict[str, Any]) -> None:
    assert torch.equal(generated(family, "poise", None, **options), generated(family, "eager", None, **options))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", named(DECODERS))
def test_a_sequence_fed_in_pieces_gives_eagers_logits(family: Family, cache: str) -> None:
    pieces = inputs(family, "no mask")[0]["input_ids"].split([7, 3, 1, 1], dim=1)

    def run(attention: str) -> Tensor:
        model = model_of(family, attention)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=20)
        else:
            past = transformers.DynamicCache(config=model.config)
        logits, seen = [], 0
        for piece in pieces:
            seen += piece.shape[1]
            mask = torch.ones(BATCH, seen, dtype=torch.long)
            mask[0, :2] = 0
            with torch.no_grad():
                logits.append(model(input_ids=piece, attention_mask=mask, past_key_values=past, use_cache=True).logits)
        whole = torch.cat(logits, 1)
        return torch.cat([whole[0, 2:], whole[1]])

    eager = run("eager")
    assert (run("poise") - eager).abs().max() <= BOUND * eager.abs().max()


@pytest.mark.parametrize("family", named(list(FAMILIES)))
def test_output_attentions_returns_the_weights_of_eager(family: Family) -> None:
    case = "no mask" if family.kind == "vision" else "right padding"
    call, valid = inputs(family, case)
    outputs = []
    for attention in ("eager", "poise"):
        with torch.no_grad():
            outputs.append(model_of(family, attention)(**call, output_attentions=True))
    if family.kind == "contrastive":
        outputs = [out.text_model_output for out in outputs]
    names = [name for name in outputs[0] if name.endswith("attentions")]
    pairs = [pair for name in names for pair in zip(*(out[name] for out in outputs), strict=True)]
    assert pairs
    for theirs, mine in pairs:
        if family.kind in ("encoder", "decoder"):  # padding's own queries may see no key at all, in local layers
            theirs, mine = (x.transpose(1, 2)[valid] for x in (theirs, mine))
        assert (theirs - mine).abs().max() <= BOUND


class TestChoosingLayers:
    def test_only_the_chosen_layers_weights_are_returned(self) -> None:
        family = BY_NAME["llama"]
        call, _ = inputs(family, "no mask")
        both = model_of(family, "poise")(**call, output_attentions=True).attentions
        hf.register(attention_layers=[1])
        (one,) = model_of(family, "poise")(**call, output_attentions=True).attentions
        assert torch.equal(one, both[1])

    def test_a_layer_without_number_is_an_error(self) -> None:
        family = BY_NAME["distilbert"]
        hf.register(attention_layers=[1])
        with pytest.raises(ValueError, match=r"attention_layers: DistilBert\w+ does not know its number"):
            model_of(family, "poise")(**inputs(family, "no mask")[0], output_attentions=True)

    def test_names_instead_of_numbers_are_an_error(self) -> None:
        with pytest.raises(TypeError, match="attention_layers must hold layer numbers"):
            hf.register(attention_layers="1")  # type: ignore[arg-type]

    def test_large_weights_give_a_warning(self) -> None:
        family = BY_NAME["llama"]
        hf.register(warn_bytes=100)
        with pytest.warns(UserWarning, match="weights of this layer take"):
            model_of(family, "poise")(**inputs(family, "no mask")[0], output_attentions=True)

    def test_no_weights_no_warning(self) -> None:
        family = BY_NAME["llama"]
        hf.register(warn_bytes=100)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model_of(family, "poise")(**inputs(family, "no mask")[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "t5", "gpt_oss"])
def test_gradient_checkpointing_changes_no_gradient(name: str, reentrant: bool) -> None:
    family = BY_NAME[name]
    plain = logits_and_gradients(family, model_of(family, "poise"), "left padding")
    model = copy.deepcopy(model_of(family, "poise")).train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    checkpointed = logits_and_gradients(family, model, "left padding")
    assert plain.keys() == checkpointed.keys()
    for tensor, value in plain.items():
        assert (checkpointed[tensor] - value).abs().max() <= BOUND * scale_of(tensor, plain), tensor


def test_dropout_acts_in_training_only() -> None:
    model = build(BY_NAME["llama"], "poise", attention_dropout=0.5)
    call, _ = inputs(BY_NAME["llama"], "no mask")
    with torch.no_grad():
        calm = model(**call).logits
        assert torch.equal(calm, model(**call).logits)
        model.train()
        torch.manual_seed(1)
        dropped = model(**call).logits
        torch.manual_seed(1)
        assert torch.equal(dropped, model(**call).logits)
    assert not torch.allclose(dropped, calm)


def test_autocast_runs_in_its_dtype() -> None:
    family = BY_NAME["llama"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, eager = (logits_of(family, model_of(family, name), "left padding") for name in ("poise", "eager"))
    assert ours.dtype is torch.bfloat16
    exact = logits_of(family, model_of(family, "eager"), "left padding").detach()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()


def test_a_callers_own_4d_mask_is_taken_as_given() -> None:
    family = BY_NAME["llama"]
    call, _ = inputs(family, "no mask")
    allowed = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    with torch.no_grad():
        eager = model_of(family, "eager")(**call, attention_mask=additive).logits
        for mask in (additive, allowed):
            ours = model_of(family, "poise")(**call, attention_mask=mask).logits
            assert (ours - eager).abs().max() <= BOUND * eager.abs().max()


class TestMasks:
    """The mask function against transformers' dense one."""

    @staticmethod
    def functions() -> dict[str, Any]:
        from transformers import masking_utils as made

        ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]])
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 0, 1]])
        window = made.sliding_window_causal_mask_function(3)
        return {
            "causal": made.causal_mask_function,
            "everything": made.bidirectional_mask_function,
            "window": window,
            "both ways": made.sliding_window_bidirectional_mask_function(2),
            "or": made.or_masks(made.causal_mask_function, made.sliding_window_bidirectional_overlay(2)),
            "packed": made.packed_sequence_compatibility_function(made.causal_mask_function, positions, ids),
            "packed window": made.packed_sequence_compatibility_function(window, positions, ids),
            "a caller's": made.and_masks(made.causal_mask_function, lambda b, h, i, j: (i + j) % 2 == 0),
        }

    @staticmethod
    def both(function: Any, length: int, keys: int, offset: int, kv_offset: int, padding: Any) -> tuple[Any, Tensor]:
        from transformers import masking_utils

        call = {"q_offset": offset, "kv_offset": kv_offset, "mask_function": function, "attention_mask": padding}
        dense = masking_utils.sdpa_mask(BATCH, length, keys, **call, allow_is_causal_skip=False)
        return hf.mask_for(BATCH, length, keys, **call, allow_is_causal_skip=False), dense.expand(-1, 1, -1, -1)

    @pytest.mark.parametrize("kind", ["none", "left", "right", "holes", "nothing", "short"])
    @pytest.mark.parametrize(
        "sizes", [(8, 8, 0, 0), (3, 8, 5, 0), (1, 8, 7, 0), (3, 12, 2, 0), (2, 4, 6, 4), (8, 12, 0, 0)]
    )
    @pytest.mark.parametrize("name", ["causal", "everything", "window", "both ways", "or", "a caller's"])
    def test_it_means_what_transformers_means(self, name: str, sizes: tuple[int, int, int, int], kind: str) -> None:
        length, keys, offset, kv_offset = sizes
        padding = None if kind == "none" else torch.ones(BATCH, keys + kv_offset, dtype=torch.bool)
        if padding is not None:
            part = {"left": slice(0, 3), "right": slice(5, None), "holes": slice(1, 3), "nothing": slice(None)}
            padding[0, part.get(kind, slice(0, 0))] = False
            if kind == "short":
                padding = padding[:, :-2]
        mask, dense = self.both(self.functions()[name], length, keys, offset, kv_offset, padding)
        assert torch.equal(mask | False, dense)  # any use makes it dense
        assert isinstance(mask, hf.StructuredMask) == (name != "a caller's")

    @pytest.mark.parametrize("name", ["packed", "packed window"])
    def test_packed_documents_stay_apart(self, name: str) -> None:
        mask, dense = self.both(self.functions()[name], 8, 8, 0, 0, None)
        assert isinstance(mask, hf.StructuredMask)
        assert torch.equal(mask | False, dense)

    def test_a_cache_longer_than_the_documents_gives_a_dense_mask(self) -> None:
        from transformers import masking_utils as made

        ids = torch.zeros(BATCH, 12, dtype=torch.long)
        mask, dense = self.both(made.packed_sequence_mask_function(ids), 3, 8, 4, 4, None)
        assert not isinstance(mask, hf.StructuredMask)
        assert torch.equal(mask, dense)

    def test_plain_causal_needs_no_mask(self) -> None:
        assert hf.mask_for(BATCH, 8, 8, attention_mask=torch.ones(BATCH, 8, dtype=torch.bool)) is None
        assert hf.mask_for(BATCH, 1, 8, 7) is None
        assert isinstance(hf.mask_for(BATCH, 2, 8, 6), hf.StructuredMask)

    def test_it_holds_no_memory_until_read(self) -> None:
        mask = hf.mask_for(1, 1 << 20, 1 << 20, allow_is_causal_skip=False)
        assert isinstance(mask, hf.StructuredMask)
        assert mask.shape == (1, 1, 1 << 20, 1 << 20)
        assert mask.detach().mask == poise.causal()
        assert "causal()" in repr(mask)

    def test_indexing_gives_an_ordinary_tensor(self) -> None:
        mask = hf.mask_for(1, 4, 4, allow_is_causal_skip=False)
        assert mask is not None
        assert type(mask[:, :, :2, :3]) is Tensor
        assert mask[0, 0].tolist() == torch.ones(4, 4).tril().bool().tolist()


def test_a_compiled_model_gives_the_same_logits() -> None:
    family = BY_NAME["llama"]
    model = model_of(family, "poise")
    with torch.no_grad():
        plain = logits_of(family, model, "left padding")
        compiled = logits_of(family, torch.compile(model, backend="eager"), "left padding")  # type: ignore[arg-type]
    assert (compiled - plain).abs().max() <= BOUND * plain.abs().max()


def test_a_sentence_packed_with_others_reads_as_it_does_alone() -> None:
    model = model_of(BY_NAME["llama"], "poise")
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 5:]
        alone = model(input_ids=ids[:, 5:], use_cache=False).logits
    assert (packed - alone).abs().max() <= BOUND * alone.abs().max()


def test_set_attn_implementation_switches_a_loaded_model() -> None:
    family = BY_NAME["gpt2"]
    model = build(family, "sdpa")
    before = logits_of(family, model, "left padding").detach()
    model.set_attn_implementation("poise")  # type: ignore[operator]
    after = logits_of(family, model, "left padding").detach()
    assert model.config._attn_implementation == "poise"  # type: ignore[union-attr]
    assert (after - before).abs().max() <= BOUND * before.abs().max()


def test_a_saved_model_loads_with_poise(tmp_path: Any) -> None:
    family = BY_NAME["llama"]
    model_of(family, "eager").save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="poise")
    eager = logits_of(family, model_of(family, "eager"), "left padding").detach()
    assert (logits_of(family, loaded.eval(), "left padding") - eager).abs().max() <= BOUND * eager.abs().max()
