"""Generation: the same tokens as transformers where both are greedy, and what is promised of everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from torch import Tensor

from poise import models
from poise.models.generate import Transcript, generate, stream, stream_text
from poise.models.sampling import Sampling
from poise.nn.cache import GrowingCache, PagedCache, StaticCache

CONFIGS = {
    "gpt": transformers.GPT2Config(
        vocab_size=67, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "llama": transformers.LlamaConfig(
        vocab_size=67, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, max_position_embeddings=64, eos_token_id=2,
    ),
    "t5": transformers.T5Config(
        vocab_size=67, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, decoder_start_token_id=0,
        eos_token_id=1, pad_token_id=0,
    ),
}  # fmt: skip
THEIRS = {
    "gpt": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "t5": transformers.T5ForConditionalGeneration,
}
PROMPTS = [[5, 9, 33, 12], [7], [40, 41, 42, 43, 44, 45, 46]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Their model and ours with the same weights, wild enough that greedy texts do not repeat one token."""
    made: dict[str, tuple[Any, Any]] = {}

    def pair(name: str) -> tuple[Any, Any]:
        if name not in made:
            torch.manual_seed(1)
            reference = THEIRS[name](CONFIGS[name]).eval()
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
            directory = tmp_path_factory.mktemp(name)
            reference.save_pretrained(directory)
            made[name] = reference, models.load(directory)
        return made[name]

    return pair


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """A byte-level tokenizer of 67 tokens: letters, space, and the bytes of é in two halves."""
    letters = ["Ġ", *"abcdefghijklmnopqrstuvwxyz", "Ã", "©", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"]
    tokenizer = Tokenizer(token_models.BPE({letter: i for i, letter in enumerate(letters[:67])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def theirs(model: Any, prompt: list[int], **how: Any) -> list[int]:
    """Their continuation of one prompt alone."""
    ids = torch.tensor([prompt])
    out: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **how)
    skipped = 1 if model.config.is_encoder_decoder else len(prompt)
    return out[0, skipped:].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_of_a_ragged_batch_equal_transformers_one_by_one(name: str, both: Any) -> None:
    reference, model = both(name)
    for prompt, got in zip(PROMPTS, generate(model, PROMPTS, new=20), strict=True):
        assert got.ids == theirs(reference, prompt, max_new_tokens=20)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_repetition_penalty_acts_as_in_transformers(name: str, both: Any) -> None:
    reference, model = both(name)
    results = generate(model, PROMPTS, new=12, sampling=Sampling(repetition_penalty=1.7))
    for prompt, got in zip(PROMPTS, results, strict=True):
        want = theirs(reference, prompt, max_new_tokens=12, repetition_penalty=1.7)
        assert got.ids == want


@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_beams_find_what_transformers_finds(name: str, length_penalty: float, both: Any) -> None:
    reference, model = both(name)
    results = generate(model, PROMPTS, new=9, beams=3, length_penalty=length_penalty)
    for prompt, got in zip(PROMPTS, results, strict=True):
        want = theirs(reference, prompt, max_new_tokens=9, num_beams=3, length_penalty=length_penalty)
        while len(want) > len(got.ids) and want[-1] == 0:
            want.pop()  # their padding
        assert got.ids == want


def test_one_beam_more_never_scores_worse_than_greedy(both: Any) -> None:
    _, model = both("llama")
    prompt = torch.tensor([PROMPTS[0]])

    def score(ids: list[int]) -> float:
        logits = model(torch.cat((prompt, torch.tensor([ids])), 1))[0, prompt.shape[1] - 1 : -1]
        return float(logits.log_softmax(-1)[torch.arange(len(ids)), ids].sum())

    with torch.no_grad():
        [greedy], [beam] = (generate(model, prompt, new=6, beams=k, stop_tokens=()) for k in (1, 4))
        assert score(beam.ids) >= score(greedy.ids) - 1e-4
        assert beam.score == pytest.approx(score(beam.ids) / 6, abs=1e-4)


@pytest.mark.parametrize("make", [GrowingCache, lambda: StaticCache(40), lambda: PagedCache(40, 4)])
def test_every_cache_gives_the_same_tokens(make: Callable[[], Any], both: Any) -> None:
    _, model = both("llama")
    plain, cached = generate(model, PROMPTS, new=20), generate(model, PROMPTS, new=20, cache=make())
    assert [one.ids for one in plain] == [one.ids for one in cached]


def test_pages_of_finished_beams_are_free_again(both: Any) -> None:
    _, model = both("llama")
    cache = PagedCache(200, 4)
    generate(model, PROMPTS, new=9, beams=3, cache=cache)
    held = {page for table in cache._tables for page in table}
    assert cache.pages_free == 200 - len(held)


def test_a_seed_reproduces_and_companions_do_not_matter(both: Any) -> None:
    _, model = both("llama")
    sampling = Sampling(temperature=1.5, top_k=30, top_p=0.95, min_p=0.01, seed=7)
    first, again = (generate(model, PROMPTS, new=15, sampling=sampling, stop_tokens=()) for _ in range(2))
    assert [one.ids for one in first] == [one.ids for one in again]
    [alone] = generate(model, PROMPTS[:1], new=15, sampling=sampling, stop_tokens=())
    assert alone.ids == first[0].ids
    other = Sampling(temperature=1.5, seed=8)
    assert generate(model, PROMPTS[:1], new=15, sampling=other, stop_tokens=())[0].ids != alone.ids


def test_without_a_seed_torchs_reproduces(both: Any) -> None:
    _, model = both("llama")
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([one.ids for one in generate(model, PROMPTS, new=10, sampling=Sampling(temperature=1.0))])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(1.0, top_k=5), transformers.TopKLogitsWarper(5)),
        (Sampling(1.0, top_p=0.7), transformers.TopPLogitsWarper(0.7)),
        (Sampling(1.0, min_p=0.2), transformers.MinPLogitsWarper(0.2)),
    ],
)
def test_cut_offs_keep_what_transformers_keeps(sampling: Sampling, warper: Any) -> None:
    for logits in 2 * torch.randn(20, 50):
        kept = sampling.cut(logits) > -torch.inf
        assert torch.equal(kept, warper(None, logits[None])[0] > -torch.inf)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampling = Sampling(temperature=2.0, seed=0)
    generator = sampling.generators(1)[0]
    drawn = torch.tensor([sampling.choose(logits, (), generator) for _ in range(4000)])
    torch.testing.assert_close(drawn.bincount() / 4000, (logits / 2).softmax(-1), atol=0.03, rtol=0)


def test_streaming_yields_what_generate_returns(both: Any, words: Tokenizer) -> None:
    _, model = both("llama")
    pieces = list(stream(model, PROMPTS, new=20, tokenizer=words))
    for row, got in enumerate(generate(model, PROMPTS, new=20, tokenizer=words)):
        mine = [piece for piece in pieces if piece.row == row]
        assert [piece.token for piece in mine] == got.ids
        assert "".join(piece.text for piece in mine) == got.text == words.decode(got.ids)
        assert [piece.ended for piece in mine][:-1] == [None] * (len(mine) - 1)
        assert mine[-1].ended == got.ended


def test_a_stop_token_ends_its_sequence_only(both: Any) -> None:
    _, model = both("llama")
    free = generate(model, PROMPTS, new=12, stop_tokens=())
    stop = free[0].ids[4]
    for row, got in enumerate(generate(model, PROMPTS, new=12, stop_tokens=[stop])):
        want = free[row].ids
        end = want.index(stop) + 1 if stop in want else 12
        assert got.ids == want[:end]
        assert got.ended == ("token" if stop in want else "length")


def test_a_stop_string_is_found_across_tokens_and_cut_off(both: Any, words: Tokenizer) -> None:
    _, model = both("llama")
    [free] = generate(model, PROMPTS[2], new=20, stop_tokens=(), tokenizer=words)
    stop = free.text[5:8]
    assert len(stop) == 3
    [got] = generate(model, PROMPTS[2], new=20, stop_tokens=(), stop_strings=["nowhere", stop], tokenizer=words)
    assert got.text == free.text[: free.text.index(stop)]
    assert got.ended == "string"
    assert got.ids == free.ids[: len(got.ids)]


def test_text_is_shown_only_when_it_can_no_longer_be_part_of_a_stop_string(words: Tokenizer) -> None:
    transcript = Transcript(words, ["abc"])
    ids = words.encode("xabdabc").ids
    assert [transcript.add(token) for token in ids] == [
        ("x", False), ("", False), ("", False), ("abd", False), ("", False), ("", False), ("", True),
    ]  # fmt: skip
    assert transcript.rest() == ""
    assert transcript.text == "xabd"


def test_a_character_of_several_tokens_comes_whole(words: Tokenizer) -> None:
    transcript = Transcript(words, [])
    ids = words.encode("aéb").ids
    assert len(ids) == 4
    assert [transcript.add(token)[0] for token in ids] == ["a", "", "é", "b"]


def test_a_directory_and_a_prompt_become_text(both: Any, words: Tokenizer, tmp_path: Path) -> None:
    _, model = both("llama")
    models.save(model, tmp_path)
    words.save(str(tmp_path / "tokenizer.json"))
    pieces = list(stream_text(tmp_path, "hello", new=8))
    assert "".join(pieces) == generate(model, "hello", new=8, tokenizer=words)[0].text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prompts": "text"}, "texts need a tokenizer"),
        ({"prompts": []}, "prompts must hold at least one"),
        ({"prompts": [[]]}, "every prompt at least one token"),
        ({"prompts": torch.zeros(1, 2)}, "prompts must be ids"),
        ({"new": 0}, "new must be at least 1"),
        ({"new": 62}, "must fit the model's 64 positions; got 7 \\+ 62"),
        ({"stop_strings": ["a"]}, "stop_strings need a tokenizer"),
        ({"beams": 0}, "beams must be at least 1"),
        ({"beams": 2, "sampling": Sampling(1.0)}, "beams are searched greedily"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(options: dict[str, Any], told: str, both: Any) -> None:
    _, model = both("gpt")
    with pytest.raises(ValueError, match=told):
        generate(model, **{"prompts": PROMPTS, **options})


@pytest.mark.parametrize("beams", [1, 2])
def test_one_stop_string_is_not_taken_for_its_characters(beams: int, both: Any, words: Tokenizer) -> None:
    _, model = both("gpt")
    with pytest.raises(TypeError, match="stop_strings must be several"):
        generate(model, PROMPTS, stop_strings="end", tokenizer=words, beams=beams)


@pytest.mark.parametrize("change", [{"temperature": -1}, {"top_k": 0}, {"top_p": 2.0}, {"repetition_penalty": 0.0}])
def test_sampling_refuses_nonsense(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Sampling(**change)


def test_an_encoder_cannot_generate() -> None:
    model = models.Bert({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9})
    with pytest.raises(TypeError, match="model must be a causal"):
        generate(model, [[1, 2]])
