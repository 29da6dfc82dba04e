"""Sinks: files that survive being killed and resumed, trackers fed the right numbers, and training that never waits."""

from __future__ import annotations

import csv
import json
import sys
import threading
import time
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import poise
from poise.monitor.record import make_record, scalars
from poise.monitor.sinks import Background, Csv, JsonLines, Log, Mlflow, Prometheus, TensorBoard, Wandb


def record(step: int, layers: int = 2) -> dict[str, Any]:
    torch.manual_seed(step)
    q = torch.randn(2, 3, 5, 8)
    summary = poise.observe(q, q, q)[1].reduce("head")
    return make_record(step, {f"layers.{i}": summary for i in range(layers)}, {})


class TestJsonLines:
    def test_records_come_back_as_they_went(self, tmp_path: Path) -> None:
        sink, made = JsonLines(tmp_path / "run" / "a.jsonl"), [record(0), record(5)]
        for each in made:
            sink(each)
        sink.close()
        assert list(JsonLines.read(tmp_path / "run" / "a.jsonl")) == made

    def test_every_line_is_there_before_the_file_is_closed(self, tmp_path: Path) -> None:
        sink = JsonLines(tmp_path / "a.jsonl")
        sink(record(0))
        assert len(list(JsonLines.read(tmp_path / "a.jsonl"))) == 1
        sink.close()

    def test_resuming_appends_and_writes_no_step_twice(self, tmp_path: Path) -> None:
        for steps in ((0, 1, 2), (1, 2, 3, 4)):
            sink = JsonLines(tmp_path / "a.jsonl")
            for step in steps:
                sink(record(step))
            sink.close()
        assert [each["step"] for each in JsonLines.read(tmp_path / "a.jsonl")] == [0, 1, 2, 3, 4]

    def test_half_a_line_of_a_killed_run_is_passed_over_and_mended(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        whole = json.dumps(record(0)) + "\n"
        path.write_text(whole + whole[:40])
        assert [each["step"] for each in JsonLines.read(path)] == [0]
        sink = JsonLines(path)
        sink(record(1))
        sink.close()
        assert [each["step"] for each in JsonLines.read(path)] == [0, 1]

    def test_nothing_but_a_broken_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"sche')
        sink = JsonLines(path)
        sink(record(3))
        sink.close()
        assert [each["step"] for each in JsonLines.read(path)] == [3]

    def test_another_schema_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"schema": "poise.watch/99", "step": 0}\n')
        with pytest.raises(ValueError, match=r"schema is 'poise\.watch/99'; this release reads"):
            list(JsonLines.read(tmp_path / "a.jsonl"))

    def test_infinities_and_nan_are_valid_json(self, tmp_path: Path) -> None:
        q = torch.full((1, 1, 2, 4), 1e30)
        stats = poise.observe(q, q, torch.ones(1, 1, 2, 4))[1]
        sink = JsonLines(tmp_path / "a.jsonl")
        sink(make_record(0, {"a": stats.reduce("head")}, {}))
        sink.close()
        (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class TestCsv:
    def test_one_row_per_step_layer_and_head(self, tmp_path: Path) -> None:
        for steps in ((0, 1), (1, 2)):  # the second run resumes
            sink = Csv(tmp_path / "a.csv")
            for step in steps:
                sink(record(step))
            sink.close()
        rows = list(csv.DictReader((tmp_path / "a.csv").open()))
        assert [(row["step"], row["layer"], row["head"]) for row in rows] == [
            (str(step), f"layers.{i}", str(head)) for step in range(3) for i in range(2) for head in range(3)
        ]
        assert float(rows[1]["max_logit.max"]) == record(0)["layers"]["layers.0"]["max_logit"]["max"][1]

    def test_a_file_with_other_columns_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("a,b\n")
        with pytest.raises(ValueError, match="choose another file"):
            Csv(tmp_path / "a.csv")(record(0))


@pytest.mark.parametrize("make", [JsonLines, Csv])
def test_a_sink_that_gets_no_record_touches_no_file(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a").close()
    assert not (tmp_path / "a").exists()


class TestTrackers:
    """TensorBoard and Prometheus where they are installed; others against a stand-in that notes what it is told."""

    def test_log_gets_numbers_by_name_and_the_step(self) -> None:
        calls: list[Any] = []
        Log(lambda numbers, step: calls.append((numbers, step)))(record(7))
        assert calls == [(dict(scalars(record(7))), 7)]

    def test_wandb(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        wandb = ModuleType("wandb")
        wandb.run = SimpleNamespace(log=calls.append)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        Wandb()(record(7))
        assert calls == [{"attention/step": 7, **dict(scalars(record(7)))}]
        wandb.run = None  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="no W&B run is active"):
            Wandb()

    def test_mlflow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Any] = []
        mlflow = ModuleType("mlflow")
        mlflow.active_run = lambda: SimpleNamespace(info=SimpleNamespace(run_id="r"))  # type: ignore[attr-defined]
        mlflow.log_metrics = lambda *a, **k: calls.append((a, k))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        Mlflow()(record(7))
        assert calls == [((dict(scalars(record(7))),), {"step": 7, "run_id": "r"})]

    def test_prometheus(self) -> None:
        client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
        registry = client.CollectorRegistry()
        sink = Prometheus(registry=registry)
        sink(record(7))
        labels = {"layer": "layers.1", "statistic": "entropy.mean"}
        want = dict(scalars(record(7)))["attention/layers.1/entropy.mean"]
        assert registry.get_sample_value("poise_attention", labels) == want
        assert registry.get_sample_value("poise_step") == 7
        sink.close()
        Prometheus(registry=registry).close()  # the names are free again

    def test_tensorboard(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        sink = TensorBoard(tmp_path)
        sink(record(7))
        sink.close()
        events = EventAccumulator(str(tmp_path)).Reload()
        (scalar,) = events.Scalars("attention/layers.0/entropy.mean")
        assert scalar.step == 7
        assert scalar.value == pytest.approx(dict(scalars(record(7)))["attention/layers.0/entropy.mean"], rel=1e-6)

    @pytest.mark.parametrize(("module", "make"), [("wandb", Wandb), ("mlflow", Mlflow)])
    def test_a_missing_package_is_named(self, module: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ImportError, match=f"pip install {module}"):
            make()


class TestBackground:
    def test_records_arrive_in_order_and_the_sink_is_closed_last(self) -> None:
        got: list[Any] = []

        class Sink:
            def __call__(self, each: Any) -> None:
                got.append(each["step"])

            def close(self) -> None:
                got.append("closed")

        sink = Background(Sink())
        for step in range(5):
            sink({"step": step})
        sink.close()
        assert got == [0, 1, 2, 3, 4, "closed"]

    def test_a_slow_sink_stalls_nobody_and_its_losses_are_counted(self) -> None:
        gate = threading.Event()
        got: list[Any] = []

        def slow(each: Any) -> None:
            gate.wait(30)
            got.append(each)

        sink = Background(slow, size=3)
        began = time.monotonic()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(20):
                sink({"step": step})
        assert time.monotonic() - began < 5
        assert [str(each.message)[:26] for each in warned] == ["sink slow is too slow: rec"]
        gate.set()
        sink.close()
        assert len(got) + sink.dropped == 20
        assert sink.dropped >= 16

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_a_sink_that_never_returns_is_left_behind(self) -> None:
        sink = Background(lambda _: threading.Event().wait(60), patience=0.1)
        sink({"step": 0})
        sink({"step": 1})
        began = time.monotonic()
        sink.close()
        assert time.monotonic() - began < 10
        assert sink.dropped >= 1

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")
    def test_a_failing_sink_is_counted_and_the_others_go_on(self) -> None:
        def failing(_: Any) -> None:
            raise OSError("disk full")

        got: list[Any] = []
        net = nn.MultiheadAttention(8, 2)
        x = torch.randn(3, 1, 8)
        with poise.watch(net, sinks=[failing, got.append]) as w:
            for _ in range(3):
                net(x, x, x)
                w.step()
        assert len(got) == 3
        assert w.dropped == 3


class TestCallbacks:
    def test_hugging_faces_trainer(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate", reason="accelerate is not installed: Trainer needs it")
        from hf_families import FAMILIES, build

        from poise import hf
        from poise.monitor.callbacks import trainer_callback

        hf.register()
        (family,) = (family for family in FAMILIES if family.name == "llama")
        model = build(family, "poise")
        data = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 8
        callback = trainer_callback(every=2, sinks=[JsonLines(tmp_path / "a.jsonl")])
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
        records = list(JsonLines.read(tmp_path / "a.jsonl"))
        assert [each["step"] for each in records] == [0, 2]
        assert {layer["rows"] for each in records for layer in each["layers"].values()} == {2 * 4}

    def test_lightnings_callback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Lightning is not installed here: what it calls, and in which order, is written out.
        package = ModuleType("lightning.pytorch")
        package.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
        monkeypatch.setitem(sys.modules, "lightning.pytorch", package)
        from poise.monitor.callbacks import lightning_callback

        net = nn.MultiheadAttention(8, 2)
        callback, trainer = lightning_callback(), SimpleNamespace(global_step=10)
        callback.on_train_start(trainer, net)
        net(torch.randn(3, 1, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8))
        callback.on_exception(trainer, net, RuntimeError())
        callback.on_train_end(trainer, net)
        assert [each["step"] for each in callback.watch.records] == [10]

    def test_without_lightning_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("lightning.pytorch", "pytorch_lightning"):
            monkeypatch.setitem(sys.modules, module, None)
        from poise.monitor.callbacks import lightning_callback

        with pytest.raises(ImportError, match="pip install lightning"):
            lightning_callback()
