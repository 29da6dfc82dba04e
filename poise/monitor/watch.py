"""`poise.watch(model)`: statistics of every attention in a model, per layer and head, while it trains or runs.

Decides what is collected and when a step ends. How attention is met is torch_hook.py's business, what a record holds
record.py's, where records go sinks.py's, what is alarming alarms.py's. Nothing is registered on the model.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from poise import torch_hook
from poise.monitor.alarms import Alarm, Alarms
from poise.monitor.ranks import Merger
from poise.monitor.record import Record, make_record
from poise.monitor.sinks import Background
from poise.op import Scored
from poise.stats import ScoreStats
from poise.summary import ScoreSummary

Layers: TypeAlias = str | Iterable[str] | Callable[[str], bool]


class Watch:
    """What `watch` returns; a context manager."""

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        layers: Layers | None = None,
        rows: int | None = None,
        sinks: Iterable[Callable[[Record], object]] = (),
        alarms: Alarms | bool = True,
        first_step: int = 0,
        keep: int = 1000,
        process_group: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
        for name, value, least in (("every", every, 1), ("rows", rows, 1), ("first_step", first_step, 0)):
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be an int of at least {least}; got {value!r}")
        model = _uncompiled(model)
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._model = model  # kept alive: the names are by id
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._wanted = _chooser(layers, self._names.values())
        self._every, self._rows = every, rows
        self._sinks = [sink if isinstance(sink, Background) else Background(sink) for sink in sinks]
        self._alarms = Alarms(handler=_warn) if alarms is True else alarms or None
        self._merger = Merger(model, process_group)
        self._summaries: dict[str, ScoreSummary] = {}
        self._missed: dict[str, str] = {}
        self._open = True
        self._step_number = first_step
        self.records: deque[Record] = deque(maxlen=keep)
        self.alarms: deque[Alarm] = deque(maxlen=keep)
        for implementation in _strange_attention(model):
            self.miss(self._names[id(model)], f'it uses "{implementation}" attention: set it to "poise" or "sdpa"')
        self._optimizer_hook = register_optimizer_step_post_hook(self._after_optimizer_step)
        self._listen()

    # What a user reads.

    @property
    def step_number(self) -> int:
        """The number of the current step, from `first_step`."""
        return self._step_number

    @property
    def summaries(self) -> dict[str, ScoreSummary]:
        """What was collected so far in the current step, by the path of the module that attends; by head."""
        return dict(self._summaries)

    @property
    def record(self) -> Record | None:
        """The latest step's record."""
        return self.records[-1] if self.records else None

    @property
    def dropped(self) -> int:
        """How many records were lost by sinks that were too slow or failed."""
        return sum(sink.dropped + sink.failed for sink in self._sinks)

    @property
    def not_seen(self) -> dict[str, str]:
        """Modules whose attention could not be seen, and why."""
        return dict(self._missed)

    def __repr__(self) -> str:
        state = "open" if self._open else "closed"
        return f"Watch({type(self._model).__name__}, {state}, step {self._step_number}, {len(self.records)} records)"

    # What a user does.

    def step(self) -> Record | None:
        """Ends a step: makes its record (None if there is nothing to record) and begins the next.

        Any torch optimizer that holds parameters of the model does this by itself after its step; without one, call it
        where a step ends. Gradient accumulation and several forward passes thus fall into one step.
        """
        if not self._open:
            raise RuntimeError("this watch is closed; open another with poise.watch(model)")
        record = self._finish()
        self._step_number += 1
        self._listen()
        return record

    def close(self) -> None:
        """Ends the watch and records what the current step holds; again changes nothing."""
        if not self._open:
            return
        self._open = False
        torch_hook.stop_listening(self)
        self._optimizer_hook.remove()
        try:
            self._finish()
        finally:
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._merger.give_up()  # other ranks may be gone, or still at work: wait for nobody
        self.close()

    # What torch_hook asks for.

    def name_of(self, module: nn.Module) -> str | None:
        return self._names.get(id(module))

    def wants(self, name: str) -> bool:
        return self._wanted(name)

    def receive(self, name: str, stats: ScoreStats, scored: Scored) -> None:
        mine = _some_rows(stats, self._rows).reduce("head")
        heads = mine.rows.numel()
        before = self._summaries.get(name)
        if before is not None and before.rows.numel() != heads:  # one module, attending in two ways
            name = f"{name} ({heads} heads)"
            before = self._summaries.get(name)
        self._summaries[name] = mine if before is None else before.merge(mine)

    def miss(self, name: str, why: str) -> None:
        if self._wanted(name):
            self._missed.setdefault(name, why)

    # Steps.

    def _listen(self) -> None:
        if self._step_number % self._every == 0:
            torch_hook.listen(self)
        else:
            torch_hook.stop_listening(self)

    def _finish(self) -> Record | None:
        collected = self._step_number % self._every == 0
        summaries, self._summaries = self._summaries, {}
        if not collected:
            return None
        summaries = self._merger.merged(summaries)
        if not summaries:
            return None
        record = make_record(self._step_number, summaries, self._missed)
        begun = self._alarms(record) if self._alarms is not None else []
        self.alarms.extend(begun)
        record["alarms"] = [alarm.to_dict() for alarm in begun]
        self.records.append(record)
        if self._merger.leads:
            for sink in self._sinks:
                sink(record)
        return record

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self.step()


def watch(
    model: nn.Module,
    *,
    every: int = 1,
    layers: Layers | None = None,
    rows: int | None = None,
    sinks: Iterable[Callable[[Record], object]] = (),
    alarms: Alarms | bool = True,
    first_step: int = 0,
    keep: int = 1000,
    process_group: Any = None,
) -> Watch:
    """Watches every attention in a torch or Hugging Face model: what its scores are like, per layer and head.

    Seen are `poise.attention`, Hugging Face models on "poise" or "sdpa", `F.scaled_dot_product_attention` and
    `nn.MultiheadAttention`; attention computed by hand (Hugging Face's "eager" too) is listed in `not_seen`. Outputs
    change by rounding at most, the model not at all.

    every: collect each so manieth step; the steps between run as if unwatched.
    layers: which modules: a pattern or patterns for their paths ("*.layers.1?.*"), or a function of the path.
    rows: at most so many query rows of each call, evenly spaced, go into the summaries; None for all.
    sinks: called with each step's record, in threads of their own; see poise.monitor.sinks.
    alarms: what to raise alarms about, or False for none; they are logged, and kept in `alarms`.
    first_step: the number of the first step, to go on from a checkpoint.
    keep: how many records stay in memory, in `records`.
    process_group: whose ranks to merge over, where torch.distributed runs; None for all.

    A step ends after the step of any optimizer that holds parameters of the model, or by `w.step()`; the last one by
    `w.close()`, or at the end of `with`. A checkpoint's repeated forward counts once.

    Under torch.distributed every rank opens the watch, after wrapping the model, and ends the same steps; one
    collective a collected step merges them, and the first rank writes to the sinks. What torch.compile has compiled
    runs in pieces, slower and counted rightly, during collected steps, and compiled between them; with fullgraph=True,
    which forbids pieces, a collected step raises.

    >>> with poise.watch(model) as w:
    ...     model(inputs)
    >>> w.record["layers"]["model.layers.0.self_attn"]["max_logit"]["max"]
    """
    return Watch(
        model,
        every=every,
        layers=layers,
        rows=rows,
        sinks=sinks,
        alarms=alarms,
        first_step=first_step,
        keep=keep,
        process_group=process_group,
    )


_log = logging.getLogger("poise")


def _warn(alarm: Alarm) -> None:
    _log.warning("%s", alarm)


def _some_rows(stats: ScoreStats, most: int | None) -> ScoreStats:
    length = stats.packed.shape[-1]
    packed = stats.packed.detach()
    if most is not None and length > most:
        packed = packed[..., torch.linspace(0, length - 1, most, device=packed.device).round().long()]
    sink = None if stats.sink is None else stats.sink.detach()
    return ScoreStats(packed, sink, stats.sink_keys, stats.layout)


def _chooser(layers: Layers | None, names: Iterable[str]) -> Callable[[str], bool]:
    if layers is None:
        return lambda name: True
    if callable(layers):
        return layers
    patterns = (layers,) if isinstance(layers, str) else tuple(layers)
    known = list(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"layers must be patterns of module paths, or a function; got {pattern!r}")
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(
                f"layers: {pattern!r} is the path of no module. Paths look like {known[len(known) // 2]!r}"
            )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _strange_attention(model: nn.Module) -> set[str]:
    """Hugging Face implementations in use that are neither seen nor recognised by what they call."""
    used = {getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules()}
    return {name for name in used if isinstance(name, str)} - {"poise", "sdpa", "eager"}


def _uncompiled(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile(model) returns: that one has the paths its author knows."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        inner = model._orig_mod
        assert isinstance(inner, nn.Module)
        return inner
    return model
