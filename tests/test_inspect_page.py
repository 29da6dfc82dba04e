"""The page of an inspection, in a real browser: it renders, asks for nothing, and says what the reference says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from chromium import READY, Page, browser, executable
from torch import Tensor

import poise
from poise import models

WORDS = [
    "El",
    "gato",
    "se",
    "sentó",
    "en",
    "la",
    "alfombra",
    ".",
    "</script><img/src='//nowhere.invalid/x'>",
    "the",
    "cat",
]
SHORT = " ".join(WORDS[:9])
LENGTH = 200  # tokens of the long text: cells of 5 × 5
SIDE, CELLS, LAYERS, HEADS = 5, 40, 3, 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose attention is far from even, with a tokenizer of whole words."""
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("llama")
    sizes = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    model = models.Llama({**sizes, "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 256})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "projection" in name:
                parameter.mul_(3)
    models.save(model, directory)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def long_words() -> list[str]:
    order = torch.randint(0, len(WORDS), (LENGTH,), generator=torch.Generator().manual_seed(0))
    return [WORDS[i] for i in order.tolist()]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, long_words: list[str]) -> list[Tensor]:
    """[layers, H, N, N] of both texts by transformers' own eager attention."""
    import transformers

    model = transformers.AutoModel.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32)
    made = []
    for words in (WORDS[:9], long_words):
        ids = torch.tensor([[WORDS.index(word) + 1 for word in words]])
        with torch.no_grad():
            attentions = model(input_ids=ids, output_attentions=True).attentions
        made.append(torch.stack([attention[0] for attention in attentions]))
    return made


@pytest.fixture(scope="module")
def file(checkpoint: Path, long_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    poise.inspect(checkpoint, [SHORT, " ".join(long_words)]).html(path)
    return path


@pytest.fixture(scope="module")
def shared() -> Iterator[Page]:
    if executable() is None:
        if os.environ.get("POISE_REQUIRE_CHROMIUM") == "1":
            pytest.fail("no Chromium: run scripts/install_chromium.sh, or name one in POISE_CHROMIUM")
        pytest.skip("no Chromium is installed: scripts/install_chromium.sh does it")
    with browser() as page:
        page.size(1400, 2600)
        yield page


@pytest.fixture
def page(shared: Page, file: Path) -> Page:
    """The page freshly opened, its first map shown."""
    shared.complaints.clear()
    shared.requests.clear()
    shared.open(file, READY)
    return shared


def choose(page: Page, *, text: int | None = None, layer: int | None = None, head: int | None = None) -> None:
    """By the controls that a user has."""
    if text is not None:
        select = "document.querySelector('#map-text select')"
        page.evaluate(f"{select}.value = '{text}'; {select}.dispatchEvent(new Event('change'))")
    if layer is not None and head is not None:
        page.evaluate(f"document.querySelector('#table tr[data-head=\"{layer}.{head}\"]').click()")
    now = page.evaluate("document.querySelector('#map-text select').value")
    page.wait(
        f"document.documentElement.dataset.ready.startsWith('{now} {'' if layer is None else f'{layer} {head}'}')"
    )


def point_at(page: Page, row: int, column: int) -> str:
    """What is said when the mouse is over a cell."""
    where = page.evaluate(
        "(() => { const c = document.getElementById('map'), b = c.getBoundingClientRect(), d = c.dataset;"
        f"return [b.left + +d.left + ({column} + .5) * d.cell, b.top + +d.top + ({row} + .5) * d.cell] }})()"
    )
    page.point(*where)
    return told(page)


def told(page: Page) -> str:
    """What is said, with single spaces: a token brings along that before it."""
    return " ".join(page.evaluate("document.getElementById('told').textContent").split())


def number(page: Page, name: str) -> float:
    return float(page.evaluate(f"document.getElementById('{name}').textContent"))


def cell(weights: Tensor, row: int, column: int) -> Tensor:
    return weights[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]


def without_sink(weights: Tensor, rows: int) -> Tensor:
    """[N, N] without the key that gets most from the rows that are looked at, every row scaled to 1 again."""
    left = weights.double().clone()
    left[:, weights[-rows:].sum(0).argmax()] = 0
    whole = left.sum(-1, keepdim=True)
    return torch.where(whole > 0, left / whole, 0.0)


class TestItself:
    def test_it_renders_without_a_complaint_and_asks_for_nothing(self, page: Page, file: Path) -> None:
        for dark in (True, False):
            page.dark(dark)
            page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        colours = page.evaluate(
            "(() => { const c = document.getElementById('map'); const d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data; return new Set(new Uint32Array(d.buffer)).size })()"
        )
        assert colours > 10  # not blank
        assert page.complaints == []
        assert page.requests == [file.resolve().as_uri()]

    def test_nothing_in_it_names_another_place(self, file: Path) -> None:
        code = re.sub(
            r'<script (type="application/json"|type="text/plain").*?</script>', "", file.read_text(), flags=re.S
        )
        assert set(re.findall(r"https?://[^\s\"'`)]+", code)) == {"http://www.w3.org/2000/svg"}
        assert not re.search(
            r"\b(?:src|href)=(?!\"data:,\")|@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\b *[({\"']", code
        )

    def test_a_text_cannot_break_out_of_its_place(self, page: Page) -> None:
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert WORDS[8] in page.evaluate("document.getElementById('query-tokens').textContent")

    def test_all_heads_are_in_grid_points_and_table(self, page: Page) -> None:
        counts = page.evaluate(
            "['#grid button', '#scatter circle', '#table tbody tr'].map(x => document.querySelectorAll(x).length)"
        )
        assert counts == [LAYERS * HEADS] * 3

    def test_its_width_fits_a_phone(self, page: Page) -> None:
        page.size(390, 2600)
        try:
            page.wait("document.documentElement.scrollWidth <= 390")
        finally:
            page.size(1400, 2600)


class TestValues:
    @pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 3), (2, 2)])
    def test_hovering_tells_the_weight_and_its_tokens(
        self, page: Page, expected: list[Tensor], layer: int, head: int
    ) -> None:
        choose(page, text=0, layer=layer, head=head)
        for row, column in [(8, 0), (8, 8), (5, 3), (4, 1), (0, 0)]:
            said = point_at(page, row, column)
            assert said.startswith(f"{WORDS[row]} {row} looks at {WORDS[column]} {column} with")
            weight = float(expected[0][layer, head, row, column])
            assert number(page, "weight") == pytest.approx(weight, rel=2e-5, abs=1e-12)

    def test_a_hidden_pair_has_no_weight(self, page: Page) -> None:
        choose(page, text=0, layer=1, head=1)
        point_at(page, 2, 6)
        assert number(page, "weight") == 0

    @pytest.mark.parametrize(("layer", "head"), [(0, 1), (2, 3)])
    def test_hiding_the_sink_renormalises(self, page: Page, expected: list[Tensor], layer: int, head: int) -> None:
        choose(page, text=0, layer=layer, head=head)
        page.press("s")
        page.wait("document.documentElement.dataset.ready.endsWith('true')")
        left = without_sink(expected[0][layer, head], 9)
        for row, column in [(8, 0), (8, 8), (5, 3), (6, 2)]:
            point_at(page, row, column)
            assert number(page, "weight") == pytest.approx(float(left[row, column]), rel=5e-5, abs=1e-12)
        assert page.evaluate("document.getElementById('gone').hidden") is False

    def test_pooled_cells_tell_mean_largest_and_where_it_is(
        self, page: Page, expected: list[Tensor], long_words: list[str]
    ) -> None:
        choose(page, text=1, layer=1, head=2)
        weights = expected[1][1, 2]
        for row, column in [(39, 0), (39, 39), (20, 11), (7, 7)]:
            said, part = point_at(page, row, column), cell(weights, row, column)
            assert number(page, "weight") == pytest.approx(float(part.mean()), rel=5e-5)
            assert number(page, "largest") == pytest.approx(float(part.max()), rel=5e-5)
            i, j = divmod(int(part.argmax()), SIDE)
            i, j = i + row * SIDE, j + column * SIDE
            assert said.endswith(f"{long_words[i]} {i} looks at {long_words[j]} {j}")
            marked = page.evaluate("[...document.querySelectorAll('.tokens .chosen')].map(x => x.textContent.trim())")
            assert marked == [long_words[i], long_words[j]]

    def test_pooled_cells_without_the_sink(self, page: Page, expected: list[Tensor]) -> None:
        choose(page, text=1, layer=2, head=1)
        page.press("s")
        page.wait("document.documentElement.dataset.ready.endsWith('true')")
        left = without_sink(expected[1][2, 1], LENGTH - 31)  # rows that see 32 keys
        for row, column in [(39, 0), (25, 24), (20, 11)]:
            point_at(page, row, column)
            part = cell(left, row, column)
            assert number(page, "weight") == pytest.approx(float(part.mean()), rel=1e-4, abs=1e-12)
            assert number(page, "largest") == pytest.approx(float(part.max()), rel=1e-4, abs=1e-12)

    def test_figures_of_a_head_are_the_inspections(self, page: Page, checkpoint: Path, long_words: list[str]) -> None:
        head: Any = next(
            head
            for head in poise.inspect(checkpoint, [SHORT, " ".join(long_words)], control=False).heads
            if (head.layer, head.head) == (2, 1)
        )
        choose(page, layer=2, head=1)
        shown = page.evaluate("[...document.querySelectorAll('#figures dd')].map(x => x.textContent)")
        names = page.evaluate("[...document.querySelectorAll('#figures dt')].map(x => x.textContent)")
        assert float(shown[names.index("entropy")]) == pytest.approx(head.statistics["entropy"], rel=6e-3, abs=6e-4)
        assert float(shown[names.index("induction")]) == pytest.approx(head.measures["induction"], rel=6e-2, abs=1e-3)


class TestUse:
    def test_arrow_keys_move_over_the_map(self, page: Page) -> None:
        choose(page, text=0, layer=1, head=1)
        point_at(page, 4, 2)
        page.evaluate("document.getElementById('map').focus()")
        page.press("ArrowDown")
        page.press("ArrowLeft")
        said = told(page)
        assert said.startswith(f"{WORDS[5]} 5 looks at {WORDS[1]} 1")

    def test_arrow_keys_move_over_the_grid(self, page: Page) -> None:
        page.evaluate("document.querySelector('#grid button').click(); document.querySelector('#grid button').focus()")
        page.press("ArrowRight")
        page.press("ArrowDown")
        assert page.evaluate("document.getElementById('head-name').textContent") == "Layer 1 · head 1"

    def test_brackets_step_through_heads(self, page: Page) -> None:
        choose(page, layer=0, head=3)
        page.press("]")
        assert page.evaluate("document.getElementById('head-name').textContent") == "Layer 1 · head 0"

    def test_a_token_is_found_on_each_axis(self, page: Page) -> None:
        choose(page, text=0, layer=1, head=1)
        for axis, place in (("query", 0), ("key", 1)):
            point_at(page, 8, 0)
            page.evaluate(
                f"(() => {{ const x = document.getElementById('find-{axis}'); x.value = 'GATO'; "
                "x.dispatchEvent(new Event('input')); x.focus() })()"
            )
            assert page.evaluate(f"document.getElementById('found-{axis}').textContent") == "1 found"
            page.press("Enter")
            said = told(page)
            assert said.split(" looks at ")[place].startswith("gato 1")

    def test_the_table_sorts_by_any_column(self, page: Page) -> None:
        column = page.evaluate(
            "[...document.querySelectorAll('#table th button')].findIndex(x => x.textContent === 'entropy')"
        )
        values = f"[...document.querySelectorAll('#table tbody tr')].map(x => Number(x.cells[{column}].textContent))"
        for descending in (True, False):
            page.evaluate(f"document.querySelectorAll('#table th button')[{column}].click()")
            shown = page.evaluate(values)
            assert shown == sorted(shown, reverse=descending)

    def test_a_class_shows_its_heads_only(self, page: Page) -> None:
        for index in range(8):
            count = page.evaluate(
                f"(() => {{ const x = document.querySelectorAll('#classes button')[{index}]; x.click(); "
                "return Number(document.querySelectorAll('#classes button')"
                f"[{index}].querySelector('b').textContent) }})()"
            )
            assert page.evaluate("document.querySelectorAll('#table tbody tr').length") == count
            page.evaluate(f"document.querySelectorAll('#classes button')[{index}].click()")
        assert page.evaluate("document.querySelectorAll('#table tbody tr').length") == LAYERS * HEADS

    def test_axes_of_the_points_are_chosen(self, page: Page) -> None:
        before = page.evaluate("document.querySelector('#scatter circle').getAttribute('cx')")
        page.evaluate(
            "(() => { const x = document.querySelector('#scatter-axes select'); x.value = '12'; "
            "x.dispatchEvent(new Event('change')) })()"
        )
        assert page.evaluate("document.querySelector('#scatter circle').getAttribute('cx')") != before
