"""Packs an iteration within a time: decodes in bulk, prompts in chunks, and evictions when blocks are short."""

import math
from functools import cached_property

import numpy as np

from alignedserve.costmodel.model import CostModel, chunk_within
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policies.aligned_slo.forecast import (
    BEST_EFFORT,
    LATE,
    ON_TIME,
    STARVING,
    URGENT,
    RankGroup,
    SloForecast,
    in_order,
    rows_of,
)
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView
from alignedserve.scheduling.table import Ints, rows_where
from alignedserve.scheduling.table_operations import num_decodes_within


class LoanCredit:
    """Keeps account of the time that the loans of a worker may take."""

    def __init__(self, share: float, most_s: float) -> None:
        """`share`: of the time, which is earned as it passes. `most_s`: as much is kept at most, and there at first."""
        self._share, self._most_s = share, most_s
        self._left_s = most_s
        self._earned_until_s = 0.0

    def earn(self, now: float) -> None:
        self._left_s = min(self._left_s + self._share * (now - self._earned_until_s), self._most_s)
        self._earned_until_s = now

    def spend(self, cost_s: float) -> bool:
        """Take this much of the credit; return False, and take nothing, if there is less."""
        if cost_s > self._left_s:
            return False
        self._left_s -= cost_s
        return True


class Lenders:
    """Chats that can lend their memory to late first tokens in one decision.

    A lender keeps its cache on the host or in the pool: none is computed again. Loans stop when the lent caches would
    fill the device.
    """

    def __init__(self, view: WorkerView, forecast: SloForecast, credit: LoanCredit) -> None:
        self._view = view
        self._table = view.table
        self._rows = forecast.rows
        self.credit = credit

    @cached_property
    def lenders(self) -> list[int]:
        """List the requests ahead of their schedule whose cache has room elsewhere, the furthest last.

        It is empty while all that is lent would fill the device.
        """
        table, memory, eviction_slack_s = self._table, self._view.memory, self._rows.eviction_slack_s
        if self._num_lent_tokens() >= memory.slots_in(memory.num_blocks):
            return []
        can_lend = self._rows.is_ready & (self._rows.rank > STARVING) & (eviction_slack_s > 0)
        can_lend &= (table.num_blocks > 0) & self._view.can_evict
        if self._view.pool is None:
            can_lend &= table.num_cached <= memory.num_free_host
        rows = np.flatnonzero(can_lend)
        furthest_last: list[int] = rows[np.lexsort((table.order[rows], eviction_slack_s[rows]))].tolist()
        return furthest_last

    def _num_lent_tokens(self) -> int:
        rows = self._rows
        if not any(rows.num_waiting[URGENT : ON_TIME + 1]):
            return 0
        lent = rows_where((rows.claim <= ON_TIME) & ~rows.is_ready & (self._table.num_generated > 0))
        return int(self._table.context_len[lent].sum())


def in_parts_s(
    costs: CostModel, num_tokens: int, part: int, num_cached: int, *, now: IterationWork, later: IterationWork
) -> float:
    """Return the seconds until a prompt is computed in parts, one in each iteration from now on; inf without a part.

    `num_tokens`: of the prompt, after `num_cached`. `part`: tokens of each but the last, which may have fewer. `now`,
    `later`: what else this iteration and each of those that follow compute. A part reads as many keys more than the one
    before it: of all that follow in full, the mean of the first and the last stands for each.
    """
    if part <= 0:
        return math.inf
    end = num_cached + num_tokens

    def part_s(beside: IterationWork, start: int, size: int) -> float:
        iteration = beside.copy()
        iteration.add_chunk(size, start, is_last=start + size == end)
        return costs.iteration_s(iteration)

    first = min(part, num_tokens)
    total_s = part_s(now, num_cached, first)
    num_full, num_last = divmod(num_tokens - first, part)
    if num_full:
        total_s += num_full * (part_s(later, num_cached + first, part) + part_s(later, end - num_last - part, part)) / 2
    if num_last:
        total_s += part_s(later, end - num_last, num_last)
    return total_s


class SloPacking:
    """One decision: within a rank by `priority`, then the shortest first; ties by arrival at the worker."""

    def __init__(self, view: WorkerView, forecast: SloForecast, loans: Lenders, *, growth_tokens: int) -> None:
        self._view = view
        self._table = view.table
        self._forecast = forecast
        self._rows = forecast.rows
        self._packer = Packer(view)
        self._loans = loans
        self._growth_tokens = growth_tokens
        self._evicted: set[int] = set()
        self._gain: list[int] | None = None  # see _blocks_to_gain
        self._lendable = 0
        self._decodes = IterationWork()
        self._kept = 0  # blocks for the rest of starving prompts

    @property
    def work(self) -> IterationWork:
        return self._packer.work

    def predicted_s(self) -> float:
        return self._packer.predicted_s()

    def plan(self) -> IterationPlan:
        """Return the plan, never empty while there are requests: if none fits, the first is forced in by evictions."""
        if not self._packer.num_scheduled and len(self._table):
            self._force_one()
        return self._packer.plan()

    # --- decodes

    def add_decodes(
        self, group: RankGroup, budget_s: float, *, at_least: int = 0, are_chats: bool | None = None
    ) -> None:
        """Add the requests of this group that only need their next token, as many as the time allows.

        `are_chats`: only real-time requests, or only others.
        """
        rows = rows_of(group, self._table, self._rows, is_ready=True)
        if not len(rows):
            return
        rows = self._still_out(self._of_class(rows, are_chats))
        work, costs = self._packer.work, self._view.costs
        rows = rows[: max(num_decodes_within(costs, work, self._table, rows, budget_s), at_least)]
        while len(rows):
            rows = rows[self._packer.add_decodes(rows) :]
            if not len(rows) or min(self._packer.num_places_left, self._packer.num_tokens_left) < 1:
                return
            if not self._evict_for(int(rows[0]), is_growth=True):
                return
            rows = self._still_out(rows)

    # --- prompts, and caches to swap in

    def add_prompts(
        self, group: RankGroup, budget_s: float, *, decodes: IterationWork | None = None, are_chats: bool | None = None
    ) -> None:
        """Add requests of this group that have more to compute or lie on the host, in order, until the time is used up.

        Rows that do not fit are overtaken; blocks are kept for starving ones. While a chat is silent for too long, none
        begins. `decodes`: what later iterations compute beside parts of a prompt. `are_chats`: as in add_decodes.
        """
        packer = self._packer
        at_most = packer.num_places_left + self._rows.num_overtakable
        rows = rows_of(group, self._table, self._rows, is_ready=False, at_most=at_most)
        if not len(rows):
            return
        rows = self._of_class(rows, are_chats)
        self._gain, self._decodes = None, decodes or IterationWork()
        for row in rows.tolist():
            if row in self._evicted or (row in packer and not self._is_extensible(row, budget_s)):
                continue
            if self._forecast.is_silent and not (self._has_begun(row) or self._is_starving(row)):
                continue
            num_blocks = self._wanted(row)
            wanted = num_blocks + self._kept_from(row)
            self._overtake(row, wanted - packer.num_free, budget_s)
            if min(packer.num_places_left, packer.num_tokens_left) < 1:
                return
            missing = wanted - packer.num_free
            fits = missing <= 0 or missing <= self._blocks_to_gain(row)
            if not fits or not self._evict_until(row, wanted):
                if self._forecast.keeps_blocks(row, missing):
                    self._kept += num_blocks
                continue
            num_free = packer.num_free
            looks_further = self._add_prompt(row, budget_s)
            if self._forecast.keeps_blocks(row, 0):
                self._kept += num_blocks - (num_free - packer.num_free)
            if not looks_further:
                return

    def _of_class(self, rows: Ints, are_chats: bool | None) -> Ints:
        return rows if are_chats is None else rows[self._table.is_real_time[rows] == are_chats]

    def _is_extensible(self, row: int, budget_s: float) -> bool:
        if self._packer.predicted_s() >= budget_s:
            return False
        self._packer.withdraw(row)
        self._kept = 0
        return True

    def _wanted(self, row: int) -> int:
        packer, rank = self._packer, self._rows.rank[row]
        wanted = packer.blocks_needed(row, packer.remaining(row))
        if self._table.num_blocks[row]:
            return wanted
        if rank > URGENT:
            wanted += self._reserved_blocks
        return wanted + self._forecast.kept_blocks if rank >= LATE else wanted

    def _kept_from(self, row: int) -> int:
        is_kept = self._kept and (self._forecast.is_floor_held or self._rows.claim[row] > ON_TIME)
        return self._kept if is_kept else 0

    def _has_begun(self, row: int) -> bool:
        return bool(self._table.num_generated[row] or self._table.num_blocks[row])

    def _is_starving(self, row: int) -> bool:
        return bool(self._rows.rank[row] == STARVING)

    def _blocks_to_gain(self, row: int) -> int:
        if self._gain is None:
            rows = np.array([row for row in self._victims if row not in self._packer], np.int64)
            held = np.bincount(self._forecast.hold[rows], self._view.own_blocks(rows), BEST_EFFORT + 1)
            self._gain = [int(held[rank + 1 :].sum()) for rank in range(BEST_EFFORT + 1)]
            self._lendable = int(self._view.own_blocks(np.array(self._loans.lenders, np.int64)).sum())
        return self._gain[self._weakest(row)] + (self._lendable if self._rows.claim[row] == URGENT else 0)

    def _evict_until(self, row: int, num_blocks: int) -> bool:
        while num_blocks > self._packer.num_free:
            if not self._evict_for(row, is_growth=False):
                return False
        return True

    def _add_prompt(self, row: int, budget_s: float) -> bool:
        packer, table = self._packer, self._table
        remaining = packer.remaining(row)
        at_most = min(remaining, packer.num_tokens_left)
        if table.num_swapped[row] or remaining == 1:
            if self._rows.rank[row] == URGENT:
                budget_s = max(budget_s, self._forecast.stretched_s)
            does_come = self._can_copy(int(table.num_swapped[row]), budget_s) or self._is_starving(row)
            num_tokens = max(self._chunk_within(row, at_most, budget_s), 1)
            has_come = does_come and packer.add(row, num_tokens)
            if has_come and self._forecast.is_bound and packer.predicted_s() > budget_s:
                packer.withdraw(row)
            return True
        num_tokens = self._chunk_within(row, at_most, budget_s)
        if num_tokens < at_most and self._rows.rank[row] == URGENT and not self._table.num_generated[row]:
            num_tokens = self._in_time(row, num_tokens, at_most)
        return num_tokens > 0 and packer.add(row, num_tokens) and num_tokens == remaining

    def _chunk_within(self, row: int, at_most: int, budget_s: float) -> int:
        num_cached = int(self._table.num_cached[row])
        return chunk_within(
            self._view.costs,
            self._packer.work,
            num_cached=num_cached,
            at_most=at_most,
            budget_s=budget_s,
            num_scored=self._table.num_scored(row, at_most, num_cached),
        )

    def _in_time(self, row: int, usual: int, at_most: int) -> int:
        """Return the tokens of an urgent newcomer to compute now: more than the `usual` if it is in time only so.

        With longer parts others still hold their mean gap. One that waits alone counts on what their later gaps give
        back as well; two would count on the same.
        """
        forecast, costs, packer = self._forecast, self._view.costs, self._packer
        remaining, num_cached, whole = packer.remaining(row), packer.num_kept(row), packer.work.copy()
        packer.note_work(whole, row, remaining)
        whole_s, slack_s = costs.iteration_s(whole), float(self._rows.slack_s[row])

        def is_in_time(part: int) -> bool:
            takes_s = in_parts_s(costs, remaining, part, num_cached, now=packer.work, later=self._decodes)
            return takes_s <= slack_s

        if whole_s > slack_s or is_in_time(usual):
            return usual
        if at_most == remaining and whole_s <= forecast.stretched_s:
            return remaining
        waits_alone = sum(self._rows.num_waiting[: LATE + 1]) <= 1
        longer = self._chunk_within(row, at_most, forecast.stretched_s if waits_alone else forecast.banked_s)
        return longer if longer > usual and is_in_time(longer) else usual

    @cached_property
    def _reserved_blocks(self) -> int:
        table, ready = self._table, rows_where(self._rows.is_ready)
        if not len(ready) or not self._view.can_evict:
            return 0
        grown_len = table.num_cached[ready] + 1 + np.where(self._rows.is_free[ready], 0, self._growth_tokens)
        grown = self._view.memory.blocks_for_each(grown_len, is_hidden=table.is_hidden[ready])
        return int(np.maximum(grown - table.num_blocks[ready], 0).sum())

    # --- evictions

    @cached_property
    def _victims(self) -> list[int]:
        table, forecast = self._table, self._rows
        holders = np.flatnonzero((table.num_blocks > 0) & self._view.can_evict)
        order = np.lexsort((table.order[holders], forecast.left_s[holders], self._forecast.hold[holders]))
        return [row for row in holders[order].tolist() if row not in self._evicted]

    def _evict_for(self, row: int, *, is_growth: bool) -> bool:
        """Evict a victim for this row; return False without a victim.

        A newcomer displaces only late or best-effort requests of a worse rank than its own, and if it is urgent also
        those ahead of their schedule; a request that grows displaces any behind it.
        """
        hold, claim = self._forecast.hold, self._rows.claim
        weakest = self._weakest(row)
        while self._victims:
            victim = self._victims[-1]
            if victim in self._packer:
                self._victims.pop()
                continue
            is_worse = hold[victim] > weakest
            if victim == row or not (is_worse or (is_growth and self._comes_after(victim, row))):
                break
            self._victims.pop()
            self._evict(victim)
            return True
        return not is_growth and claim[row] == URGENT and self._evict_ahead(row)

    def _weakest(self, row: int) -> int:
        """Return the rank from whose holders a newcomer takes no memory, nor from those before it.

        Documents never evict others: an evicted document could become urgent and be recomputed.
        """
        if self._is_starving(row):
            return LATE
        claim = int(self._rows.claim[row])
        return BEST_EFFORT if claim > LATE else max(claim, ON_TIME)

    def _evict_ahead(self, row: int) -> bool:
        """Let the request furthest ahead of its schedule lend its memory, even if it is in the plan already.

        It returns into free blocks, or when its next token is due by the schedule: until then it is not urgent.
        """
        while self._loans.lenders:
            victim = self._loans.lenders.pop()
            if victim != row and victim not in self._evicted and self._lend(victim):
                return True
        return False

    def _lend(self, row: int) -> bool:
        if not (self._is_swapped(row) and self._loans.credit.spend(2 * self._copying_s(row))):
            return False
        self._packer.evict(row, EvictionMode.SWAP)
        self._forget_victim(row)
        return True

    def _comes_after(self, victim: int, row: int) -> bool:
        hold, left_s = self._forecast.hold, self._rows.left_s
        if self._rows.claim[row] > ON_TIME >= hold[victim]:  # whoever has waited takes nothing from those on time
            return False
        return bool((hold[victim], left_s[victim]) > (hold[row], left_s[row]))

    def _evict(self, row: int) -> None:
        self._packer.evict(row, EvictionMode.SWAP if self._is_swapped(row) else EvictionMode.DROP)
        self._forget_victim(row)

    def _forget_victim(self, row: int) -> None:
        self._evicted.add(row)
        for others in (self._victims, self._longest):
            if row in others:
                others.remove(row)

    def _is_swapped(self, row: int) -> bool:
        """Return whether a victim's cache is copied to the host: in less time, there and back, than computing it again
        takes, within the time that copies have, and where there is room."""
        num_cached = int(self._table.num_cached[row])
        is_cheaper = 2 * self._copying_s(row) < self._recomputing_s(row) and not self._table.num_swapped[row]
        has_room = num_cached <= self._packer.num_free_host
        return is_cheaper and has_room and self._can_copy(num_cached, self._forecast.copies_s)

    def _can_copy(self, num_tokens: int, budget_s: float) -> bool:
        work = self._packer.work
        copied = work.swap_in_tokens + work.swap_out_tokens + self._view.memory.copy_tokens(num_tokens)
        return self._view.costs.swap_s(copied) <= budget_s

    def _copying_s(self, row: int) -> float:
        return self._view.costs.swap_s(self._view.memory.copy_tokens(int(self._table.num_cached[row])))

    def _recomputing_s(self, row: int) -> float:
        return int(self._table.num_cached[row]) * self._forecast.prefill_token_s

    # --- overtaking, among requests without objectives, of those with far more left to do

    @cached_property
    def _longest(self) -> list[int]:
        table, forecast = self._table, self._rows
        rows = np.flatnonzero(forecast.is_overtakable)
        order = np.lexsort((table.order[rows], forecast.left_s[rows], table.priority[rows], forecast.rank[rows]))
        return [row for row in rows[order].tolist() if row not in self._evicted]

    def _overtake(self, row: int, missing: int, budget_s: float) -> None:
        packer = self._packer
        if (missing <= 0 < packer.num_places_left) or not self._rows.is_free[row]:
            return
        gives_place = self._longest_running() if packer.num_places_left < 1 else None
        if packer.num_places_left < 1 and (gives_place is None or not self._is_far_longer(gives_place, row)):
            return
        chosen = self._overtaken(row, missing, budget_s) if missing > 0 else []
        if chosen is None or packer.predicted_s() > budget_s:
            return
        for victim in chosen:
            self._evict(victim)
        if packer.num_places_left < 1 and gives_place is not None:
            packer.withdraw(gives_place)  # pauses, its cache kept

    def _longest_running(self) -> int | None:
        return next((row for row in reversed(self._longest) if row in self._packer), None)

    def _overtaken(self, row: int, missing: int, budget_s: float) -> list[int] | None:
        chosen, copying_s = [], 0.0
        for victim in reversed(self._longest if self._view.can_evict else []):
            copying_s += self._copying_s(victim)
            if copying_s > budget_s or not self._is_far_longer(victim, row):
                return None
            chosen.append(victim)
            missing -= int(self._view.own_blocks(np.array([victim]))[0])
            if missing <= 0:
                return chosen
        return None

    def _is_far_longer(self, victim: int, row: int) -> bool:
        table, forecast = self._table, self._rows
        recovery_s = self._recomputing_s(victim)
        if table.num_cached[victim] <= self._packer.num_free_host:
            recovery_s = min(recovery_s, 2 * self._copying_s(victim))
        is_equal = forecast.claim[victim] == forecast.claim[row] and table.priority[victim] >= table.priority[row]
        return bool(is_equal and forecast.left_s[victim] > 2 * (forecast.left_s[row] + recovery_s))

    def _force_one(self) -> None:
        rows = in_order(np.arange(len(self._table)), self._table, self._rows._replace(rank=self._forecast.hold))
        row = next(candidate for candidate in rows.tolist() if candidate not in self._evicted)
        packer = self._packer
        while self._view.can_evict and packer.blocks_needed(row, packer.remaining(row)) > packer.num_free:
            victim = self._victims.pop()
            if victim != row:
                self._evict(victim)
        packer.add(row, packer.chunk(row))

    def _still_out(self, rows: Ints) -> Ints:
        packer, evicted = self._packer, self._evicted
        if not evicted and not (packer.num_scheduled and self._rows.num_ready[STARVING]):
            return rows
        taken = evicted.union(packer.rows)
        return rows[[row not in taken for row in rows.tolist()]]
