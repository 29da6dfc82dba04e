"""Performer: softmax attention estimated with positive random features, in time and memory linear in the length.

FAVOR+ (arXiv:2009.14794): e^(scale q·k) is the mean over random ω of e^(ω·q̂ - |q̂|²/2) e^(ω·k̂ - |k̂|²/2) with
x̂ = √scale · x. With m fixed ω's, the sum over keys no longer depends on the query: each ω pools the values once, by a
softmax over keys of ω·k̂ - |k̂|²/2, and each query then attends to the m pools, whose log-sums are a bias. Both steps are
exact attention, so the operator runs them: nothing of size N x m is stored, and no constant need keep sums from
underflowing.

The causal form carries the pools of a prefix from chunk to chunk, and takes pairs inside a chunk one by one, each
scaled by its own query and key and by the largest key so far. What comes later therefore changes no earlier output, not
in a bit. One token at a time, the state is all there is to keep: [m, Dv + 1] numbers per head.

An estimate: its error falls as 1/√m and grows steeply with the size of the scores. docs/variants.md has it measured.

Letters: B batch, H query heads, G key/value heads, N queries, M keys, D head dim, m features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from poise.kernels.selective import mix
from poise.mask import Keep
from poise.nn.attention import Call
from poise.op import observe
from poise.variants.calls import PLAIN, check_heads, check_padding, refuse


class PerformerState(NamedTuple):
    """What a prefix of keys and values leaves behind, float32 (float64 for float64 values)."""

    pooled: Tensor  # [B, G, m, Dv] each feature's softmax-weighted mean of the values
    lse: Tensor  # [B, G, m] and the logarithm of that softmax's sum; -inf without keys


class Performer(nn.Module):
    """Attention by m positive features, drawn once and frozen: `redraw` alone draws others.

    head_dim: D of q and k.
    features: m; None for D ln D.
    orthogonal: features in orthogonal groups of D, which never estimates worse; else independent ones.
    scale: of the scores estimated; None for 1/√D.
    chunk: how many positions the causal form takes at once.
    seed: of the draw; the features are a buffer of the state dict.

    >>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    >>> Performer(64)(q, k, v).shape
    torch.Size([1, 8, 4096, 64])
    """

    omega: Tensor  # [m, D]

    def __init__(
        self,
        head_dim: int,
        features: int | None = None,
        *,
        orthogonal: bool = True,
        scale: float | None = None,
        chunk: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if features is None:
            features = max(1, int(head_dim * math.log(head_dim)))
        for name, value in (("head_dim", head_dim), ("features", features), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"Performer: {name} must be at least 1; got {value}")
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise ValueError(
                f"Performer: scale must be positive and finite, its root scales the features; got {scale}. "
                "Pass None for 1 / sqrt(head_dim)"
            )
        self.head_dim, self.orthogonal, self.chunk = head_dim, orthogonal, chunk
        self.scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("omega", draw_features(features, head_dim, orthogonal, generator))

    def extra_repr(self) -> str:
        return f"features={len(self.omega)}, head_dim={self.head_dim}"

    def __repr__(self) -> str:
        return f"Performer({self.extra_repr()})"

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draws new features, in training only: the outputs of an evaluated model must not change under it."""
        if not self.training:
            raise RuntimeError("Performer.redraw: the module is in eval mode, where features are frozen. Call .train()")
        self.omega.copy_(draw_features(len(self.omega), self.head_dim, self.orthogonal, generator))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN) -> Tensor:
        """[B, H, N, Dv] from q [B, H, N, D], k [B, G, M, D], v [B, G, M, Dv]; of `call`, causal and padding count."""
        self._check(q, k, v, call)
        if call.visible.causal:
            return self.extend(q, k, v, call=call)[0]
        return self._read(q, self._pool(k, v, call.visible.padding))[0]

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: PerformerState | None = None, call: Call = PLAIN
    ) -> tuple[Tensor, PerformerState]:
        """The causal form over tokens that follow those of `state`: their outputs, and the state after them.

        Any split into calls gives the same outputs. A call with one token costs the same however many came before.
        """
        self._check(q, k, v, call)
        if q.shape[2] != k.shape[2] or q.shape[2] == 0:
            raise ValueError(
                f"Performer: the causal form needs as many queries as keys, one at least; got {q.shape[2]} and "
                f"{k.shape[2]}. For tokens after a prefix call extend() with its state"
            )
        outs, padding = [], call.visible.padding
        for start in range(0, q.shape[2], self.chunk):
            part = slice(start, start + self.chunk)
            keys = None if padding is None else padding[:, part]
            out, state = self._step(q[:, :, part], k[:, :, part], v[:, :, part], state, keys)
            outs.append(out)
        assert state is not None
        return torch.cat(outs, 2), state

    def features(self, x: Tensor) -> Tensor:
        """φ(x) [.., m], whose products φ(q)·φ(k) are unbiased estimates of e^(scale q·k). Large x may overflow here."""
        return (self._logits(x) - self._half_norm(x)).exp() / math.sqrt(len(self.omega))

    def _logits(self, x: Tensor) -> Tensor:
        """ω·x̂: [.., m]"""
        return math.sqrt(self.scale) * (x @ self.omega.to(x.dtype).mT)

    def _half_norm(self, x: Tensor) -> Tensor:
        """|x̂|²/2: [.., 1]"""
        return self.scale / 2 * x.square().sum(-1, keepdim=True)

    def _omega(self, like: Tensor) -> Tensor:
        """[B, G, m, D], a view."""
        return self.omega.to(like.dtype).expand(*like.shape[:2], -1, -1)

    def _pool(self, k: Tensor, v: Tensor, keys: Tensor | None) -> PerformerState:
        """Each feature attends to the keys."""
        bias = -self._half_norm(_exact(k)).mT  # [B, G, 1, M]
        mask = None if keys is None else Keep(keys[:, None, None])
        pooled, stats = observe(self._omega(k), k, v, mask=mask, bias=bias, scale=math.sqrt(self.scale))
        return PerformerState(_exact(pooled), stats.lse)

    def _read(self, q: Tensor, state: PerformerState) -> tuple[Tensor, Tensor]:
        """Each query attends to the features: [B, H, N, Dv], and [B, H, N] the log of its sum, less |q̂|²/2."""
        pooled, lse = state
        bias = lse.repeat_interleave(q.shape[1] // lse.shape[1], 1)[:, :, None]  # [B, H, 1, m]
        omega = self.omega.to(q.dtype).expand(*lse.shape[:2], -1, -1)
        out, stats = observe(q, omega, pooled.to(q.dtype), bias=bias, scale=math.sqrt(self.scale))
        return out, stats.lse

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, state: PerformerState | None, keys: Tensor | None
    ) -> tuple[Tensor, PerformerState]:
        """One chunk."""
        after = self._pool(k, v, keys)
        if state is not None:
            after = _joined(state, after)
        if q.shape[2] == 1:
            return self._read(q, after)[0], after
        out, lse = self._within(q, k, v, keys)
        if state is not None:
            before, before_lse = self._read(q, state)
            # A row without a key in either has -inf twice, and 0 for both outputs.
            share = torch.sigmoid((lse - before_lse).nan_to_num(0.0, math.inf, -math.inf))[..., None]
            out = share * out + (1 - share) * before
        return out.to(q.dtype), after

    def _within(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pairs inside one chunk, causal: output [B, H, C, Dv] and log-sum [B, H, C].

        A weight is e^(a_i + b_j) Σ_f e^(lq_if - a_i) e^(lk_jf - b_j), a and b being the largest of the query's and the
        key's own exponents. Should the sum underflow, the floor keeps the row defined.
        """
        group = q.shape[1] // k.shape[1]
        q, k, v = _exact(q), _exact(k).repeat_interleave(group, 1), _exact(v).repeat_interleave(group, 1)
        lq, lk = self._logits(q), self._logits(k) - self._half_norm(k)
        a, b = lq.detach().amax(-1), lk.detach().amax(-1)  # they cancel, so no derivative passes through them
        products = (lq - a[..., None]).exp() @ (lk - b[..., None]).exp().mT  # [B, H, C, C]
        size = q.shape[2]
        visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        if keys is not None:
            visible = visible & keys[:, None, None]
            b = b.masked_fill(~keys[:, None], -math.inf)
        largest = b.cummax(-1).values  # [B, H, C], over the keys so far
        relative = (b[:, :, None] - largest[..., None]).masked_fill(~visible, -math.inf).exp()
        floor = torch.finfo(products.dtype).tiny
        weights = torch.where(visible, relative * products.clamp_min(floor), 0.0)
        total = weights.sum(-1)
        # 0 * NaN: an ordinary product would show a later value that is not finite to the rows before it.
        out = weights @ v if bool(v.isfinite().all()) else mix(weights, v, visible.expand(weights.shape))
        empty = total == 0
        lse = (a + largest + total.masked_fill(empty, 1.0).log()).masked_fill(empty, -math.inf)
        return out / total.masked_fill(empty, 1.0)[..., None], lse

    def _check(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        refuse("Performer", call, "mask", "bias", "softcap", "sink", "dropout", "q_offset")
        check_heads("Performer", q, k, v)
        check_padding("Performer", call.visible.padding, k)
        if q.shape[3] != self.head_dim or k.shape[3] != self.head_dim:
            raise ValueError(
                f"Performer: the features were drawn for head dim {self.head_dim}; q has {q.shape[3]}, k {k.shape[3]}"
            )
        if call.scale is not None and call.scale != self.scale:
            raise ValueError(
                f"Performer: made for scale {self.scale:g}, called with {call.scale}. Pass scale= when making it"
            )


def draw_features(count: int, dim: int, orthogonal: bool, generator: torch.Generator | None = None) -> Tensor:
    """[count, dim], each row normally distributed; if orthogonal, every dim rows in a group at right angles."""
    independent = torch.randn(count, dim, generator=generator)
    if not orthogonal:
        return independent
    groups = -(-count // dim)
    q, r = torch.linalg.qr(torch.randn(groups, dim, dim, generator=generator))
    # Signs that the factorisation chose would not be uniform; those of the diagonal make it unique.
    directions = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.reshape(groups * dim, dim)[:count]
    features: Tensor = directions * independent.norm(dim=1, keepdim=True)
    return features


def _joined(x: PerformerState, y: PerformerState) -> PerformerState:
    """The state of two disjoint sets of keys."""
    largest = torch.maximum(x.lse, y.lse).detach()
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    total = (x.lse - largest).exp() + (y.lse - largest).exp()
    # Not torch.logaddexp: where neither has a key, its derivative is NaN.
    lse = (largest + total.masked_fill(total == 0, 1.0).log()).masked_fill(total == 0, -math.inf)
    share = torch.sigmoid((y.lse - x.lse).nan_to_num(0.0, math.inf, -math.inf))[..., None]
    return PerformerState(torch.lerp(x.pooled, y.pooled, share), lse)


def _exact(x: Tensor) -> Tensor:
    """Half precision as float32: sums over a whole prefix need more than its 8 bits."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
