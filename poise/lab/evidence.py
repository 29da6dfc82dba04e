"""From measurements to a verdict: intervals over seeds, checks against limits fixed beforehand, and their sum.

Nothing here knows what was measured. An interval that reaches over a limit decides nothing, and one undecided check
leaves the whole verdict inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

Kind = Literal["holds", "holds_if", "does_not_hold", "inconclusive"]
KINDS: tuple[Kind, ...] = ("holds", "holds_if", "does_not_hold", "inconclusive")
Answer = Literal["yes", "no", "open"]


@dataclass(frozen=True)
class Interval:
    """Where the expectation lies, as far as the seeds tell."""

    low: float
    mean: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def __truediv__(self, positive: float) -> Interval:
        return Interval(self.low / positive, self.mean / positive, self.high / positive)


def interval(values: Iterable[float], confidence: float = 0.95, comparisons: int = 1) -> Interval:
    """Student's interval for the mean of one number per seed.

    comparisons: how many intervals one verdict rests on; each is widened so that together they have the confidence
    (Bonferroni). A single value, or one that is not finite, leaves everything possible.
    """
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError("interval: values must hold at least one number; got none")
    count, mean = len(numbers), math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else math.nan
    if count == 1 or math.isnan(mean):
        return Interval(-math.inf, mean, math.inf)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (count - 1))
    half = student(1 - (1 - confidence) / (2 * comparisons), count - 1) * deviation / math.sqrt(count)
    return Interval(mean - half, mean, mean + half)


def share(successes: int, trials: int, confidence: float = 0.95, comparisons: int = 1) -> Interval:
    """Wilson's interval for the probability behind `successes` out of `trials`: for what happens or does not."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"share: successes must be 0 to trials, and trials positive; got {successes} of {trials}")
    z = student(1 - (1 - confidence) / (2 * comparisons), 10**6)
    p, weight = successes / trials, z * z / trials
    middle = (p + weight / 2) / (1 + weight)
    half = z * math.sqrt(p * (1 - p) / trials + weight / (4 * trials)) / (1 + weight)
    return Interval(max(0.0, middle - half), p, min(1.0, middle + half))


def exact(value: float) -> Interval:
    """What has no randomness: a format's limit, a deterministic yes or no."""
    return Interval(value, value, value)


@dataclass(frozen=True)
class Check:
    """One question with limits fixed beforehand: does the measured quantity lie between them?"""

    label: str  # key of a text that names the quantity
    measured: Interval
    low: float = -math.inf
    high: float = math.inf
    values: Mapping[str, str] = field(default_factory=dict)  # placeholders of the label

    @property
    def answer(self) -> Answer:
        if self.low <= self.measured.low and self.measured.high <= self.high:
            return "yes"
        return "no" if self.measured.low > self.high or self.measured.high < self.low else "open"


# Placeholders of a text; a tuple of keys becomes a list of their texts.
Said = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Verdict:
    """What follows from the checks, and the text that says so with the measured numbers."""

    kind: Kind
    checks: tuple[Check, ...]
    values: Mapping[
        str, str | tuple[str, ...]
    ]  # placeholders of the text; a tuple of keys becomes a list of their texts

    @property
    def finding(self) -> str:
        """Key of that text."""
        return f"finding.{self.kind}"


def weigh(core: Sequence[Check], variations: Sequence[Check] = ()) -> Kind:
    """The rule of rules. core: what the claim says. variations: conditions that it does not name, in which it may fail.

    Any check open, core or variation: inconclusive. All of the core no: does not hold, whatever the variations. All of
    both yes: holds. Else it holds if: some of the core, or some of the variations, are no.
    """
    own = {check.answer for check in core}
    answers = own | {check.answer for check in variations}
    if not own or "open" in answers:
        return "inconclusive"
    if own == {"no"}:
        return "does_not_hold"
    return "holds" if answers == {"yes"} else "holds_if"


def worst(checks: Iterable[Check]) -> Check:
    """Of checks that must all be yes, the one that decides: a no, else an open one, else whichever comes closest."""

    def badness(check: Check) -> tuple[int, float]:
        slack = min(check.measured.low - check.low, check.high - check.measured.high)
        return ("yes", "open", "no").index(check.answer), -slack

    return max(checks, key=badness)


def saying(answer: Answer, checks: Sequence[Check], groups: Sequence[str] = ()) -> tuple[str, ...]:
    """The labels of the checks that were answered so, for a text that lists them.

    groups: where all checks whose labels begin with GROUP and a dot agree, the text GROUP stands for them.
    """
    said: dict[str, None] = {}
    for check in checks:
        group = check.label.split(".")[0]
        alike = {other.answer for other in checks if other.label.startswith(f"{group}.")}
        if check.answer == answer:
            said[group if group in groups and alike == {answer} else check.label] = None
    return tuple(said)


@cache
def student(probability: float, freedom: int) -> float:
    """The quantile of Student's t, by bisection of its distribution function."""
    if probability < 0.5:
        return -student(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _student_below(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, freedom) < probability else (low, middle)
    return high


def _student_below(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0: the finite series in the angle atan(t / sqrt(freedom)); the normal for many degrees."""
    if freedom > 1000:
        return (1 + math.erf(t / math.sqrt(2))) / 2
    angle = math.atan2(t, math.sqrt(freedom))
    cos2, odd = math.cos(angle) ** 2, freedom % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for k in range(1 if odd else 0, freedom - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cos2
    between = (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
    return (1 + between) / 2
