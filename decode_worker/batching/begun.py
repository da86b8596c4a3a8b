"""Common parts of the two kinds of running batch."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BatchId, BlockId, RequestId
from alignedserve.messages.iterations import RunIteration
from alignedserve.worker_core.request import WorkerRequest
from decode_worker.held_requests import HeldRequest
from decode_worker.state import Candidate, LoadingCandidate, RunningRequest

# A request is admitted only if every request of the batch can then generate this many tokens without an eviction.
FORESEEN_TOKENS = 32

BatchMember = RunningRequest | HeldRequest


class Begun(NamedTuple):
    """An iteration that begins, and candidates whose caches are to be loaded beside it."""

    command: RunIteration | None  # None: only they
    members: Collection[BatchMember]
    has_changed: bool = True  # other members than in the iteration before
    loads: tuple[LoadingCandidate, ...] = ()
    alone_s: float = 0.0  # of its real-time part, as in the plan


class LoadingCandidates:
    """Candidates whose caches are being copied in, with the blocks that they are copied into."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, LoadingCandidate] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def get(self, request_id: RequestId) -> Candidate | None:
        entry = self._entries.get(request_id)
        return entry.candidate if entry is not None else None

    def candidates(self) -> list[Candidate]:
        return [entry.candidate for entry in self._entries.values()]

    def growth(self, block_size: int, state_blocks: int = 0) -> int:
        entries = self._entries.values()
        return sum(growth_of(entry.candidate, len(entry.block_ids) - state_blocks, block_size) for entry in entries)

    def add(self, loading: LoadingCandidate) -> None:
        self._entries[loading.candidate.request.request_id] = loading

    def pop(self, request_id: RequestId) -> LoadingCandidate:
        return self._entries.pop(request_id)


def growth_of(request: WorkerRequest, num_held: int, block_size: int) -> int:
    foreseen = min(request.context_len + FORESEEN_TOKENS, request.max_context_len)
    return max(blocks_for(foreseen, block_size) - num_held, 0)


def span_of(members: Iterable[BatchMember], batch_id: BatchId) -> tuple[int, int] | None:
    lengths = [member.context_len for member in members if member.batch_id == batch_id]
    return (min(lengths), max(lengths)) if lengths else None


class Leaving(NamedTuple):
    """Remainder of a request that was taken out of the batch, to be copied out."""

    block_ids: tuple[BlockId, ...]
    num_cached: int
    first_token_s: float
    last_token_s: float | None  # None: not known
    service_s: float = 0.0  # that it spent in iterations, where a policy asks
