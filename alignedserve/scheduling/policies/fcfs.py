"""First come, first served, prompts first: vLLM as the five papers have it (Kwon et al., 2023)."""

from collections import deque
from dataclasses import dataclass
from typing import Annotated, NamedTuple

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


class _Marks(NamedTuple):
    able: Bools  # whose prompts may be computed
    is_decoding: Bools
    is_swapped: Bools


class Fcfs:
    """The policy: an iteration is either whole prompts, as many of the earliest as fit, or one token of each decode.

    When the decodes no longer fit, the last to arrive is preempted. No new request begins while one is swapped out. The
    page docs/policies/fcfs.md has an example.
    """

    def __init__(self, config: FcfsConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        packer, marks = Packer(view), self._marks(view)
        prompts = self._prompts(view, marks)
        if prompts:
            self._add_prompts(packer, view, marks, prompts)
        if not packer.num_scheduled:
            self._add_decodes(packer, view, marks)
        return packer.plan()

    def _marks(self, view: WorkerView) -> _Marks:
        return _Marks(self._able(view), view.table.is_decoding, view.table.num_swapped > 0)

    def _able(self, view: WorkerView) -> Bools:
        table = view.table
        able: Bools = (table.num_blocks > 0) | (table.context_len <= view.memory.slots_in(view.memory.num_blocks))
        return able

    def _in_order(self, view: WorkerView, rows: Ints, at_most: int | None = None) -> Ints:
        return view.table.by_arrival(rows, at_most)

    def _add_prompts(self, packer: Packer, view: WorkerView, marks: _Marks, prompts: list[int]) -> None:
        num_decodes = int(np.count_nonzero(marks.able & marks.is_decoding & ~marks.is_swapped))
        num_places = packer.num_places_left - num_decodes
        for row in prompts:
            num_tokens = packer.remaining(row)
            if not packer.num_scheduled:
                num_tokens = min(num_tokens, packer.num_tokens_left)
            if packer.num_scheduled >= num_places or not self._is_admitted(packer, view, row):
                return
            if not packer.add(row, num_tokens):
                return

    def _prompts(self, view: WorkerView, marks: _Marks) -> list[int]:
        """Return prompts that hold blocks already, then new ones if no request of theirs is swapped out.

        A prompt that the whole memory cannot hold is skipped.
        """
        prompts = np.flatnonzero(marks.able & ~marks.is_decoding)
        if not len(prompts):
            return []
        has_blocks = view.table.num_blocks[prompts] > 0
        admitted: list[int] = self._in_order(view, prompts[has_blocks]).tolist()
        if np.any(marks.able & marks.is_swapped):
            return admitted
        new: list[int] = self._in_order(view, prompts[~has_blocks], view.limits.max_running_requests).tolist()
        return admitted + new

    def _is_admitted(self, packer: Packer, view: WorkerView, row: int) -> bool:
        if view.table.num_blocks[row]:
            return True
        return self._has_room(packer, view, row, packer.remaining(row))

    def _has_room(self, packer: Packer, view: WorkerView, row: int, num_tokens: int) -> bool:
        num_free = packer.num_free
        watermark = 0 if num_free == view.memory.num_blocks else self._watermark(view)
        return packer.blocks_needed(row, num_tokens) + watermark <= num_free

    def _watermark(self, view: WorkerView) -> int:
        return int(self._config.watermark * view.memory.num_blocks)

    def _preempt(self, packer: Packer, view: WorkerView, row: int) -> None:
        packer.evict(row, self._config.preemption if view.table.is_decoding[row] else EvictionMode.DROP)

    def _add_decodes(self, packer: Packer, view: WorkerView, marks: _Marks) -> None:
        ordered = self._in_order(view, np.flatnonzero(marks.is_decoding & ~marks.is_swapped))
        running: deque[int] = deque(ordered[packer.add_decodes(ordered) :].tolist())  # but those that fit, at once
        holders = self._in_order(view, np.flatnonzero(view.table.num_blocks > 0)).tolist() if running else []
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
            swapped = np.flatnonzero(marks.is_decoding & marks.is_swapped)
            self._bring_back(packer, view, self._in_order(view, swapped, packer.num_places_left).tolist())

    def _bring_back(self, packer: Packer, view: WorkerView, swapped: list[int]) -> None:
        for row in swapped:
            if not self._has_room(packer, view, row, 1) or not packer.add(row, 1):
                return
