"""Attention one tile at a time in plain torch ops: any device, any float dtype, any order of derivative.

A tile is a block of query rows against every key those rows may see, for a few heads (tiles.py). The forward pass keeps
no tile and the backward pass computes each again: both take O(N * block) memory. What needs the whole graph (double
backward, forward mode, torch.func transforms) gets the same tiles recorded by torch, in O(N * M).

This file validates nothing (arguments.py), lowers nothing (plan.py): it evaluates the mask and bias objects per tile.

Masked pairs never matter, whatever their q, k, v, bias or incoming gradient holds. Elementwise that is a `where`; in
sums over keys (over queries, backward) 0 * NaN would leak, so that calls with a NaN or an infinity sum over visible
pairs only (selective.py), and all others use ordinary products.

Letters: B batch, H query heads, G key/value heads, N queries, M keys; b, h, g, n, m their extents in a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from poise.dropout import keep
from poise.kernels.program import constants
from poise.kernels.selective import mix, needs_care, pair
from poise.kernels.tiles import (
    Tile,
    compute_dtype,
    cut,
    hollow,
    indices,
    kinds,
    of_tile,
    operands,
    part_of,
    tiles,
    unwrapped,
    upcast,
    with_operands,
)
from poise.problem import Problem, without_autocast
from poise.score import Bias, Dense
from poise.stats import FIELDS

_unpack_dual: Any = forward_ad.unpack_dual  # torch leaves it untyped
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # of autograd's own vmap, as in grad(is_grads_batched=True)

# Statistics of a row that sees nothing; 0 where not named.
_EMPTY = {"max_score": -math.inf, "max_logit": -math.inf, "min_score": math.inf}


def run(problem: Problem, stats: bool) -> tuple[Tensor, Tensor | None]:
    """Output [B, H, N, Dv] in q's dtype and, if asked for, the packed statistics [11, B, H, N]."""
    problem = unwrapped(problem)
    tensors = operands(problem)
    with without_autocast(problem.q.device):
        careful = needs_care(problem, *tensors[:3])
        if _transformed(tensors):
            return _recorded(problem, stats, careful)
        if _wants_grad(tensors):
            # The graph holds the operands as saved tensors, where in-place checks and offloading hooks see them.
            result: tuple[Tensor, Tensor | None] = _Attention.apply(hollow(problem), stats, careful, *tensors)  # type: ignore[no-untyped-call]
            return result
        return _swept(problem, stats, careful)


def received(problem: Problem, lse: Tensor) -> Tensor:
    """What each key receives, the sum over queries of e^(s - lse): [B, H, M], for the lse [B, H, N] of the same call.

    O(N * block) memory, O(N * M) if a derivative is wanted.
    """
    problem = unwrapped(problem)
    tensors, dtype = operands(problem), compute_dtype(problem)
    batch, heads, _, keys = problem.shape
    recorded = _transformed([*tensors, lse]) or _wants_grad([*tensors, lse])
    total = torch.zeros((batch, heads, keys), dtype=dtype, device=problem.q.device)
    with without_autocast(problem.q.device):
        careful = needs_care(problem, *tensors[:2])
        prepared = upcast(problem)
        for tile, visible in tiles(problem, whole=recorded):
            scores = _scores(part_of(problem, tile, prepared), tile, visible, careful)
            row_lse = lse[tile.batch, tile.heads, tile.rows, None].to(dtype)  # [b, h, n, 1]
            if scores.empty is not None:  # its lse is -inf or the sink's, its scores are stand-ins
                row_lse = torch.where(scores.empty, 0.0, row_lse)
            share = (scores.s - row_lse).exp()
            if scores.visible is not None:
                share = torch.where(scores.visible, share, 0.0)
            share = share.sum(-2)  # [b, h, m]
            if recorded:
                total = total + torch.nn.functional.pad(share, (tile.keys.start, keys - tile.keys.stop))
            else:
                total[tile.batch, tile.heads, tile.keys] += share
    return total


# Three ways over the tiles: swept (nothing is recorded), recorded (everything is), swept and computed again backward.


def _swept(problem: Problem, stats: bool, careful: bool) -> tuple[Tensor, Tensor | None]:
    """Every tile's results straight into their place."""
    dtype = compute_dtype(problem)
    batch, heads, queries, _ = problem.shape
    q, width = problem.q, problem.v.shape[-1]
    if q.stride(1) < q.stride(2):  # q is a transposed [B, N, H, D]: so is the output
        out = q.new_empty((batch, queries, heads, width)).transpose(1, 2)
    else:
        out = q.new_empty((batch, heads, queries, width))
    packed = torch.empty((len(FIELDS), batch, heads, queries), dtype=dtype, device=q.device) if stats else None
    with torch.no_grad():
        prepared = upcast(problem)
        for tile, visible in tiles(problem):
            tile_out, tile_packed = _attend(part_of(problem, tile, prepared), tile, visible, careful, stats)
            out[tile.batch, tile.heads, tile.rows] = tile_out
            if packed is not None and tile_packed is not None:
                packed[:, tile.batch, tile.heads, tile.rows] = tile_packed
    return out, packed


def _recorded(problem: Problem, stats: bool, careful: bool) -> tuple[Tensor, Tensor | None]:
    """One graph of torch ops without a write in place: what torch can do to those, it can do to the call."""
    prepared = upcast(problem)
    results = [
        _attend(part_of(problem, tile, prepared), tile, visible, careful, stats)
        for tile, visible in tiles(problem, whole=True)
    ]
    out = torch.cat([out for out, _ in results], 2).to(problem.q.dtype)
    return out, torch.cat([packed for _, packed in results if packed is not None], 3) if stats else None


class _Attention(torch.autograd.Function):
    """`_swept`; its first derivative computes every tile again, higher ones go through `_recorded`."""

    @staticmethod
    def forward(ctx: Any, shell: Problem, stats: bool, careful: bool, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        ctx.shell, ctx.careful = shell, careful
        ctx.save_for_backward(*tensors, *constants(shell))
        ctx.set_materialize_grads(False)
        return _swept(with_operands(shell, tensors), stats, careful)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_packed: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        problem = with_operands(ctx.shell, ctx.saved_tensors[: len(wanted)])
        with without_autocast(problem.q.device):
            # A NaN that comes in at one row must not reach the values which that row does not see.
            careful = ctx.careful or (d_out is not None and needs_care(problem, d_out))
            watched = torch.is_grad_enabled() or _transformed([x for x in (d_out, d_packed) if x is not None])
            gradients = _recorded_gradients if watched else _swept_gradients
            return None, None, None, *gradients(problem, wanted, careful, d_out, d_packed)


def _swept_gradients(
    problem: Problem, wanted: Sequence[bool], careful: bool, d_out: Tensor | None, d_packed: Tensor | None
) -> list[Tensor | None]:
    """Gradients of the operands, every tile's part added to its place."""
    tensors, dtype = operands(problem), compute_dtype(problem)
    prepared = upcast(problem)
    totals = [torch.zeros_like(x, dtype=dtype) if want else None for x, want in zip(tensors, wanted, strict=True)]
    for tile, visible in tiles(problem):
        leaves = [
            cut(kind, tensor, tile).detach().to(dtype).requires_grad_(want)
            for kind, tensor, want in zip(kinds(problem), prepared, wanted, strict=True)
        ]
        with torch.enable_grad():
            results = _attend(of_tile(problem, tile, leaves), tile, visible, careful, d_packed is not None)
        incoming = (
            None if d_out is None else d_out[tile.batch, tile.heads, tile.rows].to(dtype),
            None if d_packed is None else d_packed[:, tile.batch, tile.heads, tile.rows],
        )
        parts = _pulled(results, incoming, [leaf for leaf in leaves if leaf.requires_grad], create_graph=False)
        places = [
            cut(kind, total, tile) for kind, total in zip(kinds(problem), totals, strict=True) if total is not None
        ]
        for place, part in zip(places, parts, strict=True):
            if part is not None:
                place += part
    return [None if total is None else total.to(x.dtype) for total, x in zip(totals, tensors, strict=True)]


def _recorded_gradients(
    problem: Problem, wanted: Sequence[bool], careful: bool, d_out: Tensor | None, d_packed: Tensor | None
) -> list[Tensor | None]:
    """The same, made of torch ops on the saved operands, so that it can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that a dependence of one operand on another (k made from q) is not followed here.
        inputs = [tensor.view_as(tensor) for tensor in operands(problem)]
        results = _recorded(with_operands(problem, inputs), d_packed is not None, careful)
    sources = [source for source, want in zip(inputs, wanted, strict=True) if want]
    parts = iter(_pulled(results, (d_out, d_packed), sources, create_graph=again))
    return [next(parts) if want else None for want in wanted]


def _pulled(
    results: Sequence[Tensor | None], incoming: Sequence[Tensor | None], sources: list[Tensor], create_graph: bool
) -> Sequence[Tensor | None]:
    """torch.autograd.grad, also when a result has no gradient or does not depend on any source."""
    pairs = [
        (x, g) for x, g in zip(results, incoming, strict=True) if x is not None and g is not None and x.requires_grad
    ]
    if not pairs or not sources:
        return [None] * len(sources)
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, sources, gradients, create_graph=create_graph, allow_unused=True)


# One tile. `part` is the problem cut to it.


class _Scores(NamedTuple):
    z: Tensor  # [b, h, n, m] scaled, before cap and bias; arbitrary where masked
    s: Tensor  # [b, h, n, m] -inf where masked, but 0 in an empty row, whose softmax must stay finite
    visible: Tensor | None  # [b, h, n, m]; None: every pair is
    empty: Tensor | None  # [b|1, h|1, n, 1]; None: no row is


def _scores(part: Problem, tile: Tile, visible: Tensor | None, careful: bool) -> _Scores:
    """Everything up to the softmax; `visible` is the mask's answer, [b|1, h|1, n, m]."""
    q, k = part.q, part.k
    b, h, n, m = part.shape
    g, d = k.shape[1], k.shape[3]
    bias: Tensor | None = None  # [b|1, h|1, n|1, m|1]
    for term in part.bias:
        values = _evaluated(term, part, tile)
        bias = values if bias is None else bias + values
    if bias is not None:
        seen = (bias != -math.inf).expand(-1, -1, n, m)
        visible = seen if visible is None else visible & seen
    empty = None
    if visible is not None:
        empty = ~visible.any(-1, keepdim=True)
        visible = visible.expand(b, h, n, m)
        if careful:  # a learned scale must not see the query of an empty row either
            q = torch.where(empty, 0.0, q)
    elif m == 0:
        empty = torch.ones((1, 1, n, 1), dtype=torch.bool, device=q.device)
    q = q * (part.scale[..., None] if isinstance(part.scale, Tensor) else part.scale)
    rows = q.reshape(b, g, h // max(g, 1) * n, d)  # query heads that share keys are more rows to them
    if careful and visible is not None:
        z = pair(rows, k, visible.reshape(b, g, rows.shape[2], m)).view(b, h, n, m)
    else:
        z = (rows @ k.mT).view(b, h, n, m)
    s = z
    if part.softcap is not None:
        # tanh of a NaN would leak backward, past the `where` below.
        inner = z if visible is None else torch.where(visible, z, 0.0)
        s = part.softcap * torch.tanh(inner / part.softcap)
    if bias is not None:
        s = s + bias
    if visible is not None and empty is not None:
        s = torch.where(visible, s, torch.where(empty, 0.0, -math.inf).to(s.dtype))
    return _Scores(z, s, visible, empty)


def _attend(
    part: Problem, tile: Tile, visible: Tensor | None, careful: bool, stats: bool
) -> tuple[Tensor, Tensor | None]:
    """Output [b, h, n, Dv] and packed statistics [11, b, h, n]."""
    scores = _scores(part, tile, visible, careful)
    v, s = part.v, scores.s
    b, h, n, m = s.shape
    g, d = v.shape[1], v.shape[3]

    def selected(x: Tensor) -> Tensor:
        # A row that attends a NaN is NaN throughout, and the gradient of v would carry that to keys it does not see.
        return x if scores.visible is None else torch.where(scores.visible, x, 0.0)

    weights = p = selected(torch.softmax(s, -1))
    if part.sink is not None:
        # The keys' share, e^lse / (e^lse + e^sink), in the form that can't overflow and whose derivative can't vanish.
        share = torch.nn.functional.logsigmoid(_log_sum_exp(s) - part.sink[:, None]).exp()
        weights = selected(p * share[..., None])
    if part.dropout:
        weights = torch.where(_kept(part, tile), weights, 0.0)
    weights = weights.reshape(b, g, h // max(g, 1) * n, m)
    if careful and scores.visible is not None:
        out = mix(weights, v, scores.visible.reshape(weights.shape)).view(b, h, n, d)
    else:
        out = (weights @ v).view(b, h, n, d)
    if part.dropout:
        out = out / (1.0 - part.dropout)
    if scores.empty is not None:
        out = torch.where(scores.empty, 0.0, out)
    return out, _statistics(part, tile, scores, p) if stats else None


def _log_sum_exp(s: Tensor) -> Tensor:
    """log sum e^s over the keys, [b, h, n]. An attended +inf shows as NaN, as in the softmax, not as torch's inf."""
    if s.shape[-1] == 0:
        return s.new_full(s.shape[:-1], -math.inf)
    base = s.detach().amax(-1, keepdim=True)  # any constant gives the same value, so no derivative passes here
    return base[..., 0] + (s - base).exp().sum(-1).log()


def _statistics(part: Problem, tile: Tile, scores: _Scores, p: Tensor) -> Tensor:
    """The fields of stats.FIELDS, stacked: [11, b, h, n]."""
    z, s, visible, empty = scores
    if s.shape[-1] == 0:
        return torch.stack([s.new_full(s.shape[:-1], _EMPTY.get(name, 0.0)) for name in FIELDS])
    count = s.new_full(s.shape[:-1], s.shape[-1]) if visible is None else visible.sum(-1, dtype=s.dtype)

    def seen(value: Tensor, otherwise: float) -> Tensor:
        return value if visible is None else torch.where(visible, value, otherwise)

    largest = s.amax(-1)
    distance = s - largest[..., None]
    log_sum = distance.exp().sum(-1).log()
    # Where p is 0 a term counts for nothing, however far down the score is.
    gap = torch.where(p == 0, 0.0, distance)
    shift = (p * gap).sum(-1)
    each = 1.0 / count.clamp_min(1.0)[..., None]
    mean = (seen(s, 0.0) * each).sum(-1)  # divided first: a sum of huge biases may overflow where their mean does not
    sinks = [key - tile.keys.start for key in part.sink_keys if tile.keys.start <= key < tile.keys.stop]
    # A row without a p has no mass either, also if it sees no sink key.
    mass = sum((p[..., key] for key in sinks), torch.zeros_like(shift))
    fields = {
        "log_sum": log_sum,
        "max_score": largest,
        "max_logit": largest if part.softcap is None and not part.bias else seen(z, -math.inf).amax(-1),
        "min_score": seen(s, math.inf).amin(-1),
        "mean": mean,
        "var": (seen(s - mean[..., None], 0.0).square() * each).sum(-1),
        "count": count,
        "shift": shift,
        "var_p": (p * (gap - shift[..., None]).square()).sum(-1),
        "collision": p.square().sum(-1),
        "sink_mass": torch.where(log_sum.isnan(), math.nan, mass),
    }
    if empty is not None:
        fields = {name: torch.where(empty[..., 0], _EMPTY.get(name, 0.0), x) for name, x in fields.items()}
    return torch.stack([fields[name] for name in FIELDS])


def _evaluated(term: Bias, part: Problem, tile: Tile) -> Tensor:
    """One bias over the tile; a dense one is read where it lies: [b|1, h|1, n|1, m|1]."""
    if isinstance(term, Dense):
        return term.tensor
    device = part.q.device
    return term.evaluate(indices(tile.rows, device), indices(tile.keys, device), part.offset, part.shape, part.q.dtype)


def _kept(part: Problem, tile: Tile) -> Tensor:
    """Which weights dropout keeps: bool [b, h, n, m]."""
    device = part.q.device
    b, h = indices(tile.batch, device)[:, None], indices(tile.heads, device)[None, :]
    rows, keys = indices(tile.rows, device), indices(tile.keys, device)
    return keep(part.seed, b, h, tile.all_heads, rows, keys, part.dropout)


def _wants_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _transformed(tensors: Sequence[Tensor]) -> bool:
    """Whether something other than plain autograd is watching: torch.func, dual numbers or a compiler."""
    if torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return True
    return any(_is_batched(tensor) or _unpack_dual(tensor).tangent is not None for tensor in tensors)
