"""A packer for blocks that two requests share; it counts the slots that each leaves the other.

A real-time request runs over the slots of a best-effort one only after those are evicted (`overwritten` says how many).
A best-effort one that would run into a real-time one leaves the shared block, and needs one block more.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import EvictionMode, PlannedEviction, PlannedShare, ScheduledRequest, WorkerView
from alignedserve.scheduling.shared_blocks import num_overwritten, slots_in_last


class Overwritten(NamedTuple):
    """The slots of a request that another is about to overwrite."""

    row: int
    num_tokens: int  # its last ones on the device


class SharingPacker(Packer):
    """A packer with the worker's pairs, as the plan leaves them."""

    def __init__(self, view: WorkerView) -> None:
        super().__init__(view)
        self._table = view.table
        self._block_size = view.memory.block_size
        shared = view.shared_blocks
        self._partners: dict[int, int] = shared.partner_rows() if shared is not None else {}  # both ways
        self._joined: dict[int, int] = {}  # partner of a scheduled row that joins it by this plan
        self._taken: dict[int, int] = {}  # free blocks, by scheduled row
        self._left: dict[int, int] = {}  # partners that scheduled best-effort rows leave
        self._by_room: dict[bool, list[int]] = {}  # rows of either class, most empty slots first

    # --- what others ask

    def partner(self, row: int) -> int | None:
        """Return the row that shares this one's last block; None: the block is its own."""
        return self._partners.get(row)

    def joins(self, row: int) -> bool:
        return row in self._joined

    def is_joined(self, row: int) -> bool:
        return row in self._joined.values()

    def num_on_device(self, row: int) -> int:
        """Return the cached tokens of this row on the device, after the plan's evictions."""
        left = self._num_cached(row) - self._num_swapped(row)
        eviction = self._evictions.get(row)
        if eviction is None:
            return left
        return 0 if eviction.num_tokens is None else left - eviction.num_tokens

    def overwritten(self, row: int, num_tokens: int) -> Overwritten | None:
        """Return what has to be evicted before a real-time row computes `num_tokens` in the block that it shares."""
        other = self._partners.get(row)
        if other is None or not self._table.is_real_time[row]:
            return None
        joins = other in self._joined  # the slots there come from this plan alone
        beside = self._slots_after(other) if joins else slots_in_last(self.num_on_device(other), self._block_size)
        overlap = num_overwritten(self._slots_with(row, num_tokens), beside, self._block_size)
        return Overwritten(other, overlap) if overlap else None

    def overwritten_by_joining(self, row: int, num_tokens: int, other: int) -> int:
        """Return how many slots of `other` have to be evicted before this real-time row joins it."""
        beside = slots_in_last(self.num_on_device(other), self._block_size)
        slots = slots_in_last(self._num_cached(row) + num_tokens, self._block_size)
        return num_overwritten(slots, beside, self._block_size)

    def find_partner(self, row: int, num_tokens: int) -> int | None:
        """Return the row of the other class with most empty slots in its last block, for the last block that this one
        takes; None: there is none.

        A real-time row may overwrite slots of it, as many as the host has room for. A best-effort one may not.
        """
        is_real_time = bool(self._table.is_real_time[row])
        cannot = row in self._evictions or (row in self._partners and not is_real_time)  # one share after the other
        if cannot or not self._memory.has_shared_blocks or self.blocks_needed(row, num_tokens) < 1:
            return None
        slots = slots_in_last(self._num_cached(row) + num_tokens, self._block_size)
        for other in self._rows_with_room(of_real_time=not is_real_time):
            is_sharing = other in self._partners or other in self._left.values()  # or was, until this plan
            if is_sharing or other in self._evictions or (is_real_time and other in self._scheduled):
                continue
            if is_real_time:
                overlap = self.overwritten_by_joining(row, num_tokens, other)
                is_shared = overlap < slots_in_last(self.num_on_device(other), self._block_size)  # not all of it
                return other if is_shared and overlap <= self.num_free_host else None
            if self._slots_after(other) + slots <= self._block_size:
                return other
        return None

    # --- the plan

    @override
    def blocks_needed(self, row: int, num_tokens: int, *, is_hidden: bool = False) -> int:
        num_blocks = super().blocks_needed(row, num_tokens, is_hidden=is_hidden)
        if row in self._joined:
            return num_blocks - 1
        return num_blocks + self._leaves_partner(row, num_tokens)

    def join(self, row: int, num_tokens: int, other: int) -> bool:
        """Schedule `num_tokens` of a row whose last new block is the last of `other`; return False if they do not
        fit."""
        assert row not in self._partners, "a block shared by three"
        assert other not in self._partners, "a block shared by three"
        self._joined[row] = self._partners[row] = other
        self._partners[other] = row
        if self.add(row, num_tokens):
            return True
        self._part(row)
        del self._joined[row]
        return False

    @override
    def add(self, row: int, num_tokens: int, *, is_hidden: bool = False) -> bool:
        """Schedule this many tokens of the request; return False if they do not fit."""
        assert self.overwritten(row, num_tokens) is None, "overwrites what is not evicted"
        leaves, num_blocks = self._leaves_partner(row, num_tokens), self.blocks_needed(row, num_tokens)
        if not super().add(row, num_tokens, is_hidden=is_hidden):
            return False
        self._taken[row] = num_blocks
        if leaves:
            self._left[row] = self._part(row)
        return True

    @override
    def withdraw(self, row: int) -> int:
        num_tokens = super().withdraw(row)
        del self._taken[row]
        if self._joined.pop(row, None) is not None and row in self._partners:
            self._part(row)
        elif (other := self._left.pop(row, None)) is not None and other not in self._partners:
            self._partners[row], self._partners[other] = other, row
        return num_tokens

    @override
    def evict(self, row: int, how: EvictionMode, num_tokens: int | None = None) -> None:
        """Evict the cache of this request; a block that it shares is the other's then."""
        super().evict(row, how, num_tokens)
        if row in self._partners and -(-self.num_on_device(row) // self._block_size) < self._num_blocks(row):
            self._part(row)
            self.num_free -= 1

    @override
    def note_work(self, work: IterationWork, row: int, num_tokens: int) -> None:
        super().note_work(work, row, num_tokens)
        if row in self._left if row in self._taken else self._leaves_partner(row, num_tokens):
            moved = self._copied(row, slots_in_last(self.num_on_device(row), self._block_size))
            work.swap_out_tokens += moved
            work.swap_in_tokens += moved

    @override
    def _shares(self) -> tuple[PlannedShare, ...]:
        return tuple(PlannedShare(row, other) for row, other in self._joined.items())

    @override
    def _taken_by(self, part: ScheduledRequest) -> int:
        return self._taken[part.row]

    # --- slots

    def _slots_with(self, row: int, num_tokens: int) -> int:
        """Return the slots that a row has after `num_tokens` more, in its last block or in the one that it joins.

        A row that goes on into another block has all slots of this one.
        """
        if not num_tokens:
            return slots_in_last(self.num_on_device(row), self._block_size)
        total = self._num_cached(row) + num_tokens
        grows_out = row not in self._joined and -(-total // self._block_size) > self._num_blocks(row)
        return self._block_size if grows_out else slots_in_last(total, self._block_size)

    def _slots_after(self, row: int) -> int:
        part = self._scheduled.get(row)
        return self._slots_with(row, 0 if part is None else part.num_tokens)

    def _leaves_partner(self, row: int, num_tokens: int) -> bool:
        other = self._partners.get(row)
        if other is None or row in self._joined or self._table.is_real_time[row]:
            return False
        total = self._num_cached(row) + num_tokens
        in_block = total - (self._num_blocks(row) - 1) * self._block_size
        return in_block > self._block_size - self._slots_after(other)

    def _part(self, row: int) -> int:
        other = self._partners.pop(row)
        del self._partners[other]
        return other

    def _rows_with_room(self, *, of_real_time: bool) -> Iterator[int]:
        """Iterate over a class's rows on the device, emptiest last block first.

        Among equals the later one comes first.
        """
        if of_real_time not in self._by_room:
            table = self._table
            rows = np.flatnonzero((table.is_real_time == of_real_time) & (table.num_blocks > 0))
            on_device = table.num_cached[rows] - table.num_swapped[rows]
            used = (on_device - 1) % self._block_size
            ranked = np.lexsort((-table.order[rows], -table.arrival_s[rows], used))
            self._by_room[of_real_time] = rows[ranked].tolist()
        return iter(self._by_room[of_real_time])


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """A way to the blocks that a request needs."""

    evictions: tuple[PlannedEviction, ...] = ()
    partner: int | None = None  # the row whose last block it shares; None: it needs no share


class BlockSearch:
    """One search for blocks: evictions for one request, in the order of finding."""

    def __init__(self, view: WorkerView, packer: SharingPacker) -> None:
        self._packer = packer
        self._is_real_time = view.table.is_real_time
        self._block_size = view.memory.block_size
        self._is_lazy = view.memory.has_shared_blocks
        self._has_users = bool(view.held_blocks)
        self._leaving: dict[int, int] = {}  # tokens, the last on the device, by row

    def find(
        self, row: int, num_tokens: int, victims: Callable[[], Iterable[int]], *, may_take: bool
    ) -> FoundBlocks | None:
        """Return evictions and a share by which the request has its blocks; None: there are none.

        `may_take`: it may share a block or evict `victims`, in this order; else it needs free blocks.
        """
        packer = self._packer
        missing = packer.blocks_needed(row, num_tokens) - packer.num_free
        overwritten = packer.overwritten(row, num_tokens)
        if missing <= 0 and overwritten is None:
            return FoundBlocks()
        partner = packer.find_partner(row, num_tokens) if missing > 0 and may_take else None
        for shared in dict.fromkeys((partner, None)):
            self._leaving = {}
            if shared is not None and (overlap := packer.overwritten_by_joining(row, num_tokens, shared)):
                self._leaving[shared] = overlap  # first of all: the host has room for it
            if overwritten is not None:
                self._leaving[overwritten.row] = overwritten.num_tokens
            if self._take_all(missing - (shared is not None), victims if may_take else tuple, shared):
                return FoundBlocks(self._evictions(), shared)
        return None

    def _take_all(self, missing: int, victims: Callable[[], Iterable[int]], shared: int | None) -> bool:
        num_freed = 0
        for victim in victims() if missing > 0 else ():
            num_freed += self._take(victim, missing - num_freed) if victim != shared else 0
            if self._has_users:  # what victims have may be used by others too
                num_freed = self._packer.num_freed_by(self._leaving)
            if missing <= num_freed:
                break
        return missing <= num_freed

    def _take(self, victim: int, missing: int) -> int:
        packer, partner = self._packer, self._partner(victim)
        if self._is_real_time[victim]:
            if partner is not None:  # both leave the block, or it would not be free
                self._leaving[partner] = packer.num_on_device(partner) - self._tokens_in(self._num_blocks(partner) - 1)
            num_blocks = self._num_blocks(victim)
        else:
            is_sharing = partner is not None
            num_own = self._num_blocks(victim) - is_sharing
            num_blocks = min(num_own, missing) if self._is_lazy else num_own
            if 0 < num_blocks < num_own:
                tokens = self._tokens_in(num_own - num_blocks)
                self._leaving[victim] = packer.num_on_device(victim) - tokens
                return num_blocks
        if num_blocks:
            self._leaving[victim] = packer.num_on_device(victim)
        return num_blocks

    def _evictions(self) -> tuple[PlannedEviction, ...]:
        evictions, room = [], self._packer.num_free_host
        for row, num_tokens in self._leaving.items():
            if num_tokens > room:
                evictions.append(PlannedEviction(row, EvictionMode.DROP))
            else:
                evictions.append(PlannedEviction(row, EvictionMode.SWAP, num_tokens))
                room -= num_tokens
        return tuple(evictions)

    def _num_left(self, row: int) -> int:
        return self._packer.num_on_device(row) - self._leaving.get(row, 0)

    def _num_blocks(self, row: int) -> int:
        return -(-self._num_left(row) // self._block_size)

    def _tokens_in(self, num_blocks: int) -> int:
        return num_blocks * self._block_size

    def _partner(self, row: int) -> int | None:
        other = self._packer.partner(row)
        if other is None or self._leaves_block(row) or self._leaves_block(other):
            return None
        return other

    def _leaves_block(self, row: int) -> bool:
        return self._num_blocks(row) < -(-self._packer.num_on_device(row) // self._block_size)
