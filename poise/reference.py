"""The specification: dense attention and its statistics in plain torch, one step per line of the definition.

Every other implementation is measured against this one. It needs memory for whole score matrices, and for every pair's
elementwise products once an input holds a NaN or an infinity; it is not fast and uses nothing of a lowered plan. Half
precision computes in float32, float64 stays. Differentiable to any order.

A masked pair (by the mask, or by a bias of -inf) contributes to nothing, forward or backward. Hence selection by
torch.where before every product, and never a multiplication by zero, which would let a NaN through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from poise import dropout
from poise.problem import Problem, without_autocast

Stage: TypeAlias = Literal["raw", "capped", "biased", "prob"]
STAGES: tuple[Stage, ...] = ("raw", "capped", "biased", "prob")


def run(problem: Problem, stats: bool) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, Dv] in q's dtype, and the packed statistics [11, B, H, N] (poise.stats.FIELDS) or None."""
    batch, heads, queries, keys = problem.shape
    rows = torch.arange(queries, device=problem.q.device)
    cols = torch.arange(keys, device=problem.q.device)
    visible, bias = _visible(problem, rows, cols)  # [B, H, N, M]
    raw = _raw(problem, rows, cols, visible)
    scores = _capped(problem, raw) + bias
    p, lse = _softmax(scores, visible)  # without the sink
    weights = _with_sink(problem, p, lse, visible)
    if problem.dropout:
        kept = dropout.all_heads(problem.seed, batch, heads, rows, cols, problem.dropout)
        weights = torch.where(kept, weights / (1 - problem.dropout), 0.0)
    out = _mix(weights, _for_heads(problem.v, problem), visible).to(problem.q.dtype)
    return out, _packed(problem, raw, scores, visible, p, lse) if stats else None


def score_tile(problem: Problem, rows: Tensor, keys: Tensor, stage: Stage, lse: Tensor | None = None) -> Tensor:
    """One stage of the scores for some query rows and keys (int64 [n], [m]): [B, H, n, m], float32 or float64.

    raw: z = scale q.k, and capped: softcap tanh(z / softcap), of every pair, masked or not. biased: s = capped + bias,
    -inf where masked. prob: e^(s - lse), before dropout, 0 where masked; lse is that of all keys and the sink,
    [B, H, N], and is computed here when None.
    """
    if stage == "raw":
        return _raw(problem, rows, keys, None)
    if stage == "capped":
        return _capped(problem, _raw(problem, rows, keys, None))
    if stage not in STAGES:
        raise ValueError(f"stage is {stage!r}; pass one of {', '.join(STAGES)}")
    whole = stage == "prob" and lse is None
    cols = torch.arange(problem.shape[3], device=keys.device) if whole else keys
    visible, bias = _visible(problem, rows, cols)
    scores = _capped(problem, _raw(problem, rows, cols, visible)) + bias
    if stage == "biased":
        return torch.where(visible, scores, -math.inf)
    if lse is None:
        return _with_sink(problem, *_softmax(scores, visible), visible)[..., keys]
    return torch.where(visible, torch.where(visible, scores - lse[:, :, rows, None], 0.0).exp(), 0.0)


def _visible(problem: Problem, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Who sees whom [B, H, n, m], a -inf in the bias counting as masked, and the bias there (0 elsewhere)."""
    batch, heads, _, _ = problem.shape
    full = (batch, heads, rows.numel(), keys.numel())
    visible = torch.ones(full, dtype=torch.bool, device=rows.device)
    if problem.mask is not None:
        visible = problem.mask.evaluate(rows, keys, problem.offset, problem.shape).expand(full)
    dtype = _work_dtype(problem)
    bias = torch.zeros(full, dtype=dtype, device=rows.device)
    for term in problem.bias:
        bias = bias + term.evaluate(rows, keys, problem.offset, problem.shape, dtype)
    visible = visible & ~torch.isneginf(bias)
    return visible, torch.where(visible, bias, 0.0)


def _raw(problem: Problem, rows: Tensor, keys: Tensor, visible: Tensor | None) -> Tensor:
    """z = scale q.k for the visible pairs, 0 for others; for all pairs if visible is None."""
    dtype = _work_dtype(problem)
    q = problem.q[:, :, rows].to(dtype)  # [B, H, n, Dk]
    k = _for_heads(problem.k, problem)[:, :, keys]  # [B, H, m, Dk]
    if visible is None:
        dots = _product(q, k.mT)
    elif _finite(q, k):
        dots = torch.where(visible, _product(q, k.mT), 0.0)
    else:
        pair = visible[..., None]  # [B, H, n, m, 1]
        dots = (torch.where(pair, q[..., :, None, :], 0.0) * torch.where(pair, k[..., None, :, :], 0.0)).sum(-1)
    if isinstance(problem.scale, float):
        return dots * problem.scale
    scale = problem.scale if problem.scale.shape[2] == 1 else problem.scale[:, :, rows]
    return dots * scale[..., None]


def _capped(problem: Problem, raw: Tensor) -> Tensor:
    return raw if problem.softcap is None else problem.softcap * torch.tanh(raw / problem.softcap)


def _softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(s) over the visible keys [B, H, n, m], 0 elsewhere, and lse = log sum e^s [B, H, n]; no sink."""
    empty = ~visible.any(-1)
    # A shift by any constant gives the same p, so no gradient needs to pass through the maximum.
    base = torch.where(empty, 0.0, _extreme(scores.detach(), visible, torch.amax, -math.inf))
    powers = torch.where(visible, torch.where(visible, scores - base[..., None], 0.0).exp(), 0.0)
    total = torch.where(empty, 1.0, powers.sum(-1))
    p = torch.where(visible, powers / total[..., None], 0.0)
    return p, torch.where(empty, -math.inf, base + total.log())


def _with_sink(problem: Problem, p: Tensor, lse: Tensor, visible: Tensor) -> Tensor:
    """The weights of the keys when the sink takes its part: p e^lse / (e^lse + e^sink)."""
    if problem.sink is None:
        return p
    lse = torch.where(torch.isneginf(lse), 0.0, lse)  # an empty row has no weights anyway
    # The sigmoid by its logarithm, whose derivative is right also where next to nothing goes to the sink.
    share = torch.nn.functional.logsigmoid(lse - problem.sink[:, None]).exp()
    return torch.where(visible, p * share[..., None], 0.0)


def _mix(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """sum_j w_ij v_j over the visible keys: [B, H, n, Dv]."""
    if _finite(weights, v):
        return _product(weights, v)
    return (weights[..., None] * torch.where(visible[..., None], v[..., None, :, :], 0.0)).sum(-2)


def _packed(problem: Problem, raw: Tensor, scores: Tensor, visible: Tensor, p: Tensor, lse: Tensor) -> Tensor:
    """The fields of poise.stats.FIELDS in their order, none of which knows the sink."""
    count = visible.sum(-1).to(scores.dtype)  # [B, H, n]
    some = count.clamp_min(1)
    largest = _extreme(scores, visible, torch.amax, -math.inf)
    mean = torch.where(visible, scores, 0.0).sum(-1) / some
    var = torch.where(visible, scores - mean[..., None], 0.0).square().sum(-1) / some
    # A term with p = 0 contributes 0, also where the score is infinitely far below the largest.
    distance = torch.where(visible & (p != 0), scores - largest[..., None], 0.0)
    shift = (p * distance).sum(-1)
    empty = count == 0
    gaps = torch.where(visible, scores - torch.where(empty, 0.0, largest)[..., None], -math.inf)
    log_sum = torch.where(empty, 0.0, torch.where(empty[..., None], 0.0, gaps).exp().sum(-1).log())
    sink_mass = p[..., list(problem.sink_keys)].sum(-1)
    var_p = (p * (distance - shift[..., None]).square()).sum(-1)
    return torch.stack(
        [
            log_sum,
            largest,
            _extreme(raw, visible, torch.amax, -math.inf),
            _extreme(scores, visible, torch.amin, math.inf),
            mean,
            var,
            count,
            shift,
            var_p,
            p.square().sum(-1),
            torch.where(lse.isnan(), math.nan, sink_mass),  # such a row has no p, also if it sees no sink key
        ]
    )


def _extreme(value: Tensor, visible: Tensor, reduce: Callable[..., Tensor], empty: float) -> Tensor:
    """The largest or smallest visible value per row, `empty` where there is none; there may be no keys at all."""
    padding = value.new_full((*value.shape[:-1], 1), empty)
    return reduce(torch.cat([torch.where(visible, value, empty), padding], -1), -1)


def _for_heads(tensor: Tensor, problem: Problem) -> Tensor:
    """Keys or values as every query head sees them: [B, G, M, D] -> [B, H, M, D]."""
    heads, groups = problem.q.shape[1], tensor.shape[1]
    return tensor.to(_work_dtype(problem)).repeat_interleave(heads // max(groups, 1), dim=1)


def _work_dtype(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.q.dtype == torch.float64 else torch.float32


def _product(x: Tensor, y: Tensor) -> Tensor:
    with without_autocast(x.device):
        return x @ y


def _finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
