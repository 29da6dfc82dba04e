"""Trained models: embeddings, greedy texts and statistics equal those of transformers on the same checkpoints.

With POISE_REQUIRE_WEIGHTS=1, as `make test` sets it, missing weights fail these tests instead of skipping them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import poise
import poise.hf
from poise import models
from poise.models.generate import generate
from poise.testing import weights

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SENTENCES = [
    "El gato se sentó en la alfombra.",
    "The cat sat on the mat.",
    "Attention weighs what it sees by how well it fits the question, and a softmax keeps the weights honest.",
    "?",
    "Die Katze saß auf der Matte, während draußen der Regen gegen die Fenster schlug und niemand an Mathematik dachte.",
    "Interest rates rose again. " * 12,
]
QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea."]
NEW = 16
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def located(find: Callable[[], Path]) -> Path:
    try:
        return find()
    except FileNotFoundError as error:
        if os.environ.get("POISE_REQUIRE_WEIGHTS") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def minilm() -> Path:
    return located(weights.minilm)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return located(weights.smollm2)


@torch.no_grad()
def test_embeddings_of_minilm_equal_transformers(minilm: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    hidden = transformers.AutoModel.from_pretrained(minilm)(**batch).last_hidden_state
    real = batch["attention_mask"][..., None]
    want = torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)

    ours = models.tokenizer(minilm)
    rows = [ours.encode(sentence).ids for sentence in SENTENCES]
    got = models.load(minilm, head="embedding")(rows)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    assert float(got[0] @ got[1]) > float(got[0] @ got[2])  # the same thing said twice is nearer


@torch.no_grad()
def test_texts_of_smollm2_equal_transformers(smollm2: Path) -> None:
    words = models.tokenizer(smollm2)
    prompts = [words.encode(CHAT.format(question)).ids for question in QUESTIONS]
    model = models.load(smollm2, dtype=torch.float32)
    answers = generate(model, prompts, new=NEW, tokenizer=words)
    assert "Paris" in answers[0].text

    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        compared = reference(ids).logits
        assert float((model(ids) - compared).abs().max()) <= 1e-5 * float(compared.abs().max())
        want = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        assert answer.ids == want[0, len(prompt) :].tolist()


def test_the_tokenizer_of_smollm2_restores_what_it_reads(smollm2: Path) -> None:
    words = models.tokenizer(smollm2)
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in [*SENTENCES, CHAT.format("中文 naïve\n\n  1234 + 5")]:
        ids = words.encode(text).ids
        assert words.decode(ids, skip_special_tokens=False) == text
        assert theirs(text)["input_ids"] == ids


@pytest.mark.usefixtures("minilm", "smollm2")
def test_what_the_readme_does_with_models_works(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", readme.partition("## Models\n")[2], re.S)
    assert code is not None
    done: dict[str, Any] = {}
    exec(code.group(1), done)
    assert len(capsys.readouterr().out.split()) > 10
    assert done["vectors"].shape == (len(done["texts"]), 384)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["minilm", "smollm2"])
@torch.no_grad()
def test_on_poise_a_trained_model_is_eagers_and_a_watch_tells_of_eagers_weights(
    name: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(name)
    poise.hf.register()
    kind: Any = transformers.AutoModel if name == "minilm" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    text = transformers.AutoTokenizer.from_pretrained(directory)(SENTENCES[-1], return_tensors="pt")
    eager = model(**text, output_attentions=True)
    continued = model.generate(**text, do_sample=False, max_new_tokens=NEW) if name == "smollm2" else None

    model.set_attn_implementation("poise")
    with poise.watch(model, every=1) as watch:
        ours = model(**text)
    assert float((ours[0] - eager[0]).abs().max()) <= 1e-5 * float(eager[0].abs().max())
    if continued is not None:
        assert torch.equal(model.generate(**text, do_sample=False, max_new_tokens=NEW), continued)

    layers = watch.record["layers"]
    order = sorted(layers, key=lambda path: int(re.findall(r"\d+", path)[0]))
    assert len(order) == len(eager.attentions)
    for path, p in zip(order, eager.attentions, strict=True):  # p [1, H, N, M]
        entropy = -(p * p.clamp_min(1e-38).log()).sum(-1).mean((0, 2))
        responsiveness = (1 - p.square().sum(-1)).mean((0, 2))
        for told, want in (("entropy", entropy), ("responsiveness", responsiveness)):
            torch.testing.assert_close(torch.tensor(layers[path][told]["mean"]), want, rtol=0, atol=1e-4)
