"""Packs an iteration of decodes and of chunks of prompts, in an order that a policy gives.

It is what Sarathi-Serve does by arrival, for any order: a decode computes a token; a prompt computes a chunk of what is
left of the iteration, and has blocks for all its tokens from its first chunk on. A newcomer (a request without cache on
the device) takes blocks only from holders of worse levels, never from equals, so that equals do not evict each other in
turn; a decode that needs one more block takes it from whoever comes after it. What is evicted is dropped. A prompt that
finds no place takes that of a scheduled request of a worse level, which pauses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.table import Bools, Floats, Ints, rows_where

ChunkRule = Callable[[Packer, int], int]
"""Returns the most tokens that this prompt (a row) computes beside what is packed already."""


@dataclass(frozen=True)
class ChunkOrder:
    """The order of a policy."""

    turns: Ints  # rows, in the order in which they compute
    level: Ints  # by row, 0 the best
    is_holder: Bools  # by row: it holds blocks
    is_ready: Bools  # by row: it computes a last token beside its cache on the device
    kept_by: tuple[Ints | Floats, ...]  # columns by which blocks are kept, the one that counts most last

    @cached_property
    def keeps(self) -> Ints:
        """Rows that hold blocks; the last loses them first. Few decisions ask for it."""
        holders = rows_where(self.is_holder)
        return holders[np.lexsort(tuple(ints[holders] for ints in self.kept_by))]


def order_of(view: WorkerView, key: Floats, *, group: Ints, level: Ints, keep: Floats | None = None) -> ChunkOrder:
    """Return the order by group; in each, decodes go before prompts, and both by key, then arrival.

    Blocks are kept by level, then by `keep` (the same key if it is not given), then arrival.
    """
    table = view.table
    is_holder = table.num_blocks > 0
    is_ready = is_holder & (table.num_remaining == 1)
    turns = np.lexsort((table.order, table.arrival_s, key, ~is_ready, group))
    kept_by = (table.order, table.arrival_s, key if keep is None else keep, level)
    return ChunkOrder(turns, level, is_holder, is_ready, kept_by)


def class_of(view: WorkerView) -> Ints:
    return np.where(view.table.is_real_time, 0, 1)


class ChunkedPacking:
    """One decision."""

    def __init__(
        self,
        view: WorkerView,
        order: ChunkOrder,
        *,
        token_budget: int | None = None,
        chunk_rule: ChunkRule = Packer.remaining,
        watermark: float,
    ) -> None:
        """`token_budget`: of the iteration, None: what the worker allows. `watermark`: the share of the blocks that
        newcomers leave free, unless they are alone."""
        self._view = view
        self._order = order
        has_begun = order.is_holder & (view.table.num_remaining > 1)
        self._packer = Packer(view)
        self._packer.reserve(view.table.context_len, has_begun)
        if token_budget is not None:
            self._packer.num_tokens_left = min(self._packer.num_tokens_left, token_budget)
        self._chunk_rule = chunk_rule
        self._watermark = int(watermark * view.memory.num_blocks)
        self._closed_from = int(order.level.max(initial=0)) + 1  # newcomers from this level on wait

    def plan(self) -> IterationPlan:
        turns = self._order.turns
        is_ready = self._order.is_ready[turns]
        ends = [*(rows_where(is_ready[1:] != is_ready[:-1]) + 1).tolist(), len(turns)]
        for begin, end in pairwise([0, *ends]):
            if begin < end and is_ready[begin]:
                self._add_decodes(turns[begin:end])
            else:
                self._add_prompts(turns[begin:end])
        return self._packer.plan()

    def _add_decodes(self, rows: Ints) -> None:
        packer = self._packer
        staying = np.array(self._staying(rows), np.int64) if packer.has_evictions else rows
        for row in staying[packer.add_decodes(staying) :].tolist():  # those that fit, at once
            if not packer.is_evicted(row):
                packer.add_evicting(row, 1, self._after(row))

    def _add_prompts(self, rows: Ints) -> None:
        packer, level, is_holder = self._packer, self._order.level, self._order.is_holder
        for row in rows.tolist():
            if packer.num_tokens_left < 1:
                return
            if is_holder[row]:
                if not packer.is_evicted(row):
                    self._add_chunk(row, self._chunk_rule(packer, row))
            elif level[row] < self._closed_from and not self._enter(row):
                self._closed_from = int(level[row])

    def _add_chunk(self, row: int, at_most: int) -> bool:
        if at_most < 1 or not self._has_place(row):
            return False
        num_tokens = min(self._packer.chunk(row), at_most)
        return num_tokens > 0 and self._packer.add(row, num_tokens)

    def _has_place(self, row: int) -> bool:
        packer, level = self._packer, self._order.level
        if packer.num_places_left > 0:
            return True
        worse = next((other for other in reversed(packer.rows) if level[other] > level[row]), None)
        if worse is not None:
            packer.withdraw(worse)
        return worse is not None

    def _enter(self, row: int) -> bool:
        packer, at_most = self._packer, self._chunk_rule(self._packer, row)
        missing = packer.blocks_needed(row, 1) + self._watermark - packer.num_free
        if at_most < 1 or (missing > 0 and not self._claim(row, missing)):
            return False
        return self._add_chunk(row, at_most)

    def _claim(self, row: int, missing: int) -> bool:
        level, holders = self._order.level, self._staying(self._order.keeps)
        worse = [other for other in holders if self._view.can_evict and level[other] > level[row]]
        if not self._packer.num_scheduled and len(worse) == len(holders):
            missing -= self._watermark
        if missing <= 0:
            return True
        if not self._packer.displace(worse, missing):
            return False
        self._closed_from = min(self._closed_from, int(level[row]) + 1)
        return True

    def _after(self, row: int) -> list[int]:
        if not self._view.can_evict:
            return []
        keeps = self._order.keeps
        return self._staying(keeps[int(rows_where(keeps == row)[0]) + 1 :])

    def _staying(self, rows: Ints) -> list[int]:
        return [row for row in rows.tolist() if not self._packer.is_evicted(row)]
