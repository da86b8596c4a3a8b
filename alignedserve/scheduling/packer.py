"""Packs an iteration request by request and accounts for blocks, tokens, places and predicted time.

Every policy decides on it: `add` in its order while its budget lasts, and where blocks lack `evict`, or `displace` and
`add_evicting` with a list of victims.
"""

from collections.abc import Callable, Iterable

import numpy as np

from alignedserve.costmodel.model import chunk_within
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import (
    EvictionMode,
    IterationPlan,
    PlannedEviction,
    PlannedShare,
    ScheduledRequest,
    WorkerView,
)
from alignedserve.scheduling.shared_blocks import LeavingUsers
from alignedserve.scheduling.table import Bools, Ints, rows_where
from alignedserve.scheduling.table_operations import fitting_decodes

_NUM_DECODES = 4096
_DECODES = tuple(ScheduledRequest(row, 1) for row in range(_NUM_DECODES))  # shared by all plans
_IntOf = Callable[[int], int]  # of a row
_BoolOf = Callable[[int], bool]


class Packer:
    """A plan in construction. A call of `add` that returns False leaves it unchanged."""

    def __init__(self, view: WorkerView) -> None:
        self._view = view
        self._memory = view.memory
        table = view.table
        context_len = table.prompt_len + table.num_generated
        # One row at a time: lists of all rows would cost more than a plan looks at.
        self._context_len: _IntOf = context_len.item
        self._num_cached: _IntOf = table.num_cached.item
        self._num_blocks: _IntOf = table.num_blocks.item
        self._num_swapped: _IntOf = table.num_swapped.item
        self._is_hidden: _BoolOf = table.is_hidden.item
        self._is_constrained: _BoolOf = table.is_constrained.item
        self._scheduled: dict[int, ScheduledRequest] = {}
        self._evictions: dict[int, PlannedEviction] = {}
        self._uploads: list[int] = []
        self._departures: list[int] = []
        self._returns: list[int] = []
        self._total_len: _IntOf | None = None  # for which a request reserves blocks
        self._reserved: dict[int, int] = {}  # blocks not allocated yet
        self._leaving = LeavingUsers(view.held_blocks) if view.held_blocks else None
        self.num_free = view.memory.num_free  # blocks
        self.num_free_host = view.memory.num_free_host  # tokens
        self.num_tokens_left = view.limits.max_tokens
        self.num_places_left = view.limits.max_running_requests
        self.work = IterationWork()

    def reserve(self, total_len: Ints, has_begun: Bools) -> None:
        """Let requests reserve blocks for `total_len` tokens when they are first scheduled; `has_begun`: these have."""
        self._total_len = total_len.item
        begun: list[int] = rows_where(has_begun).tolist()
        self._reserved = {row: self.blocks_needed(row, 0) for row in begun}
        self.num_free -= sum(self._reserved.values())

    def __contains__(self, row: int) -> bool:
        return row in self._scheduled

    @property
    def rows(self) -> list[int]:
        return list(self._scheduled)

    @property
    def num_scheduled(self) -> int:
        return len(self._scheduled)

    @property
    def has_evictions(self) -> bool:
        return bool(self._evictions)

    def is_evicted(self, row: int) -> bool:
        return row in self._evictions

    def remaining(self, row: int) -> int:
        """Return the tokens to compute before this request can sample: all if this plan drops its cache."""
        return self._context_len(row) - self.num_kept(row)

    def num_kept(self, row: int) -> int:
        return 0 if self._evictions and self._is_dropped(row) else self._num_cached(row)

    def blocks_needed(self, row: int, num_tokens: int, *, is_hidden: bool = False) -> int:
        """Return the free blocks that the request takes; where it reserves, all or none, whatever it computes now."""
        is_evicted = row in self._evictions
        if self._total_len is not None:
            if row in self._reserved:
                return 0
            num_tokens = self._total_len(row) - (0 if is_evicted else self._num_cached(row))
        wanted = self._memory.blocks_for(
            num_tokens + (0 if is_evicted else self._num_cached(row)),
            is_hidden=is_hidden or (self._is_hidden(row) and not is_evicted),
        )
        return max(wanted - (0 if is_evicted else self._num_blocks(row)), 0)

    def add(self, row: int, num_tokens: int, *, is_hidden: bool = False) -> bool:
        """Schedule this many tokens of the request; return False if they do not fit."""
        assert row not in self._scheduled, "a request packed twice"
        assert row not in self._evictions or self._is_dropped(row), "what is swapped out does not compute"
        assert 0 < num_tokens <= self.remaining(row), "computes tokens that are not known yet"
        num_blocks = self.blocks_needed(row, num_tokens, is_hidden=is_hidden)
        if self.num_places_left < 1 or num_tokens > self.num_tokens_left or num_blocks > self.num_free:
            return False
        self._scheduled[row] = ScheduledRequest(row, num_tokens, is_hidden)
        self.num_free -= num_blocks
        self.num_tokens_left -= num_tokens
        self.num_places_left -= 1
        self.note_work(self.work, row, num_tokens)
        return True

    def add_decodes(self, rows: Ints) -> int:
        """Schedule one token for each of these rows, up to the first that does not fit; return how many were added.

        For rows that decode with their whole cache on the device.
        """
        at_most = min(self.num_places_left, self.num_tokens_left)
        fitting = fitting_decodes(self._view.table, self._memory, rows, at_most=at_most, num_free=self.num_free)
        count, num_blocks, *sums = fitting
        if count:
            self._scheduled.update(self._decodes_of(rows[:count].tolist()))
            self.num_free -= num_blocks
            self.num_tokens_left -= count
            self.num_places_left -= count
            self.work.add_decodes(count, *sums)
        return count

    def note_work(self, work: IterationWork, row: int, num_tokens: int) -> None:
        """Add the request's tokens to `work`: `self.work`, or a copy for a trial."""
        context_len, num_cached, is_constrained = self._context_len(row), self.num_kept(row), self._is_constrained(row)
        if num_tokens == 1 and num_cached + 1 == context_len:
            work.add_decode(context_len, is_hidden=self._is_hidden(row), is_constrained=is_constrained)
        else:
            is_last = num_cached + num_tokens == context_len
            num_scored = self._view.table.num_scored(row, num_tokens, num_cached)
            work.add_chunk(
                num_tokens, num_cached, is_last=is_last, is_constrained=is_constrained, num_scored=num_scored
            )
        if num_swapped := self._num_swapped(row):
            work.swap_in_tokens += 0 if self._is_dropped(row) else self._copied(row, num_swapped)

    def chunk(self, row: int) -> int:
        """Return the largest chunk of this request that fits into tokens, places and blocks; 0: none."""
        if self.num_places_left < 1:
            return 0
        most = min(self.remaining(row), self.num_tokens_left)
        if most <= 0 or self.blocks_needed(row, most) <= self.num_free:
            return max(most, 0)
        is_evicted = row in self._evictions
        if self._is_hidden(row) and not is_evicted:
            return 0  # a hidden cache is not extended in parts
        num_cached, held = (0, 0) if is_evicted else (self._num_cached(row), self._num_blocks(row))
        num_slots = self._memory.slots_in(held + self.num_free)
        return max(min(num_slots - num_cached, most), 0)

    def chunk_within(self, row: int, at_most: int, until_s: float) -> int:
        """Return the largest chunk of up to `at_most` tokens with which the iteration is no longer than `until_s`."""
        num_cached = self.num_kept(row)
        num_scored = self._view.table.num_scored(row, at_most, num_cached)
        chunk = {"num_cached": num_cached, "at_most": at_most, "num_scored": num_scored}
        return chunk_within(self._view.costs, self.work, budget_s=until_s, **chunk)

    def unchunked(self, row: int) -> int:
        """Return the tokens to compute where prompts are not chunked: all that remain, whether or not they fit.

        For a prompt longer than an iteration may be: as many tokens as are left in this one.
        """
        remaining = self.remaining(row)
        return remaining if remaining <= self._view.limits.max_tokens else self.num_tokens_left

    def drop(self, row: int) -> None:
        self.evict(row, EvictionMode.DROP)

    def evict(self, row: int, how: EvictionMode, num_tokens: int | None = None) -> None:
        """Evict the cache of this request from the device (SWAP: only its last `num_tokens`, if given).

        Without host memory a swap becomes a drop. If the request is scheduled in this plan, it is withdrawn first.
        """
        assert self._view.can_evict, "an eviction on a worker that cannot evict"
        assert row not in self._evictions, "a request evicted twice"
        assert how is EvictionMode.SWAP or num_tokens is None, "a part of a cache is dropped"
        if row in self._scheduled:
            self.withdraw(row)
        on_device = self._num_cached(row) - self._num_swapped(row)
        leaving = on_device if num_tokens is None else min(num_tokens, on_device)
        assert leaving > 0, "nothing of it is on the device"
        if how is EvictionMode.SWAP and leaving > self.num_free_host:
            how, num_tokens, leaving = EvictionMode.DROP, None, on_device
        if how is EvictionMode.SWAP:
            self.num_free_host -= leaving
            self.work.swap_out_tokens += self._copied(row, leaving)
        self._evictions[row] = PlannedEviction(row, how, None if leaving == on_device else num_tokens)
        blocks = self._memory.blocks_for(on_device - leaving, is_hidden=self._is_hidden(row))
        self.num_free += self._freed(self._leaving, row, blocks if leaving < on_device else 0)
        self.num_free += self._reserved.pop(row, 0)

    def num_freed_by(self, rows: Iterable[int]) -> int:
        """Return how many blocks would become free if these requests were dropped as well, one after the other."""
        trial = self._leaving.copy() if self._leaving is not None else None
        return sum(self._freed(trial, row, 0) + self._reserved.get(row, 0) for row in rows)

    def displace(self, victims: list[int], missing: int, evict: Callable[[int], None] | None = None) -> bool:
        """Evict from the end of `victims` until so many more blocks are free; evict none if all would be too few.

        `evict`: how; None: they are dropped.
        """
        if missing > 0 and self.num_freed_by(victims) < missing:
            return False
        wanted = self.num_free + missing
        while self.num_free < wanted:
            (evict or self.drop)(victims.pop())
        return True

    def add_evicting(self, row: int, num_tokens: int, victims: list[int]) -> bool:
        """Schedule this many tokens, dropping the last of `victims` (and removing it from the list) while blocks lack.

        Return False, without scheduling it, if places, tokens or victims run out.
        """
        while not self.add(row, num_tokens):
            if not victims or self.num_places_left < 1 or num_tokens > self.num_tokens_left:
                return False
            self.drop(victims.pop())
        return True

    def add_earliest(self, at_most: int) -> None:
        """Resolve a deadlock in which all wait for blocks that others hold: drop the latest for the earliest to arrive.

        It computes up to `at_most` tokens, or as many as fit when no other request holds blocks.
        """
        table = self._view.table
        others = [row for row in table.by_arrival(np.arange(len(table))).tolist() if row not in self._evictions]
        if not others:
            return
        earliest = others.pop(0)
        holders = [row for row in others if self._view.can_evict and table.num_blocks[row] > 0]
        num_tokens = min(self.remaining(earliest), self.num_tokens_left, at_most)
        if not self.add_evicting(earliest, num_tokens, holders) and (num_tokens := self.chunk(earliest)):
            self.add(earliest, min(num_tokens, at_most))

    def _freed(self, leaving: LeavingUsers | None, row: int, num_kept: int) -> int:
        num_left = self._num_blocks(row) - num_kept
        return num_left if leaving is None else num_left - leaving.leave(self._view.table.request_ids[row], num_kept)

    def upload(self, row: int) -> bool:
        """Swap in what this request has on the host, without computing; return False if blocks are lacking."""
        assert self._num_swapped(row), "nothing of it is on the host"
        assert row not in self._scheduled, "a scheduled request is swapped in anyway"
        assert row not in self._evictions, "a request both evicted and swapped in"
        num_blocks = self.blocks_needed(row, 0)
        if num_blocks > self.num_free:
            return False
        self._uploads.append(row)
        self.num_free -= num_blocks
        self.work.swap_in_tokens += self._copied(row, self._num_swapped(row))
        return True

    def depart(self, row: int) -> None:
        self._departures.append(row)

    def bring_back(self, row: int) -> bool:
        """Let a request come back from the pool, to compute later; return False if blocks are lacking."""
        assert row not in self._scheduled, "a request that is elsewhere is scheduled"
        num_blocks = self.blocks_needed(row, 1)
        if num_blocks > self.num_free:
            return False
        self._returns.append(row)
        self.num_free -= num_blocks
        return True

    def withdraw(self, row: int) -> int:
        part = self._scheduled.pop(row)
        self.num_free += self._taken_by(part)
        self.num_tokens_left += part.num_tokens
        self.num_places_left += 1
        withdrawn = IterationWork()
        self.note_work(withdrawn, row, part.num_tokens)
        self.work.subtract(withdrawn)
        if 0 < withdrawn.max_decode_context_len == self.work.max_decode_context_len:
            self.work.max_decode_context_len = self._longest_decode()
        return part.num_tokens

    def _taken_by(self, part: ScheduledRequest) -> int:
        return self.blocks_needed(part.row, part.num_tokens, is_hidden=part.is_hidden)

    def predicted_s(self) -> float:
        return self._view.costs.iteration_s(self.work)

    def plan(self) -> IterationPlan:
        is_added_up = not (self._evictions or self._uploads or self.work.swap_in_tokens or self.work.swap_out_tokens)
        return IterationPlan(
            *(tuple(self._scheduled.values()), tuple(self._evictions.values()), tuple(self._uploads)),
            *(self._shares(), tuple(self._departures), tuple(self._returns)),
            work=self.work if is_added_up else None,
        )

    def _shares(self) -> tuple[PlannedShare, ...]:
        return ()

    def _decodes_of(self, rows: list[int]) -> Iterable[tuple[int, ScheduledRequest]]:
        if len(self._view.table) <= _NUM_DECODES:
            return zip(rows, map(_DECODES.__getitem__, rows), strict=True)
        return ((row, ScheduledRequest(row, 1)) for row in rows)

    def _copied(self, row: int, num_tokens: int) -> float:
        return self._memory.copy_tokens(num_tokens, is_hidden=self._is_hidden(row)) if num_tokens else 0

    def _longest_decode(self) -> int:
        others = IterationWork()
        for part in self._scheduled.values():
            self.note_work(others, part.row, part.num_tokens)
        return others.max_decode_context_len

    def _is_dropped(self, row: int) -> bool:
        evict = self._evictions.get(row)
        return evict is not None and evict.how is EvictionMode.DROP
