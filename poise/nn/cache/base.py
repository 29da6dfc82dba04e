"""What every cache of keys and values promises, and what is the same in all of them.

A cache holds, per layer, the keys and values of a batch of sequences, each of its own length. Every call changes
everything it should or, if it raises, nothing. How tokens are stored is up to slab.py (one piece per sequence) and
paged.py (pages from a pool); attention is not computed here: the operator reads `view(layer)`.

A layer's memory is allocated at its first append, for the batch, heads, head dims and dtype it brings. No gradients.

Letters: B sequences, G key/value heads, n tokens appended at once, Dk and Dv head dims.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from poise.kvview import FLOATS, KVView
from poise.mask import Mask, causal
from poise.nn.cache.int8 import quantise


class CacheFull(RuntimeError):
    """There is no room for what was appended; the cache is as it was."""

    def __init__(self, message: str, need: int, free: int) -> None:
        super().__init__(message)
        self.need, self.free = need, free  # in the cache's own unit: tokens per sequence, or pages


@dataclass
class Layer:
    """One layer's memory, and how far each sequence has filled it."""

    parts: list[
        Tensor
    ]  # keys, values and, with int8, their scales; slabs [B, G, places, ...] or pools [P, G, page, ...]
    form: tuple[object, ...]  # what every append must agree with: G, Dk, Dv, dtype, device
    seen: list[int]  # tokens appended and not truncated: the position of the next one
    stored: list[int]  # how many of them are still held
    floor: list[int]  # the fewest tokens to truncate to: what was held before that is gone
    first: int = 0  # the place of key 0 in a slab
    lengths: Tensor | None = field(default=None, repr=False)  # `stored` for the kernels, made when asked for


class Cache(ABC):
    """Keys and values of a batch of sequences, layer by layer."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and dtype not in (*FLOATS, torch.int8):
            raise TypeError(f"dtype must be float32, bfloat16, float16, float64, int8 or None; got {dtype}")
        self._dtype = dtype
        self._layers: dict[int, Layer] = {}
        self._places: tuple[object, tuple[Tensor, ...]] = (None, ())

    @property
    def batch(self) -> int:
        """The number of sequences; 0 before the first append."""
        return len(next(iter(self._layers.values())).seen) if self._layers else 0

    @property
    def nbytes(self) -> int:
        """The memory that is allocated for keys, values and scales."""
        return sum(part.nbytes for layer in self._layers.values() for part in layer.parts)

    @property
    def mask(self) -> Mask:
        """Who sees whom when the last tokens appended attend to `view`, causally."""
        return causal()

    def lengths(self, layer: int = 0) -> tuple[int, ...]:
        """How many tokens each sequence has seen: the position of its next one, whatever is still held."""
        return tuple(self._layers[layer].seen) if layer in self._layers else ()

    def append(self, layer: int, k: Tensor, v: Tensor, counts: Sequence[int] | Tensor | None = None) -> None:
        """Adds n tokens to every sequence: k [B, G, n, Dk] and v [B, G, n, Dv], copied, in the cache's dtype.

        counts: how many of the n each sequence takes, its *last* ones: prompts of different lengths are padded on the
        left, so that the last query stands at the last key in all of them.
        """
        form = self._check(layer, k, v)
        n = k.shape[2]
        taken = [n] * k.shape[0] if counts is None else _counts(counts, k.shape[0], n)
        state = self._layers.get(layer)
        with torch.inference_mode(False), torch.no_grad():
            if state is None:
                zeros = [0] * k.shape[0]
                state = Layer([], form, [*zeros], [*zeros], [*zeros])
            self._store(state, self._encoded(k, v), taken)
            state.stored = [held + count for held, count in zip(state.stored, taken, strict=True)]
            state.seen = [seen + count for seen, count in zip(state.seen, taken, strict=True)]
            state.lengths = None
            self._layers[layer] = state

    def view(self, layer: int) -> KVView:
        """What the operator reads in place of k and v; good until the cache changes."""
        state = self._layer(layer)
        keys, device = max(state.stored, default=0), state.parts[0].device
        if state.lengths is None:
            with torch.inference_mode(False):
                state.lengths = torch.tensor(state.stored, dtype=torch.int32, device=device)
        parts, pages = self._shown(state, keys)
        k, v, *scales = parts
        k_scale, v_scale = scales or (None, None)
        even = all(stored == keys for stored in state.stored)
        return KVView(k, v, state.lengths, keys, even, pages, k_scale, v_scale)

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forgets the latest tokens in all layers: each sequence keeps as many as given, one number for all or [B]."""
        wanted = [_index("lengths", lengths)] * self.batch if isinstance(lengths, int) else list(lengths)
        if len(wanted) != self.batch:
            raise ValueError(f"lengths must be one number, or one per sequence, {self.batch}; got {len(wanted)}")
        wanted = [_index("lengths", length) for length in wanted]
        for b, length in enumerate(wanted):
            seen = max(state.seen[b] for state in self._layers.values())
            floor = max(state.floor[b] for state in self._layers.values())
            if not 0 <= length <= seen:
                raise ValueError(f"sequence {b} has {seen} tokens and can't be truncated to {length}")
            if length < floor:
                raise ValueError(
                    f"sequence {b} can't be truncated to {length} tokens: of those before token {floor} some are gone"
                )
        self._cut(wanted)

    def free(self, rows: int | Sequence[int]) -> None:
        """Forgets these sequences; their rows stay, empty, to be appended to again."""
        chosen = self._rows([rows] if isinstance(rows, int) else rows)
        for state in self._layers.values():
            for b in chosen:
                state.floor[b] = 0
        self._cut([0 if b in chosen else max(x.seen[b] for x in self._layers.values()) for b in range(self.batch)])

    def fork(self, source: int, target: int) -> None:
        """The sequence `target` becomes a copy of `source`; what it held is forgotten."""
        (source, target), rows = self._rows([source, target]), list(range(self.batch))
        rows[target] = source
        self.reorder(rows)

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        """Sequence i becomes what rows[i] was, as in beam search; more or fewer rows change the batch."""
        chosen = self._rows(rows.tolist() if isinstance(rows, Tensor) else rows)
        if not chosen:
            raise ValueError("rows must name at least one sequence; to forget them all use free()")
        with torch.inference_mode(False), torch.no_grad():
            self._permute(chosen)
        for state in self._layers.values():
            state.seen, state.stored, state.floor = (
                [values[b] for b in chosen] for values in (state.seen, state.stored, state.floor)
            )
            state.lengths = None

    # What a kind of cache must do; arguments are valid, and nothing is tracked for gradients.

    @abstractmethod
    def _store(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        """Makes room and writes the last counts[b] tokens of each `new` [B, G, n, ...] after stored[b]; or raises."""

    @abstractmethod
    def _shown(self, state: Layer, keys: int) -> tuple[list[Tensor], Tensor | None]:
        """The parts as a view shows them, and the page table."""

    @abstractmethod
    def _permute(self, rows: list[int]) -> None:
        """Memory for `reorder`, before the lengths are permuted."""

    def _cut(self, wanted: list[int]) -> None:
        """No sequence keeps more than wanted[b] tokens."""
        for state in self._layers.values():
            for b, length in enumerate(wanted):
                state.stored[b] = max(state.stored[b] - max(state.seen[b] - length, 0), 0)
                state.seen[b] = min(state.seen[b], length)
            state.lengths = None

    # Arguments.

    def _layer(self, layer: int) -> Layer:
        state = self._layers.get(layer)
        if state is None:
            raise ValueError(f"layer {layer!r} holds no keys yet; append to it first")
        return state

    def _check(self, layer: int, k: Tensor, v: Tensor) -> tuple[object, ...]:
        """Raises unless k and v may be appended; what later appends must agree with."""
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ValueError(f"layer must be an int from 0 on; got {layer!r}")
        for name, tensor in (("k", k), ("v", v)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
            if tensor.dim() != 4:
                raise ValueError(f"{name} must be [batch, kv heads, tokens, dim]; got {list(tensor.shape)}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} requires a gradient, and none passes through a cache: call under torch.no_grad()"
                )
        if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
            raise ValueError(
                "k and v must agree in batch, heads, tokens, dtype and device; got "
                f"{list(k.shape)} {k.dtype} on {k.device} and {list(v.shape)} {v.dtype} on {v.device}"
            )
        if k.dtype not in FLOATS:
            raise TypeError(f"k and v must be float32, bfloat16, float16 or float64; got {k.dtype}")
        if self._layers and k.shape[0] != self.batch:
            raise ValueError(f"k must bring tokens for {self.batch} sequences; got {list(k.shape)}")
        form = (k.shape[1], k.shape[3], v.shape[3], k.dtype if self._dtype is None else self._dtype, k.device)
        state = self._layers.get(layer)
        if state is not None and state.form != form:
            names = ("heads", "key dim", "value dim", "dtype", "device")
            wrong = [
                f"{name} {held}, got {got}"
                for name, held, got in zip(names, state.form, form, strict=True)
                if held != got
            ]
            raise ValueError(
                f"layer {layer} holds {'; '.join(wrong)}. Append what agrees, or give the cache a dtype to convert to"
            )
        return form

    def _rows(self, rows: Sequence[int]) -> list[int]:
        chosen = [_index("rows", row) for row in rows]
        for row in chosen:
            if not 0 <= row < self.batch:
                raise ValueError(f"rows must name sequences 0 ... {self.batch - 1}; got {row}")
        return chosen

    def _encoded(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """The parts as they are stored."""
        if self._dtype is torch.int8:
            (k8, k_scale), (v8, v_scale) = quantise(k), quantise(v)
            return [k8, v8, k_scale, v_scale]
        return [k, v] if self._dtype is None else [k.to(self._dtype), v.to(self._dtype)]

    def _targets(self, state: Layer, n: int, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """For each new token: its sequence, its column in k, and its index in the sequence; int64 [T] each.

        Layers mostly ask for the same in turn, so the last answer is kept.
        """
        device = state.parts[0].device
        key = (n, *state.stored, *counts, device)
        if self._places[0] != key:
            column = torch.arange(n)
            held, count = torch.tensor(state.stored)[:, None], torch.tensor(counts)[:, None]
            taken = (column >= n - count).nonzero()  # [T, 2]
            index = (held + count - n + column)[taken[:, 0], taken[:, 1]]
            self._places = (key, (taken[:, 0].to(device), taken[:, 1].to(device), index.to(device)))
        b, column, index = self._places[1]
        return b, column, index


def fresh(new: list[Tensor], leading: tuple[int, ...]) -> list[Tensor]:
    """Zeroed memory for the parts [B, G, n, ...]: [leading..., ...], where leading says B, G, places or P, G, page."""
    return [torch.zeros((*leading, *part.shape[3:]), dtype=part.dtype, device=part.device) for part in new]


def _counts(counts: Sequence[int] | Tensor, batch: int, n: int) -> list[int]:
    listed = [_index("counts", x) for x in (counts.tolist() if isinstance(counts, Tensor) else counts)]
    if len(listed) != batch or not all(0 <= count <= n for count in listed):
        raise ValueError(f"counts must be {batch} numbers from 0 to the {n} tokens of k; got {listed}")
    return listed


def _index(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must hold ints; got {type(value).__name__}") from None
