"""Random operations on every cache against lists of tokens: nothing is lost, shared by mistake or leaked.

A token is a number: its key holds it, its value its negative, so that whatever a view shows can be traced back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from poise.nn import Cache, CacheFull, GrowingCache, PagedCache, QuantCache, RollingCache, StaticCache

GROUPS, LAYERS, MOST = 2, 2, 4
CAPACITY, WINDOW, SINKS, PAGES, PAGE = 12, 4, 2, 9, 3


@dataclass
class Sequence:
    """One layer's part of one sequence, as the cache should hold it."""

    history: list[int] = field(default_factory=list)  # every token appended and not truncated
    held: list[int] = field(default_factory=list)  # those that the cache still has
    floor: int = 0  # what it may be truncated to

    def copy(self) -> Sequence:
        return Sequence([*self.history], [*self.held], self.floor)


class Machine(RuleBasedStateMachine):
    """The kind of cache is set by `make`."""

    make: Callable[[], Cache]

    @initialize(batch=st.integers(1, 3))
    def start(self, batch: int) -> None:
        self.cache = type(self).make()
        self.model: dict[int, list[Sequence]] = {}
        self.batch, self.next = batch, 1

    def refused(self, call: Callable[[], Any], error: type[Exception]) -> Exception:
        with pytest.raises(error) as caught:
            call()
        return caught.value

    @rule(layer=st.integers(0, LAYERS - 1), n=st.integers(0, 6), data=st.data())
    def append(self, layer: int, n: int, data: st.DataObject) -> None:
        counts = data.draw(st.none() | st.lists(st.integers(0, n), min_size=self.batch, max_size=self.batch))
        ids = torch.arange(self.next, self.next + self.batch * n).view(self.batch, 1, n, 1)
        self.next += self.batch * n
        k = ids.float().expand(-1, GROUPS, -1, 2).contiguous()
        taken = [n] * self.batch if counts is None else counts
        sequences = self.model.get(layer) or [Sequence() for _ in range(self.batch)]
        if not self.fits(sequences, taken):
            error = self.refused(lambda: self.cache.append(layer, k, -k, counts), CacheFull)
            assert error.need > error.free >= 0  # type: ignore[attr-defined]
            return
        self.cache.append(layer, k, -k, counts)
        for b, (sequence, count) in enumerate(zip(sequences, taken, strict=True)):
            new = ids[b, 0, n - count :, 0].tolist()
            if isinstance(self.cache, RollingCache) and count:
                seen = sequence.history
                kept = {*seen[:SINKS], *seen[max(len(seen) - (WINDOW - 1), 0) :]}
                left = [token for token in sequence.held if token in kept]
                if len(left) < len(sequence.held):
                    sequence.floor = len(seen)
                sequence.held = left
            sequence.history += new
            sequence.held += new
        self.model[layer] = sequences

    def fits(self, sequences: list[Sequence], taken: list[int]) -> bool:
        lengths = [len(sequence.held) for sequence in sequences]
        if isinstance(self.cache, StaticCache):
            return all(held + count <= CAPACITY for held, count in zip(lengths, taken, strict=True))
        if not isinstance(self.cache, PagedCache):
            return True
        tables, need = self.cache._tables or [[] for _ in lengths], 0
        writers: Counter[int] = Counter()
        for table, held, count in zip(tables, lengths, taken, strict=True):
            ends = {place // PAGE for place in range(held, held + count)}
            need += len([t for t in ends if t >= len(table)])
            writers.update(table[t] for t in ends if t < len(table))
        holders = Counter(page for table in tables for page in table)
        need += sum(min(count, holders[page] - 1) for page, count in writers.items())
        return need <= self.cache.pages_free

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        longest = [max(len(layer[b].history) for layer in self.model.values()) for b in range(self.batch)]
        floors = [max(layer[b].floor for layer in self.model.values()) for b in range(self.batch)]
        wanted = [data.draw(st.integers(max(0, most - 5), most + (most == 3))) for most in longest]
        if any(length > most or length < low for length, most, low in zip(wanted, longest, floors, strict=True)):
            self.refused(lambda: self.cache.truncate(wanted), ValueError)
            return
        self.cache.truncate(wanted)
        for layer in self.model.values():
            for sequence, length in zip(layer, wanted, strict=True):
                gone = set(sequence.history[length:])
                sequence.history = sequence.history[:length]
                sequence.held = [token for token in sequence.held if token not in gone]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        b = data.draw(st.integers(0, self.batch - 1))
        self.cache.free(b)
        for layer in self.model.values():
            layer[b] = Sequence()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source, target = data.draw(st.tuples(*[st.integers(0, self.batch - 1)] * 2))
        self.cache.fork(source, target)
        for layer in self.model.values():
            layer[target] = layer[source].copy()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=MOST))
        self.cache.reorder(torch.tensor(rows) if len(rows) % 2 else rows)
        self.batch = len(rows)
        for layer, sequences in self.model.items():
            self.model[layer] = [sequences[row].copy() for row in rows]

    @precondition(lambda self: self.model and hasattr(self.cache, "keep"))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        layer = data.draw(st.sampled_from(sorted(self.model)))
        sequences = self.model[layer]
        keys = max(len(sequence.held) for sequence in sequences)
        kept = torch.tensor(
            [data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys)) for _ in sequences]
        ).reshape(self.batch, 1, keys)
        self.cache.keep(layer, kept.bool())  # type: ignore[attr-defined]
        for sequence, row in zip(sequences, kept[:, 0].tolist(), strict=True):
            held = [token for token, keep in zip(sequence.held, row, strict=False) if keep]
            if len(held) < len(sequence.held):
                sequence.floor = len(sequence.history)
            sequence.held = held

    @invariant()
    def every_view_shows_the_lists(self) -> None:
        assert self.cache.batch == (self.batch if self.model else 0)
        for layer, sequences in self.model.items():
            view = self.cache.view(layer)
            lengths = [len(sequence.held) for sequence in sequences]
            assert view.lengths.tolist() == lengths
            assert (view.keys, view.even) == (max(lengths), len(set(lengths)) == 1)
            assert self.cache.lengths(layer) == tuple(len(sequence.history) for sequence in sequences)
            k, v = view.dense(torch.float32)
            for b, sequence in enumerate(sequences):
                expected = torch.tensor(sequence.held, dtype=torch.float32)[None, :, None].expand(GROUPS, -1, 2)
                # int8 writes a token as 127 times a 127th of itself.
                torch.testing.assert_close(k[b, :, : lengths[b]], expected, rtol=1e-6, atol=0)
                torch.testing.assert_close(v[b, :, : lengths[b]], -expected, rtol=1e-6, atol=0)

    @invariant()
    def every_page_is_held_or_free(self) -> None:
        if not isinstance(self.cache, PagedCache):
            return
        held = Counter(page for table in self.cache._tables for page in table)
        assert sorted([*held, *self.cache._free]) == list(range(PAGES))
        assert {page: count for page, count in enumerate(self.cache._holders) if count} == dict(held)
        for b, table in enumerate(self.cache._tables):
            assert len(set(table)) == len(table)
            longest = max((len(layer[b].held) for layer in self.model.values()), default=0)
            assert len(table) == -(-longest // PAGE)

    @invariant()
    def a_rolling_cache_holds_no_more_than_the_last_chunk_needs(self) -> None:
        if isinstance(self.cache, RollingCache):
            for sequence in (x for layer in self.model.values() for x in layer):
                assert len(sequence.held) <= SINKS + WINDOW - 1 + 6

    def teardown(self) -> None:
        if getattr(self, "model", None):
            self.cache.free(range(self.batch))
            assert all(self.cache.view(layer).keys == 0 for layer in self.model)
            if isinstance(self.cache, PagedCache):
                assert self.cache.pages_free == PAGES


KINDS: dict[str, Callable[[], Cache]] = {
    "growing": GrowingCache,
    "static": lambda: StaticCache(CAPACITY),
    "rolling": lambda: RollingCache(WINDOW, SINKS),
    "paged": lambda: PagedCache(PAGES, PAGE),
    "int8": QuantCache,
    "paged int8": lambda: PagedCache(PAGES, PAGE, torch.int8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_operations_do_what_they_do_to_lists(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # So few places to begin with that a few tokens outgrow them.
    monkeypatch.setattr("poise.nn.cache.slab._FEWEST", 2)
    machine = type(f"Machine of {kind}", (Machine,), {"make": staticmethod(KINDS[kind])})
    chosen = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=chosen)
