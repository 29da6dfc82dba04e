"""Remedies at the projections: σReparam, clip_qkv, and a smaller learning rate for W_q and W_k.

None of them looks at scores. Which rows of which weights are meant is anatomy.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from poise.monitor.remedies.anatomy import Anatomy
from poise.monitor.remedies.handle import Remedy, stands


def sigma_reparam(remedy: Remedy, gamma: float | None = None, parts: str = "qk") -> None:
    if not parts or set(parts) - set("qkv"):
        raise ValueError(f'parts must be some of "q", "k" and "v", such as "qk"; got {parts!r}')
    if gamma is not None and not gamma > 0:
        raise ValueError(f"gamma, the spectral norm to start with, must be a positive number; got {gamma!r}")
    for one in remedy.treated:
        if stands("qk-clip", one.module):
            raise remedy.refuse(one, '"qk-clip" scales its weights. Undo that first')
    for owner, name, axis, sections in _matrices(remedy.treated, parts):
        made = SigmaReparam(owner._parameters[name], sections, axis, gamma)
        if parametrize.is_parametrized(owner, name):
            raise ValueError(f'"sigma-reparam": {type(owner).__name__}.{name} is parametrized already; undo that first')
        order = list(owner._parameters)
        parametrize.register_parametrization(owner, name, made)
        remedy.adopt(made.gamma)

        def reverse(owner: nn.Module = owner, name: str = name, order: list[str] = order) -> None:
            parametrize.remove_parametrizations(owner, name, leave_parametrized=False)
            for key in order:  # in the old order: optimizers and state dicts go by it
                owner._parameters[key] = owner._parameters.pop(key)

        remedy.on_undo(reverse)


class SigmaReparam(nn.Module):
    """Ŵ = γ W / σ(W), for each section of W's outputs by itself; σ, the largest singular value, by power iteration.

    One iteration each time the weight is used in training; none in a checkpoint's second pass, which must find what the
    first one found.
    """

    def __init__(self, weight: Any, sections: list[Tensor], axis: int, gamma: float | None) -> None:
        super().__init__()
        self.axis = axis
        self.gamma = nn.Parameter(torch.ones(len(sections), device=weight.device))
        with torch.no_grad():
            for i, rows in enumerate(sections):
                self.register_buffer(f"rows{i}", rows.to(weight.device), persistent=False)
                part = weight.detach().index_select(axis, rows.to(weight.device)).float()
                part = part if axis == 0 else part.T
                left, sizes, right = torch.linalg.svd(part, full_matrices=False)
                self.register_buffer(f"left{i}", left[:, 0].contiguous())
                self.register_buffer(f"right{i}", right[0].contiguous())
                self.gamma[i] = sizes[0] if gamma is None else gamma

    def forward(self, weight: Tensor) -> Tensor:
        factor = torch.ones(weight.shape[self.axis], dtype=torch.float32, device=weight.device)
        for i, gamma in enumerate(self.gamma):
            rows, left, right = (getattr(self, f"{name}{i}") for name in ("rows", "left", "right"))
            part = weight.index_select(self.axis, rows).float()
            part = part if self.axis == 0 else part.T
            if self.training and torch._C._current_graph_task_id() == -1:
                with torch.no_grad():
                    right.copy_(nn.functional.normalize(part.T @ left, dim=0))
                    left.copy_(nn.functional.normalize(part @ right, dim=0))
                # Autograd keeps what it multiplied with, and the next use overwrites it.
                left, right = left.clone(), right.clone()
            sigma = left @ part @ right
            factor = factor.index_put((rows,), (gamma / sigma).expand(len(rows)))
        shape = [1] * weight.dim()
        shape[self.axis] = -1
        return weight * factor.to(weight.dtype).view(shape)


def _matrices(treated: list[Anatomy], parts: str) -> Iterator[tuple[nn.Module, str, int, list[Tensor]]]:
    """(owner, weight, axis, the rows of each wanted part), each matrix once."""
    found: dict[tuple[int, str], tuple[nn.Module, str, int, list[Tensor]]] = {}
    for one in treated:
        for letter, part in zip("qkv", (one.query, one.key, one.value), strict=True):
            if letter in parts:
                key = (id(part.owner), part.weight)
                found.setdefault(key, (part.owner, part.weight, part.axis, []))[3].append(part.rows.flatten())
    yield from found.values()


def clip_qkv(remedy: Remedy, limit: float = 8.0) -> None:
    if not (isinstance(limit, int | float) and limit > 0):
        raise ValueError(f"limit, the largest component that is let be, must be a positive number; got {limit!r}")
    for one in remedy.treated:
        if one.kind == "torch":
            raise remedy.refuse(one, "torch computes its projections, with no place for this")
        if one.kind == "own":
            remedy.put(one.module.projection, "clip", float(limit))  # type: ignore[arg-type]
            continue
        owners = {id(part.owner): part.owner for part in (one.query, one.key, one.value)}
        for owner in owners.values():
            remedy.on_undo(owner.register_forward_hook(_Clamp(limit)).remove)
        if (shared := getattr(one.module, "kv_a_proj_with_mqa", None)) is not None:  # holds the keys all heads share
            hook = shared.register_forward_hook(_Clamp(limit, one.module.kv_lora_rank))  # type: ignore[arg-type]
            remedy.on_undo(hook.remove)


class _Clamp:
    """A forward hook: outputs from the first on into [-limit, limit]."""

    def __init__(self, limit: float, first: int = 0) -> None:
        self.limit, self.first = float(limit), first

    def __call__(self, module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        if not self.first:
            return out.clamp(-self.limit, self.limit)
        before, after = out[..., : self.first], out[..., self.first :]
        return torch.cat((before, after.clamp(-self.limit, self.limit)), -1)


def qk_lr(remedy: Remedy, factor: float = 0.1, *, optimizer: torch.optim.Optimizer | None = None) -> None:
    if optimizer is None:
        raise ValueError('optimizer is needed: poise.remedy(model, "qk-lr", factor=0.1, optimizer=optimizer)')
    if not (isinstance(factor, int | float) and factor >= 0):
        raise ValueError(f"factor, what the learning rate is multiplied with, must not be negative; got {factor!r}")
    refuse_scheduled(optimizer)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found: dict[int, tuple[nn.Parameter, int, set[int]]] = {}
    for one in remedy.treated:
        for part in (one.query, one.key):
            for tensor, axis, rows in part.tensors():
                if id(tensor) in held:
                    found.setdefault(id(tensor), (tensor, axis, set()))[2].update(rows.flatten().tolist())
    if not found:
        raise ValueError("optimizer holds none of the model's W_q and W_k: pass the one that trains them")
    whole = [tensor for tensor, axis, rows in found.values() if len(rows) == tensor.shape[axis]]
    _move(remedy, optimizer, {id(tensor) for tensor in whole}, factor)
    fused = [(tensor, axis, sorted(rows)) for tensor, axis, rows in found.values() if len(rows) < tensor.shape[axis]]
    if fused:
        _damp(remedy, optimizer, [(tensor, axis, torch.tensor(rows)) for tensor, axis, rows in fused], factor)


def _move(remedy: Remedy, optimizer: torch.optim.Optimizer, wanted: set[int], factor: float) -> None:
    """Parameters into groups of their own, which are as theirs were but for the learning rate."""
    for group in list(optimizer.param_groups):
        before = list(group["params"])
        moved = [p for p in before if id(p) in wanted]
        if not moved:
            continue
        group["params"] = [p for p in before if id(p) not in wanted]
        rates: dict[str, Any] = {key: group[key] * factor for key in ("lr", "initial_lr") if key in group}
        optimizer.add_param_group({**group, "params": moved, **rates})
        remedy.on_undo(_moving_back(optimizer, group, optimizer.param_groups[-1], before))


def _moving_back(optimizer: torch.optim.Optimizer, group: Any, own: Any, before: list[Any]) -> Any:
    def reverse() -> None:
        here = {id(p) for p in (*group["params"], *own["params"])}
        known = {id(p) for p in before}
        group["params"] = [p for p in before if id(p) in here] + [p for p in group["params"] if id(p) not in known]
        optimizer.param_groups[:] = [other for other in optimizer.param_groups if other is not own]

    return reverse


def _damp(
    remedy: Remedy, optimizer: torch.optim.Optimizer, rows: list[tuple[nn.Parameter, int, Tensor]], factor: float
) -> None:
    """Rows of a matrix that also holds others move by `factor` of what the optimizer moves them."""
    before: list[Tensor] = []

    def keep(*_: Any) -> None:
        before[:] = [tensor.detach().index_select(axis, at.to(tensor.device)) for tensor, axis, at in rows]

    @torch.no_grad()
    def shorten(*_: Any) -> None:
        for (tensor, axis, at), old in zip(rows, before, strict=True):
            at = at.to(tensor.device)
            tensor.index_copy_(axis, at, old.lerp(tensor.index_select(axis, at), factor))
        before.clear()

    remedy.on_undo(optimizer.register_step_pre_hook(keep).remove)
    remedy.on_undo(optimizer.register_step_post_hook(shorten).remove)


def join_optimizer(remedy: Remedy, optimizer: torch.optim.Optimizer) -> None:
    """What the remedy added to the model, as a group of its own, without weight decay."""
    refuse_scheduled(optimizer)
    optimizer.add_param_group({"params": remedy.parameters(), "weight_decay": 0.0})
    own = optimizer.param_groups[-1]

    def reverse() -> None:
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group is not own]
        for parameter in own["params"]:
            optimizer.state.pop(parameter, None)

    remedy.on_undo(reverse)


def refuse_scheduled(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler has counted the groups already."""
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        raise ValueError(
            "optimizer has a learning rate scheduler already: apply the remedy first, make the scheduler then"
        )
