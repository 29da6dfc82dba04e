"""A watch opened and closed by a trainer: callbacks for Hugging Face's Trainer and for Lightning.

Both watch from the first training step to the end of training, also when it ends by an exception (Lightning tells; the
Trainer does not: there the watch is closed when training starts again or the callback is deleted). Steps end with the
optimizer's, so accumulation is right by itself. What a watch does is watch.py's.

>>> Trainer(model, ..., callbacks=[poise.monitor.callbacks.trainer_callback(every=10, sinks=[JsonLines(path)])])
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from poise.monitor.watch import Watch, watch


class _Session:
    """The one watch of a callback."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.watch: Watch | None = None

    def open(self, model: Any, step: int) -> None:
        self.close()
        self.watch = watch(model, first_step=step, **self._options)

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()


def trainer_callback(**options: Any) -> Any:
    """A `transformers.TrainerCallback`; options as for `poise.watch`. The watch is its attribute `watch`."""
    base = _base(("transformers",), "TrainerCallback")

    class PoiseCallback(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            self._session = _Session(options)

        @property
        def watch(self) -> Watch | None:
            return self._session.watch

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self._session.open(model, state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._session.close()

        def __del__(self) -> None:
            self._session.close()

    return PoiseCallback()


def lightning_callback(**options: Any) -> Any:
    """A Lightning `Callback`; options as for `poise.watch`. The watch is its attribute `watch`."""
    base = _base(("lightning.pytorch", "pytorch_lightning"), "Callback")

    class PoiseCallback(base):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._session = _Session(options)

        @property
        def watch(self) -> Watch | None:
            return self._session.watch

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._session.open(pl_module, trainer.global_step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._session.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._session.close()

    return PoiseCallback()


def _base(modules: tuple[str, ...], name: str) -> Any:
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except ImportError:
            continue
    raise ImportError(f"this callback needs {modules[0]}: pip install {modules[0].split('.')[0]}")
