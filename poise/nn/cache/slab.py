"""Caches that hold every sequence in one piece: growing, of fixed capacity, int8, and rolling.

Memory is [B, G, places, D] per layer; all sequences begin at the same place, so that a view is a slice and nothing is
copied to read it.

Letters: B sequences, G key/value heads, n tokens appended at once, D a head dim.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from poise.mask import Mask, causal, prefix, window
from poise.nn.cache.base import Cache, CacheFull, Layer, fresh

_FEWEST = 64  # places to begin with: a token at a time would otherwise double 1, 2, 4, ...


class Slab(Cache):
    """What the caches in one piece have in common; not a cache by itself."""

    @abstractmethod
    def _room(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        """Makes places for counts[b] tokens after stored[b], or raises; may drop what the new tokens can't see."""

    def _store(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        self._room(state, new, counts)
        n, held = new[0].shape[2], state.stored[0] if state.stored else 0
        if all(count == n for count in counts) and all(stored == held for stored in state.stored):
            for part, tokens in zip(state.parts, new, strict=True):
                part[:, :, state.first + held : state.first + held + n] = tokens
            return
        b, column, index = self._targets(state, n, counts)
        for part, tokens in zip(state.parts, new, strict=True):
            part[b, :, state.first + index] = tokens[b, :, column]

    def _shown(self, state: Layer, keys: int) -> tuple[list[Tensor], Tensor | None]:
        return [part[:, :, state.first : state.first + keys] for part in state.parts], None

    def _permute(self, rows: list[int]) -> None:
        moved = [b for b, row in enumerate(rows) if b != row]
        for state in self._layers.values():
            filled = slice(state.first, state.first + max(state.stored))
            for i, part in enumerate(state.parts):
                if len(rows) == part.shape[0]:
                    if moved:
                        part[moved, :, filled] = part[[rows[b] for b in moved], :, filled]
                    continue
                wider = torch.zeros((len(rows), *part.shape[1:]), dtype=part.dtype, device=part.device)
                wider[:, :, filled] = part[rows, :, filled]
                state.parts[i] = wider


class Evictable(Slab):
    """A cache in one piece whose tokens may be dropped one by one; not a cache by itself."""

    def keep(self, layer: int, kept: Tensor) -> None:
        """Drops every token of a layer that is not kept: bool [B, 1|G, keys], keys as in the view, each sequence with
        the same number in all heads. What stays closes ranks: masks and biases count anew. See evict.py for policies.
        """
        state = self._layer(layer)
        keys, device = max(state.stored, default=0), state.parts[0].device
        batch, groups = state.parts[0].shape[:2]
        if not isinstance(kept, Tensor) or kept.dtype is not torch.bool:
            raise TypeError(f"kept must be a bool tensor; got {getattr(kept, 'dtype', type(kept).__name__)}")
        if kept.dim() != 3 or kept.shape[0] != batch or kept.shape[1] not in (1, groups) or kept.shape[2] != keys:
            raise ValueError(f"kept must be [{batch}, 1 or {groups}, {keys}]; got {list(kept.shape)}")
        held = torch.tensor(state.stored, device=device)[:, None, None]
        kept = (kept.to(device) & (torch.arange(keys, device=device) < held)).expand(batch, groups, keys)
        counts = kept.sum(-1)
        if not bool((counts == counts[:, :1]).all()):
            raise ValueError("kept must hold as many tokens in every head of a sequence; the lengths are per sequence")
        with torch.inference_mode(False), torch.no_grad():
            left: list[int] = counts[:, 0].tolist()
            for part in state.parts:
                part[:, :, : max(left)] = gathered(part[:, :, :keys], kept)[:, :, : max(left)]
        for b in range(batch):
            if left[b] < state.stored[b]:
                state.floor[b] = state.seen[b]
        state.stored, state.lengths = left, None


class GrowingCache(Evictable):
    """Grows as it must, at least to twice what it has: n tokens cost O(n) copying in all."""

    def _room(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        need = max((held + count for held, count in zip(state.stored, counts, strict=True)), default=0)
        places = state.parts[0].shape[2] if state.parts else 0
        if need <= places and state.parts:
            return
        larger = fresh(new, (*new[0].shape[:2], max(need, 2 * places, _FEWEST)))
        for part, old in zip(larger, state.parts, strict=False):
            part[:, :, :places] = old
        state.parts = larger


class QuantCache(GrowingCache):
    """A growing cache of int8 with a scale per token and head: half of bfloat16's memory and traffic, see int8.py."""

    def __init__(self) -> None:
        super().__init__(torch.int8)


class StaticCache(Evictable):
    """Room for `capacity` tokens per sequence, allocated at once and never moved; more raise CacheFull."""

    def __init__(self, capacity: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(dtype)
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be a positive number of tokens; got {capacity!r}")
        self.capacity = capacity

    def _room(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        for b, (held, count) in enumerate(zip(state.stored, counts, strict=True)):
            if held + count > self.capacity:
                raise CacheFull(
                    f"sequence {b} holds {held} of {self.capacity} tokens: {count} more need {count} free places, and "
                    f"{self.capacity - held} are free. Make the cache larger, or truncate or free the sequence",
                    count,
                    self.capacity - held,
                )
        if not state.parts:
            state.parts = fresh(new, (*new[0].shape[:2], self.capacity))


class RollingCache(Slab):
    """The first `sinks` tokens and the last `window`, in constant memory however long the stream.

    A query sees itself, the `window - 1` tokens before it, and the sinks: `mask` says so, also within a chunk of
    tokens appended at once, for which the cache holds window - 1 tokens more than the chunk. Tokens roll out when later
    ones come in; `truncate` reaches back to before the last append, or to anywhere while nothing has rolled out.

    Masks and biases count the tokens that are held: past the window a sink stands closer than it was.
    """

    def __init__(self, window: int, sinks: int = 0, dtype: torch.dtype | None = None) -> None:
        super().__init__(dtype)
        for name, value, least in (("window", window, 1), ("sinks", sinks, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}; got {value!r}")
        self.window, self.sinks = window, sinks

    @property
    def mask(self) -> Mask:
        band = window(self.window - 1)
        return band | (prefix(self.sinks) & causal()) if self.sinks else band

    def _room(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        # How many of the oldest tokens, after the sinks, no query from now on can see.
        gone = [
            max(held - self.sinks - (self.window - 1), 0) if count else 0
            for held, count in zip(state.stored, counts, strict=True)
        ]
        left = [held - drop for held, drop in zip(state.stored, gone, strict=True)]
        need = max((held + count for held, count in zip(left, counts, strict=True)), default=0)
        step, places = gone[0] if gone else 0, state.parts[0].shape[2] if state.parts else 0
        if not state.parts or len(set(gone)) > 1 or state.first + step + need > places:
            self._moved(state, new, gone, left, need)
        elif step:
            # The window slides on; the sinks follow, onto tokens that are gone.
            for part in state.parts:
                sinks = part[:, :, state.first : state.first + self.sinks].clone()
                part[:, :, state.first + step : state.first + step + self.sinks] = sinks
            state.first += step
        for b, drop in enumerate(gone):
            if drop:
                state.floor[b] = state.seen[b]
        state.stored = left

    def _moved(self, state: Layer, new: list[Tensor], gone: list[int], left: list[int], need: int) -> None:
        """To new memory with room for the window to slide as far again as it is long."""
        larger = fresh(new, (*new[0].shape[:2], 2 * max(need, _FEWEST)))
        for part, old in zip(larger, state.parts, strict=False):
            for b, (drop, held) in enumerate(zip(gone, left, strict=True)):
                sinks, first = min(self.sinks, held), state.first
                part[b, :, :sinks] = old[b, :, first : first + sinks]
                part[b, :, sinks:held] = old[b, :, first + sinks + drop : first + held + drop]
        state.parts, state.first = larger, 0


def gathered(x: Tensor, kept: Tensor) -> Tensor:
    """What is kept of x [B, G, keys, ...] by a bool [B, G, keys], moved to the front in order; anything behind it."""
    order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)  # [B, G, keys]
    return x.take_along_dim(order.reshape(*order.shape, *(1,) * (x.dim() - 3)), 2)
