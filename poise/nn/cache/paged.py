"""A cache in pages from one pool, which sequences share until one of them writes.

Each sequence has a table of pages, the same for all layers; a page is a place in every layer's pool [P, G, page, D].
Forks share pages and copy one only when they append to it, so that beams and common prefixes cost their difference. A
page that nobody holds is free at once. The kernels read pages where they lie.

Letters: B sequences, P pages, G key/value heads, n tokens appended at once, D a head dim.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from poise.nn.cache.base import Cache, CacheFull, Layer, fresh


class PagedCache(Cache):
    """`pages` pages of `page` tokens for all sequences together; more than that raise CacheFull."""

    def __init__(self, pages: int, page: int = 16, dtype: torch.dtype | None = None) -> None:
        super().__init__(dtype)
        for name, value in (("pages", pages), ("page", page)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int; got {value!r}")
        self.pages, self.page = pages, page
        self._tables: list[list[int]] = []  # of each sequence, the pages of its tokens in order
        self._holders = [0] * pages  # how many tables a page is in
        self._free = list(range(pages - 1, -1, -1))  # the next one last
        self._table: Tensor | None = None  # the tables as kernels read them, made when asked for

    @property
    def pages_free(self) -> int:
        """How many pages no sequence holds."""
        return len(self._free)

    def _store(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        tables = self._tables or [[] for _ in counts]
        copied, added = self._wanted(tables, state, counts)
        if len(copied) + sum(added) > len(self._free):
            need, free = len(copied) + sum(added), len(self._free)
            raise CacheFull(
                f"{need} pages of {self.page} tokens are needed and {free} of {self.pages} are free. Free or truncate "
                "sequences, or make the cache larger",
                need,
                free,
            )
        if not state.parts:
            state.parts = fresh(new, (self.pages, new[0].shape[1], self.page))
        self._tables = tables
        self._copy(copied)
        for table, number in zip(self._tables, added, strict=True):
            table.extend(self._take() for _ in range(number))
        self._write(state, new, counts)

    def _wanted(
        self, tables: list[list[int]], state: Layer, counts: list[int]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Which (sequence, page of it) must become its own before it is written to; how many pages each lacks."""
        copied, added, leaving = [], [], Counter[int]()
        for b, (table, held, count) in enumerate(zip(tables, state.stored, counts, strict=True)):
            end = -(-(held + count) // self.page) if count else 0
            added.append(max(end - len(table), 0))
            for t in range(held // self.page, min(end, len(table))):
                page = table[t]
                if self._holders[page] - leaving[page] > 1:
                    leaving[page] += 1
                    copied.append((b, t))
        return copied, added

    def _copy(self, places: list[tuple[int, int]]) -> None:
        if not places:
            return
        shared = [self._tables[b][t] for b, t in places]
        own = [self._take() for _ in places]
        for state in self._layers.values():
            for pool in state.parts:
                pool[own] = pool[shared]
        for (b, t), old, page in zip(places, shared, own, strict=True):
            self._tables[b][t] = page
            self._drop(old)

    def _write(self, state: Layer, new: list[Tensor], counts: list[int]) -> None:
        b, column, index = self._targets(state, new[0].shape[2], counts)
        table = self._device_table(index.device).long()
        place, slot = table[b, index // self.page], index % self.page
        for pool, tokens in zip(state.parts, new, strict=True):
            pool[place, :, slot] = tokens[b, :, column]

    def _shown(self, state: Layer, keys: int) -> tuple[list[Tensor], Tensor | None]:
        return list(state.parts), self._device_table(state.parts[0].device)

    def _device_table(self, device: torch.device) -> Tensor:
        if self._table is None or self._table.device != device:
            width = max(map(len, self._tables), default=0)
            rows = [table + [-1] * (width - len(table)) for table in self._tables]
            with torch.inference_mode(False):
                self._table = torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)
        return self._table

    def _permute(self, rows: list[int]) -> None:
        tables = [list(self._tables[row]) for row in rows]
        for table in tables:
            for page in table:
                self._holders[page] += 1
        for table in self._tables:
            for page in table:
                self._drop(page)
        self._tables, self._table = tables, None

    def _cut(self, wanted: list[int]) -> None:
        super()._cut(wanted)
        for b, table in enumerate(self._tables):
            longest = max(state.stored[b] for state in self._layers.values())
            while len(table) > -(-longest // self.page):
                self._drop(table.pop())
                self._table = None

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        self._table = None
        return page

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)
