"""DeepSpeed-FastGen: forward passes of one size, by Dynamic SplitFuse (Holmes et al., 2024)."""

from dataclasses import dataclass

import numpy as np

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView


@dataclass(frozen=True, slots=True)
class FastgenConfig:
    """The defaults of its public implementation."""

    token_budget: int = 768  # of a forward pass
    max_sequences: int = 512  # in one pass


class Fastgen:
    """The policy: decodes, then prompts in order of arrival, the last one split so that the budget is met exactly.

    Blocks are allocated as they are filled; a prompt waits until its whole remainder fits. A decode without a block
    pauses. Only when no request can continue, all but the earliest lose their cache.
    """

    def __init__(self, config: FastgenConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        table = view.table
        packer = Packer(view)
        packer.num_tokens_left = min(packer.num_tokens_left, self._config.token_budget)
        packer.num_places_left = min(packer.num_places_left, self._config.max_sequences)
        is_decoding = table.is_decoding
        for row in table.by_arrival(np.flatnonzero(is_decoding)).tolist():
            packer.add(row, 1)
        self._add_prompts(packer, view)
        if not packer.rows and view.can_evict:
            self._begin_anew(packer, view)
        return packer.plan()

    def _add_prompts(self, packer: Packer, view: WorkerView) -> None:
        table = view.table
        prompts = np.flatnonzero(~table.is_decoding)
        has_begun = table.num_blocks[prompts] > 0
        for row in (*table.by_arrival(prompts[has_begun]).tolist(), *table.by_arrival(prompts[~has_begun]).tolist()):
            num_tokens = min(packer.remaining(row), packer.num_tokens_left)
            if packer.blocks_needed(row, packer.remaining(row)) > packer.num_free or num_tokens < 1:
                return
            if not packer.add(row, num_tokens):
                return

    def _begin_anew(self, packer: Packer, view: WorkerView) -> None:
        holders = view.table.by_arrival(np.flatnonzero(view.table.num_blocks > 0)).tolist()
        for row in holders[1:]:
            packer.drop(row)
        if holders and (num_tokens := packer.chunk(holders[0])):
            packer.add(holders[0], num_tokens)
