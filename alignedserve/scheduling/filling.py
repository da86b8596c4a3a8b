"""Fills an iteration: pieces in order while time, places and memory last, and evictions for them."""

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView
from alignedserve.scheduling.table import Bools, Floats, Ints, rows_where
from alignedserve.scheduling.table_operations import num_decodes_within

ON_TIME, LATE, PRESSING, DOCUMENT = range(4)  # groups, the first ones first: chats, then documents


class Rows(NamedTuple):
    """Columns over the rows of a table; seconds from now."""

    group: Ints
    key: Floats  # the order within a group and a priority, the least first
    start_s: Floats  # the latest start of the next piece
    piece_s: Floats  # that the next piece takes alone
    is_ready: Bools  # decodes, with its whole cache on the device
    slack_s: Floats  # until the next token of a chat on time that decodes is due; else inf


class Filling:
    """One iteration in the making."""

    def __init__(
        self, view: WorkerView, rows: Rows, guaranteed: Collection[int], *, growth_tokens: int, token_s: float
    ) -> None:
        """`guaranteed`: rows that are not evicted. `growth_tokens`: for which newcomers leave blocks to each chat.

        `token_s`: to compute a lost token again.
        """
        self._view, self._table, self._rows = view, view.table, rows
        self._growth_tokens, self._token_s = growth_tokens, token_s
        self._packer = Packer(view)
        self._evicted: set[int] = set()
        self._guaranteed = guaranteed
        self._kept = 0  # blocks that wait for guaranteed requests
        self._away: set[int] = set()  # in the pool
        self._num_coming = 0  # blocks of requests on their way there, free soon
        if view.pool is not None:
            self._num_coming = view.pool.num_coming
            self._away = {view.table.row(request_id) for request_id in view.pool.away}
            moving = [request_id for request_id, is_returning in view.pool.away.items() if is_returning]
            self._evicted = {view.table.row(request_id) for request_id in (*moving, *view.pool.leaving)}

    def predicted_s(self) -> float:
        return self._packer.predicted_s() if self._packer.num_scheduled else 0.0

    def plan(self) -> IterationPlan:
        """Return the plan, never empty while there are requests: if none fits, the first is forced in by evictions."""
        if not self._packer.num_scheduled and len(self._table):
            self._force_one()
        plan = self._packer.plan()
        return plan if plan.scheduled or not self._num_coming else replace(plan, evictions=(), work=None)

    # --- fill

    def add_decodes(self, mask: Bools, until_s: float = math.inf) -> float:
        """Add a token of each, the first ones first, while the iteration is no longer than `until_s`.

        Return by how many seconds the iteration grows.
        """
        packer, before_s = self._packer, self.predicted_s()
        rows = self._in_order(rows_where(mask))
        if not len(rows):
            return 0.0
        if taken := self._evicted.union(packer.rows if self._guaranteed else ()):
            rows = rows[[row not in taken for row in rows.tolist()]]
        rows = rows[: num_decodes_within(self._view.costs, packer.work, self._table, rows, until_s)]
        while len(rows):
            rows = rows[packer.add_decodes(rows) :]
            if not len(rows) or min(packer.num_places_left, packer.num_tokens_left) < 1:
                break
            if self._make_room(int(rows[0]), 1, is_growth=True):
                rows = rows[[row not in self._evicted for row in rows.tolist()]]
            else:
                rows = rows[1:]
        return self.predicted_s() - before_s

    def add_prompts(self, mask: Bools, until_s: float) -> None:
        """Add requests with more than a token to compute, or with a cache on the host.

        Chats overtake a chat that lacks memory; documents wait for the first document, so that none starves.
        """
        rows = self._in_order(rows_where(mask & ~self._rows.is_ready), self._view.limits.max_running_requests)
        for row in rows.tolist():
            if min(self._packer.num_places_left, self._packer.num_tokens_left) < 1:
                return
            if row not in self._evicted and row not in self._packer and not self._add_prompt(row, until_s):
                return

    def add_guaranteed(self, row: int, owed_s: float, until_s: float) -> float:
        """Add a guaranteed request once its whole piece is owed; from then on blocks are kept for it.

        Return by how many seconds the iteration grows.
        """
        packer, before_s = self._packer, self.predicted_s()
        if row in packer or row in self._evicted or owed_s < self._rows.piece_s[row]:
            return 0.0
        needed = packer.blocks_needed(row, packer.remaining(row))
        if not self._add_prompt(row, until_s, is_guaranteed=True) or row not in packer:
            self._kept += needed
        return self.predicted_s() - before_s

    def _add_prompt(self, row: int, until_s: float, *, is_guaranteed: bool = False) -> bool:
        packer, table = self._packer, self._table
        remaining = packer.remaining(row)
        needed = packer.blocks_needed(row, remaining)
        if not table.num_blocks[row] and not is_guaranteed:
            needed += self._kept + self._growth_blocks
        if needed > packer.num_free and not self._make_room(row, needed, is_growth=False):
            return bool(self._rows.group[row] <= LATE)
        at_most = min(remaining, packer.num_tokens_left)
        if row in self._away:
            if not (self._view.pool and self._view.pool.num_returning) and packer.bring_back(row):
                self._evicted.add(row)
            return True
        num_tokens = packer.chunk_within(row, at_most, until_s)
        if table.num_swapped[row] or remaining == 1:
            return self._add_swapped(row, max(num_tokens, 1), until_s)
        return num_tokens > 0 and packer.add(row, num_tokens) and num_tokens == remaining

    def _add_swapped(self, row: int, num_tokens: int, until_s: float) -> bool:
        """Bring a cache back within the time; a chat's comes all the same where the copy alone takes longer."""
        packer = self._packer
        has_copies = packer.work.swap_in_tokens > 0
        if not packer.add(row, num_tokens) or packer.predicted_s() <= until_s:
            return True
        is_long = self._view.costs.swap_s(packer.work.swap_in_tokens) > until_s
        if has_copies or not is_long or self._rows.group[row] > LATE:
            packer.withdraw(row)
        return True

    @cached_property
    def _growth_blocks(self) -> int:
        table, ready = self._table, rows_where(self._rows.is_ready)
        if not len(ready) or not self._view.can_evict:
            return 0
        grown_len = table.num_cached[ready] + 1 + np.where(self._rows.group[ready] <= LATE, self._growth_tokens, 0)
        grown = self._view.memory.blocks_for_each(grown_len, is_hidden=table.is_hidden[ready])
        return int(np.maximum(grown - table.num_blocks[ready], 0).sum())

    # --- order

    def _in_order(self, rows: Ints, at_most: int | None = None) -> Ints:
        if len(rows) < 2:
            return rows
        key, priority = self._rows.key[rows], self._table.priority[rows]
        if at_most is not None and at_most < len(rows) and priority.min() == priority.max():
            first = np.argpartition(key, at_most)[:at_most]
            rows, key, priority = rows[first], key[first], priority[first]
        return rows[np.lexsort((self._table.order[rows], key, priority, self._rows.group[rows]))]

    # --- evict

    @cached_property
    def _victims(self) -> list[int]:
        """List the requests that hold memory, the last of the order last."""
        table, rows = self._table, rows_where(self._table.num_blocks > 0)
        ordered = np.lexsort((table.order[rows], table.priority[rows], self._rows.group[rows]))
        return rows[ordered].tolist() if self._view.can_evict else []

    def _make_room(self, row: int, num_blocks: int, *, is_growth: bool) -> bool:
        """Evict from the end of the order until so many blocks are free; evict none if that cannot be.

        Chats take memory from documents, and from prompts of a worse group. A growing request takes memory from any
        request behind.
        """
        packer, chosen = self._packer, []
        missing = num_blocks - packer.num_free - self._num_coming  # what leaves to the pool makes room soon
        for victim in reversed(self._victims):
            if missing <= 0:
                break
            is_taken = victim in self._evicted or (victim in packer and not is_growth)
            if victim == row or victim in self._guaranteed or is_taken:
                continue
            if not self._gives_way(victim, row, is_growth=is_growth):
                break
            chosen.append(victim)
            missing -= packer.num_freed_by([victim])
        if missing > 0:
            return False
        for victim in chosen:
            self._evict(victim)
        return num_blocks <= packer.num_free

    def _gives_way(self, victim: int, row: int, *, is_growth: bool) -> bool:
        table, group = self._table, self._rows.group
        is_chat = group[row] <= LATE
        if is_chat and group[victim] > LATE:
            return True
        if is_growth:
            turn = [(group[each], table.priority[each], table.order[each]) for each in (victim, row)]
            return turn[0] > turn[1]
        return bool(is_chat and group[victim] > group[row] and not table.num_generated[victim])

    def _evict(self, row: int) -> None:
        """Let a cache leave to the pool, or to the host, where a copy takes less time than to compute it again."""
        packer, table, view = self._packer, self._table, self._view
        num_cached, again_s = int(table.num_cached[row]), float(table.num_cached[row] * self._token_s)
        self._evicted.add(row)
        self._victims.remove(row)
        is_whole = self._rows.is_ready[row] and not table.is_hidden[row]
        if (
            is_whole
            and view.pool is not None
            and view.pool.has_room
            and table.num_blocks[row] * view.pool.block_s < again_s
        ):
            packer.depart(row)
            self._num_coming += int(table.num_blocks[row])
            return
        copy_s = 2 * view.costs.swap_s(view.memory.copy_tokens(num_cached))
        does_swap = self._rows.is_ready[row] and num_cached <= packer.num_free_host and copy_s < again_s
        packer.evict(row, EvictionMode.SWAP if does_swap else EvictionMode.DROP)

    def _force_one(self) -> None:
        packer = self._packer
        if self._view.pool is not None and (self._view.pool.is_busy or self._num_coming):
            return  # what is on its way makes room, or computes
        ordered = [row for row in self._in_order(np.arange(len(self._table))).tolist() if row not in self._evicted]
        if not ordered:
            return
        row = next((row for row in ordered if row not in self._away), ordered[0])
        while packer.blocks_needed(row, packer.remaining(row)) > packer.num_free and self._victims:
            victim = self._victims[-1]
            if victim == row:
                self._victims.pop()
            else:
                self._evict(victim)
        if row in self._away:
            packer.bring_back(row)
        elif num_tokens := packer.chunk(row):
            packer.add(row, num_tokens)
