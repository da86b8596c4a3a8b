"""The interface of batch formers: an index of pooled requests from which batches are chosen."""

from dataclasses import dataclass
from typing import Protocol

from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.messages.cluster_view import FormedBatch, LengthTree
from kvpool.state import PooledRequest


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Half-open range of context lengths, in tokens."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on the size of a batch."""

    max_blocks: int
    max_requests: int
    min_requests: int = 1  # fewer would leave the decode worker idle: search further
    is_for_real_time: bool = False  # where classes are known: best effort by its floor alone
    by_turn: bool = False  # the first by turn, whatever their lengths


@dataclass(frozen=True, slots=True)
class AlignedBatch:
    """Requests to decode together."""

    request_ids: tuple[RequestId, ...]  # shortest context first; those that were chosen by turn, in that order
    lengths: LengthRange  # covers every member
    num_blocks: int  # decode memory needed on admission

    def as_formed(self, batch_id: BatchId, worker: WorkerName) -> FormedBatch:
        """Describe it for people who look on."""
        lengths, num_requests = self.lengths, len(self.request_ids)
        return FormedBatch(batch_id, worker, lengths.start, lengths.stop, num_requests, self.num_blocks)


class BatchFormer(Protocol):
    """Index of pooled requests. The same history gives the same batches; ties go to the earlier arrival."""

    is_aligned: bool  # its batches are of similar length

    def insert(self, pooled: PooledRequest, now: float) -> None:
        """Add a request; its id must be new."""

    def remove(self, request_id: RequestId) -> None:
        """Take a request out; it must be there."""

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """Choose a batch within both limits, or None. Removes nothing: the caller removes what it grants.

        A request larger than `max_blocks` by itself is passed over, and stays for a larger limit.
        """

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """Choose requests to join a running batch of these lengths, the oldest first, or None. Removes nothing.

        None as well if the policy ignores lengths.
        """

    def seen(self) -> LengthTree:
        """Return how many requests wait in which range of lengths; an empty tree if the policy ignores lengths."""


def batch_of(chosen: list[PooledRequest], *, by_turn: bool = False) -> AlignedBatch:
    by_length = sorted(chosen, key=lambda pooled: (pooled.context_len, pooled.arrival_s, pooled.request_id))
    return AlignedBatch(
        request_ids=tuple(pooled.request_id for pooled in (chosen if by_turn else by_length)),
        lengths=LengthRange(by_length[0].context_len, by_length[-1].context_len + 1),
        num_blocks=sum(pooled.num_blocks for pooled in by_length),
    )
