"""`poise.remedy(model, name, ...)`: what helps attention that goes wrong, each opt-in and reversible.

| name | what it does | options |
|---|---|---|
| "qk-clip" | scales W_q and W_k of a head down after a step in which its largest score was above tau | tau, alpha |
| "qk-norm" | queries and keys of unit mean square, and a learned gain per head | gain, eps |
| "soft-cap" | z becomes cap tanh(z / cap) | cap |
| "sigma-reparam" | W becomes gamma W / sigma(W), gamma learned | gamma, parts |
| "scale" | 1/sqrt(d), 1/d, log n, YaRN's temperature, or learned per head | policy, factor, length, learned |
| "sink" | a learned logit per head that takes probability | logit |
| "off-by-one" | the same at 0, not learned: softmax with one more in its denominator | |
| "qk-lr" | a smaller learning rate for W_q and W_k | factor, optimizer |
| "clip-qkv" | components of q, k, v clamped | limit |
| "z-loss" | adds weight mean(lse^2) to the loss | weight |
| "entropy-floor" | adds weight mean(max(0, floor - entropy)) to the loss | floor, weight |

docs/remedies.md has formulas, references, costs and when to use which. Alarms (alarms.py) name these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from poise.monitor.remedies import calls, penalties, scaling, weights
from poise.monitor.remedies.anatomy import anatomy, attention_modules
from poise.monitor.remedies.clip import QKClip
from poise.monitor.remedies.handle import Remedy, chosen

_MAKERS: dict[str, Callable[..., None]] = {
    "qk-clip": QKClip.start,
    "qk-norm": scaling.qk_norm,
    "soft-cap": calls.soft_cap,
    "sigma-reparam": weights.sigma_reparam,
    "scale": scaling.scale,
    "sink": calls.sink,
    "off-by-one": calls.off_by_one,
    "qk-lr": weights.qk_lr,
    "clip-qkv": weights.clip_qkv,
    "z-loss": penalties.z_loss,
    "entropy-floor": penalties.entropy_floor,
}
NAMES = tuple(_MAKERS)


def remedy(
    model: nn.Module,
    name: str,
    *,
    layers: str | Iterable[str] | Callable[[str], bool] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Remedy:
    """Applies a remedy to every attention of a model, and returns the handle that takes it off again.

    model: a Hugging Face model on "poise" attention (`poise.hf.register()`, `model.set_attn_implementation("poise")`),
        one of poise.models, or anything made of poise.nn's attention. Remedies of weights alone ("qk-clip",
        "sigma-reparam", "qk-lr") also take torch.nn.MultiheadAttention.
    name: one of `poise.monitor.remedies.NAMES`; docs/remedies.md describes them.
    layers: which attention modules: a pattern or patterns for their paths, or a function of the path; None for all.
    optimizer: the one that is training the model. It gets what the remedy adds to learn, as a group of its own;
        without it, `handle.parameters()` are the caller's to pass on. Apply remedies before making a scheduler.
    options: the remedy's own.

    Remedies combine, and go in any order. `undo` restores the model, bit for bit but for what training has done to its
    weights since.

    >>> clip = poise.remedy(model, "qk-clip", tau=100)
    >>> ...  # train; after each step of the optimizer, heads with larger scores are scaled down
    >>> clip.undo()
    >>> with poise.remedy(model, "soft-cap", cap=50): ...
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    make = _MAKERS.get(name)
    if make is None:
        raise ValueError(f"name must be one of {', '.join(map(repr, NAMES))}; got {name!r}")
    accepted = list(inspect.signature(make).parameters)[1:]
    for option in options:
        if option not in accepted:
            takes = ", ".join(one for one in accepted if one != "optimizer") or "no options"
            raise TypeError(f'"{name}" takes {takes}; got {option}')
    found = attention_modules(model)
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no attention that remedies know: Hugging Face's (of a family that asks "
            "transformers' attention interface), poise.nn's, or torch.nn.MultiheadAttention"
        )
    treated = [anatomy(path, found[path]) for path in chosen(found, layers)]
    made = (QKClip if name == "qk-clip" else Remedy)(model, name, treated)
    try:
        if "optimizer" in accepted:
            make(made, optimizer=optimizer, **options)
        else:
            make(made, **options)
            if optimizer is not None:
                if not made.parameters():
                    raise ValueError(f'optimizer is not needed: "{name}" adds nothing that learns')
                weights.join_optimizer(made, optimizer)
    except BaseException:
        made.undo()
        raise
    return made
