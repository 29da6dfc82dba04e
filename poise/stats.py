"""What is measured about each query row's scores: the formulas, and the merge of disjoint sets of keys.

Knows no kernels: an implementation fills one packed tensor per call, everything else is derived here by differentiable
torch ops. It does not decide what is alarming; summaries over rows are in summary.py.

Notation, for one row: s are the scores of the visible keys (scaled, capped, biased), z the scaled scores before cap
and bias, p = softmax(s). A softmax sink is one more outcome with a score and no value: it counts in lse, in
probabilities and in what is made of them; it is no key, so maxima, minima, mean, std and count leave it out. All values
are before dropout. A row that attended a NaN shows NaN; a row without visible keys has each docstring's "Empty" value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from poise.summary import EDGES, ScoreSummary

# The packed tensor's fields, all without the sink; the order and the values of empty rows are kernels/cpu/forward.h's.
FIELDS = (
    "log_sum",  # log sum exp(s - max s), never negative; empty 0. Apart from max s, so that large scores cancel nothing
    "max_score",  # max s; empty -inf
    "max_logit",  # max z; empty -inf
    "min_score",  # min s; empty +inf
    "mean",  # mean of s over the keys; empty 0
    "var",  # population variance of s over the keys; empty 0
    "count",  # number of visible keys
    "shift",  # sum p (s - max s), never positive; empty 0
    "var_p",  # variance of s under p; empty 0
    "collision",  # sum p^2; empty 0
    "sink_mass",  # sum of p over sink_keys; empty 0
)


Value = TypeVar("Value")


class _kept(Generic[Value]):
    """A property computed once; before Python 3.12 functools' own takes a lock, which no compiler traces."""

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute, self.name = compute, compute.__name__

    def __get__(self, owner: Any, _: type) -> Value:
        value = self.compute(owner)
        object.__setattr__(owner, self.name, value)
        return value


@dataclass(frozen=True, eq=False)
class ScoreStats:
    """Statistics of every query row, [B, H, N] each ([H, N] or [N] for such calls), computed when read.

    All are differentiable but extremes and counts (max_logit, max_score, max_prob, min_score, count): those come
    without a gradient, because where the largest changes place there is none. Penalise lse or entropy instead.
    """

    packed: Tensor  # [11, B, H, N], the order of FIELDS
    sink: Tensor | None = None  # [H]
    sink_keys: tuple[int, ...] = ()
    layout: Literal["bhsd", "bshd"] = "bhsd"  # how the output that belongs to these statistics lies; merge needs it

    def __repr__(self) -> str:
        return (
            f"ScoreStats(rows={list(self.packed.shape[1:])}, sink={self.sink is not None}, sink_keys={self.sink_keys})"
        )

    def fields(self) -> dict[str, Tensor]:
        """The packed fields by name, all without the sink."""
        return dict(zip(FIELDS, self.packed.unbind(0), strict=True))

    def _field(self, name: str) -> Tensor:
        return self.packed[FIELDS.index(name)]

    @_kept
    def _empty(self) -> Tensor:
        return self.count == 0

    def _filled(self, value: Tensor) -> Tensor:
        """The value with 0 in empty rows, so that no difference of infinities arises, forward or backward."""
        return value.masked_fill(self._empty, 0.0)

    @_kept
    def _sink_score(self) -> Tensor | None:
        """The sink's score, broadcastable to a row field."""
        if self.sink is None:
            return None
        score = self.sink.to(self.packed.dtype)
        return score[:, None] if self.packed.dim() > 2 else score.reshape(())  # [H, 1]

    @_kept
    def _key_share(self) -> Tensor:
        """The probability that goes to keys at all, e^(lse0 - lse) where lse0 is without the sink. Empty: 0."""
        return (self._filled(self._lse_of_keys) - self._filled(self.lse)).exp().masked_fill(self._empty, 0.0)

    @_kept
    def _sink_share(self) -> Tensor:
        """The probability that goes to the sink, e^(sink - lse). Empty: 1, or 0 if the sink is absent or -inf."""
        sink = self._sink_score
        if sink is None:
            return torch.zeros_like(self._key_share)
        alone = torch.where(torch.isneginf(sink), 0.0, 1.0).to(self.packed.dtype)
        return torch.where(self._empty, alone, (sink - self._filled(self.lse)).exp())

    @property
    def _lse_of_keys(self) -> Tensor:
        """log sum e^s without the sink. Empty: -inf."""
        return self._field("max_score") + self._field("log_sum")

    @property
    def lse(self) -> Tensor:
        """log(sum e^s + e^sink): the softmax's normaliser, so that p = e^(s - lse). Empty: the sink, or -inf."""
        lse0, sink = self._lse_of_keys, self._sink_score
        return lse0 if sink is None else _logaddexp(lse0, sink)

    @property
    def max_logit(self) -> Tensor:
        """max z: the largest scaled score before cap and bias, as in QK-clip and "max attention logit". Empty: -inf."""
        return self._field("max_logit").detach()

    @property
    def max_score(self) -> Tensor:
        """max s: the largest score as it enters the softmax. Empty: -inf."""
        return self._field("max_score").detach()

    @property
    def max_prob(self) -> Tensor:
        """max p = e^(max s - lse): the largest attention weight of a key. Empty: 0."""
        among_keys = (-self._field("log_sum")).exp().masked_fill(self._empty, 0.0)
        return (among_keys if self.sink is None else self._key_share * among_keys).detach()

    @property
    def entropy(self) -> Tensor:
        """-sum p log p in nats, the sink being an outcome: 0 = collapsed on one key, log(count) = uniform. Empty: 0."""
        among_keys = (self._field("log_sum") - self._field("shift")).clamp_min(0.0)
        sink = self._sink_score
        if sink is None:
            return among_keys
        to_keys, to_sink = self._key_share, self._sink_share
        lse0, lse = self._filled(self._lse_of_keys), self._filled(self.lse)
        whole = to_keys * among_keys + _surprise(to_keys, lse0 - lse) + _surprise(to_sink, sink - lse)
        return whole.masked_fill(self._empty, 0.0)

    @property
    def mean(self) -> Tensor:
        """(1/n) sum s over the n visible keys, unweighted ("attention logit mean"). Empty: 0."""
        return self._field("mean")

    @property
    def std(self) -> Tensor:
        """sqrt((1/n) sum (s - mean)^2) over the visible keys, unweighted ("attention logit std"). Empty: 0.

        0, without a gradient, also where the scores differ by nothing but rounding: a square root makes of that
        a slope as steep as that of any other row, in no direction.
        """
        var = self._field("var")
        size = self._filled(self._field("max_score")).abs() + self._filled(self._field("min_score")).abs()
        rounding = (4 * torch.finfo(var.dtype).eps * size.detach()).square()
        flat = ((self.count <= 1) | (var <= rounding)) & var.isfinite()  # NaN must show
        return torch.where(flat, 0.0, torch.where(flat, 1.0, var).sqrt())

    @property
    def min_score(self) -> Tensor:
        """min s: the smallest visible score as it enters the softmax. Empty: +inf."""
        return self._field("min_score").detach()

    @property
    def var_p(self) -> Tensor:
        """sum p (s - E_p[s])^2, the variance of the score under p, the sink being an outcome. Empty: 0.

        Also the temperature sensitivity: with p = softmax(beta s), d^2 lse / d beta^2 at beta = 1 is this, and
        -d entropy / d beta too. 0 = saturated or flat.
        """
        sink, inside = self._sink_score, self._field("var_p")
        if sink is None:
            return inside
        to_keys, to_sink = self._key_share, self._sink_share
        one_only = (to_keys == 0) | (to_sink == 0)  # there the gap may be infinite, and 0 * inf must not arise
        gap = (
            torch.where(one_only, 0.0, self._field("max_score"))
            + self._field("shift")
            - torch.where(one_only, 0.0, sink)
        )
        return to_keys * inside + to_keys * to_sink * gap.masked_fill(one_only, 0.0).square()

    @property
    def collision(self) -> Tensor:
        """sum p^2, the chance that two draws meet, the sink being an outcome: 1 = one-hot, 1/n = uniform.

        Empty: 0, or 1 with a finite sink, the one outcome.
        """
        inside = self._field("collision")
        return inside if self.sink is None else self._key_share.square() * inside + self._sink_share.square()

    @property
    def count(self) -> Tensor:
        """n: the number of visible keys, as a float. A key whose bias is -inf is not visible."""
        return self._field("count").detach()

    @property
    def sink_mass(self) -> Tensor:
        """sum of p over the keys in `sink_keys` (by default the first key, the "attention sink"). Empty: 0."""
        inside = self._field("sink_mass")
        return inside if self.sink is None else self._key_share * inside

    @property
    def effective_keys(self) -> Tensor:
        """1 / sum p^2: how many outcomes a uniform attention with the same collision would use. Empty: as collision."""
        none = self.collision == 0
        return torch.where(none, 0.0, 1.0 / torch.where(none, 1.0, self.collision))

    @property
    def responsiveness(self) -> Tensor:
        """1 - sum p^2, the trace of the softmax Jacobian diag(p) - p p^T: how much gradient passes. Empty: 0."""
        none = self.collision == 0
        return torch.where(none, 0.0, 1.0 - self.collision).clamp_min(0.0)

    @property
    def normalized_entropy(self) -> Tensor:
        """entropy / log(n), or / log(n + 1) with a sink: in [0, 1] whatever the number of keys. n of 0 or 1: NaN."""
        few = self.count <= 1
        outcomes = torch.where(few, math.e, self.count) + (0 if self.sink is None else 1)
        return torch.where(few, math.nan, self.entropy / outcomes.log())

    def detach(self) -> ScoreStats:
        """The same values, cut off from autograd."""
        sink = None if self.sink is None else self.sink.detach()
        return ScoreStats(self.packed.detach(), sink, self.sink_keys, self.layout)

    def reduce(self, by: Literal["head", "batch", "layer", "all"] = "head") -> ScoreSummary:
        """Summarise over rows: an entry per head, per batch element, or one in all ("layer" and "all" are the same)."""
        with torch.no_grad():
            return ScoreSummary.of({name: getattr(self, name) for name in EDGES}, by)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(e^x + e^y), where torch's own has no second derivative at -inf."""
    y = y.expand_as(x)
    no_x, no_y = torch.isneginf(x), torch.isneginf(y)
    filled = x.masked_fill(no_x, 0.0)
    both = filled - torch.nn.functional.logsigmoid(filled - y.masked_fill(no_y, 0.0))
    return torch.where(no_x, y, torch.where(no_y, x, both))


def _surprise(p: Tensor, log_p: Tensor) -> Tensor:
    """-p log p, 0 at p = 0 (log p may be -inf there), NaN for NaN; so are its derivatives."""
    return -p * log_p.masked_fill(p == 0, 0.0)


def merge(*parts: tuple[Tensor, ScoreStats]) -> tuple[Tensor, ScoreStats]:
    """Output and statistics over the union of disjoint sets of keys, from those over each: exact, in any order.

    Each part is what `observe` returned for the same queries. With w_i = e^(lse_i - lse): out = sum w_i out_i, shifted
    sums move to the common maximum, plain moments follow Chan's formula. A sink must be the same in every part: it is
    in each part's lse, and once in the union's. Masses on sink_keys add up, whichever keys the parts mean by them.
    """
    if not parts:
        raise ValueError("merge: got no parts; pass one or more (out, stats) pairs as returned by observe")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[1], ScoreStats)):
            raise TypeError(f"merge: each part must be an (out, stats) pair as returned by observe; got {_kind(part)}")
    (out, stats), *others = parts
    for other_out, other in others:
        out, stats = _merge_two(out, stats, other_out, other)
    return out, stats


def _kind(part: object) -> str:
    if isinstance(part, tuple):
        return "(" + ", ".join(type(each).__name__ for each in part) + ")"
    return type(part).__name__


def _merge_two(out_x: Tensor, x: ScoreStats, out_y: Tensor, y: ScoreStats) -> tuple[Tensor, ScoreStats]:
    _check_mergeable(out_x, x, out_y, y)
    fx, fy = x.fields(), y.fields()
    largest = torch.maximum(fx["max_score"], fy["max_score"])
    # Sums relative to the common maximum: log sum e^(s - largest) of each part, -inf for a part without keys.
    sum_x, sum_y = _relative_sum(fx, largest), _relative_sum(fy, largest)
    total = _logaddexp(sum_x, sum_y)
    wx, wy = _weight(sum_x, total), _weight(sum_y, total)
    shift_x = fx["shift"] + _gap(fx["max_score"], largest, wx)  # E_x[s] - max
    shift_y = fy["shift"] + _gap(fy["max_score"], largest, wy)
    count = fx["count"] + fy["count"]
    part_x, part_y = fx["count"] / count.clamp_min(1), fy["count"] / count.clamp_min(1)
    delta = fy["mean"] - fx["mean"]
    merged = {
        "log_sum": total.masked_fill(count == 0, 0.0),
        "max_score": largest,
        "max_logit": torch.maximum(fx["max_logit"], fy["max_logit"]),
        "min_score": torch.minimum(fx["min_score"], fy["min_score"]),
        "mean": fx["mean"] + delta * part_y,
        "var": fx["var"] * part_x + fy["var"] * part_y + delta.square() * part_x * part_y,
        "count": count,
        "shift": wx * shift_x + wy * shift_y,
        "var_p": wx * fx["var_p"] + wy * fy["var_p"] + wx * wy * (shift_x - shift_y).square(),
        "collision": wx.square() * fx["collision"] + wy.square() * fy["collision"],
        "sink_mass": wx * fx["sink_mass"] + wy * fy["sink_mass"],
    }
    packed = torch.stack([merged[name] for name in FIELDS])
    stats = ScoreStats(packed, x.sink, tuple(sorted({*x.sink_keys, *y.sink_keys})), x.layout)
    # Each part's output is normalised by its own lse, sink included; relative to the union's the sink counts once.
    vx, vy = _weight(x.lse, stats.lse)[..., None], _weight(y.lse, stats.lse)[..., None]
    if x.layout == "bshd" and vx.dim() > 2:
        vx, vy = vx.transpose(-3, -2), vy.transpose(-3, -2)
    out = vx * out_x.to(packed.dtype) + vy * out_y.to(packed.dtype)
    return out.to(out_x.dtype), stats


def _relative_sum(fields: dict[str, Tensor], largest: Tensor) -> Tensor:
    """log sum e^(s - largest) over one part's keys; -inf if it has none."""
    none = fields["count"] == 0
    own = fields["max_score"].masked_fill(none, 0.0) - largest.masked_fill(none, 0.0)
    return (own + fields["log_sum"]).masked_fill(none, -math.inf)


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    """e^(part - whole), 0 for a part that has nothing (-inf), also when the whole has nothing."""
    nothing = torch.isneginf(part)
    return (part.masked_fill(nothing, 0.0) - whole.masked_fill(nothing, 0.0)).exp().masked_fill(nothing, 0.0)


def _gap(part: Tensor, whole: Tensor, weight: Tensor) -> Tensor:
    """part - whole, 0 where it has no weight: there it may be infinite, and 0 * inf must not arise."""
    nothing = weight == 0
    return part.masked_fill(nothing, 0.0) - whole.masked_fill(nothing, 0.0)


def _check_mergeable(out_x: Tensor, x: ScoreStats, out_y: Tensor, y: ScoreStats) -> None:
    for name, got, want in (
        ("out", (list(out_y.shape), out_y.dtype), (list(out_x.shape), out_x.dtype)),
        ("stats.packed", (list(y.packed.shape), y.packed.dtype), (list(x.packed.shape), x.packed.dtype)),
        ("stats.layout", y.layout, x.layout),
    ):
        if got != want:
            raise ValueError(f"merge: {name} differs between parts, {want} and {got}; parts must share their queries")
    if (x.sink is None) != (y.sink is None):
        raise ValueError("merge: one part has a sink and the other has none; pass the same sink to every observe call")
    if x.sink is not None and y.sink is not None and x.sink is not y.sink and not torch.equal(x.sink, y.sink):
        raise ValueError("merge: the parts have different sinks; pass the same sink to every observe call")
