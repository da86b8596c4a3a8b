"""Shortest predicted remaining time first, by levels, with ageing and swapping (ALISE: Zhao and Wang, 2024).

- `rank`: the level of a request, 0 the best, by the time that it is predicted to need, and how long it will wait.
- `fill`: level by level, whole prompts and decodes, until places or tokens run out: the only budget.
- `evict`: better levels take memory from worse ones; copies to and from the host go ahead of their turn.
"""

import enum
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView
from alignedserve.scheduling.runtime_estimate import (
    RefreshedEstimate,
    RequestRuntimeModel,
    fit_request_runtime,
    remaining_output_len,
)
from alignedserve.scheduling.table import Floats, Ints


class Preemption(enum.Enum):
    """Treatment of a cache whose memory a better level claims (ALISE, section 4.3)."""

    SWAP = "swap"  # to the host, and back ahead of its turn
    RECOMPUTE = "recompute"  # dropped
    DEFER = "defer"  # kept: the newcomer waits; only a request that outgrows the memory drops the last of them


@dataclass(frozen=True, slots=True)
class AliseConfig:
    """Parameters of the paper, which gives no values: docs/policies/alise.md says how these were chosen."""

    num_levels: Annotated[int, Meta(ge=1)] = 8
    first_level_tokens: Annotated[int, Meta(ge=1)] = 16  # level 0 ends at the time of this many short decodes
    age_threshold_s: Annotated[float, Meta(gt=0)] = 60.0  # waiting that raises a request by one level (the paper's K)
    preemption: Preemption = Preemption.SWAP  # RECOMPUTE, DEFER: the paper's Figure 8
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that newcomers leave free
    runtime: RequestRuntimeModel | None = None  # T0, alpha, beta; None: probed from the worker's cost model


class Alise:
    """The policy. The page docs/policies/alise.md has the formulas and an example."""

    def __init__(self, config: AliseConfig) -> None:
        self._config = config
        self._runtime = RefreshedEstimate(fit_request_runtime, config.runtime)

    def plan(self, view: WorkerView) -> IterationPlan:
        config = self._config
        level, wait_s = rank(view, config, self._runtime.of(view.costs))
        return PriorityPacking(view, level, wait_s, preemption=config.preemption, watermark=config.watermark).plan()


def rank(view: WorkerView, config: AliseConfig, runtime: RequestRuntimeModel) -> tuple[Ints, Floats]:
    """Return the level of every row, and the time until it runs: all of better levels first, or ageing before that."""
    table, threshold_s = view.table, config.age_threshold_s
    num_left, num_overruns = remaining_output_len(table)
    remaining_s = runtime.remaining_s(table, num_left)
    by_time = np.frexp(remaining_s / (config.first_level_tokens * runtime.decode_s))[1].astype(np.int64)
    level = np.clip(np.maximum(by_time, num_overruns), 0, config.num_levels - 1)
    waited_s = np.maximum(view.now - table.arrival_s - table.service_s, 0.0)
    level = np.maximum(level - (waited_s // threshold_s).astype(np.int64), 0)
    by_level = np.bincount(level, weights=remaining_s, minlength=config.num_levels)
    better_s = np.cumsum(by_level) - by_level
    promoted_s = level * threshold_s - waited_s % threshold_s
    return level, np.minimum(better_s[level], np.maximum(promoted_s, 0.0))


class PriorityPacking:
    """Fills one iteration by levels, 0 the best; within a level by arrival. `wait_s`: estimated wait of each row.

    A newcomer (new, dropped or swapped out) displaces only worse levels, so that equals never evict each other in turn.
    A request on the device that needs one more block may displace any request behind it. Victims go by level, then by
    wait, the worst and longest first; caches are swapped in ahead of their turn in the opposite order.
    """

    def __init__(
        self, view: WorkerView, level: Ints, wait_s: Floats, *, preemption: Preemption, watermark: float
    ) -> None:
        self._view, self._packer = view, Packer(view)
        self._preemption = preemption
        self._watermark = int(watermark * view.memory.num_blocks)
        self._level, self._wait_s = level, wait_s
        self._is_decoding = view.table.is_decoding
        self._rows = self._in_order()
        self._rank = np.zeros(len(view.table), np.int64)
        self._rank[self._rows] = np.arange(len(self._rows))
        self._holders = self._by_wait(np.flatnonzero(view.table.num_blocks > 0))
        self._is_closed = False  # a newcomer did not fit: none after it enters

    def plan(self) -> IterationPlan:
        """Schedule requests in order until places or tokens run out; then add copies that the pass hides."""
        packer, holders = self._packer, set(self._holders)
        for row in self._rows:
            if not packer.num_places_left or not packer.num_tokens_left:
                break
            if row in holders:
                self._continue(row)
            elif not self._is_closed:
                self._is_closed = not self._enter(row)
        if self._preemption is Preemption.SWAP and self._view.can_evict and not packer.work.is_empty:
            self._copy_ahead()
        return packer.plan()

    def _in_order(self) -> list[int]:
        """Return, in order, all requests on the device and as many others as two iterations have places for.

        Requests that the whole memory cannot hold are skipped.
        """
        table, memory, level = self._view.table, self._view.memory, self._level
        is_holder = table.num_blocks > 0
        newcomers = np.flatnonzero(~is_holder & (table.context_len <= memory.slots_in(memory.num_blocks)))
        ranked = np.lexsort((table.order[newcomers], table.arrival_s[newcomers], level[newcomers]))
        nearest = newcomers[ranked[: 2 * self._view.limits.max_running_requests]]
        rows = np.concatenate((np.flatnonzero(is_holder), nearest))
        in_order: list[int] = rows[np.lexsort((table.order[rows], table.arrival_s[rows], level[rows]))].tolist()
        return in_order

    # --- fill

    def _continue(self, row: int) -> None:
        packer = self._packer
        if packer.is_evicted(row):
            self._is_closed = True  # later requests do not take the blocks that were missing
            return
        num_tokens = 1 if self._is_decoding[row] else min(packer.remaining(row), packer.num_tokens_left)
        missing = packer.blocks_needed(row, num_tokens) - packer.num_free
        if missing > 0:
            self._displace([other for other in self._staying() if self._rank[other] > self._rank[row]], missing)
        packer.add(row, num_tokens)

    def _enter(self, row: int) -> bool:
        """Schedule the whole prompt of a request without cache on the device; return False to stop admission.

        Memory for all of it is free or can be claimed, and the watermark stays free, unless it is alone. A prompt
        longer than an iteration may be begins with a part.
        """
        packer, num_tokens = self._packer, self._packer.remaining(row)
        if packer.num_tokens_left < num_tokens <= self._view.limits.max_tokens:
            return False
        missing = packer.blocks_needed(row, num_tokens) + self._watermark - packer.num_free
        if missing > 0 and not self._claim(row, missing):
            return False
        return packer.add(row, min(num_tokens, packer.num_tokens_left))

    def _claim(self, row: int, missing: int) -> bool:
        holders, can_claim = self._staying(), self._preemption is not Preemption.DEFER
        worse = [other for other in holders if can_claim and self._level[other] > self._level[row]]
        if self._packer.work.is_empty and len(worse) == len(holders):
            missing -= self._watermark
        return self._displace(worse, missing)

    # --- evict

    def _staying(self) -> list[int]:
        return [row for row in self._holders if not self._packer.is_evicted(row)]

    def _displace(self, victims: list[int], missing: int) -> bool:
        how = EvictionMode.SWAP if self._preemption is Preemption.SWAP else EvictionMode.DROP
        victims = victims if self._view.can_evict else []
        return self._packer.displace(victims, missing, lambda row: self._packer.evict(row, how))

    def _copy_ahead(self) -> None:
        """Add copies that take no longer than the pass computes.

        Paused caches are swapped out until the watermark is free, the last to run first; then, if places or tokens were
        short and not memory, the next to run are swapped in.
        """
        packer, table = self._packer, self._view.table
        compute_s = self._view.costs.iteration_s(replace(packer.work, swap_in_tokens=0.0, swap_out_tokens=0.0))
        for row in reversed(self._staying()):
            if packer.num_free >= self._watermark:
                break
            if row not in packer:
                num_tokens = int(table.num_cached[row] - table.num_swapped[row])
                if num_tokens > packer.num_free_host or not self._is_hidden_copy(row, num_tokens, compute_s):
                    break
                packer.evict(row, EvictionMode.SWAP)
        if self._is_closed:
            return
        for row in self._by_wait(np.array([row for row in self._rows if table.num_swapped[row]], np.int64)):
            if row not in packer and not packer.is_evicted(row):
                is_hidden = self._is_hidden_copy(row, int(table.num_swapped[row]), compute_s)
                if not is_hidden or packer.blocks_needed(row, 1) > packer.num_free - self._watermark:
                    break
                packer.upload(row)

    def _is_hidden_copy(self, row: int, num_tokens: int, compute_s: float) -> bool:
        view, work = self._view, self._packer.work
        copied = view.memory.copy_tokens(num_tokens, is_hidden=bool(view.table.is_hidden[row]))
        return view.costs.swap_s(work.swap_in_tokens + work.swap_out_tokens + copied) <= compute_s

    def _by_wait(self, rows: Ints) -> list[int]:
        ordered: list[int] = rows[np.lexsort((self._rank[rows], self._wait_s[rows], self._level[rows]))].tolist()
        return ordered
