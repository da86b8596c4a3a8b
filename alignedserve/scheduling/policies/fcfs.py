"""First come, first served, prompts first: vLLM as the five papers measure it (Kwon et al., 2023)."""

from collections import deque
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta

from alignedserve.scheduling.packer import Packer, by_arrival
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, WorkerView


@dataclass(frozen=True, slots=True)
class FcfsConfig:
    """vLLM's defaults."""

    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01  # share of the blocks that newcomers leave free
    preemption: EvictionMode = EvictionMode.DROP  # vLLM recomputes a single sequence


class Fcfs:
    """The policy: an iteration is either whole prompts, as many of the earliest as fit, or one token of each decode.

    When the decodes no longer fit, the last to arrive is preempted. No new request begins while one is swapped out. The
    page docs/policies/fcfs.md has an example.
    """

    def __init__(self, config: FcfsConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        """See IterationPolicy."""
        packer = Packer(view)
        self._add_prompts(packer, view)
        if not packer.rows:
            self._add_decodes(packer, view)
        return packer.plan()

    def _add_prompts(self, packer: Packer, view: WorkerView) -> None:
        """Add prompts up to the first that does not fit; the first one is chunked if it is longer than an iteration."""
        is_decoding, is_swapped = view.table.is_decoding, view.table.num_swapped > 0
        num_places = packer.num_places_left - int(np.count_nonzero(is_decoding & ~is_swapped))
        for row in self._prompts(view):
            num_tokens = packer.remaining(row)
            if not packer.rows:
                num_tokens = min(num_tokens, packer.num_tokens_left)
            if len(packer.rows) >= num_places or not self._is_admitted(packer, view, row):
                return
            if not packer.add(row, num_tokens):
                return

    @staticmethod
    def _prompts(view: WorkerView) -> list[int]:
        """Return prompts that hold blocks already, then new ones if no request is swapped out.

        A prompt that the whole memory cannot hold is skipped.
        """
        table, memory = view.table, view.memory
        is_prompt, has_blocks = ~table.is_decoding, table.num_blocks > 0
        admitted = by_arrival(view, np.flatnonzero(is_prompt & has_blocks))
        if np.any(table.num_swapped):
            return admitted
        fits_alone = table.context_len <= memory.num_blocks * memory.block_size
        new = np.flatnonzero(is_prompt & ~has_blocks & fits_alone)
        return admitted + by_arrival(view, new, view.limits.max_running_requests)

    def _is_admitted(self, packer: Packer, view: WorkerView, row: int) -> bool:
        """Return whether the whole prompt fits and leaves the watermark free; alone it may take all memory."""
        if view.table.num_blocks[row] or packer.num_free == view.memory.num_blocks:
            return True
        return packer.blocks_needed(row, packer.remaining(row)) <= packer.num_free - self._watermark(view)

    def _watermark(self, view: WorkerView) -> int:
        return int(self._config.watermark * view.memory.num_blocks)

    def _add_decodes(self, packer: Packer, view: WorkerView) -> None:
        """Add one token of each request on the device, then swap others in if that preempted none."""
        is_decoding, is_swapped = view.table.is_decoding, view.table.num_swapped > 0
        running = deque(by_arrival(view, np.flatnonzero(is_decoding & ~is_swapped)))
        for _ in range(packer.add_decodes(np.array(running, np.int64))):  # those that fit, at once
            running.popleft()
        holders = by_arrival(view, np.flatnonzero(view.table.num_blocks > 0))
        has_left: set[int] = set()
        while running and packer.num_places_left and packer.num_tokens_left:
            row = running.popleft()
            if row in has_left:
                continue
            while not packer.add(row, 1) and view.can_evict:
                victim = holders.pop()
                packer.evict(victim, self._config.preemption if is_decoding[victim] else EvictionMode.DROP)
                has_left.add(victim)
                if victim == row:
                    break
        if not has_left:
            swapped = np.flatnonzero(is_decoding & is_swapped)
            self._bring_back(packer, view, by_arrival(view, swapped, packer.num_places_left))

    def _bring_back(self, packer: Packer, view: WorkerView, swapped: list[int]) -> None:
        for row in swapped:
            is_alone = packer.num_free == view.memory.num_blocks
            if not is_alone and packer.blocks_needed(row, 1) > packer.num_free - self._watermark(view):
                return
            if not packer.add(row, 1):
                return
