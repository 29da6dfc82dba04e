"""`make train`: its losses are those of torch's attention, an interruption leaves no trace, and what it prints."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import poise

SCRIPT = Path(__file__).parents[1] / "examples" / "train_char_lm.py"
TINY = ("--batch", "2", "--length", "48", "--layers", "2", "--width", "32", "--heads", "2", "--threads", "1")
STEPS = 200

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Losses = Callable[..., Tensor]

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_char_lm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


class Finished(NamedTuple):
    folder: Path
    out: str
    err: str


def command(folder: Path, *arguments: str) -> list[str]:
    dropout = ("--dropout", "0.1", "--steps", str(STEPS), "--out", str(folder))
    return [sys.executable, str(SCRIPT), *TINY, *dropout, *arguments]


def checkpoint(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def losses(example: ModuleType) -> Losses:
    text = torch.frombuffer(bytearray((SCRIPT.parents[1] / "LICENSE").read_bytes()), dtype=torch.uint8)

    def run(attention: Attention, dtype: str, double: bool = False) -> Tensor:
        options, _ = example.arguments([*TINY, "--steps", "60", "--dtype", dtype])
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(example.CONTESTANTS, "tried", attention)
            trainee = example.Run.start("tried", options)
            if double:
                trainee.model.double()
            trainee.advance(options.steps, text, options, example.Stop())
        return torch.tensor(trainee.losses, dtype=torch.float64)

    return run


@pytest.fixture(scope="module", params=["fp32", "bf16-autocast"])
def budget(request: pytest.FixtureRequest, example: ModuleType, losses: Losses) -> tuple[str, Tensor, float]:
    """(dtype, losses in float64, how far from them a loss may be): twice what torch's own backends are."""

    def by(backend: SDPBackend) -> Attention:
        def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
            with sdpa_kernel(backend):
                return example.by_torch(q, k, v, dropout)

        return attention

    exact = losses(by(SDPBackend.MATH), "fp32", double=True)
    backends = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)
    apart = max(float((losses(by(backend), request.param) - exact).abs().max()) for backend in backends)
    return request.param, exact, 2 * apart + 4 * torch.finfo(torch.float32).eps * float(exact.max())


class TestCurve:
    """60 steps, long enough for rounding to spread through the weights and back into the losses."""

    def test_poise_is_as_close_to_float64_as_torch(
        self, example: ModuleType, losses: Losses, budget: tuple[str, Tensor, float]
    ) -> None:
        dtype, exact, allowed = budget
        assert exact[-1] < exact[0] - 1, "it learned nothing: no comparison"
        assert (losses(example.by_poise, dtype) - exact).abs().max() <= allowed

    def test_the_budget_notices_a_wrong_attention(self, losses: Losses, budget: tuple[str, Tensor, float]) -> None:
        dtype, exact, allowed = budget
        factor = 1.001 if dtype == "fp32" else 4.0

        def wrong(q: Tensor, k: Tensor, v: Tensor, _: float) -> Tensor:
            return poise.attention(q, k, v, mask=poise.causal(), scale=factor * q.shape[-1] ** -0.5, layout="bshd")

        assert (losses(wrong, dtype) - exact).abs().max() > allowed


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run to the end, with dropout, so that the random numbers matter too."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = subprocess.run(command(folder, "--sample", "100"), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return Finished(folder, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run, stopped by Ctrl-C on its way."""
    folder = tmp_path_factory.mktemp("interrupted")
    with subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(f"step {STEPS // 10} of {STEPS}")
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert f"--resume --out {folder}" in rest
    return folder


class TestResume:
    def test_after_an_interrupt_gives_bitwise_the_same_losses_and_weights(
        self, uninterrupted: Finished, interrupted: Path, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(interrupted, tmp_path / "copy"))
        before = checkpoint(folder)
        assert all(0 < len(run["losses"]) < STEPS for run in before["runs"].values())
        done = subprocess.run([sys.executable, SCRIPT, "--resume", "--out", folder], capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        whole, resumed = checkpoint(uninterrupted.folder), checkpoint(folder)
        for name in ("poise", "torch"):
            ours, theirs = resumed["runs"][name], whole["runs"][name]
            assert len(ours["losses"]) == STEPS
            assert ours["losses"] == theirs["losses"]
            assert all(torch.equal(ours["model"][key], theirs["model"][key]) for key in theirs["model"])

    def test_with_another_option_names_both_values(
        self, example: ModuleType, interrupted: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            example.main(["--resume", "--out", str(interrupted), "--lr", "0.5"])
        message = capsys.readouterr().err
        assert "--lr 0.5" in message
        assert "--lr 0.002" in message

    def test_without_a_checkpoint_names_the_path(
        self, example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            example.main(["--resume", "--out", str(tmp_path)])
        assert str(tmp_path / "checkpoint.pt") in capsys.readouterr().err

    def test_a_failed_save_leaves_the_checkpoint_before_it(
        self, example: ModuleType, interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(shutil.copytree(interrupted, tmp_path / "copy"))
        options, _ = example.arguments(["--resume", "--out", str(folder)])

        def full(_: object, file: BinaryIO) -> None:
            file.write(b"half of it")
            raise OSError("no space left on device")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="no space"):
            example.save([], options)
        assert checkpoint(folder)["runs"].keys() == {"poise", "torch"}


class TestPrinted:
    def test_a_pipe_gets_no_escape_codes(self, uninterrupted: Finished) -> None:
        assert "\x1b" not in uninterrupted.out + uninterrupted.err

    def test_stderr_has_ten_lines_of_progress(self, uninterrupted: Finished) -> None:
        steps = re.findall(rf"^step (\d+) of {STEPS} .*poise \d\.\d+  torch \d\.\d+$", uninterrupted.err, re.M)
        assert list(map(int, steps)) == list(range(STEPS // 10, STEPS + 1, STEPS // 10))

    def test_times_and_their_ratio_are_those_of_the_checkpoint(self, uninterrupted: Finished) -> None:
        ours, theirs = (checkpoint(uninterrupted.folder)["runs"][name]["seconds"] for name in ("poise", "torch"))
        assert f"poise trains {theirs / ours:.2f} times as fast" in uninterrupted.out
        assert re.search(rf"^torch +{theirs:.1f} s", uninterrupted.out, re.M)

    def test_the_difference_is_that_of_the_losses(self, uninterrupted: Finished) -> None:
        ours, theirs = (checkpoint(uninterrupted.folder)["runs"][name]["losses"] for name in ("poise", "torch"))
        apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        assert f"largest difference between the loss curves: {apart:.1e}" in uninterrupted.out

    def test_with_dropout_it_says_that_curves_differ(self, uninterrupted: Finished) -> None:
        assert "with dropout the two draw different masks" in uninterrupted.out

    def test_the_state_of_the_scores_has_a_line_per_layer(self, uninterrupted: Finished) -> None:
        table = uninterrupted.out.split("state of the scores")[1]
        assert re.findall(r"^ +(\d)(?: +\d+\.\d+){5}$", table, re.M) == ["0", "1"]

    def test_statistics_are_those_of_the_trained_scores(
        self, example: ModuleType, uninterrupted: Finished, capsys: pytest.CaptureFixture[str]
    ) -> None:
        options, state = example.arguments(["--resume", "--out", str(uninterrupted.folder)])
        run = example.Run.start("poise", options)
        run.load(state["runs"]["poise"])
        _, held_out = example.corpus()
        seeded = torch.Generator().manual_seed(options.seed)
        pair = example.windows(held_out, options.batch, options.length, seeded)
        largest: list[float] = []

        def dense(q: Tensor, k: Tensor, v: Tensor, _: float) -> Tensor:
            scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~visible, -torch.inf)
            largest.append(float(scores.max()))
            return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

        run.model.eval()
        with torch.no_grad():
            example.loss_of(run.model, dense, pair, "fp32")
        shown = re.findall(r"^ +\d +(\d+\.\d+) ", uninterrupted.out.split("state of the scores")[1], re.M)
        assert list(map(float, shown)) == pytest.approx(largest, abs=0.0051)

    def test_the_sample_comes_last_and_is_printable(self, uninterrupted: Finished) -> None:
        sample = uninterrupted.out.split("held-out batch")[1].split("\n\n", 1)[1].removesuffix("\n")
        assert len(sample) > 50
        assert all(char.isprintable() or char == "\n" for char in sample)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--width", "30", "--heads", "4"), "--width must be a multiple of --heads; got 30 and 4: --width 32 would do"),
        (("--steps", "0"), "--steps must be at least 1; got 0"),
        (("--dropout", "1"), "--dropout is a probability below 1; got 1.0"),
        (("--lr", "nan"), "--lr must be a positive number; got nan"),
        (("--sample", "-1"), "--sample must be at least 0; got -1"),
        (("--length", "99999999"), "--length must be at most 65536; got 99999999"),
        (("--dtype", "fp16"), "invalid choice: 'fp16'"),
    ],
)
def test_bad_arguments_get_errors_that_name_them(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SystemExit) as left:
        example.main([*arguments, "--out", str(tmp_path)])
    assert left.value.code == 2
    assert told in capsys.readouterr().err


def test_on_a_terminal_there_is_a_bar(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with example.progress(10) as show:
        show(4, [])
    assert "\x1b[" in terminal.getvalue()
    assert "4/10" in terminal.getvalue()
