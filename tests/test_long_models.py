"""Longformer and BigBird as whole models, against transformers, on checkpoints that transformers itself saved.

Weights are random: no trained ones are to be had without a network. `extend` is compared with the BERT and RoBERTa that
it started from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poise.models import extend, load, save

TOLERANCE = 1e-5  # relative to the largest output

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "type_vocab_size": 2,
    "max_position_embeddings": 200,
}


def saved(where: Path, kind: str, **changes: Any) -> Any:
    """A random model of transformers, in eval mode, saved to `where`; its weights large enough to tell keys apart."""
    import transformers

    config_of = {"Longformer": "LongformerConfig", "BigBird": "BigBirdConfig", "Bert": "BertConfig"}
    family = next((name for name in config_of if kind.startswith(name)), "Roberta")
    config = getattr(transformers, config_of.get(family, "RobertaConfig"))(**{**SMALL, **changes})
    model = getattr(transformers, kind)(config).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("LayerNorm.weight" in name or "layer_norm.weight" in name), std=0.15)
    model.save_pretrained(where)
    return model


def batch(n: int, *lengths: int) -> tuple[Tensor, Tensor]:
    """ids [B, N] that hold no padding token but where they are padded, and what is real."""
    padding = torch.arange(n) < torch.tensor(lengths)[:, None]
    return torch.randint(3, 99, padding.shape).where(padding, torch.tensor(1)), padding


def at(n: int, *positions: list[int]) -> Tensor:
    tokens = torch.zeros(len(positions), n, dtype=torch.bool)
    for row, there in zip(tokens, positions, strict=True):
        row[there] = True
    return tokens


def close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


# --- Longformer -------------------------------------------------------------------------------------------------------

LONGFORMERS: dict[str, dict[str, Any]] = {
    "one window": {"attention_window": 16},
    "a window per layer": {"attention_window": [8, 32]},
    "relu": {"attention_window": 16, "hidden_act": "relu", "layer_norm_eps": 1e-5},
    "other padding token": {"attention_window": 16, "pad_token_id": 0},
}
PATTERNS = {"none": ([], []), "first": ([0], [0]), "some": ([0, 3, 70], [17]), "many": (list(range(0, 90, 4)), [])}


@pytest.mark.parametrize("config", LONGFORMERS.values(), ids=LONGFORMERS)
def test_longformer_hidden_states_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    theirs = saved(tmp_path, "LongformerModel", **config)
    ours = load(tmp_path)
    for n, lengths in ((96, (96, 96)), (101, (101, 64))):  # 101 is no multiple of a window
        ids, padding = batch(n, *lengths)
        for pattern in PATTERNS.values():
            tokens = at(n, *pattern)
            with torch.no_grad():
                expected = theirs(ids, padding.long(), global_attention_mask=tokens.long()).last_hidden_state
                got = ours(ids, padding, tokens=tokens)
            close(got[padding], expected[padding])


@pytest.mark.parametrize("tied", [True, False])
def test_longformer_masked_lm(tmp_path: Path, tied: bool) -> None:
    theirs = saved(tmp_path, "LongformerForMaskedLM", attention_window=16, tie_word_embeddings=tied)
    ids, padding = batch(80, 80, 51)
    segments, tokens = torch.randint(0, 2, ids.shape), at(80, [0], [0, 5])
    with torch.no_grad():
        expected = theirs(ids, padding.long(), tokens.long(), token_type_ids=segments).logits
        close(load(tmp_path)(ids, padding, segments, tokens)[padding], expected[padding])


def test_longformer_classification_makes_the_first_token_global(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "LongformerForSequenceClassification", attention_window=16, num_labels=3)
    ids, padding = batch(80, 80, 51)
    with torch.no_grad():
        close(load(tmp_path)(ids, padding), theirs(ids, padding.long()).logits)


def test_longformer_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "LongformerForMaskedLM", attention_window=16)
    ours = load(tmp_path)
    ids, padding = batch(80, 80, 51)
    tokens, weight = at(80, [0], [0, 5]), torch.randn(2, 80, 99) * padding[..., None]
    (theirs(ids, padding.long(), tokens.long()).logits * weight).sum().backward()
    (ours(ids, padding, tokens=tokens) * weight).sum().backward()
    layer, block = theirs.longformer.encoder.layer[0], ours.encoder.blocks[0]
    attention = layer.attention.self
    pairs = {
        "projection": (
            block.attention.projection.weight,
            torch.cat([getattr(attention, name).weight.grad for name in ("query", "key", "value")]),
        ),
        "global query": (block.attention.choice.query.weight, attention.query_global.weight.grad),
        "global key": (block.attention.choice.key.weight, attention.key_global.weight.grad),
        "global value": (block.attention.choice.value.weight, attention.value_global.weight.grad),
        "up": (block.feedforward.up.weight, layer.intermediate.dense.weight.grad),
    }
    for name, (parameter, expected) in pairs.items():
        assert (parameter.grad - expected).abs().max() <= TOLERANCE * expected.abs().max(), name


def test_a_saved_longformer_is_read_by_transformers(tmp_path: Path) -> None:
    import transformers

    saved(tmp_path / "theirs", "LongformerForMaskedLM", attention_window=16)
    ours = load(tmp_path / "theirs")
    save(ours, tmp_path / "ours")
    theirs = transformers.LongformerForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    ids, padding = batch(80, 80, 51)
    tokens = at(80, [0], [4])
    with torch.no_grad():
        expected = theirs(ids, padding.long(), tokens.long()).logits
        close(ours(ids, padding, tokens=tokens)[padding], expected[padding])


def test_windows_must_be_named_for_every_layer(tmp_path: Path) -> None:
    saved(tmp_path, "LongformerModel", attention_window=[8, 8])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_window": [8]}))
    with pytest.raises(ValueError, match="attention_window names 1 layers, num_hidden_layers 2"):
        load(tmp_path)


# --- BigBird ----------------------------------------------------------------------------------------------------------

BIGBIRDS: dict[str, dict[str, Any]] = {
    "plain": {"block_size": 8, "num_random_blocks": 2},
    "without biases": {"block_size": 8, "num_random_blocks": 3, "use_bias": False},
    "scaled embeddings": {"block_size": 16, "num_random_blocks": 1, "rescale_embeddings": True, "hidden_act": "gelu"},
    "full": {"attention_type": "original_full"},
}


@pytest.mark.parametrize("config", BIGBIRDS.values(), ids=BIGBIRDS)
@pytest.mark.parametrize(("n", "lengths"), [(160, (160, 160)), (133, (133, 100)), (60, (60, 33))])
def test_bigbird_hidden_states_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], n: int, lengths: tuple[int, int]
) -> None:
    theirs = saved(tmp_path, "BigBirdModel", **config)
    ids, padding = batch(n, *lengths)
    options = {} if "attention_type" in config else {"hf_compat": True}
    with torch.no_grad():
        expected = theirs(ids, padding.long()).last_hidden_state
        close(load(tmp_path, **options)(ids, padding)[padding], expected[padding])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["BigBirdForMaskedLM", "BigBirdForSequenceClassification"])
def test_bigbird_heads(tmp_path: Path, kind: str, tied: bool) -> None:
    theirs = saved(tmp_path, kind, block_size=8, num_random_blocks=2, tie_word_embeddings=tied)
    ids, padding = batch(160, 160, 131)
    segments = torch.randint(0, 2, ids.shape)
    with torch.no_grad():
        got = load(tmp_path, hf_compat=True)(ids, padding, segments)
        expected = theirs(ids, padding.long(), segments).logits
    close(got[padding] if got.dim() == 3 else got, expected[padding] if got.dim() == 3 else expected)


def test_a_saved_bigbird_is_read_by_transformers(tmp_path: Path) -> None:
    import transformers

    saved(tmp_path / "theirs", "BigBirdForMaskedLM", block_size=8, num_random_blocks=2)
    ours = load(tmp_path / "theirs", hf_compat=True)
    save(ours, tmp_path / "ours")
    theirs = transformers.BigBirdForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    ids, padding = batch(160, 160, 131)
    with torch.no_grad():
        close(ours(ids, padding)[padding], theirs(ids, padding.long()).logits[padding])


def test_bigbird_has_random_blocks_by_default_others_in_each_layer(tmp_path: Path) -> None:
    saved(tmp_path, "BigBirdModel", block_size=8, num_random_blocks=2)
    ours = load(tmp_path)
    assert [block.attention.choice.seed for block in ours.encoder.blocks] == [0, 1]
    ids, padding = batch(160, 160, 131)
    with torch.no_grad():
        assert not torch.equal(ours(ids, padding), load(tmp_path, hf_compat=True)(ids, padding))


# --- extend -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "RobertaModel", "RobertaForMaskedLM"])
def test_an_extended_model_answers_as_before_within_its_window(tmp_path: Path, kind: str) -> None:
    theirs = saved(tmp_path, kind)
    ours = extend(tmp_path, window=160, max_len=500)
    ids, padding = batch(80, 80, 51)
    if kind.startswith("Bert"):
        ids[~padding] = 0  # its padding token
    with torch.no_grad():
        result = theirs(ids, padding.long())
        expected = result.logits if "MaskedLM" in kind else result.last_hidden_state
        close(ours(ids, padding)[padding], expected[padding])


def test_an_extended_model_repeats_positions_and_copies_projections(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "RobertaModel", pad_token_id=1)
    ours = extend(tmp_path, window=16, max_len=500)
    old, new = theirs.embeddings.position_embeddings.weight, ours.positions.weight
    assert len(new) == 502
    assert torch.equal(new[:200], old)
    assert torch.equal(new[200:398], old[2:])
    assert torch.equal(new[398:], old[2:106])
    for block in ours.encoder.blocks:
        for part, own in zip(block.attention.projection.weight.chunk(3), ("query", "key", "value"), strict=True):
            assert torch.equal(getattr(block.attention.choice, own).weight, part)


def test_an_extended_model_saves_as_a_longformer_that_transformers_reads(tmp_path: Path) -> None:
    import transformers

    saved(tmp_path / "bert", "BertForMaskedLM")
    ours = extend(tmp_path / "bert", window=16, max_len=300)
    save(ours, tmp_path / "long")
    theirs = transformers.LongformerForMaskedLM.from_pretrained(tmp_path / "long").eval()
    ids, padding = batch(250, 250, 220)
    ids[~padding] = 0
    tokens = at(250, [0], [0])
    with torch.no_grad():
        expected = theirs(ids, padding.long(), tokens.long()).logits
        close(ours(ids, padding, tokens=tokens)[padding], expected[padding])


def test_extend_names_what_it_does_not_take(tmp_path: Path) -> None:
    saved(tmp_path / "big", "BigBirdModel")
    with pytest.raises(ValueError, match="takes a BERT or RoBERTa checkpoint; model_type is 'big_bird'"):
        extend(tmp_path / "big", window=16, max_len=300)
    saved(tmp_path / "relu", "BertForMaskedLM", hidden_act="relu")
    with pytest.raises(ValueError, match="activation 'gelu', this one 'relu'"):
        extend(tmp_path / "relu", window=16, max_len=300)
