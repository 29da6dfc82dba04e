"""Remedies that change the attention call itself, and the first of them: soft-cap, sink, off-by-one.

On a Hugging Face model a small module, `CallRemedies`, goes into each attention module; poise.hf hands it the call
(hence the model must be on "poise"). poise's own attention has places for all of it, which are filled and emptied. What
a remedy learns is thus part of the model: of its parameters, its state dict, its devices. QK-norm and scales are in
scaling.py, penalties in penalties.py.

Letters: B batch, H query heads, G key/value heads, N queries, M keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from poise.hf import NAME, REMEDIES
from poise.monitor.remedies.anatomy import Anatomy
from poise.monitor.remedies.handle import Remedy, stands
from poise.op import attention, observe
from poise.stats import ScoreStats


class CallRemedy(nn.Module):
    """What one remedy makes of a call."""

    penalises = False  # whether it wants the statistics

    def adjust(
        self, q: Tensor, k: Tensor, call: dict[str, Any], scaling: float | None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Queries, keys [B, H or G, N, D] and the other arguments; `scaling` is the attention module's attribute."""
        return q, k, call

    def through(self, out: Tensor, stats: ScoreStats) -> Tensor:
        """The output, which may take a gradient to the statistics."""
        return out


class CallRemedies(nn.Module):
    """The remedies of one attention module, which stands in for `poise.attention` there."""

    def __init__(self, scaling: float | None) -> None:
        super().__init__()
        self.scaling = scaling  # the module's own attribute
        self.each = nn.ModuleDict()
        self.retire: Callable[[], None] | None = None  # what takes this away once it is empty

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "retire": None}  # copies and files: their remedies stay

    def adjusted(self, q: Tensor, k: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Queries, keys and the other arguments as the remedies want them."""
        for remedy in self.each.values():
            assert isinstance(remedy, CallRemedy)
            q, k, call = remedy.adjust(q, k, call, self.scaling)
        return q, k, call

    def forward(self, q: Tensor, k: Any, v: Tensor | None = None, **call: Any) -> Tensor:
        penalties = [each for each in self.each.values() if isinstance(each, CallRemedy) and each.penalises]
        if not penalties or not torch.is_grad_enabled():
            return attention(q, k, v, **call)
        out, stats = observe(q, k, v, **call)
        for penalty in penalties:
            out = penalty.through(out, stats)
        return out


def soft_cap(remedy: Remedy, cap: float = 50.0) -> None:
    positive(cap=cap)
    for one in reachable(remedy):
        if one.kind == "hf":
            install(remedy, one, _SoftCap(cap))
        else:
            remedy.put(one.module, "softcap", float(cap))


class _SoftCap(CallRemedy):
    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = float(cap)

    def adjust(self, q: Tensor, k: Tensor, call: dict[str, Any], scaling: float | None) -> Any:
        return q, k, {**call, "softcap": self.cap}


def sink(remedy: Remedy, logit: float = 0.0) -> None:
    _sinks(remedy, logit, learned=True)


def off_by_one(remedy: Remedy) -> None:
    _sinks(remedy, 0.0, learned=False)


def _sinks(remedy: Remedy, logit: float, learned: bool) -> None:
    other = "off-by-one" if learned else "sink"
    for one in reachable(remedy):
        has = getattr(one.module, "sinks", None) is not None
        if stands(other, one.module):
            raise remedy.refuse(one, f'"{other}" gives it a sink; undo that first')
        if has:
            raise remedy.refuse(one, "it has learned sinks of its own")
        values = torch.full((one.heads,), float(logit), device=next(one.query.tensors())[0].device)
        made: Tensor = nn.Parameter(values) if learned else values
        if learned:
            remedy.adopt(made)  # type: ignore[arg-type]
        if one.kind == "hf":
            install(remedy, one, _Sink(made))
        else:
            remedy.put(one.module, "sinks", made)


class _Sink(CallRemedy):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        if isinstance(logits, nn.Parameter):
            self.logits = logits
        else:
            self.register_buffer("logits", logits, persistent=False)

    def adjust(self, q: Tensor, k: Tensor, call: dict[str, Any], scaling: float | None) -> Any:
        return q, k, {**call, "sink": self.logits}


def install(remedy: Remedy, one: Anatomy, made: CallRemedy) -> None:
    """Into a Hugging Face attention module."""
    module = one.module
    calls = module._modules.get(REMEDIES)
    if not isinstance(calls, CallRemedies):
        calls = CallRemedies(getattr(module, "scaling", None))
        module.add_module(REMEDIES, calls)
        guard = module.register_forward_pre_hook(_stay_on_poise)

        def retire() -> None:
            del module._modules[REMEDIES]
            guard.remove()

        calls.retire = retire
    add(remedy, one, calls, made.train(module.training))


def add(remedy: Remedy, one: Anatomy, calls: CallRemedies, made: CallRemedy) -> None:
    if remedy.name in calls.each:
        raise remedy.refuse(one, "it is at work there already: the model is a copy of one that it was applied to")
    calls.each[remedy.name] = made

    def reverse() -> None:
        del calls.each[remedy.name]
        if not calls.each and calls.retire is not None:
            calls.retire()

    remedy.on_undo(reverse)


def reachable(remedy: Remedy) -> list[Anatomy]:
    """The modules to treat, if their calls can be reached."""
    for one in remedy.treated:
        if one.kind == "torch":
            raise remedy.refuse(one, "torch computes it, with no place for this. poise.nn.MultiHeadAttention has one")
        if one.kind == "hf" and (used := implementation(one.module)) != NAME:
            raise remedy.refuse(one, f'it runs on "{used}". {_WAY_OUT}')
        choice = getattr(one.module, "choice", None)
        if one.kind == "own" and not hasattr(choice, "attend"):
            raise remedy.refuse(one, f"its attention is {choice!r}, not the exact one")
    return remedy.treated


_WAY_OUT = 'Call poise.hf.register() and model.set_attn_implementation("poise") first'


def implementation(module: Any) -> str | None:
    """What a Hugging Face attention module runs on."""
    used: str | None = module.config._attn_implementation
    return used


def _stay_on_poise(module: nn.Module, _: Any) -> None:
    if (used := implementation(module)) != NAME:
        at_work = ", ".join(module.get_submodule(REMEDIES + ".each")._modules)
        raise RuntimeError(
            f'the remedies on this model ({at_work}) would be lost: it was set to "{used}" attention. Undo them, or '
            'call model.set_attn_implementation("poise")'
        )


def positive(**options: float) -> None:
    for name, value in options.items():
        if not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{name} must be a positive number; got {value!r}")
