"""Alarms: what in a model's attention is going wrong, in which layer and head, what it means and what helps.

Works on records (record.py), live in a watch or later on a file, and keeps the last `window` of them. An alarm is given
when its condition has begun to hold, and again only after it has gone for a while: one line, not one a step. The limits
are `Limits`; their defaults come from the published runs that each alarm names, and leave alone what healthy models do:
heads that rest on the first token, near-uniform heads at the start of training, a large logit that is not growing.

>>> with poise.watch(model, alarms=Alarms(Limits(max_logit=500.0))) as w: ...
>>> for alarm in w.alarms: print(alarm)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from poise.monitor.record import Record


@dataclass(frozen=True)
class Limits:
    """When to raise which alarm; None switches one off."""

    max_logit: float | None = 1000.0  # loss degrades near 1e3 (a 10M model with transplanted scales)
    diverged_logit: float | None = 1e4  # every run above it diverged (Wortsman et al. 2023)
    growth_floor: float = 30.0  # growth is looked at from here on: everything grows at the start of training
    growth_horizon: int = 2000  # a predicted crossing further ahead, in steps, is no alarm
    entropy_drop: float | None = 0.1  # collapsed: the entropy fell to this share of what it was ...
    entropy_floor: float = 0.1  # ... and to this many nats
    responsiveness: float | None = 1e-3  # gradient gain 1 - sum p^2; a one-hot softmax passes no gradient
    flatness: float | None = 0.9995  # entropy as a share of a uniform row's
    sink_mass: float | None = 0.95  # all heads of a layer give this much to the first key
    dead_std: float | None = 1e-3  # scores that do not differ choose nothing
    duplicate: float | None = 1e-4  # two heads whose statistics differ by no more than this, relatively
    nonfinite: bool = True
    settled: int = 500  # steps before which flat and dead heads are the usual state
    patience: int = 3  # records in a row that a condition must hold, or be gone; what is clear at once needs one


@dataclass(frozen=True)
class Alarm:
    """One finding."""

    kind: str
    layer: str
    head: int | None  # None: the whole layer
    step: int
    value: float
    limit: float
    meaning: str
    remedy: str
    reference: str
    remedies: tuple[str, ...] = ()  # names for poise.remedy
    crossing: tuple[float, float, float] | None = None  # growth only: expected step, and where it lies with 95 %

    def __str__(self) -> str:
        where = self.layer if self.head is None else f"{self.layer} head {self.head}"
        names = ", ".join(f'"{name}"' for name in self.remedies)
        return (
            f"[{self.kind}] {where}, step {self.step}: {self.value:.4g} (limit {self.limit:.4g}). "
            f"{self.meaning} {self.remedy} " + (f"[poise.remedy: {names}] " if names else "") + f"[{self.reference}]"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a record."""
        return asdict(self)


# kind: what it means, what helps, where it is described, and which of poise.remedy's names that is
_TEXTS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "max_logit": (
        "The largest score is so large that one key takes nearly all weight and its gradient vanishes.",
        "Use QK-norm, QK-Clip or a soft-cap, or lower the learning rate of W_q and W_k.",
        "Wortsman et al. 2023, arXiv:2309.14322",
        ("qk-norm", "qk-clip", "soft-cap", "qk-lr"),
    ),
    "diverged_logit": (
        "No run whose scores grew this large is known to have recovered.",
        "Go back to a checkpoint before the growth, and use QK-norm, QK-Clip or a soft-cap.",
        "Wortsman et al. 2023, arXiv:2309.14322",
        ("qk-norm", "qk-clip", "soft-cap"),
    ),
    "logit_growth": (
        "The largest score grows exponentially towards divergence.",
        "Use QK-Clip (it can be switched on in the middle of a run), QK-norm, or a lower learning rate.",
        "Kimi K2 2025, arXiv:2507.20534",
        ("qk-clip", "qk-norm", "qk-lr"),
    ),
    "entropy_collapse": (
        "Attention that was spread over many keys has collapsed onto few.",
        "Use sigma-Reparam or QK-norm, lengthen the warm-up, or lower the learning rate.",
        "Zhai et al. 2023, arXiv:2303.06296",
        ("sigma-reparam", "qk-norm", "entropy-floor", "qk-lr"),
    ),
    "saturation": (
        "The softmax is one-hot: almost no gradient passes to queries and keys.",
        "Lower the scale (1/sqrt(d), QK-norm, a soft-cap).",
        "Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1",
        ("scale", "qk-norm", "soft-cap"),
    ),
    "flat": (
        "Attention is uniform: the head averages its values whatever it is asked.",
        "Raise the scale or the learning rate of W_q and W_k; check that positions reach the scores.",
        "Noci et al. 2022, arXiv:2206.03126",
        ("scale", "qk-lr"),
    ),
    "sink_takeover": (
        "Every head of the layer rests on the first key: the layer moves no information.",
        "Give the softmax a sink of its own (a learned sink logit, or softmax-off-by-one).",
        "Xiao et al. 2023, arXiv:2309.17453; Gu et al. 2024, arXiv:2410.10781",
        ("sink", "off-by-one"),
    ),
    "dead": (
        "The head's scores are all alike: its queries or keys are zero.",
        "Check weight decay and initialisation of W_q and W_k, or prune the head.",
        "Michel et al. 2019, arXiv:1905.10650",
        (),
    ),
    "duplicate": (
        "Two heads behave alike: one of them is wasted.",
        "Initialise them apart; check that weights were not copied or tied by accident.",
        "Michel et al. 2019, arXiv:1905.10650",
        (),
    ),
    "nonfinite": (
        "Rows of the attention are NaN or infinite.",
        "Find what is not finite in q or k: a too large learning rate, fp16 overflow, or data.",
        "IEEE 754",
        (),
    ),
}

_SHORTEST = 16  # records that a trend is read from
_Key: TypeAlias = tuple[str, str, int | None]


@dataclass
class _State:
    """A condition that holds, or has held lately."""

    held: int = 0  # records in a row
    gone: int = 0
    given: bool = False


class Alarms:
    """Looks at one record after another; `alarms(record)` returns what has begun with it."""

    def __init__(
        self, limits: Limits | None = None, *, window: int = 64, handler: Callable[[Alarm], object] | None = None
    ) -> None:
        if window < _SHORTEST:
            raise ValueError(f"window must be at least {_SHORTEST} records, to fit a trend; got {window}")
        self.limits = limits if limits is not None else Limits()
        self._handler = handler
        self._window = window
        self._history: dict[tuple[str, int], deque[tuple[int, float]]] = {}  # (layer, head): (step, max logit)
        self._usual: dict[tuple[str, int], list[float]] = {}  # the first entropies, to know a collapse by
        self._states: dict[_Key, _State] = {}

    def __call__(self, record: Record) -> list[Alarm]:
        begun, holding = [], set()
        for alarm, patience in self._conditions(record):
            key = (alarm.kind, alarm.layer, alarm.head)
            holding.add(key)
            state = self._states.setdefault(key, _State())
            state.held, state.gone = state.held + 1, 0
            if state.held >= patience and not state.given:
                state.given = True
                begun.append(alarm)
        for key, state in list(self._states.items()):
            if key not in holding and key[1] in record["layers"]:
                state.held, state.gone = 0, state.gone + 1
                if state.gone >= self.limits.patience:
                    del self._states[key]
        if self._handler is not None:
            for alarm in begun:
                self._handler(alarm)
        return begun

    def _conditions(self, record: Record) -> Iterator[tuple[Alarm, int]]:
        """Everything that holds in this record, with how many records in a row it must hold."""
        limits, step = self.limits, record["step"]
        for layer, values in record["layers"].items():
            if values["rows"] == values["empty_rows"]:
                continue
            broken = max(values["nan_rows"], sum(x is None or abs(x) > 1e300 for x in values["max_logit"]["max"]))
            if limits.nonfinite and broken:
                yield self._alarm("nonfinite", layer, None, step, broken, 0.0), 1
            for head in range(values["heads"]):
                for kind, value, limit, patience in self._of_head(layer, head, step, values):
                    yield self._alarm(kind, layer, head, step, value, limit), patience
                if (growing := self._growth(layer, head, step)) is not None:
                    yield growing, limits.patience
            least = min(_known(values["sink_mass"]["mean"]), default=0.0)
            if limits.sink_mass is not None and least > limits.sink_mass and max(values["count"]["max"]) > 1:
                yield self._alarm("sink_takeover", layer, None, step, least, limits.sink_mass), limits.patience
            if limits.duplicate is not None and step >= limits.settled:
                for head, gap in _twins(values, limits.duplicate):
                    yield self._alarm("duplicate", layer, head, step, gap, limits.duplicate), limits.patience

    def _of_head(self, layer: str, head: int, step: int, values: Any) -> Iterator[tuple[str, float, float, int]]:
        limits = self.limits

        def of(statistic: str, how: str = "mean") -> float:
            value = values[statistic][how][head]
            return math.nan if value is None else value

        largest, entropy, gain = of("max_logit", "max"), of("entropy"), of("responsiveness")
        if largest > 0:
            self._history.setdefault((layer, head), deque(maxlen=self._window)).append((step, largest))
        if limits.diverged_logit is not None and largest > limits.diverged_logit:
            yield "diverged_logit", largest, limits.diverged_logit, 1
        elif limits.max_logit is not None and largest > limits.max_logit:
            yield "max_logit", largest, limits.max_logit, 1
        usual = self._usual.setdefault((layer, head), [])
        if len(usual) < 8 and not math.isnan(entropy):
            usual.append(entropy)
        on_the_sink = of("sink_mass") > 0.5  # a head that rests on the first key is idle, not collapsed
        if limits.entropy_drop is not None and usual and not on_the_sink:
            before = sorted(usual)[len(usual) // 2]
            if entropy < limits.entropy_floor and entropy < limits.entropy_drop * before:
                yield (
                    "entropy_collapse",
                    entropy,
                    min(limits.entropy_floor, limits.entropy_drop * before),
                    limits.patience,
                )
        several = of("count", "max") > 1  # keys to choose from
        if limits.responsiveness is not None and gain < limits.responsiveness and several and not on_the_sink:
            yield "saturation", gain, limits.responsiveness, limits.patience
        if step < limits.settled:
            return
        if limits.dead_std is not None and of("std") < limits.dead_std and several:
            yield "dead", of("std"), limits.dead_std, limits.patience
        elif limits.flatness is not None and of("normalized_entropy") > limits.flatness:
            yield "flat", of("normalized_entropy"), limits.flatness, limits.patience

    def _growth(self, layer: str, head: int, step: int) -> Alarm | None:
        """A straight line through log(max logit) that reaches the limit soon, whole window and latest half agreeing."""
        limits, history = self.limits, self._history.get((layer, head), deque())
        limit = limits.diverged_logit
        if limit is None or len(history) < _SHORTEST or not limits.growth_floor <= history[-1][1] < limit:
            return None
        points = [(float(at), math.log(value)) for at, value in history]
        whole, late = _line(points), _line(points[len(points) // 2 :])
        if min(whole.slope - 3 * whole.error, late.slope - 2 * late.error) <= 0 or late.slope < whole.slope / 2:
            return None  # not growing beyond doubt, or less and less
        slope, error = (late.slope, late.error) if late.slope < whole.slope else (whole.slope, whole.error)
        missing = math.log(limit) - whole.at(step)
        ahead = max(missing, 0.0) / slope
        if ahead > limits.growth_horizon:
            return None
        soonest, latest = max(missing, 0.0) / (slope + 2 * error), max(missing, 0.0) / max(slope - 2 * error, 1e-12)
        found = self._alarm("logit_growth", layer, head, step, history[-1][1], limit)
        when = f"It reaches {limit:.4g} at step {step + ahead:.0f} ({step + soonest:.0f} to {step + latest:.0f})."
        return replace(found, meaning=f"{found.meaning} {when}", crossing=(step + ahead, step + soonest, step + latest))

    @staticmethod
    def _alarm(kind: str, layer: str, head: int | None, step: int, value: float, limit: float) -> Alarm:
        return Alarm(kind, layer, head, step, value, limit, *_TEXTS[kind])


@dataclass(frozen=True)
class _Line:
    slope: float
    error: float  # of the slope
    middle: tuple[float, float]

    def at(self, x: float) -> float:
        return self.middle[1] + self.slope * (x - self.middle[0])


def _line(points: list[tuple[float, float]]) -> _Line:
    """Least squares. The noise of neighbouring records is correlated: their number counts for a third."""
    n = len(points)
    mx, my = math.fsum(x for x, _ in points) / n, math.fsum(y for _, y in points) / n
    sxx = math.fsum((x - mx) ** 2 for x, _ in points)
    if sxx == 0:
        return _Line(0.0, math.inf, (mx, my))
    slope = math.fsum((x - mx) * (y - my) for x, y in points) / sxx
    rest = math.fsum((y - my - slope * (x - mx)) ** 2 for x, y in points)
    return _Line(slope, math.sqrt(3 * rest / max(n - 2, 1) / sxx), (mx, my))


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


_FINGERPRINT = (("max_logit", "max"), ("max_logit", "mean"), ("entropy", "mean"), ("std", "mean"), ("lse", "mean"))


def _twins(values: Any, tolerance: float) -> Iterator[tuple[int, float]]:
    """Heads whose every statistic is an earlier head's, with the largest relative difference."""
    prints = [[values[name][how][head] for name, how in _FINGERPRINT] for head in range(values["heads"])]
    for head, mine in enumerate(prints):
        for other in prints[:head]:
            if None in mine or None in other or not mine[3]:
                continue
            gap = max(abs(a - b) / max(abs(a), abs(b), 1e-6) for a, b in zip(mine, other, strict=True))
            if gap <= tolerance:
                yield head, gap
                break
