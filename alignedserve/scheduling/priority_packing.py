"""Packs an iteration by priority levels: who is at a better level takes memory from who is at a worse one.

Level 0 goes first; within a level, whoever arrived first. Memory is claimed strictly: a request without cache on the
device (new, dropped or swapped out) displaces only those at worse levels, never its equals, so equals do not take turns
in throwing each other out. A request on the device that needs one more block may displace whoever comes after it.
Victims go by level and then by estimated waiting time, the last and longest first; caches come back ahead of their turn
in the opposite order.
"""

import enum
from dataclasses import replace

import numpy as np

from alignedserve.scheduling.packer import Packer, by_arrival
from alignedserve.scheduling.policy import Eviction, IterationPlan, WorkerView
from alignedserve.scheduling.table import Floats, Ints


class Preemption(enum.Enum):
    """What becomes of a cache whose memory a better level claims (ALISE, section 4.3)."""

    SWAP = "swap"  # to the host, and back ahead of its turn
    RECOMPUTE = "recompute"  # dropped
    DEFER = "defer"  # nothing: the newcomer waits; only who outgrows the memory drops the last of them


class PriorityPacking:
    """One decision. `level`: per row, 0 the best; `wait_s`: estimated time until it runs, compared within a level."""

    def __init__(
        self, view: WorkerView, level: Ints, wait_s: Floats, *, preemption: Preemption, watermark: float
    ) -> None:
        self._view = view
        self._packer = Packer(view)
        self._preemption = preemption
        self._watermark = int(watermark * view.memory.num_blocks)
        self._level, self._wait_s = level, wait_s
        self._is_decoding = view.table.is_decoding
        self._rows = self._in_order()
        self._rank = np.zeros(len(view.table), np.int64)
        self._rank[self._rows] = np.arange(len(self._rows))
        self._holders = self._by_wait(np.flatnonzero(view.table.num_blocks > 0))
        self._evicted: set[int] = set()
        self._is_closed = False  # a newcomer found no room: none after it enters

    def plan(self) -> IterationPlan:
        """Everybody in order, as far as places and tokens go; then copies that the pass hides."""
        packer, holders = self._packer, set(self._holders)
        for row in self._rows:
            if not packer.num_places_left or not packer.num_tokens_left:
                break
            if row in holders:
                self._go_on(row)
            elif not self._is_closed:
                self._is_closed = not self._enter(row)
        if self._preemption is Preemption.SWAP and self._view.can_evict and not packer.work.is_empty:
            self._copy_ahead()
        return packer.plan()

    def _in_order(self) -> list[int]:
        """Everybody on the device and, as nobody overtakes, as many of the others as this iteration and the next have
        places for.

        A request that the whole memory cannot hold is passed over.
        """
        table, memory, level = self._view.table, self._view.memory, self._level
        is_holder = table.num_blocks > 0
        newcomers = np.flatnonzero(~is_holder & (table.context_len <= memory.slots_in(memory.num_blocks)))
        rows = np.flatnonzero(is_holder).tolist()
        num_places = 2 * self._view.limits.max_running_requests
        levels = level[newcomers]
        for one_level in np.flatnonzero(np.bincount(levels)):
            chosen = by_arrival(self._view, newcomers[levels == one_level], num_places)
            rows += chosen
            num_places -= len(chosen)
        chosen_rows = np.array(rows, np.int64)
        ordered = np.lexsort((table.order[chosen_rows], table.arrival_s[chosen_rows], level[chosen_rows]))
        in_order: list[int] = chosen_rows[ordered].tolist()
        return in_order

    def _go_on(self, row: int) -> None:
        """Who is on the device computes its next token or chunk, or pauses where no memory can be claimed for it."""
        if row in self._evicted:
            self._is_closed = True  # nobody after it takes what it had to leave
            return
        packer = self._packer
        num_tokens = 1 if self._is_decoding[row] else min(packer.remaining(row), packer.num_tokens_left)
        missing = packer.blocks_needed(row, num_tokens) - packer.num_free
        if missing > 0:
            rank = self._rank[row]
            self._displace([other for other in self._staying() if self._rank[other] > rank], missing)
        packer.add(row, num_tokens)

    def _enter(self, row: int) -> bool:
        """Who has nothing on the device comes in with its whole prompt; False: it does not, and nobody after it may.

        Memory for all of it is there or can be claimed, and the watermark stays free, unless nobody else is there. A
        prompt longer than an iteration may be begins with a part.
        """
        packer, num_tokens = self._packer, self._packer.remaining(row)
        if packer.num_tokens_left < num_tokens <= self._view.limits.max_tokens:
            return False
        missing = packer.blocks_needed(row, num_tokens) + self._watermark - packer.num_free
        if missing > 0 and not self._claim(row, missing):
            return False
        return packer.add(row, min(num_tokens, packer.num_tokens_left))

    def _claim(self, row: int, missing: int) -> bool:
        """Take so many blocks, the watermark among them, from those at worse levels."""
        holders, can_claim = self._staying(), self._preemption is not Preemption.DEFER
        worse = [other for other in holders if can_claim and self._level[other] > self._level[row]]
        if self._packer.work.is_empty and len(worse) == len(holders):
            missing -= self._watermark
        return self._displace(worse, missing)

    def _staying(self) -> list[int]:
        """Who has cache on the device, the soonest to run first."""
        return [row for row in self._holders if row not in self._evicted]

    def _displace(self, candidates: list[int], missing: int) -> bool:
        """Evict as many of the last of these as free so many blocks; nobody if all of them are too few."""
        num_blocks = self._view.table.num_blocks
        if missing > 0 and (not self._view.can_evict or int(num_blocks[candidates].sum()) < missing):
            return False
        how = Eviction.SWAP if self._preemption is Preemption.SWAP else Eviction.DROP
        while missing > 0:
            row = candidates.pop()
            self._packer.evict(row, how)
            self._evicted.add(row)
            missing -= int(num_blocks[row])
        return True

    def _copy_ahead(self) -> None:
        """Copies that take no longer than the pass computes. Paused caches leave until the watermark is free, the last
        to run first; then, if places or tokens were short and not memory, the next to run come back."""
        packer, table = self._packer, self._view.table
        compute_s = self._view.costs.iteration_s(replace(packer.work, swap_in_tokens=0.0, swap_out_tokens=0.0))
        for row in reversed(self._staying()):
            if packer.num_free >= self._watermark:
                break
            if row not in packer:
                num_tokens = int(table.num_cached[row] - table.num_swapped[row])
                if num_tokens > packer.num_free_host or not self._is_hidden_copy(row, num_tokens, compute_s):
                    break
                packer.evict(row, Eviction.SWAP)
                self._evicted.add(row)
        if self._is_closed:
            return
        for row in self._by_wait(np.array([row for row in self._rows if table.num_swapped[row]], np.int64)):
            if row not in packer and row not in self._evicted:
                is_hidden = self._is_hidden_copy(row, int(table.num_swapped[row]), compute_s)
                if not is_hidden or packer.blocks_needed(row, 1) > packer.num_free - self._watermark:
                    break
                packer.upload(row)

    def _is_hidden_copy(self, row: int, num_tokens: int, compute_s: float) -> bool:
        """Whether the pass still hides all copies with this one more."""
        work, is_hidden = self._packer.work, bool(self._view.table.is_hidden[row])
        copied = work.swap_in_tokens + work.swap_out_tokens
        return (
            self._view.costs.swap_s(copied + self._view.memory.copy_tokens(num_tokens, is_hidden=is_hidden))
            <= compute_s
        )

    def _by_wait(self, rows: Ints) -> list[int]:
        """These rows, the soonest to run first."""
        ordered: list[int] = rows[np.lexsort((self._rank[rows], self._wait_s[rows], self._level[rows]))].tolist()
        return ordered
