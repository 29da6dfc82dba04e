"""Remedies in the loss: the z-loss on attention's normaliser, and a floor for its entropy.

Their gradients come through the differentiable statistics of the same pass, and join the loss, whatever it is, at the
attention's output: nothing has to be added to it by hand, and a checkpoint's second pass does the same as the first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from poise.monitor.remedies.anatomy import Anatomy
from poise.monitor.remedies.calls import CallRemedies, CallRemedy, add, install, positive, reachable
from poise.monitor.remedies.handle import Remedy
from poise.stats import ScoreStats


def z_loss(remedy: Remedy, weight: float = 1e-4) -> None:
    positive(weight=weight)
    for one in reachable(remedy):
        _penalise(remedy, one, _ZLoss(weight))


def entropy_floor(remedy: Remedy, floor: float = 0.5, weight: float = 1e-2) -> None:
    positive(floor=floor, weight=weight)
    for one in reachable(remedy):
        _penalise(remedy, one, _EntropyFloor(weight, floor))


class _Penalty(CallRemedy):
    """Adds `weight · value(stats)` to the loss, whatever the loss is: through the output's gradient."""

    penalises = True

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def value(self, stats: ScoreStats) -> Tensor:
        raise NotImplementedError

    def through(self, out: Tensor, stats: ScoreStats) -> Tensor:
        penalty = self.weight * self.value(stats)
        joined: Tensor = _Joined.apply(out, penalty) if penalty.requires_grad else out  # type: ignore[no-untyped-call]
        return joined


class _ZLoss(_Penalty):
    """The mean square of lse over rows that see a key."""

    def value(self, stats: ScoreStats) -> Tensor:
        seen = stats.count > 0
        return torch.where(seen, stats.lse, 0.0).square().sum() / seen.sum().clamp(min=1)


class _EntropyFloor(_Penalty):
    """How far the entropy is below the floor, in nats, on the mean of rows that could reach it."""

    def __init__(self, weight: float, floor: float) -> None:
        super().__init__(weight)
        self.floor = floor

    def value(self, stats: ScoreStats) -> Tensor:
        able = stats.count > math.exp(self.floor)
        return torch.where(able, (self.floor - stats.entropy).clamp(min=0), 0.0).sum() / able.sum().clamp(min=1)


class _Joined(torch.autograd.Function):
    """The first of two tensors, through which the second, a number, gets a gradient of one."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, penalty: Tensor) -> Tensor:
        ctx.like = (penalty.dtype, penalty.device)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dtype, device = ctx.like
        return grads[0], torch.ones((), dtype=dtype, device=device)


def _penalise(remedy: Remedy, one: Anatomy, penalty: _Penalty) -> None:
    if one.kind == "hf":
        install(remedy, one, penalty)
        return
    module: Any = one.module
    plain = module.choice
    calls = getattr(plain, "attend", None)
    if not isinstance(calls, CallRemedies):
        calls = CallRemedies(None)
        module.choice = type(plain)(calls)
        calls.retire = lambda: setattr(module, "choice", plain)
    add(remedy, one, calls, penalty)
