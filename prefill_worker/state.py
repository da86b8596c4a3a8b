"""The prefill worker's records."""

from dataclasses import dataclass, field

from alignedserve.core.class_floor import turn_due_s
from alignedserve.messages.caches import Handoff
from alignedserve.messages.request_notes import Cause
from alignedserve.messages.workers import PrefillRequest
from alignedserve.worker_core.handoff import HandoffStage, Outgoing
from alignedserve.worker_core.request import CacheStage
from alignedserve.worker_core.worker_blocks import BlockHolder


@dataclass(slots=True, eq=False)
class PrefillJob(BlockHolder):
    """One request on this worker."""

    stage: CacheStage = field(default=CacheStage.WAITING, kw_only=True)
    is_retry: bool = False  # assigned to a worker before
    has_copy: bool = False  # the pool may keep a copy of it from then
    handoff: Handoff | None = None  # the pool's copy of an earlier attempt, to begin from
    bypass_to: str | None = None  # the decode worker that it is to be offered first
    is_taken: bool = False  # by a decode worker: what leaves for the pool now is a copy
    leaving: Outgoing | None = None  # while its receiver is asked, until that has it
    num_failed_copies: int = 0  # to the pool
    num_passed: int = 0  # tokens that are computed, or that an iteration in flight computes
    first_token_s: float | None = None  # when it was sampled; None: not yet

    @classmethod
    def of(cls, message: PrefillRequest, now: float) -> "PrefillJob":
        return cls(
            message.request,
            message.attempt,
            list(message.generated_token_ids),
            predicted_output_len=message.predicted_output_len,
            is_retry=bool(message.generated_token_ids) or message.has_copy,
            has_copy=message.has_copy,
            bypass_to=message.bypass_to,
            first_token_s=now - message.begun_s if message.generated_token_ids else None,
        )

    @property
    def turn_due_s(self) -> float:
        return turn_due_s(self.request, has_begun=bool(self.generated_token_ids))

    def begun_s(self, now: float) -> float:
        return 0.0 if self.first_token_s is None else now - self.first_token_s

    @property
    def num_cached(self) -> int:
        return self.context_len - (self.stage is CacheStage.LEAVING)

    @property
    def is_copying(self) -> bool:
        is_copied_out = self.leaving is not None and self.leaving.stage is HandoffStage.COPYING
        return is_copied_out or self.stage is CacheStage.LOADING

    def num_usable(self, handoff: Handoff, *, takes_whole: bool = False) -> int:
        """Return how many of its first tokens have their cache in this copy; at least one is left to compute.

        `takes_whole`: a part of the copy is of no use. Tokens that never reached the client may differ from the
        client's.
        """
        num_usable = min(handoff.copy.context_len, self.context_len - 1)
        num_generated = max(num_usable - self.request.prompt_len, 0)
        is_same = handoff.request.prompt_token_ids == self.request.prompt_token_ids and handoff.generated_token_ids[
            :num_generated
        ] == tuple(self.generated_token_ids[:num_generated])
        is_enough = num_usable == handoff.copy.context_len or not takes_whole
        return num_usable if is_same and is_enough else 0


def waiting_cause(job: PrefillJob, *, is_full: bool) -> Cause | None:
    match job.stage:
        case CacheStage.WAITING:
            return Cause.BATCH_FULL if is_full else Cause.BLOCKS_SHORT
        case CacheStage.ASKING | CacheStage.LOADING:
            return Cause.PREFETCH
        case CacheStage.LEAVING if not job.is_taken:
            is_going = job.leaving is not None and job.leaving.stage is not HandoffStage.ASKED
            return None if is_going else Cause.POOL_FULL
    return None
