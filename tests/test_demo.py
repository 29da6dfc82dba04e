"""`make demo`: what it prints, wherever it prints to, and that its numbers are attention's own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from poise import models
from poise.report.terminal import LABEL, Terminal
from poise.testing import weights

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
SECTIONS = (
    "1  Projection",
    "2  Scores",
    "3  Scaling",
    "4  Softmax",
    "5  Weighted values",
    "6  Heads",
    "Why √d?",
)


def run(*arguments: str | bytes, **environment: str) -> str:
    """What the demo prints into a pipe."""
    done = subprocess.run(
        [sys.executable, DEMO, "--no-timing", *arguments],
        capture_output=True,
        env={**os.environ, "PYTHONUTF8": "1", **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("utf-8")


def projected(sentence: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the first head, from their description alone: unit variance, a row per word and mark."""
    tokens = [*sentence.removesuffix(".").split(), "."]
    assert len(tokens) == len(set(tokens))
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 4, 16, 64, generator=generator) / 4
    torch.randn(4 * 64, 16, generator=generator)
    x = torch.randn(len(tokens), 16, generator=generator)
    return x @ w[0, 0], x @ w[1, 0]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def printed() -> str:
    return run()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_step_is_shown(printed: str, section: str) -> None:
    assert f"\n{section}" in printed


def test_a_pipe_gets_no_escape_codes(printed: str) -> None:
    assert "\x1b" not in printed


def test_lines_fit_a_hundred_columns(printed: str) -> None:
    assert max(map(len, printed.splitlines())) <= 100


def test_the_three_scales_stand_side_by_side(printed: str) -> None:
    assert any(line.split() == ["unscaled", "1/√d", "1/d"] for line in printed.splitlines())


def test_without_timing_nothing_is_measured(printed: str) -> None:
    assert "GF/s" not in printed


class TestNumbers:
    @pytest.mark.parametrize(
        ("title", "stage"), [("2  Scores", "raw"), ("3  Scaling", "scaled"), ("4  Softmax", "prob")]
    )
    def test_matrices_as_printed_are_torchs(self, demo: ModuleType, printed: str, title: str, stage: str) -> None:
        q, k = projected(demo.SENTENCE)
        raw = q @ k.mT
        expected = {"raw": raw, "scaled": raw / q.shape[-1] ** 0.5, "prob": (raw / q.shape[-1] ** 0.5).softmax(-1)}[
            stage
        ]
        rows = [
            [float(cell) for cell in re.sub("[░▒▓█]", " ", line[LABEL:]).split()]
            for line in section(printed, title)
            if re.match(r" +\d ", line)
        ]
        half_a_digit = 0.051 if stage == "raw" else 0.0051
        torch.testing.assert_close(torch.tensor(rows), expected, rtol=0, atol=half_a_digit)

    @pytest.mark.parametrize(("name", "power"), [("unscaled", 0.0), ("1/√d", 0.5), ("1/d", 1.0)])
    def test_table_as_printed_is_torchs(self, demo: ModuleType, printed: str, name: str, power: float) -> None:
        q, k = projected(demo.SENTENCE)
        scores = (q @ k.mT).double() / q.shape[-1] ** power
        p = scores.softmax(-1)
        gain = 1 - p.square().sum(-1)
        expected = [
            scores.std(-1, correction=0).mean(),
            p.amax(-1).mean(),
            torch.special.entr(p).sum(-1).mean(),
            (1 / (1 - gain)).mean(),
            gain.mean(),
            gain.min(),
        ]
        table = [line for line in section(printed, "Why") if re.fullmatch(rf"{name}( +\d+\.\d+){{6}}", line)]
        assert len(table) == 1
        shown = [float(cell) for cell in table[0].split()[1:]]
        assert shown == pytest.approx([float(x) for x in expected], abs=0.0051)


class TestOtherSentences:
    def test_another_sentence_is_shown_by_its_own_words(self) -> None:
        assert "2 perro" in run("El perro, no.")

    def test_one_token_gives_itself_everything(self) -> None:
        text = run("Hola")
        assert "███ 1.00" in text
        assert "A single token has all of the weight" in text

    def test_a_long_sentence_is_cut_and_says_so(self) -> None:
        text = run(" ".join(f"palabra{i}" for i in range(30)))
        assert "30 tokens; the tables show the first 16" in text
        assert "palabra16" not in text.split("\n1  ")[1]
        assert max(map(len, text.split("\n1  ")[1].splitlines())) <= 100

    def test_nothing_to_attend_to_is_an_error_that_names_the_argument(self) -> None:
        done = subprocess.run([sys.executable, DEMO, "  "], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert "sentence must contain a word" in done.stderr

    def test_an_ascii_locale_does_not_matter(self, printed: str) -> None:
        ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        assert run(**ascii_only) == printed
        assert "sentó" in run("Se sentó.".encode(), **ascii_only)


def section(printed: str, title: str) -> list[str]:
    """The lines of one step."""
    return re.split(r"\n(?:\d  |Why)", printed[printed.index("\n" + title) + 1 :])[0].splitlines()


class TestTiming:
    def test_every_round_times_every_call(self, demo: ModuleType) -> None:
        calls: list[str] = []
        rounds = demo.interleaved([lambda: calls.append("x"), lambda: calls.append("y")], seconds=0.0)
        assert [len(times) for times in rounds] == [2] * 5
        assert calls == ["x", "y"] * 6  # a first round to warm up


class TestInspection:
    @pytest.fixture(autouse=True)
    def _weights(self) -> None:
        try:
            weights.smollm2()
        except FileNotFoundError as missing:
            if os.environ.get("POISE_REQUIRE_WEIGHTS") == "1":
                raise
            pytest.skip(str(missing))

    def test_the_long_text_has_4000_tokens_and_more(self, demo: ModuleType) -> None:
        assert len(models.tokenizer(weights.smollm2()).encode(demo.long_text()).ids) >= 4000

    def test_it_prints_the_table_and_where_the_page_is(
        self, demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo, "long_text", lambda: demo.SENTENCE * 20)
        demo.show_inspection(Terminal(), tmp_path / "made" / "report.html")
        printed = capsys.readouterr().out
        assert "30 layers, 270 heads; 6 texts" in printed
        assert "on what followed the same token before" in printed
        assert str(tmp_path / "made" / "report.html") in printed
        page = (tmp_path / "made" / "report.html").read_text()
        for piece in ("alfombra", "Katze", "chat", "猫", "mat"):
            assert piece[:4] in page
