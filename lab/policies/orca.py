"""Orca: iteration-level scheduling, first come, first served (Yu et al., OSDI 2022)."""

from dataclasses import dataclass

import numpy as np

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.table import Ints


@dataclass(frozen=True, slots=True)
class OrcaConfig:
    """Parameters as in AccelGen's comparison (section 3.1)."""

    max_batch_size: int = 8  # requests in one iteration; Orca's own evaluation goes up to 32
    reserved_len: int = 0  # tokens that each request has memory for at least, whatever its limit; AccelGen: 8 192


class Orca:
    """The policy: admitted requests are in every iteration until they end; whole prompts and decodes share it.

    Memory for a request's longest possible context is reserved when it is admitted, so none is ever preempted.
    """

    def __init__(self, config: OrcaConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        table = view.table
        has_begun = table.num_blocks > 0
        packer = Packer(view)
        packer.reserve(self._reservations(view), has_begun)
        packer.num_places_left = min(packer.num_places_left, self._config.max_batch_size)
        running = table.by_arrival(np.flatnonzero(has_begun)).tolist()
        packer.num_tokens_left -= len(running)  # a token is kept for each of them, whatever the order
        for row in running:
            packer.num_tokens_left += 1
            if num_tokens := packer.chunk(row):
                packer.add(row, num_tokens)
        self._admit(packer, table.by_arrival(np.flatnonzero(~has_begun)).tolist())
        return packer.plan()

    def _admit(self, packer: Packer, waiting: list[int]) -> None:
        for row in waiting:
            num_tokens = packer.remaining(row)
            if not packer.rows:
                num_tokens = min(num_tokens, packer.num_tokens_left)
            if not packer.add(row, num_tokens):
                return

    def _reservations(self, view: WorkerView) -> Ints:
        longest = np.maximum(view.table.prompt_len + view.table.max_tokens, self._config.reserved_len)
        capped: Ints = np.minimum(longest, view.memory.slots_in(view.memory.num_blocks))
        return capped
