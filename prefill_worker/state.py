"""The prefill worker's records."""

import enum
from dataclasses import dataclass

from alignedserve.core.ids import BlockId
from alignedserve.core.request import Request
from alignedserve.messages.links import PrefillRequest


class JobStage(enum.Enum):
    """Where a job is. Blocks are held from COMPUTING until its end."""

    WAITING = "waiting"  # no blocks yet
    COMPUTING = "computing"  # in the engine
    LEAVING = "leaving"  # computed; waits for room in the pool, or is being copied there


@dataclass(slots=True)
class PrefillJob:
    """One request on this worker."""

    request: Request
    attempt: int
    generated_token_ids: tuple[int, ...]  # emitted before (recompute) and, once computed, the new one
    num_remaining: int  # tokens not yet computed
    stage: JobStage = JobStage.WAITING
    block_ids: tuple[BlockId, ...] = ()
    is_copying: bool = False  # the transfer thread reads its blocks: they must not be freed
    is_written: bool = False  # offered to the pool, which may have taken it already
    is_aborted: bool = False
    successor: PrefillRequest | None = None  # the same request, given again while this life of it was ending

    @property
    def context_len(self) -> int:
        """Tokens whose cache its blocks hold once it is computed."""
        return self.request.prompt_len + len(self.generated_token_ids) - (self.stage is JobStage.LEAVING)
