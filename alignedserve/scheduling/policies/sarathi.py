"""Sarathi-Serve: chunked prompts beside decodes that never stall (Agrawal et al., OSDI 2024)."""

from dataclasses import dataclass

import numpy as np

from alignedserve.scheduling.packer import ReservingPacker, add_evicting, by_arrival
from alignedserve.scheduling.policy import IterationPlan, WorkerView


@dataclass(frozen=True, slots=True)
class SarathiConfig:
    """The paper's values for a strict SLO."""

    token_budget: int = 512  # of an iteration; 2 048 where the SLO is relaxed
    watermark: float = 0.01  # share of the blocks that a new prompt has to leave free (vLLM, on which it is built)


class Sarathi:
    """The policy: decodes first, then prompts that have begun, then new ones, chunked by the token budget.

    A prompt has blocks for all its tokens from its first chunk on. When a decode has no block left, the last to arrive
    is preempted and recomputed. The page docs/policies/sarathi.md has an example.
    """

    def __init__(self, config: SarathiConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        """See IterationPolicy."""
        table = view.table
        is_prompt = table.num_remaining > 1
        has_begun = table.num_blocks > 0
        packer = ReservingPacker(view, total_len=table.context_len, has_begun=has_begun & is_prompt)
        packer.num_tokens_left = min(packer.num_tokens_left, self._config.token_budget)
        begun = self._add_decodes(packer, view, by_arrival(view, np.flatnonzero(has_begun)))
        for row in begun:
            if num_tokens := packer.chunk(row):
                packer.add(row, num_tokens)
        self._admit(packer, view, by_arrival(view, np.flatnonzero(~has_begun)))
        return packer.plan()

    def _add_decodes(self, packer: ReservingPacker, view: WorkerView, running: list[int]) -> list[int]:
        """Add decodes; return the running prompts that were not preempted."""
        decodes = [row for row in running if packer.remaining(row) == 1]
        packer.add_decodes(np.array(decodes, np.int64))  # those that fit, at once
        prompts = []
        while running:
            row = running.pop(0)
            if packer.remaining(row) > 1:
                prompts.append(row)
            elif row not in packer:
                add_evicting(packer, row, 1, running if view.can_evict else [])
        return prompts

    def _admit(self, packer: ReservingPacker, view: WorkerView, waiting: list[int]) -> None:
        """Admit prompts up to the first that does not fit; only with all memory free may one use the watermark."""
        watermark = int(self._config.watermark * view.memory.num_blocks)
        for row in waiting:
            is_alone = packer.num_free == view.memory.num_blocks
            if packer.blocks_needed(row, 1) > packer.num_free - (0 if is_alone else watermark):
                return
            num_tokens = packer.chunk(row)
            if not num_tokens or not packer.add(row, num_tokens):
                return
