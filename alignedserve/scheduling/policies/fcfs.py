"""First come, first served, prompts first: vLLM as the five papers have it (Kwon et al., 2023).

- `rank`: by arrival.
- `fill`: either whole prompts, as many of the earliest as fit, or one token of each decode. The only budget is places
  and tokens.
- `evict`: when the decodes no longer fit, the last to arrive is preempted. None begins while one is swapped out.
"""

from collections import deque
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView
from alignedserve.scheduling.table import Bools, Ints


@dataclass(frozen=True, slots=True)
class FcfsConfig:
    """vLLM's defaults."""

    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that newcomers leave free
    preemption: EvictionMode = EvictionMode.DROP  # vLLM recomputes a single sequence


class Fcfs:
    """The policy. The page docs/policies/fcfs.md has an example."""

    def __init__(self, config: FcfsConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        packer, table = Packer(view), view.table
        able, is_decoding, is_swapped = self._able(view), table.is_decoding, table.num_swapped > 0
        prompts = np.flatnonzero(able & ~is_decoding)
        if len(prompts):
            num_decodes = int(np.count_nonzero(able & is_decoding & ~is_swapped))
            may_begin = not (able & is_swapped).any()
            self._add_prompts(packer, view, prompts, packer.num_places_left - num_decodes, may_begin=may_begin)
        if not packer.num_scheduled and not self._add_decodes(packer, view, np.flatnonzero(is_decoding & ~is_swapped)):
            self._bring_back(packer, view, np.flatnonzero(is_decoding & is_swapped))
        return packer.plan()

    # --- rank

    def _able(self, view: WorkerView) -> Bools:
        """Return which rows may compute prompts; a prompt that the whole memory cannot hold is skipped."""
        table = view.table
        able: Bools = (table.num_blocks > 0) | (table.context_len <= view.memory.slots_in(view.memory.num_blocks))
        return able

    def _in_order(self, view: WorkerView, rows: Ints, at_most: int | None = None) -> Ints:
        return view.table.by_arrival(rows, at_most)

    # --- fill

    def _add_prompts(
        self, packer: Packer, view: WorkerView, prompts: Ints, num_places: int, *, may_begin: bool
    ) -> None:
        """Add prompts that hold blocks already, then new ones if they may begin."""
        has_blocks = view.table.num_blocks[prompts] > 0
        rows: list[int] = self._in_order(view, prompts[has_blocks]).tolist()
        num_begun = len(rows)
        if may_begin:
            rows += self._in_order(view, prompts[~has_blocks], view.limits.max_running_requests).tolist()
        for at, row in enumerate(rows):
            num_tokens = packer.remaining(row)
            if packer.num_scheduled >= num_places or (at >= num_begun and not self._has_room(packer, view, row)):
                return
            if not packer.add(row, num_tokens if at else min(num_tokens, packer.num_tokens_left)):
                return

    def _add_decodes(self, packer: Packer, view: WorkerView, rows: Ints) -> bool:
        """Return whether any was preempted."""
        ordered = self._in_order(view, rows)
        running: deque[int] = deque(ordered[packer.add_decodes(ordered) :].tolist())  # but those that fit, at once
        holders = self._in_order(view, np.flatnonzero(view.table.num_blocks > 0)).tolist() if running else []
        while running and packer.num_places_left and packer.num_tokens_left:
            row = running.popleft()
            while not packer.is_evicted(row) and not packer.add(row, 1) and view.can_evict:
                self._preempt(packer, view, holders.pop())
        return packer.has_evictions

    def _bring_back(self, packer: Packer, view: WorkerView, swapped: Ints) -> None:
        for row in self._in_order(view, swapped, packer.num_places_left).tolist():
            if not self._has_room(packer, view, row) or not packer.add(row, packer.remaining(row)):
                return

    # --- evict

    def _has_room(self, packer: Packer, view: WorkerView, row: int) -> bool:
        num_free = packer.num_free
        watermark = 0 if num_free == view.memory.num_blocks else self._watermark(view)
        return packer.blocks_needed(row, packer.remaining(row)) + watermark <= num_free

    def _watermark(self, view: WorkerView) -> int:
        return int(self._config.watermark * view.memory.num_blocks)

    def _preempt(self, packer: Packer, view: WorkerView, row: int) -> None:
        packer.evict(row, self._config.preemption if view.table.is_decoding[row] else EvictionMode.DROP)
