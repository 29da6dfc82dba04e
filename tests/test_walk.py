"""`poise walk`: its numbers are poise's, on the screen and on the page, in five complete languages."""

from __future__ import annotations

import io
import re
import string
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tokenizers
import torch

import poise
from poise import models
from poise.cli import main
from poise.report import lesson, page, terminal, texts, walk

SENTENCE = "El gato se sentó en la alfombra."
OTHERS = [language for language in texts.LANGUAGES if language != "en"]
SIZES = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small BERT, Llama with grouped heads, and T5, random, with a tokenizer of whole words."""
    torch.manual_seed(0)
    made = {
        "bert": models.Bert(SIZES, "hidden"),
        "llama": models.Llama({**SIZES, "num_key_value_heads": 2}),
        "t5": models.T5({"vocab_size": 40, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}),
    }
    known = {word: i for i, word in enumerate(["[UNK]", *lesson.words(SENTENCE)])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found = {}
    for name, model in made.items():
        found[name] = tmp_path_factory.mktemp(name)
        models.save(model, found[name])
        words.save(str(found[name] / "tokenizer.json"))
    return found


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def printed(taught: lesson.Lesson) -> str:
    stream = io.StringIO()
    walk.walk(taught, SENTENCE, texts.speaker("en"), terminal.Terminal(stream))
    return stream.getvalue()


class Tables(HTMLParser):
    """The cells of every heat map of a page, and what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.heats: list[list[str]] = []
        self.references: list[str] = []
        self.language: str | None = None
        self.inside = self.cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "html":
            self.language = given["lang"]
        if tag == "table" and given.get("class") == "heat":
            self.heats.append([])
            self.inside = True
        self.cell = tag == "td" and self.inside

    def handle_endtag(self, tag: str) -> None:
        self.cell = False
        self.inside = self.inside and tag != "table"

    def handle_data(self, data: str) -> None:
        if self.cell:
            self.heats[-1].append(data)


class TestCatalogues:
    @pytest.mark.parametrize("language", OTHERS)
    def test_every_language_has_every_key(self, language: str) -> None:
        assert texts.catalogue(language).keys() == texts.catalogue("en").keys()

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_no_text_is_empty(self, language: str) -> None:
        assert [key for key, text in texts.catalogue(language).items() if not text.strip()] == []

    @pytest.mark.parametrize("language", OTHERS)
    def test_placeholders_are_the_same(self, language: str) -> None:
        english = texts.catalogue("en")
        assert [k for k, text in texts.catalogue(language).items() if fields(text) != fields(english[k])] == []

    @pytest.mark.parametrize("language", OTHERS)
    def test_prose_is_translated(self, language: str) -> None:
        own = texts.catalogue(language)
        assert [k for k, text in texts.catalogue("en").items() if text.count(" ") >= 2 and own[k] == text] == []

    def test_the_reports_use_every_key(self) -> None:
        source = "".join(Path(module.__file__ or "").read_text() for module in (walk, page, poise.cli))
        used = set(re.findall(r"[\"']([a-z]+(?:\.[a-z]+)?)[\"']", source))
        used |= {f"stat.{key}" for key in ("std", "top", "entropy", "keys", "gain", "least")}
        assert texts.catalogue("en").keys() <= used

    @pytest.mark.parametrize(
        ("locale", "language"),
        [("es_ES.UTF-8", "es"), ("de", "de"), ("zh-CN", "zh"), ("C.UTF-8", "en"), ("it_IT", "en"), ("", "en")],
    )
    def test_the_locale_chooses_the_language(self, locale: str, language: str) -> None:
        assert texts.preferred({"LANG": locale}) == language

    def test_lc_all_goes_before_lang(self) -> None:
        assert texts.preferred({"LC_ALL": "fr_FR", "LANG": "de_DE"}) == "fr"


class TestNumbers:
    @pytest.mark.parametrize("family", ["bert", "llama"])
    def test_weights_are_those_of_scores_on_the_same_queries_and_keys(
        self, checkpoints: dict[str, Path], family: str
    ) -> None:
        taught = lesson.of_model(checkpoints[family], SENTENCE, layer=1, head=3)
        mask = poise.causal() if family == "llama" else None
        expected = poise.scores(taught.q, taught.k, mask=mask, stage="prob")
        torch.testing.assert_close(taught.weights[3], expected, rtol=0, atol=1e-6)
        assert taught.causal == (family == "llama")

    def test_printed_and_page_weights_are_those_of_scores(self, checkpoints: dict[str, Path]) -> None:
        taught = lesson.of_model(checkpoints["bert"], SENTENCE, layer=1, head=2)
        expected = poise.scores(taught.q, taught.k, stage="prob")
        part = printed(taught).split("\n4  ")[1].split("Worked out")[0]
        rows = [
            re.sub("[░▒▓█]", " ", line[terminal.LABEL :]).split()
            for line in part.splitlines()
            if line[:3].strip().isdigit()
        ]
        torch.testing.assert_close(
            torch.tensor([[float(x) for x in row] for row in rows]), expected, rtol=0, atol=0.0051
        )
        tables = Tables()
        tables.feed(page.page(taught, SENTENCE, texts.speaker("en"), "en"))
        shown = torch.tensor([float(x) for x in tables.heats[2]]).view(expected.shape)
        torch.testing.assert_close(shown, expected, rtol=0, atol=0.00051)

    @pytest.mark.parametrize("family", ["bert", "llama", "t5"])
    def test_the_steps_end_where_the_model_does(self, checkpoints: dict[str, Path], family: str) -> None:
        """The last layer's input, projected and attended by hand, is what its attention gave."""
        taught = lesson.of_model(checkpoints[family], SENTENCE, layer=1)
        model = models.load(checkpoints[family])
        stack = model.decoder if family == "llama" else model.encoder
        out = stack.blocks[1].attention.out
        joined = taught.outs.transpose(0, 1).flatten(1)
        torch.testing.assert_close(out(joined[None])[0], taught.y, rtol=1e-5, atol=1e-6)

    def test_hidden_pairs_are_marked_not_numbered(self, checkpoints: dict[str, Path]) -> None:
        tables = Tables()
        taught = lesson.of_model(checkpoints["llama"], SENTENCE)
        tables.feed(page.page(taught, SENTENCE, texts.speaker("en"), "en"))
        assert [cell == "·" for cell in tables.heats[2]] == (~taught.visible).flatten().tolist()

    def test_a_model_without_scale_says_so_and_a_bias_is_named(self, checkpoints: dict[str, Path]) -> None:
        text = printed(lesson.of_model(checkpoints["t5"], SENTENCE))
        assert "This model does not scale its scores" in text
        assert "position bias is already added" in text

    def test_the_least_gain_is_of_rows_with_something_to_choose(self, checkpoints: dict[str, Path]) -> None:
        taught = lesson.of_model(checkpoints["llama"], SENTENCE)  # causal: its first row sees one key
        _, _, rows = walk.effects(taught, texts.speaker("en"))
        gains = [stats.responsiveness[0, taught.head] for _, _, stats in taught.scales]
        assert [row[-1] for _, row in rows] == [f"{gain[1:].min():.4f}" for gain in gains]
        assert all(gain[0] < gain[1:].min() for gain in gains)

    def test_one_token_is_a_walk_too(self, checkpoints: dict[str, Path]) -> None:
        for taught in (lesson.seeded("gato"), lesson.of_model(checkpoints["llama"], "gato")):
            assert "gato" in printed(taught)
            assert "gato" in page.page(taught, "gato", texts.speaker("en"), "en")

    def test_many_tokens_still_fit_a_terminal(self) -> None:
        text = printed(lesson.seeded(" ".join(f"palabra{i}" for i in range(30))))
        assert max(map(len, text.splitlines())) <= terminal.WIDTH

    def test_han_characters_are_tokens_of_their_own(self) -> None:
        assert lesson.words("猫坐在 mat 上。") == ["猫", "坐", "在", "mat", "上", "。"]


class TestPage:
    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_it_is_whole_in_its_language_and_fetches_nothing(self, language: str) -> None:
        html = page.page(lesson.seeded(SENTENCE), SENTENCE, texts.speaker(language), language)
        tables = Tables()
        tables.feed(html)
        assert tables.language == language
        assert tables.references == []
        assert not re.search(r"https?:|@import|url\(", html)
        assert "prefers-color-scheme: dark" in html

    def test_what_the_user_wrote_is_escaped(self) -> None:
        html = page.page(lesson.seeded("<b> & gato"), "<b> & gato", texts.speaker("en"), "en")
        assert "<b>" not in html
        assert "&lt;b&gt; &amp; gato" in html


class TestCommand:
    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_it_walks_in_every_language(self, language: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["walk", "--lang", language]) == 0
        out = capsys.readouterr().out
        assert texts.catalogue(language)["title"] in out
        assert texts.catalogue(language)["sentence"] in out
        assert "\x1b" not in out
        assert max(sum(terminal.columns(line)) for line in out.splitlines()) <= terminal.WIDTH

    def test_html_goes_to_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["walk", SENTENCE, "--html", str(tmp_path / "walk.html"), "--lang", "es"]) == 0
        assert '<html lang="es">' in (tmp_path / "walk.html").read_text("utf-8")
        assert "walk.html" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--lang", "it"], "lang must be one of en, es, de, fr, zh; got 'it'"),
            (["--model", "nowhere"], "model must be 'minilm' or 'smollm2' or a directory"),
            (["--layer", "1"], "layer must be its only one, 0; got 1"),
            (["--head", "4"], "head must be 0 to 3; got 4"),
            ([" "], "sentence must contain a word; got ' '"),
        ],
    )
    def test_mistakes_are_named_with_status_2(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["walk", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err

    def test_a_models_own_layers_and_heads_are_the_limits(
        self, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        for wrong, message in (
            (["--layer", "2"], "layer must be 0 to 1; got 2"),
            (["--head", "-1"], "head must be 0 to 3"),
        ):
            with pytest.raises(SystemExit):
                main(["walk", SENTENCE, "--model", str(checkpoints["llama"]), *wrong])
            assert message in capsys.readouterr().err

    def test_the_module_runs_as_a_program_and_fails_without_a_traceback(self) -> None:
        wrong = [sys.executable, "-m", "poise", "walk", "--lang", "it"]
        done = subprocess.run(wrong, capture_output=True, text=True, cwd=Path(poise.__file__).parents[1], timeout=120)
        assert done.returncode == 2
        assert "poise walk: error: lang must be one of" in done.stderr
        assert "Traceback" not in done.stderr


class TestGenerateCommand:
    def test_streamed_and_whole_texts_are_the_same(
        self, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked = [
            "generate",
            str(checkpoints["llama"]),
            "El gato",
            "--max-tokens",
            "5",
            "--temperature",
            "1",
            "--seed",
            "3",
        ]
        assert main([*asked, "--stream"]) == main([*asked, "--no-stream"]) == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first == second

    def test_a_wrong_option_is_named_with_status_2(
        self, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["generate", str(checkpoints["llama"]), "El gato", "--top-p", "2"])
        assert ended.value.code == 2
        assert "top_p must be a probability" in capsys.readouterr().err


class TestColour:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    def test_a_terminal_gets_colour_unless_it_or_the_user_refuses(self) -> None:
        assert terminal.Terminal(self.Screen(), {}).paint("x", "1") == "\x1b[1mx\x1b[0m"
        assert terminal.Terminal(self.Screen(), {"NO_COLOR": "1"}).paint("x", "1") == "x"
        assert terminal.Terminal(self.Screen(), {"TERM": "dumb"}).paint("x", "1") == "x"
        assert terminal.Terminal(io.StringIO(), {}).paint("x", "1") == "x"
