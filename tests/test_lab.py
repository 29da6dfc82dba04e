"""The lab: intervals and verdicts, runs that stop and go on, complete texts, and what `poise lab` writes."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import string
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from poise.cli import main
from poise.lab import experiment as contract
from poise.lab import page, runner
from poise.lab.evidence import KINDS, Check, Interval, exact, interval, saying, share, student, weigh, worst
from poise.lab.experiment import Cell, Experiment, Values, experiments, find
from poise.lab.results import Results
from poise.lab.texts import localised, speaker, texts
from poise.report.texts import LANGUAGES

YES = Check("claim", Interval(0.9, 1.0, 1.1), 0.5, 1.5)
NO = Check("claim", Interval(1.9, 2.0, 2.1), 0.5, 1.5)
OPEN = Check("claim", Interval(1.4, 1.5, 1.6), 0.5, 1.5)
CATALOGUES = sorted(path.name.removesuffix(".json") for path in (files("poise.lab") / "texts").iterdir())
OPTIONAL = {"holds_if", "holds", "does_not_hold"}  # kinds that a rule may be unable to give; test_lab_experiments says


class TestEvidence:
    @pytest.mark.parametrize(
        ("probability", "freedom", "quantile"),
        [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 3, 3.18245), (0.975, 30, 2.04227), (0.999, 7, 4.78529)],
    )
    def test_students_quantiles_are_those_of_the_tables(
        self, probability: float, freedom: int, quantile: float
    ) -> None:
        assert student(probability, freedom) == pytest.approx(quantile, rel=1e-5)
        assert student(1 - probability, freedom) == pytest.approx(-quantile, rel=1e-5)

    def test_many_degrees_of_freedom_end_in_the_normal(self) -> None:
        normal = statistics.NormalDist().inv_cdf(0.975)
        assert student(0.975, 900) == pytest.approx(normal, rel=2e-3)
        assert student(0.975, 10**6) == pytest.approx(normal, rel=1e-9)

    def test_an_interval_is_the_textbooks(self) -> None:
        found = interval([1.0, 2.0, 3.0])
        assert (found.low, found.mean, found.high) == pytest.approx((2 - 2.48414, 2, 2 + 2.48414), rel=1e-5)

    def test_more_comparisons_widen_it(self) -> None:
        assert interval([1.0, 2.0, 3.0], comparisons=10).high > interval([1.0, 2.0, 3.0]).high

    @pytest.mark.parametrize("values", [[1.0], [1.0, math.nan], [1.0, math.inf]])
    def test_one_seed_or_a_diverged_one_leaves_everything_open(self, values: list[float]) -> None:
        assert Check("claim", interval(values), 0.0, 2.0).answer == "open"

    def test_no_values_are_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match="values must hold at least one number"):
            interval([])

    def test_wilsons_interval_is_the_textbooks(self) -> None:
        found = share(8, 10)
        assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)

    def test_impossible_shares_are_refused(self) -> None:
        with pytest.raises(ValueError, match="got 3 of 2"):
            share(3, 2)

    def test_a_check_answers_yes_inside_no_outside_and_open_across(self) -> None:
        assert (YES.answer, NO.answer, OPEN.answer) == ("yes", "no", "open")

    @pytest.mark.parametrize(
        ("core", "variations", "kind"),
        [
            ([YES, YES], [YES], "holds"),
            ([YES, NO], [], "holds_if"),
            ([YES], [NO], "holds_if"),
            ([NO], [], "does_not_hold"),
            ([NO], [YES], "does_not_hold"),
            ([YES, OPEN], [], "inconclusive"),
            ([NO, OPEN], [], "inconclusive"),
            ([YES], [OPEN], "inconclusive"),
            ([], [], "inconclusive"),
        ],
    )
    def test_the_sum_of_checks(self, core: list[Check], variations: list[Check], kind: str) -> None:
        assert weigh(core, variations) == kind

    def test_the_worst_of_checks_is_a_no_before_an_open_one_before_the_closest(self) -> None:
        closer = Check("claim", exact(0.6), 0.5, 1.5)
        assert worst([YES, OPEN, NO]) is NO
        assert worst([YES, OPEN]) is OPEN
        assert worst([Check("claim", exact(1.0), 0.5, 1.5), closer]) is closer


def fields(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def test_a_group_that_agrees_is_said_as_one() -> None:
    good, bad = exact(1.0), exact(9.0)
    checks = [Check(f"{group}.{i}", x, high=2.0) for group, x in (("a", good), ("b", bad)) for i in range(2)]
    mixed = [Check("c.0", good, high=2.0), Check("c.1", bad, high=2.0)]
    assert saying("yes", [*checks, *mixed], ("a", "b", "c")) == ("a", "c.0")
    assert saying("no", [*checks, *mixed]) == ("b.0", "b.1", "c.1")


class TestTexts:
    @pytest.mark.parametrize("name", CATALOGUES)
    def test_every_text_is_there_in_every_language(self, name: str) -> None:
        assert [key for key, own in texts(name).items() if tuple(own) != LANGUAGES or not all(own.values())] == []

    @pytest.mark.parametrize("name", CATALOGUES)
    def test_placeholders_are_the_same(self, name: str) -> None:
        wrong = [key for key, own in texts(name).items() if any(fields(x) != fields(own["en"]) for x in own.values())]
        assert wrong == []

    @pytest.mark.parametrize("name", CATALOGUES)
    def test_prose_is_translated(self, name: str) -> None:
        prose = {key: own for key, own in texts(name).items() if own["en"].count(" ") >= 3}
        assert [key for key, own in prose.items() if len(set(own.values())) < len(LANGUAGES)] == []

    @pytest.mark.parametrize("own", experiments(), ids=lambda own: own.name)
    def test_an_experiment_has_its_words(self, own: Experiment) -> None:
        needed = {"title", "claim", "method", "rule", *(f"finding.{kind}" for kind in set(KINDS) - OPTIONAL)}
        assert needed <= texts(own.name).keys()

    @pytest.mark.parametrize("own", experiments(), ids=lambda own: own.name)
    def test_no_text_is_unused(self, own: Experiment) -> None:
        """A key stands in the module, whole or as the ending of a key put together there."""
        assert own.measure.__module__ == f"poise.lab.experiments.{own.name}"
        source = Path(contract.folder.__path__[0], f"{own.name}.py").read_text("utf-8")
        always = {"title", "claim", "method", "rule", *(f"finding.{kind}" for kind in KINDS)}
        unused = [
            key
            for key in texts(own.name).keys() - always
            if f'"{key}"' not in source and f'"{key.split(".", 1)[-1]}"' not in source
        ]
        assert unused == []

    def test_numbers_have_the_decimal_point_of_the_language(self) -> None:
        interval = str(Interval(-0.5, 1.25, 1e-7))
        assert localised(interval, speaker("lab", "en")) == interval == "1.25 [-0.5, 1e-07]"
        assert localised(interval, speaker("lab", "de")) == "1,25 [-0,5; 1e-07]"

    def test_the_page_uses_every_key(self) -> None:
        source = "".join(path.read_text("utf-8") for path in (files("poise.lab")).iterdir() if path.suffix == ".py")  # type: ignore[attr-defined]
        source += Path(runner.__file__).parents[1].joinpath("cli.py").read_text("utf-8")
        made = re.compile(r"^(kind|answer|level|name)\.|^check\.(quantity|measured|limits|answer)$")
        assert [
            key for key in texts("lab") if f'"{key}"' not in source and f"'{key}'" not in source and not made.match(key)
        ] == []


class TestExperiments:
    def test_numbers_and_names_are_unique(self) -> None:
        assert (
            len({own.number for own in experiments()}) == len({own.name for own in experiments()}) == len(experiments())
        )

    @pytest.mark.parametrize("own", experiments(), ids=lambda own: own.name)
    def test_levels_grow_and_cells_are_unique(self, own: Experiment) -> None:
        counts = [len(own.tasks(level, 0)) for level in contract.LEVELS]
        assert counts == sorted(counts)
        assert own.source
        assert min(own.number, own.version) >= 1
        for level in contract.LEVELS:
            cells = [json.dumps(cell, sort_keys=True) for cell in own.cells(level)]
            assert len(set(cells)) == len(cells)

    def test_an_unknown_name_is_answered_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"NAME must be one of variance.* got 'nothing'"):
            find("nothing")

    def test_a_number_finds_it_too(self) -> None:
        assert find("1") is find("variance")


@pytest.fixture
def counting() -> tuple[Experiment, list[tuple[Cell, int]]]:
    """Variance, with measurements that are counted and cost nothing."""
    made: list[tuple[Cell, int]] = []

    def measure(cell: Cell, seed: int) -> Values:
        made.append((cell, seed))
        return {"ratio": 1.0 + seed / 1e5}

    return replace(find("variance"), measure=measure), made


class TestRuns:
    def test_a_second_run_measures_nothing_and_agrees(
        self, counting: tuple[Experiment, list[tuple[Cell, int]]], tmp_path: Path
    ) -> None:
        own, made = counting
        first = runner.run(own, "quick", 0, Results(tmp_path))
        before = len(made)
        assert before == len(own.tasks("quick", 0))
        assert runner.run(own, "quick", 0, Results(tmp_path)) == first
        assert len(made) == before

    def test_an_interrupted_run_loses_only_what_was_unfinished(
        self, counting: tuple[Experiment, list[tuple[Cell, int]]], tmp_path: Path
    ) -> None:
        own, made = counting

        def interrupted(cell: Cell, seed: int) -> Values:
            if len(made) == 7:
                raise KeyboardInterrupt
            return own.measure(cell, seed)

        with pytest.raises(KeyboardInterrupt):
            runner.run(replace(own, measure=interrupted), "quick", 0, Results(tmp_path))
        made.clear()
        runner.run(own, "quick", 0, Results(tmp_path))
        assert len(made) == len(own.tasks("quick", 0)) - 7

    def test_a_line_cut_short_does_not_count_and_harms_no_other(
        self, counting: tuple[Experiment, list[tuple[Cell, int]]], tmp_path: Path
    ) -> None:
        own, made = counting
        runner.run(own, "quick", 0, Results(tmp_path))
        path = tmp_path / "cells" / "variance.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
        made.clear()
        runner.run(own, "quick", 0, Results(tmp_path))
        assert len(made) == 1
        assert len(Results(tmp_path).finished(own)) == len(own.tasks("quick", 0))

    def test_a_fuller_level_reuses_the_cells_of_a_lesser_one(
        self, counting: tuple[Experiment, list[tuple[Cell, int]]], tmp_path: Path
    ) -> None:
        own, made = counting
        runner.run(own, "quick", 0, Results(tmp_path))
        done = {json.dumps([cell, seed]) for cell, seed in made}
        made.clear()
        runner.run(own, "default", 0, Results(tmp_path))
        assert not done & {json.dumps([cell, seed]) for cell, seed in made}

    def test_measurements_side_by_side_give_the_same_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = find("variance")
        few = [cell for cell in own.cells("quick") if cell["d"] == 4]
        own = replace(own, cells=lambda level: few, seeds={"quick": 2})
        verdict = runner.run(own, "quick", 0, Results(tmp_path / "in turn"))
        monkeypatch.setattr(runner.torch, "get_num_threads", lambda: 2)
        beside = replace(own, side_by_side=True)
        assert runner.run(beside, "quick", 0, Results(tmp_path / "beside")) == verdict
        assert len(Results(tmp_path / "beside").finished(beside)) == 2 * len(few)

    def test_another_seed_or_version_is_measured_anew(
        self, counting: tuple[Experiment, list[tuple[Cell, int]]], tmp_path: Path
    ) -> None:
        own, made = counting
        runner.run(own, "quick", 0, Results(tmp_path))
        count = len(made)
        runner.run(own, "quick", 1, Results(tmp_path))
        assert len(made) == 2 * count
        runner.run(replace(own, version=own.version + 1), "quick", 0, Results(tmp_path))
        assert len(made) == 3 * count
        assert Results(tmp_path).record(own) is None  # of a version that is no more

    def test_records_keep_what_json_cannot_say(
        self, counting: tuple[Experiment, list[tuple[Cell, int]]], tmp_path: Path
    ) -> None:
        own, _ = counting
        odd = replace(own, measure=lambda cell, seed: {"ratio": math.inf, "more": [math.nan, {"low": -math.inf}]})
        assert runner.run(odd, "quick", 0, Results(tmp_path)).kind == "inconclusive"
        json.loads((tmp_path / "quick" / "variance.json").read_text(), parse_constant=pytest.fail)
        record = Results(tmp_path).record(odd)
        assert record is not None
        values = record["rows"][0].values
        assert values["ratio"] == math.inf
        assert math.isnan(values["more"][0])
        assert values["more"][1] == {"low": -math.inf}

    def test_the_same_seed_measures_the_same(self) -> None:
        own = find("variance")
        cell: Cell = {"entries": "heavy", "d": 4}
        assert own.measure(cell, 3) == own.measure(cell, 3) != own.measure(cell, 4)


class Page(HTMLParser):
    """What a page refers to, its languages, sections and verdicts."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.mains: list[str] = []
        self.badges: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.references += [given[name] for name in ("src", "href", "action") if name in given]
        self.ids += [given["id"]] if "id" in given else []
        self.mains += [given["lang"]] if tag == "main" else []
        self.badges += [given["class"].split()[1]] if given.get("class", "").startswith("badge") else []


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a quick run of the first claim."""
    out = tmp_path_factory.mktemp("lab")
    assert main(["lab", "run", "variance", "--quick", "--out", str(out), "--lang", "en"]) == 0
    return out


class TestReport:
    def test_it_is_one_page_that_fetches_nothing_in_five_languages(self, ran: Path) -> None:
        assert main(["lab", "report", "--out", str(ran), "--lang", "de"]) == 0
        html = (ran / "lab.html").read_text("utf-8")
        read = Page()
        read.feed(html)
        assert tuple(read.mains) == LANGUAGES
        assert '<html lang="de">' in html
        assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in read.references)
        assert {link[1:] for link in read.references if link.startswith("#")} <= set(read.ids)
        assert len(read.ids) == len(set(read.ids)) == len(LANGUAGES)

    def test_it_says_which_level_it_shows_and_what_is_missing(self, ran: Path) -> None:
        html = page.page(page.entries(Results(ran)), "en")
        for language in LANGUAGES:
            assert texts("lab")["level.quick"][language].replace("'", "&#x27;") in html
            assert texts("lab")["level.default"][language].replace("'", "&#x27;") not in html

    def test_verdicts_come_from_the_rows_not_from_what_a_record_says(self, ran: Path, tmp_path: Path) -> None:
        (tmp_path / "quick").mkdir()
        record = json.loads((ran / "quick" / "variance.json").read_text())
        record["verdict"]["kind"] = "holds"
        for row in record["rows"]:
            row["values"]["ratio"] = 3.0
        (tmp_path / "quick" / "variance.json").write_text(json.dumps(record))
        read = Page()
        read.feed(page.page(page.entries(Results(tmp_path)), "en"))
        assert set(read.badges) == {"does_not_hold"}

    def test_markdown_is_written_in_every_language_with_the_table_on_top(self, ran: Path, tmp_path: Path) -> None:
        assert main(["lab", "report", "--out", str(ran), "--docs", str(tmp_path)]) == 0
        for language in LANGUAGES:
            text = (tmp_path / ("lab.md" if language == "en" else f"lab.{language}.md")).read_text("utf-8")
            table = text[: text.index("\n## ")]
            assert texts("variance")["claim"][language] in table
            assert texts("lab")["kind.holds_if"][language] in table
            assert texts("lab")["level.quick"][language] in table
            assert (tmp_path / "lab" / "variance.svg").read_text("utf-8").startswith("<svg")

    def test_the_same_rows_draw_the_same_picture(self, ran: Path) -> None:
        from poise.lab.plots import svg

        record = Results(ran).record(find("variance"))
        assert record is not None
        assert svg(find("variance"), record["rows"], "es") == svg(find("variance"), record["rows"], "es")


class TestCommand:
    def test_a_run_prints_its_verdict_and_leaves_a_record_and_a_plot(
        self, ran: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["lab", "run", "1", "--quick", "--out", str(ran), "--lang", "es"]) == 0
        printed = capsys.readouterr()
        assert "variance       se sostiene si" in printed.out
        assert printed.err == ""  # nobody watches
        assert (ran / "quick" / "variance.svg").exists()
        record = json.loads((ran / "quick" / "variance.json").read_text("utf-8"))
        assert record["claim"] == texts("variance")["claim"]["en"]
        assert record["verdict"]["kind"] == "holds_if"
        assert {check["answer"] for check in record["verdict"]["checks"]} == {"yes", "no"}
        assert len(record["rows"]) == len(find("variance").tasks("quick", 0))

    @pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
    def test_on_a_terminal_progress_goes_to_stderr_and_verdicts_stay_in_a_redirected_stdout(self, ran: Path) -> None:
        terminal, other = os.openpty()
        command = [
            sys.executable,
            "-m",
            "poise",
            "lab",
            "run",
            "variance",
            "--quick",
            "--out",
            str(ran),
            "--lang",
            "en",
        ]
        root = Path(runner.__file__).parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other, cwd=root) as process:
            os.close(other)
            seen = b""
            with suppress(OSError):  # what reading ends with when the other end is closed
                while chunk := os.read(terminal, 4096):
                    seen += chunk
            printed = process.stdout.read().decode() if process.stdout else ""
        os.close(terminal)
        assert process.returncode == 0
        assert "holds if …" in printed
        assert b"seed=" in seen
        assert b"holds if" not in seen

    def test_the_list_shows_claims_and_verdicts(self, ran: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["lab", "list", "--out", str(ran), "--lang", "en"]) == 0
        out = capsys.readouterr().out
        assert all(texts(own.name)["claim"]["en"] in out for own in experiments())
        assert "[holds if … (quick)]" in out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["run"], "run takes either NAMEs or --all"),
            (["run", "variance", "--all"], "run takes either NAMEs or --all"),
            (["run", "nothing"], "NAME must be one of variance"),
            (["run", "variance", "--quick", "--full"], "not allowed with"),
            (["list", "--lang", "it"], "lang must be one of en, es, de, fr, zh; got 'it'"),
            (["report", "--out", "nowhere"], "no finished experiment in nowhere"),
        ],
    )
    def test_mistakes_are_named_with_status_2(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["lab", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
