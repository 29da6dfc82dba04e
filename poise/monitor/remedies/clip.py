"""QK-Clip: after an optimizer's step, scales down W_q and W_k of the heads whose largest score was above a threshold.

For each head S = max z over what was seen since the last step (z after scale, before cap and bias), γ = min(1, τ / S):
its largest score would have been τ. Where a head has keys of its own, W_q gets γ^(1-α) and W_k γ^α, biases included;
grouped heads share keys, and their W_q takes γ whole. Behind a norm of queries and keys weights change nothing: a gain
per head takes γ, a gain that heads share is refused. How scores are seen is torch_hook.py's business.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from poise import torch_hook
from poise.hf import NAME, REMEDIES
from poise.monitor.remedies.anatomy import Anatomy, trained
from poise.monitor.remedies.calls import CallRemedies, implementation
from poise.monitor.remedies.handle import Remedy, stands
from poise.monitor.remedies.scaling import QueryNorm
from poise.op import Scored
from poise.stats import ScoreStats


class QKClip(Remedy):
    """The remedy "qk-clip" at work.

    clipped: how many times a head was scaled down, by layer. seen: the largest score by layer and head since the last
    step. Both are for looking at.
    """

    tau: float
    alpha: float

    def start(self, tau: float = 100.0, alpha: float = 0.5, process_group: Any = None) -> None:
        if not (isinstance(tau, int | float) and 0 < tau < math.inf):
            raise ValueError(f"tau, the largest score that is let be, must be a positive number; got {tau!r}")
        if not (isinstance(alpha, int | float) and 0 <= alpha <= 1):
            raise ValueError(f"alpha, the keys' share, must be between 0 and 1; got {alpha!r}")
        self.tau, self.alpha = float(tau), float(alpha)
        self._group = process_group
        self.seen: dict[str, Tensor] = {}
        self.clipped: dict[str, int] = {}
        self._missed: dict[str, str] = {}
        self._names = {id(one.module): one.name for one in self.treated}
        for one in self.treated:
            if one.kind == "hf" and (used := implementation(one.module)) not in (NAME, "sdpa"):
                raise self.refuse(one, f'scores of "{used}" attention are not seen. Set it to "poise" or "sdpa"')
            if stands("sigma-reparam", one.module):
                raise self.refuse(one, '"sigma-reparam" sets the size of its weights. Undo that first')
            if one.norms is not None and _own_gain(one) is None:
                raise self.refuse(
                    one,
                    "it normalises its queries and keys, with a gain that its heads share; no weight sets one head's "
                    'scores. They are bounded by that gain: lower it, or use "soft-cap"',
                )
            for part in (one.query, one.key):
                if any(type(tensor) is not nn.Parameter for tensor, _, _ in part.tensors()):
                    raise self.refuse(one, "its weights are spread over machines (or no ordinary parameters)")
        hook = register_optimizer_step_post_hook(self._after_step)
        self.on_undo(hook.remove)
        torch_hook.listen(self)
        self.on_undo(lambda: torch_hook.stop_listening(self))

    # What torch_hook asks for.

    def name_of(self, module: nn.Module) -> str | None:
        return self._names.get(id(module))

    def wants(self, name: str) -> bool:
        return True

    def receive(self, name: str, stats: ScoreStats, scored: Scored) -> None:
        largest = stats.max_logit.detach()
        largest = largest.movedim(-2, 0).flatten(1).amax(1)  # [H]
        before = self.seen.get(name)
        self.seen[name] = largest if before is None else torch.maximum(before, largest)

    def miss(self, name: str, why: str) -> None:
        self._missed[name] = why

    # Steps.

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        moved = [one for one in self.treated if id(next(self._clipped_by_query(one))[0]) in stepped]
        self._agree(moved)
        for one in moved:
            largest = self.seen.pop(one.name, None)
            if largest is None and one.name in self._missed:
                why = self._missed[one.name]
                raise RuntimeError(f"qk-clip cannot see the scores of {one.name}: {why}. Leave it out with layers=...")
            if largest is None or len(largest) != one.heads:
                continue
            above = largest.isfinite() & (largest > self.tau)
            if bool(above.any()):
                self._clip(one, torch.where(above, self.tau / largest, 1.0).double())
                self.clipped[one.name] = self.clipped.get(one.name, 0) + int(above.sum())

    def _agree(self, moved: list[Anatomy]) -> None:
        """The largest of all ranks: their weights must stay equal."""
        if not (moved and dist.is_available() and dist.is_initialized() and dist.get_world_size(self._group) > 1):
            return
        device = next(moved[0].query.tensors())[0].device
        mine = [self.seen.get(one.name, torch.full((one.heads,), -math.inf)).to(device) for one in moved]
        packed = torch.cat([x.float() for x in mine])
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self._group)
        for one, largest in zip(moved, torch.split(packed, [one.heads for one in moved]), strict=True):
            self.seen[one.name] = largest

    def _clipped_by_query(self, one: Anatomy) -> Any:
        """What scales a head's queries: the gain of their norm, or the projection's rows."""
        gain = _gain(one)
        return (
            one.query.tensors() if gain is None else iter([(gain, 0, torch.arange(gain.numel()).view(one.heads, -1))])
        )

    def _clip(self, one: Anatomy, gamma: Tensor) -> None:
        if _gain(one) is not None:
            for tensor, axis, rows in self._clipped_by_query(one):
                _scale(tensor, axis, rows, gamma[:, None])
            return
        queries = gamma[:, None].repeat(1, one.head_dim)
        queries[:, : one.private] = gamma[:, None] ** (1 - self.alpha)
        for tensor, axis, rows in one.query.tensors():
            _scale(tensor, axis, rows, queries)
        if one.private:
            for tensor, axis, rows in one.key.tensors():
                _scale(tensor, axis, rows[:, : one.private], gamma[:, None] ** self.alpha)


def _gain(one: Anatomy) -> nn.Parameter | None:
    """The gain per head behind the queries' norm, if there is one: from "qk-norm", or the model's own."""
    calls = one.module._modules.get(REMEDIES)
    if isinstance(calls, CallRemedies):
        norm = calls.each._modules.get("qk-norm")
    else:
        norm = one.module._modules.get("query_norm")
    return norm.gain if isinstance(norm, QueryNorm) else _own_gain(one)


def _own_gain(one: Anatomy) -> nn.Parameter | None:
    """The weight of the model's own norm of queries, if no two heads share a part of it, and it multiplies."""
    if one.norms is None:
        return None
    weight = trained(one.norms[0], "weight")
    plain = "Gemma" not in type(one.norms[0]).__name__ and trained(one.norms[0], "bias") is None
    return weight if weight is not None and plain and weight.numel() == one.heads * one.head_dim else None


def _scale(tensor: Tensor, axis: int, rows: Tensor, by: Tensor) -> None:
    """Multiplies those rows in place."""
    factors = torch.ones(tensor.shape[axis], dtype=torch.float64, device=tensor.device)
    factors[rows.to(tensor.device)] = by.to(tensor.device).expand(rows.shape)
    shape = [1] * tensor.dim()
    shape[axis] = -1
    tensor.mul_(factors.to(tensor.dtype).view(shape))
