"""Packs an iteration where the pool of the node takes decodes: three ways to leave the device, one forecast of cost.

A victim that leaves to the pool is copied while others compute, and so is its way back: it costs the device nothing,
but its blocks are free later only. One that is swapped costs both copies, one that is dropped all of its tokens again;
their blocks are free at once. The cost is the delay, added up over the requests that it meets:

    leaving = messages + half an iteration + (blocks on their way + its own) * a block's copy
    pool      leaving + an iteration - slack of the newcomer, 0 at least; a first token must not be late by it
    swap      2 * copy * requests that run, where the copies of an iteration may take as long
    drop      computing again * requests that run

A decode that has to wait for its next block pauses. So before the blocks run out, others leave ahead:

    steps     = leaving / iteration + 1
    they leave while  growth of what runs within `steps` > free + on their way + what ends by then

Those that come back are chosen as those from the host are, by rank and the time left; they are copied in beside the
iteration, two iterations ahead at most, and decode in the one after.
"""

from dataclasses import replace
from math import ceil, inf

import numpy as np
from typing_extensions import override

from alignedserve.scheduling.policies.aligned_slo.forecast import ON_TIME, SloForecast, in_order
from alignedserve.scheduling.policies.aligned_slo.packing import Lenders, SloPacking
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import remaining_output_len
from alignedserve.scheduling.table import Ints

_LEAST_S = 0.001  # of computing again; messages of a handoff cost as much
_ITERATIONS_AHEAD = 2  # of copies back


class PooledPacking(SloPacking):
    """One decision of `aligned_slo` beside a pool; with an empty pool it decides like its base."""

    def __init__(self, view: WorkerView, forecast: SloForecast, loans: Lenders, *, growth_tokens: int) -> None:
        super().__init__(view, forecast, loans, growth_tokens=growth_tokens)
        assert view.pool is not None, "a worker without a pool"
        self._pool, row = view.pool, view.table.row
        self._away = {row(request_id) for request_id, is_returning in self._pool.away.items() if not is_returning}
        # On their way there or back: nothing is to be decided about these.
        self._evicted.update(row(request_id) for request_id in self._pool.leaving)
        self._evicted.update(row(request_id) for request_id, is_returning in self._pool.away.items() if is_returning)
        self._iteration_s = max(view.history.mean_s, self._packer.predicted_s())
        self._coming = self._leaving = self._pool.num_coming  # blocks on their way out: not promised yet; all
        self._num_returning = self._pool.num_returning
        self._promised = 0  # free blocks of those that wait for more to come
        self._waiter: int | None = None  # the newcomer that blocks are wanted for; None: they are wanted at once

    @override
    def plan(self) -> IterationPlan:
        self._leave_ahead()
        plan = super().plan()
        if plan.scheduled or not plan.evictions:
            return plan
        if self._leaving or self._pool.is_busy:  # evictions wait, and what would have their blocks
            return replace(plan, evictions=(), returns=(), work=None)
        alone = PooledPacking(self._view, self._forecast, self._loans, growth_tokens=self._growth_tokens)
        alone._force_one()
        return alone._packer.plan()

    # --- newcomers

    @override
    def _blocks_to_gain(self, row: int) -> int:
        return super()._blocks_to_gain(row) + self._coming_to(row)

    @override
    def _kept_from(self, row: int) -> int:
        return super()._kept_from(row) + self._promised

    @override
    def _evict_until(self, row: int, num_blocks: int) -> bool:
        self._waiter, does_suffice = row, True
        while does_suffice and num_blocks > self._packer.num_free + self._coming_to(row):
            does_suffice = self._evict_for(row, is_growth=False)
        self._waiter = None
        missing = num_blocks - self._packer.num_free
        if does_suffice and missing > 0:
            self._coming -= missing
            self._promised = max(self._packer.num_free, 0)
        return missing <= 0

    @override
    def _overtake(self, row: int, missing: int, budget_s: float) -> None:
        self._waiter = row
        super()._overtake(row, missing - self._coming_to(row), budget_s)
        self._waiter = None

    @override
    def _add_prompt(self, row: int, budget_s: float) -> bool:
        if row not in self._away:
            return super()._add_prompt(row, budget_s)
        num_blocks = self._packer.blocks_needed(row, 1)
        returning_s = (self._num_returning + num_blocks) * self._pool.block_s
        is_soon = not self._num_returning or returning_s <= _ITERATIONS_AHEAD * self._iteration_s
        if is_soon and self._packer.bring_back(row):
            self._num_returning += num_blocks
            self._evicted.add(row)  # one that has waited too long is looked at twice
        return True

    def _coming_to(self, row: int) -> int:
        return self._coming if self._late_s(row, 0) < inf else 0

    def _late_s(self, row: int, num_blocks: int) -> float:
        if self._rows.claim[row] > ON_TIME:
            return 0.0
        has_begun = bool(self._table.num_generated[row])
        ready_s = self._pool.leaving_s(self._leaving - self._pool.num_coming + num_blocks) + self._iteration_s
        slack_s = float(self._rows.slack_s[row])
        if has_begun:
            return max(ready_s - max(slack_s, 0.0), 0.0)
        # A first token has no mean that could still be held.
        return 0.0 if ready_s + float(self._rows.left_s[row]) <= slack_s else inf

    # --- who leaves, and how

    @override
    def _evict_for(self, row: int, *, is_growth: bool) -> bool:
        if not is_growth:
            return super()._evict_for(row, is_growth=False)
        self._waiter = row
        has_evicted = self._coming_to(row) > 0 or super()._evict_for(row, is_growth=True)
        self._waiter = None
        if has_evicted and self._packer.num_free < 1:
            self._coming -= 1
            self._evicted.add(row)
        return has_evicted

    @override
    def _lend(self, row: int) -> bool:
        num_blocks = self._own_blocks(row)
        if not self._does_leave(row, num_blocks):
            return self._waiter not in self._away and super()._lend(row)
        if not self._loans.credit.spend(2 * num_blocks * self._pool.block_s):
            return False
        self._leave(row, num_blocks)
        return True

    @override
    def _evict(self, row: int) -> None:
        num_blocks = self._own_blocks(row)
        if self._does_leave(row, num_blocks):
            self._leave(row, num_blocks)
        # One that has a copy ahead of it can wait for another, rather than cost others their cache. But where a victim
        # cannot leave, the pool being full of documents, a chat would wait for that document.
        elif self._waiter not in self._away or not self._can_leave(row, num_blocks):
            super()._evict(row)

    def _does_leave(self, row: int, num_blocks: int) -> bool:
        waiter = self._waiter
        if waiter is None or not self._can_leave(row, num_blocks):
            return False
        return self._late_s(waiter, num_blocks) <= self._delay_s(row)

    def _delay_s(self, row: int) -> float:
        device_s = min(2 * self._copying_s(row), self._recomputing_s(row))
        return device_s * max(sum(self._rows.num_ready), 1)

    def _own_blocks(self, row: int) -> int:
        return int(self._view.own_blocks(np.array([row]))[0])

    def _can_leave(self, row: int, num_blocks: int) -> bool:
        is_whole = self._rows.is_ready[row] and not self._table.is_hidden[row]
        return bool(is_whole and self._pool.has_room and num_blocks > 0 and self._is_worth_while(row, num_blocks))

    def _is_worth_while(self, row: int, num_blocks: int) -> bool:
        return max(num_blocks * self._pool.block_s, _LEAST_S) < self._recomputing_s(row)

    def _leave(self, row: int, num_blocks: int) -> None:
        self._packer.depart(row)
        self._coming += num_blocks
        self._leaving += num_blocks
        self._forget_victim(row)

    def _leave_ahead(self) -> None:
        running = np.flatnonzero(self._rows.is_ready)
        if not self._pool.has_room or len(running) < 2 or not self._view.can_evict:
            return
        shortage = self._shortage(running, 0)
        for row in self._by_stall(running) if shortage > 0 else ():
            num_blocks = self._own_blocks(row)
            if self._can_leave(row, num_blocks):
                self._leave(row, num_blocks)
                running = running[running != row]
                shortage = self._shortage(running, num_blocks)
            if shortage <= 0 or len(running) < 2:
                return

    def _shortage(self, running: Ints, num_blocks: int) -> int:
        table, memory = self._table, self._view.memory
        leaving_s = self._pool.leaving_s(
            self._leaving - self._pool.num_coming + (num_blocks or _mean(table.num_blocks))
        )
        num_steps = ceil(leaving_s / max(self._iteration_s, 1e-6)) + 1
        num_left = remaining_output_len(table)[0][running]
        num_cached, is_hidden = table.num_cached[running] + 1, table.is_hidden[running]
        now, later = (memory.blocks_for_each(num_cached + more, is_hidden=is_hidden) for more in (0, num_steps))
        ends = num_left <= num_steps
        growth = int(np.sum((later - now)[~ends]))
        ended = int(np.sum(table.num_blocks[running][ends]))
        return growth - (self._packer.num_free + self._coming + ended)

    def _by_stall(self, rows: Ints) -> list[int]:
        hold, ahead_s = self._forecast.hold[rows], self._rows.eviction_slack_s[rows]
        least_first = np.where(hold <= ON_TIME, -ahead_s, -self._rows.left_s[rows])
        ordered: list[int] = rows[np.lexsort((self._table.order[rows], least_first, -hold))].tolist()
        return [row for row in ordered if row not in self._evicted]

    @override
    def _force_one(self) -> None:
        if self._leaving or self._num_returning or self._pool.is_busy:
            return  # what is on its way makes room, or computes
        away = [
            row for row in in_order(np.arange(len(self._table)), self._table, self._rows).tolist() if row in self._away
        ]
        self._evicted |= self._away
        if len(self._evicted) < len(self._table):
            self.__dict__.pop("_victims", None)  # some were passed over for one that is away, and none was evicted
            super()._force_one()
        elif away:
            self._packer.bring_back(away[0])


def _mean(values: Ints) -> int:
    held = values[values > 0]
    return int(np.mean(held)) if len(held) else 0
