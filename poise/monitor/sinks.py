"""Where records go: files, trackers, or any function; none of them can stall or break the training they come from.

A sink is called with each record (record.py) and may have `close()`. A watch runs every sink in a thread of its own
behind a bounded queue (`Background`): what a slow sink cannot take is dropped and counted, what a failing one throws is
counted and warned about once. Files are complete up to the last line at any moment; opened again they go on where they
end, and steps that they hold already are not written twice. Trackers are imported when their sink is made.

>>> poise.watch(model, sinks=[JsonLines("run.jsonl"), Log(lambda numbers, step: print(step, numbers))])
"""

from __future__ import annotations

import atexit
import csv
import io
import json
import queue
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from poise.monitor.record import FIELDS, SCHEMA, Record, scalars


class Background:
    """A sink run by a thread, behind a queue of at most `size` records."""

    def __init__(self, sink: Callable[[Record], object], size: int = 256, patience: float = 10.0) -> None:
        self._sink, self._patience = sink, patience
        self._queue: queue.Queue[Record | None] = queue.Queue(size)
        self._warned = False
        self.dropped = 0  # records that the full queue did not take
        self.failed = 0  # records that the sink threw at
        self._thread = threading.Thread(target=self._work, name=f"poise sink {self._name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a program may end without closing

    @property
    def _name(self) -> str:
        return getattr(self._sink, "__name__", type(self._sink).__name__)

    def __call__(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            self._warn("is too slow: records are being dropped")

    def close(self) -> None:
        """Writes what is queued, for at most `patience` seconds, and closes the sink."""
        atexit.unregister(self.close)
        end = time.monotonic() + self._patience
        with suppress(queue.Full):
            self._queue.put(None, timeout=self._patience)
        self._thread.join(max(end - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self.dropped += self._queue.qsize()
            self._warn(f"did not finish in {self._patience} s: its last records are lost")

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            self._run(self._sink, record)
        end = getattr(self._sink, "close", None)
        if end is not None:
            self._run(end)

    def _run(self, step: Callable[..., object], *args: Any) -> None:
        try:
            step(*args)
        except Exception as error:  # whatever a tracker throws, training goes on
            self.failed += 1
            self._warn(f"failed: {type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"sink {self._name} {what}. This is said once", RuntimeWarning, stacklevel=3)


class _File(ABC):
    """A text file of complete lines, opened by its first record; steps up to the last that it holds are skipped."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: IO[bytes] | None = None
        self._last_step: int | None = None

    def __call__(self, record: Record) -> None:
        if self._file is None:
            self._file = self._opened()
        if self._last_step is not None and record["step"] <= self._last_step:
            return
        self._last_step = record["step"]
        self._file.write(self._lines(record).encode())  # a whole step at once
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @abstractmethod
    def _begin(self, text: str) -> tuple[str, int | None]:
        """What is to be written before the first record into a file that holds `text`, and its last step."""

    @abstractmethod
    def _lines(self, record: Record) -> str:
        """The record as complete lines."""

    def _opened(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        held = self._path.read_bytes() if self._path.exists() else b""
        whole = held[: held.rfind(b"\n") + 1]  # a killed run may have left half a line
        header, self._last_step = self._begin(whole.decode())
        file = self._path.open("r+b" if self._path.exists() else "w+b")
        file.truncate(len(whole))
        file.seek(0, io.SEEK_END)
        file.write(header.encode())
        return file


class JsonLines(_File):
    """One record a line; `read` gives them back."""

    def _begin(self, text: str) -> tuple[str, int | None]:
        lines = text.splitlines()
        return "", json.loads(lines[-1])["step"] if lines else None

    def _lines(self, record: Record) -> str:
        return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"

    @staticmethod
    def read(path: str | Path) -> Iterator[Record]:
        """The records of a file, without a last line that is not complete."""
        with Path(path).open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    record: Record = json.loads(line)
                    if record["schema"] != SCHEMA:
                        raise ValueError(f"{path}: schema is {record['schema']!r}; this release reads {SCHEMA!r}")
                    yield record


class Csv(_File):
    """One row per step, layer and head."""

    COLUMNS = ("step", "layer", "head", *(f"{name}.{how}" for name, hows in FIELDS.items() for how in hows))

    def _begin(self, text: str) -> tuple[str, int | None]:
        rows = list(csv.reader(io.StringIO(text)))
        if not rows:
            return ",".join(self.COLUMNS) + "\n", None
        if tuple(rows[0]) != self.COLUMNS:
            raise ValueError(f"{self._path}: its columns are {rows[0]}; choose another file for {list(self.COLUMNS)}")
        return "", int(rows[-1][0]) if len(rows) > 1 else None

    def _lines(self, record: Record) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for layer, values in record["layers"].items():
            for head in range(values["heads"]):
                numbers = (values[name][how][head] for name, hows in FIELDS.items() for how in hows)
                writer.writerow((record["step"], layer, head, *numbers))
        return text.getvalue()


class Log:
    """Any function of (numbers by name, step): `Log(fabric.log_dict)`, `Log(accelerator.log)`, `Log(my_print)`."""

    def __init__(self, log: Callable[[dict[str, float], int], object], prefix: str = "attention") -> None:
        self._log, self._prefix = log, prefix

    def __call__(self, record: Record) -> None:
        self._log(dict(scalars(record, self._prefix)), record["step"])


class TensorBoard:
    """Scalars for TensorBoard; needs the package tensorboard."""

    def __init__(self, folder: str | Path, prefix: str = "attention") -> None:
        self._writer = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))
        self._prefix = prefix

    def __call__(self, record: Record) -> None:
        for name, value in scalars(record, self._prefix):
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Numbers for the Weights & Biases run that is active, or one that is given; the run stays open."""

    def __init__(self, run: Any = None, prefix: str = "attention") -> None:
        self._run = run if run is not None else _needed("wandb", "wandb").run
        if self._run is None:
            raise ValueError("run: no W&B run is active. Call wandb.init() first, or pass its result")
        self._prefix = prefix

    def __call__(self, record: Record) -> None:
        # The run's own step may be ahead by now, and W&B refuses to go back: the step is a number like the others.
        self._run.log({f"{self._prefix}/step": record["step"], **dict(scalars(record, self._prefix))})


class Mlflow:
    """Metrics for MLflow's active run."""

    def __init__(self, prefix: str = "attention") -> None:
        self._mlflow = _needed("mlflow", "mlflow")
        self._run = self._mlflow.active_run()
        if self._run is None:
            raise ValueError("no MLflow run is active: call mlflow.start_run() first")
        self._prefix = prefix

    def __call__(self, record: Record) -> None:
        # Active runs are a thread's own: name the one that was active where the sink was made.
        metrics = dict(scalars(record, self._prefix))
        self._mlflow.log_metrics(metrics, step=record["step"], run_id=self._run.info.run_id)


class Prometheus:
    """Gauges `poise_attention{layer, statistic}` and `poise_step`, to be scraped; needs prometheus_client."""

    def __init__(self, port: int | None = None, registry: Any = None) -> None:
        client = _needed("prometheus_client", "prometheus_client")
        self._registry = registry if registry is not None else client.REGISTRY
        self._gauge = client.Gauge(
            "poise_attention", "attention scores, by poise.watch", ("layer", "statistic"), registry=self._registry
        )
        self._step = client.Gauge("poise_step", "the step of poise_attention", registry=self._registry)
        if port is not None:
            client.start_http_server(port, registry=self._registry)

    def __call__(self, record: Record) -> None:
        for name, value in scalars(record, ""):
            _, layer, statistic = name.split("/", 2)
            self._gauge.labels(layer, statistic).set(value)
        self._step.set(record["step"])

    def close(self) -> None:
        for gauge in (self._gauge, self._step):
            self._registry.unregister(gauge)


def _needed(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this sink needs {package}: pip install {package}") from error
