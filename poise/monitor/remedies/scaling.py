"""Remedies for the scale of the scores: QK-norm, and policies for the factor in front of q·k.

Letters: B batch, H query heads, N queries, M keys, D head dim.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poise.mask import Mask
from poise.monitor.remedies.anatomy import Anatomy
from poise.monitor.remedies.calls import CallRemedy, install, positive, reachable
from poise.monitor.remedies.handle import Remedy, stands

Policy = Literal["1/sqrt(d)", "1/d", "log-n", "yarn", "learned"]
POLICIES = ("1/sqrt(d)", "1/d", "log-n", "yarn", "learned")
_REPLACING = ("1/sqrt(d)", "1/d")


def qk_norm(remedy: Remedy, gain: float = 1.0, eps: float = 1e-6) -> None:
    positive(gain=gain, eps=eps)
    for one in reachable(remedy):
        if one.norms is not None:
            raise remedy.refuse(one, "it normalises its queries and keys already")
        if stands("scale", one.module):
            raise remedy.refuse(one, 'it sets the scale. Undo "scale" first; after "qk-norm" apply it again')
        weight = next(one.query.tensors())[0]
        own_scale = getattr(one.module, "scale", None) if one.kind == "own" else None
        if isinstance(own_scale, nn.Module):
            raise remedy.refuse(one, f"its scale is learned or depends on positions ({type(own_scale).__name__})")
        fit = 1.0 if own_scale is None else one.head_dim**-0.5 / own_scale
        norm = QueryNorm(one.heads, one.head_dim, gain, eps, fit).to(weight.device)
        remedy.adopt(norm.gain)
        if one.kind == "hf":
            install(remedy, one, norm)
        else:
            remedy.put(one.module, "query_norm", norm)
            remedy.put(one.module, "key_norm", KeyNorm(eps))


class KeyNorm(nn.Module):
    """x / sqrt(mean x² + eps) along the last dim."""

    from_a_remedy = True

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=self.eps)


class QueryNorm(CallRemedy):
    """Queries of unit mean square times a gain per head [H]; keys then need none.

    A rotation keeps norms, so that it makes no difference whether positions come before or after.
    """

    from_a_remedy = True

    def __init__(self, heads: int, head_dim: int, gain: float, eps: float, fit: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((heads,), float(gain)))
        self.head_dim, self.eps, self.fit = head_dim, eps, fit

    def forward(self, q: Tensor) -> Tensor:
        """q [B, N, H, D], where poise's own layers have their norm."""
        return F.rms_norm(q, (q.shape[-1],), eps=self.eps) * (self.gain * self.fit)[:, None].to(q.dtype)

    def adjust(self, q: Tensor, k: Tensor, call: dict[str, Any], scaling: float | None) -> Any:
        # Whatever scale the model had, what is left of it is the usual one: g · q̂·k̂ / sqrt(d).
        fit = 1.0 if call["scale"] is None else self.head_dim**-0.5 / call["scale"]
        q, k = (F.rms_norm(x, (x.shape[-1],), eps=self.eps) for x in (q, k))
        return q * (self.gain * fit)[:, None, None].to(q.dtype), k, call


def scale(
    remedy: Remedy, policy: Policy, factor: float | None = None, length: int | None = None, learned: bool = False
) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(map(repr, POLICIES))}; got {policy!r}")
    if (factor is None) != (policy != "yarn"):
        raise ValueError(
            'factor, the new context length over the trained one, belongs to policy="yarn" and is needed there'
        )
    if (length is not None or learned) and policy != "log-n":
        raise ValueError('length and learned belong to policy="log-n"')
    if length is not None and length < 2:
        raise ValueError(f"length, at which the scale stays as it was, must be at least 2; got {length}")
    if factor is not None and not factor >= 1:
        raise ValueError(f"factor must be at least 1; got {factor}")
    for one in reachable(remedy):
        if policy in _REPLACING and (one.norms is not None or stands("qk-norm", one.module)):
            raise remedy.refuse(
                one, f'behind a norm of queries and keys {policy} is not what sets the scores; "learned" is'
            )
        if policy == "yarn" and _rope_type(remedy.model, one) == "yarn":
            raise remedy.refuse(one, "its rotary positions are YaRN's and hold the temperature already")
        if policy == "log-n" and one.kind == "own" and not _causal_own(remedy.model, one):
            raise remedy.refuse(
                one, "poise's own layers count keys by the query's position, so that they must be causal"
            )
        weight = next(one.query.tensors())[0]
        before = getattr(one.module, "scale", None) if one.kind == "own" else None
        made = Scale(policy, one.heads, one.head_dim, factor, length, learned, before).to(weight.device)
        remedy.adopt(*made._parameters.values())  # type: ignore[arg-type]
        if one.kind == "hf":
            install(remedy, one, made)
        else:
            remedy.put(one.module, "scale", made)


class Scale(CallRemedy):
    """A policy for the scale, by itself or on top of what the model had."""

    def __init__(
        self,
        policy: Policy,
        heads: int,
        head_dim: int,
        factor: float | None,
        length: int | None,
        learned: bool,
        before: Any,
    ) -> None:
        super().__init__()
        self.policy, self.head_dim = policy, head_dim
        self.before = before  # of poise's own layers: None, a number, or a module from places
        self.temperature = 1.0 if factor is None else (0.1 * math.log(factor) + 1.0) ** 2
        self.log_length = 1.0 if length is None else math.log(length)
        if learned or policy == "learned":
            self.log_scale = nn.Parameter(torch.zeros(heads))

    def forward(self, places: Tensor) -> Any:
        """The scale of one of poise's own layers, causal, for queries at these places."""
        before = self.before(places) if isinstance(self.before, nn.Module) else self.before
        seen = (places if places.dim() == 2 else places[None]) + 1
        return self._of(self.head_dim**-0.5 if before is None else before, 1.0, seen[:, None])

    def adjust(self, q: Tensor, k: Tensor, call: dict[str, Any], scaling: float | None) -> Any:
        before = self.head_dim**-0.5 if call["scale"] is None else call["scale"]
        # Some modules multiply their queries by the scale and then ask for 1.
        done = scaling if before == 1.0 and scaling is not None else 1.0
        seen = _visible(q, k, call) if self.policy == "log-n" else None
        return q, k, {**call, "scale": self._of(before, done, seen)}

    def _of(self, before: Any, done: float, seen: Tensor | None) -> Any:
        """The scale, where `done` of it is in the queries already and rows see so many keys [B|1, 1, N]."""
        if self.policy == "1/sqrt(d)":
            return self.head_dim**-0.5 / done
        if self.policy == "1/d":
            return 1.0 / self.head_dim / done
        if self.policy == "yarn":
            return before * self.temperature
        if isinstance(before, Tensor) and before.dim() == 1:
            before = before[:, None]
        made: Any = before
        if self.policy == "log-n":
            assert seen is not None
            made = made * (seen.clamp(min=1).float().log() / self.log_length)
        if hasattr(self, "log_scale"):
            made = made * self.log_scale.exp()[:, None]
        return made if made.dim() == 3 else made[None]


def _visible(q: Tensor, k: Tensor, call: dict[str, Any]) -> Tensor:
    """How many keys each query may see: [B|1, 1, N]."""
    mask, rows, keys = call.get("mask"), q.shape[2], k.shape[2]
    if mask is None:
        return torch.full((1, 1, rows), keys, device=q.device)
    if isinstance(mask, Tensor):
        return mask[(None,) * (4 - mask.dim())].expand(-1, -1, rows, keys)[:, :1].sum(-1)
    assert isinstance(mask, Mask)
    offset = call.get("q_offset")
    offset = keys - rows if offset == "end" else 0 if offset in (None, "start") else offset
    places = torch.arange(keys, device=q.device)
    some = max(1, (1 << 22) // max(keys, 1))  # of the mask at once: megabytes, not the square of the length
    shape = (q.shape[0], 1, rows, keys)
    counts = [
        mask.evaluate(part, places, offset, shape).expand(-1, 1, part.numel(), keys).sum(-1)
        for part in torch.split(torch.arange(rows, device=q.device), some)
    ]
    return torch.cat(counts, -1)


def _rope_type(model: nn.Module, one: Anatomy) -> str | None:
    """How rotary positions are stretched, as far as the module or its stack says."""
    if one.kind == "own":
        stack = _stack_of(model, one)
        scaling = getattr(getattr(stack, "positions", None), "scaling", None)
        return "yarn" if type(scaling).__name__ == "YaRNScaling" else None
    told = getattr(one.module.config, "rope_parameters", None) or {}  # by kind of layer in some families
    kinds = {part.get("rope_type") for part in (told, *told.values()) if isinstance(part, dict)}
    return "yarn" if "yarn" in kinds else None


def _stack_of(model: nn.Module, one: Anatomy) -> nn.Module | None:
    """The innermost encoder or decoder around one of poise's own modules."""
    path = one.name.split(".")
    around = [model.get_submodule(".".join(path[:end])) for end in range(len(path))]
    return next((x for x in reversed(around) if hasattr(x, "blocks")), None)


def _causal_own(model: nn.Module, one: Anatomy) -> bool:
    return type(_stack_of(model, one)).__name__ == "Decoder" and one.name.split(".")[-1] != "cross"
