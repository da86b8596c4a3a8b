"""The decode worker's records."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from typing_extensions import override

from alignedserve.core.ids import BatchId, BlockId
from alignedserve.core.lifecycle import is_same_epoch
from alignedserve.core.request import SampledToken
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import TokenDelta
from alignedserve.messages.workers import SetPredictedLength
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.request import WorkerRequest


@dataclass(slots=True, eq=False)
class RunningRequest(WorkerRequest):
    """One request in the running batch."""

    block_ids: list[BlockId]
    num_computed: int  # tokens whose cache lies in its blocks
    batch_id: BatchId = NO_BATCH
    first_token_s: float = field(default=0.0, kw_only=True)
    is_prefilled: bool = field(default=True, kw_only=True)
    is_stalled: bool = False  # waits for a block that an eviction is about to free

    @classmethod
    def of_candidate(cls, candidate: "Candidate", block_ids: tuple[BlockId, ...], num_cached: int) -> "RunningRequest":
        return cls(
            candidate.request,
            candidate.attempt,
            candidate.generated_token_ids,
            list(block_ids),
            num_cached,
            candidate.batch_id,
            first_token_s=candidate.first_token_s,
            granted_s=candidate.granted_s,
            predicted_output_len=candidate.predicted_output_len,
        )

    @override
    def append(self, token: SampledToken, eos_token_ids: frozenset[int]) -> TokenDelta:
        self.num_computed = self.context_len
        return WorkerRequest.append(self, token, eos_token_ids)

    @property
    def num_remaining(self) -> int:
        return self.context_len - self.num_computed


def set_predicted_length(known: Iterable[WorkerRequest], message: SetPredictedLength) -> bool:
    current = [record for record in known if is_same_epoch(record.attempt, message.attempt)]
    for record in current:
        record.predicted_output_len = message.predicted_output_len
    return bool(current)


@dataclass(slots=True)
class LoadingCandidate:
    """A candidate on its way into the running batch: its cache is being copied into this worker's blocks."""

    candidate: Candidate
    block_ids: tuple[BlockId, ...]
