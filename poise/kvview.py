"""What a kernel must know of a cache: where keys and values lie, and how many of each sequence are there.

Plain data, made by the caches in poise.nn or by whoever keeps keys and values in another way, and handed to the
operator in place of k and v. No cache logic: nothing here appends, forgets or shares.

Letters: B sequences, G key/value heads, S places, P pages in a pool, Dk and Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False, slots=True)
class KVView:
    """The keys and values of B sequences, each of its own length, in one piece or in pages.

    Sequence b has the keys 0 ... lengths[b] - 1, in chronological order; masks and biases speak of these indices. A
    view shows its cache's memory as it is: use it before the cache changes, and make a new one afterwards.
    """

    k: Tensor  # [B, G, S, Dk] with S >= keys, or with pages a pool [P, G, page, Dk]; float, or int8 with scales
    v: Tensor  # [B, G, S, Dv] or [P, G, page, Dv]
    lengths: Tensor  # int32 [B], >= 0
    keys: int  # the largest length, known without asking the device
    even: bool  # whether all lengths are that one
    pages: Tensor | None = None  # int32 [B, T]: page t of a sequence holds its keys from t * page on; -1: no page
    k_scale: Tensor | None = None  # float32 [B, G, S] or [P, G, page], with int8: key = int8 * scale
    v_scale: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether k and v as they are say everything."""
        return self.even and self.pages is None and self.k_scale is None and self.k.size(2) == self.keys

    @property
    def dtype(self) -> torch.dtype:
        """What the keys and values are as numbers: int8 ones with their scales are float32."""
        return self.k.dtype if self.k_scale is None else torch.float32

    def trimmed(self) -> KVView:
        """Without the places that no sequence has filled; a pool stays as it is."""
        if self.pages is not None or self.k.shape[2] == self.keys:
            return self
        k, v, k_scale, v_scale = (
            None if x is None else x[:, :, : self.keys] for x in (self.k, self.v, self.k_scale, self.v_scale)
        )
        assert k is not None
        assert v is not None
        return replace(self, k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [B, G, keys, Dk] and values [B, G, keys, Dv] as ordinary tensors; arbitrary beyond a length."""
        k, v = (
            self._gathered(x).to(dtype)
            if scale is None
            else self._gathered(x).to(dtype) * self._gathered(scale)[..., None]
            for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return k, v

    def _gathered(self, stored: Tensor) -> Tensor:
        if self.pages is None:
            return stored[:, :, : self.keys]
        size = stored.shape[2]
        chosen = stored[self.pages[:, : -(-self.keys // size)].clamp_min(0)]  # [B, T, G, page, ...]
        return chosen.transpose(1, 2).flatten(2, 3)[:, :, : self.keys]

    def describe(self) -> str:
        """One line for `explain`."""
        kind = str(self.k.dtype).removeprefix("torch.")
        shape = "in one piece" if self.pages is None else f"in pages of {self.k.shape[2]}"
        return f"{kind} keys {shape}, " + ("all of one length" if self.even else "of different lengths")

    def check(self, q: Tensor) -> None:
        """Raises unless the fields fit each other and queries [B, H, N, Dk]; reads no lengths and no pages."""
        for name in ("k", "v", "lengths", "pages", "k_scale", "v_scale"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and (value is not None or name in ("k", "v", "lengths")):
                raise TypeError(f"KVView.{name} must be a torch.Tensor; got {type(value).__name__}")
            if value is not None and value.device != self.k.device:
                raise ValueError(f"KVView.{name} must be on the device of k, {self.k.device}; got {value.device}")
        _check_stored("k", self.k, self.k_scale)
        _check_stored("v", self.v, self.v_scale)
        if self.k.shape[:3] != self.v.shape[:3] or self.k.dtype != self.v.dtype:
            raise ValueError(
                "KVView.k and v must agree in all but their last dim, and in dtype; got "
                f"{list(self.k.shape)} {self.k.dtype} and {list(self.v.shape)} {self.v.dtype}"
            )
        if (self.k_scale is None) != (self.v_scale is None):
            raise ValueError("KVView.k_scale and v_scale must be given together")
        if self.lengths.dtype != torch.int32 or self.lengths.dim() != 1:
            raise ValueError(f"KVView.lengths must be int32 [B]; got {self.lengths.dtype} {list(self.lengths.shape)}")
        if isinstance(self.keys, bool) or not isinstance(self.keys, int) or self.keys < 0:
            raise ValueError(f"KVView.keys must be the largest length, an int; got {self.keys!r}")
        batch = self.lengths.shape[0]
        if self.pages is None:
            rows, places = self.k.shape[0], self.k.shape[2]
        elif self.pages.dtype != torch.int32 or self.pages.dim() != 2 or self.pages.stride(1) not in (0, 1):
            raise ValueError(
                "KVView.pages must be int32 [B, T] with a contiguous last dim; "
                f"got {self.pages.dtype} {list(self.pages.shape)}"
            )
        else:
            rows, places = self.pages.shape[0], self.pages.shape[1] * self.k.shape[2]
        if rows != batch or places < self.keys:
            where = "k" if self.pages is None else "pages"
            raise ValueError(
                f"KVView.{where} must hold {batch} sequences of up to {self.keys} keys, as lengths and keys say; "
                f"it holds {rows} of up to {places}"
            )
        if self.k.device != q.device:
            raise ValueError(f"q must be on the device of the cache, {self.k.device}; got {q.device}")
        if batch != q.shape[0]:
            raise ValueError(f"q must have a row per cached sequence, {batch}; got {list(q.shape)} as [B, H, N, D]")
        if (q.dtype is torch.float64) != (self.dtype is torch.float64) and self.k_scale is None:
            raise TypeError(f"float64 queries and a float64 cache go together only; got q {q.dtype}, k {self.dtype}")
        if q.shape[3] != self.k.shape[3]:
            raise ValueError(f"q must have the head dim of the cached keys, {self.k.shape[3]}; got {q.shape[3]}")
        heads, groups = q.shape[1], self.k.shape[1]
        if heads != groups and (groups == 0 or heads % groups):
            raise ValueError(f"the heads of q must be a multiple of the {groups} in the cache; got {heads}")


def _check_stored(name: str, stored: Tensor, scale: Tensor | None) -> None:
    if stored.dim() != 4:
        raise ValueError(
            f"KVView.{name} must have 4 dims, [B, G, S, D] or a pool [P, G, page, D]; got {list(stored.shape)}"
        )
    if stored.shape[3] > 1 and stored.stride(3) != 1:
        raise ValueError(f"KVView.{name} must have a contiguous last dim; got strides {list(stored.stride())}")
    if stored.dtype not in (*FLOATS, torch.int8):
        raise TypeError(f"KVView.{name} must be float32, bfloat16, float16, float64 or int8; got {stored.dtype}")
    if (scale is None) != (stored.dtype != torch.int8):
        raise ValueError(f"KVView.{name}_scale goes with int8, and int8 with it; {name} is {stored.dtype}")
    if scale is not None and (scale.dtype != torch.float32 or scale.shape != stored.shape[:3]):
        raise ValueError(
            f"KVView.{name}_scale must be float32 {list(stored.shape[:3])}; got {scale.dtype} {list(scale.shape)}"
        )
