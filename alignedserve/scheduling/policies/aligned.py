"""All requests in every iteration, prompts first come, first served: AlignedServe and DistServe on their workers.

Their decisions lie elsewhere: in the pool, which forms batches of similar lengths, and in the handover of requests.
"""

from dataclasses import dataclass

import numpy as np

from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView


@dataclass(frozen=True, slots=True)
class AlignedConfig:
    """AlignedServe's values (sections 3.3 and 4.1), which go to the `batching` section of pool and router."""

    min_requests: int = 36  # a batch of fewer does not saturate a decode worker
    max_block_share: float = 0.4  # of a decode worker's blocks, for what is granted to it ahead of need
    starvation_s: float = 2.0  # lengths that were in no batch for this long go first; the paper gives no value
    # Not AlignedServe's but Kairos's: of a TPOT objective, what an iteration may take with requests of other lengths
    # packed in (docs/policies/aligned.md); None: batches of different lengths stay apart.
    pack_share: float | None = 0.95

    def __post_init__(self) -> None:
        if self.pack_share is not None and not 0.0 < self.pack_share <= 1.0:
            raise ValueError("pack_share must be above 0 and at most 1, or unset")


class RunAllRequests:
    """The policy: one token for each decode; then prompts in order, in chunks, until the iteration is full.

    For workers where each request holds the blocks that it needs (`can_evict` False).
    """

    def __init__(self, config: object) -> None:
        """Ignore the configuration: it concerns no iteration."""

    def plan(self, view: WorkerView) -> IterationPlan:
        assert not view.can_evict, "for prefill and decode workers only"
        packer = Packer(view)
        packer.add_decodes(np.flatnonzero(view.table.num_remaining == 1))
        for row in view.table.by_arrival(np.flatnonzero(view.table.num_remaining > 1)).tolist():
            num_tokens = packer.chunk(row)
            if num_tokens < 1 or not packer.add(row, num_tokens):
                break
        return packer.plan()
