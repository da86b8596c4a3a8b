"""First come, first served, prompts first: vLLM as the five papers have it (Kwon et al., 2023); also class by class."""

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.packer import Packer, by_arrival, displace
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView
from alignedserve.scheduling.table import Bools, Ints


@dataclass(frozen=True, slots=True)
class FcfsConfig:
    """vLLM's defaults."""

    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that newcomers leave free
    preemption: EvictionMode = EvictionMode.DROP  # vLLM recomputes a single sequence


class Fcfs:
    """The policy: an iteration is either whole prompts, as many of the earliest as fit, or one token of each decode.

    When the decodes no longer fit, the last to arrive is preempted. No new request begins while one is swapped out. The
    page docs/policies/fcfs.md has an example.

    Classed, real-time requests go before best-effort ones in both, whose prompts wait while there is a real-time
    request; and one that finds no blocks preempts the last best-effort requests to arrive.
    """

    def __init__(self, config: FcfsConfig, *, is_classed: bool = False) -> None:
        self._config = config
        self._is_classed = is_classed

    def plan(self, view: WorkerView) -> IterationPlan:
        """See IterationPolicy."""
        packer = Packer(view)
        self._add_prompts(packer, view, self._first_class(view))
        if not packer.rows:
            self._add_decodes(packer, view)
        return packer.plan()

    def _first_class(self, view: WorkerView) -> Bools:
        """Return the rows whose prompts may be computed: of real-time requests where there are any."""
        table = view.table
        able = (table.num_blocks > 0) | (table.context_len <= view.memory.slots_in(view.memory.num_blocks))
        real_time: Bools = able & table.is_real_time
        return real_time if self._is_classed and real_time.any() else able

    def _in_order(self, view: WorkerView, rows: Ints, at_most: int | None = None) -> list[int]:
        """Return these rows, or the first `at_most`, by class where that counts, then by arrival."""
        if not self._is_classed:
            return by_arrival(view, rows, at_most)
        is_real_time = view.table.is_real_time[rows]
        ordered = by_arrival(view, rows[is_real_time], at_most) + by_arrival(view, rows[~is_real_time], at_most)
        return ordered[:at_most]

    def _add_prompts(self, packer: Packer, view: WorkerView, able: Bools) -> None:
        """Add prompts up to the first that does not fit; the first one is chunked if it is longer than an iteration."""
        is_decoding, is_swapped = view.table.is_decoding, view.table.num_swapped > 0
        num_places = packer.num_places_left - int(np.count_nonzero(able & is_decoding & ~is_swapped))
        for row in self._prompts(view, able):
            num_tokens = packer.remaining(row)
            if not packer.rows:
                num_tokens = min(num_tokens, packer.num_tokens_left)
            if len(packer.rows) >= num_places or not self._is_admitted(packer, view, row):
                return
            if not packer.add(row, num_tokens):
                return

    def _prompts(self, view: WorkerView, able: Bools) -> list[int]:
        """Return prompts that hold blocks already, then new ones if no request of theirs is swapped out.

        A prompt that the whole memory cannot hold is skipped.
        """
        table = view.table
        is_prompt, has_blocks = able & ~table.is_decoding, table.num_blocks > 0
        admitted = self._in_order(view, np.flatnonzero(is_prompt & has_blocks))
        if np.any(able & (table.num_swapped > 0)):
            return admitted
        new = np.flatnonzero(is_prompt & ~has_blocks)
        return admitted + self._in_order(view, new, view.limits.max_running_requests)

    def _is_admitted(self, packer: Packer, view: WorkerView, row: int) -> bool:
        """Return whether the whole prompt fits and leaves the watermark free; alone it may take all memory."""
        if view.table.num_blocks[row]:
            return True
        return self._has_room(packer, view, row, packer.remaining(row))

    def _has_room(self, packer: Packer, view: WorkerView, row: int, num_tokens: int) -> bool:
        """Return whether these tokens fit beside the watermark; classed, best effort is preempted for real time."""
        watermark = int(self._config.watermark * view.memory.num_blocks)
        missing = packer.blocks_needed(row, num_tokens) + watermark - packer.num_free
        if missing <= 0:
            return True
        worse = self._worse(packer, view, row)
        if packer.num_free + packer.num_freed_by(worse) == view.memory.num_blocks:
            missing -= watermark
        return displace(packer, worse, missing, partial(self._preempt, packer, view))

    def _worse(self, packer: Packer, view: WorkerView, row: int) -> list[int]:
        """Return the requests that this one may preempt before it is in, the last to arrive at the end."""
        table = view.table
        if not (self._is_classed and table.is_real_time[row] and view.can_evict):
            return []
        holders = by_arrival(view, np.flatnonzero((table.num_blocks > 0) & ~table.is_real_time))
        return [other for other in holders if not packer.is_evicted(other)]

    def _preempt(self, packer: Packer, view: WorkerView, row: int) -> None:
        """Evict a decode as it is configured; a prompt in parts is dropped."""
        packer.evict(row, self._config.preemption if view.table.is_decoding[row] else EvictionMode.DROP)

    def _add_decodes(self, packer: Packer, view: WorkerView) -> None:
        """Add one token of each request on the device, then swap others in if that preempted none."""
        is_decoding, is_swapped = view.table.is_decoding, view.table.num_swapped > 0
        ordered = self._in_order(view, np.flatnonzero(is_decoding & ~is_swapped))
        running = deque(ordered[packer.add_decodes(np.array(ordered, np.int64)) :])  # but those that fit, at once
        holders = self._in_order(view, np.flatnonzero(view.table.num_blocks > 0)) if running else []
        has_left: set[int] = set()
        while running and packer.num_places_left and packer.num_tokens_left:
            row = running.popleft()
            if row in has_left:
                continue
            while not packer.add(row, 1) and view.can_evict:
                victim = holders.pop()
                self._preempt(packer, view, victim)
                has_left.add(victim)
                if victim == row:
                    break
        if not has_left:
            swapped = np.flatnonzero(is_decoding & is_swapped)
            self._bring_back(packer, view, self._in_order(view, swapped, packer.num_places_left))

    def _bring_back(self, packer: Packer, view: WorkerView, swapped: list[int]) -> None:
        for row in swapped:
            if not self._has_room(packer, view, row, 1) or not packer.add(row, 1):
                return
