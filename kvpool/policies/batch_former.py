"""The interface of batch formers: an index of pooled requests that can cut a batch out of itself."""

from dataclasses import dataclass
from typing import Protocol

from alignedserve.core.ids import RequestId
from kvpool.state import PooledRequest


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Half-open range of context lengths, in tokens."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large a batch may become."""

    max_blocks: int
    max_requests: int
    min_requests: int = 1  # a batch of fewer would leave the decode worker idle: look further for more


@dataclass(frozen=True, slots=True)
class AlignedBatch:
    """Requests that will decode together."""

    request_ids: tuple[RequestId, ...]  # shortest context first
    lengths: LengthRange  # covers every member
    num_blocks: int  # decode memory needed on admission


class BatchFormer(Protocol):
    """Holds what is pooled. Deterministic: the same history gives the same batches; ties go to the earlier arrival."""

    is_aligned: bool  # whether its batches are of similar length

    def insert(self, pooled: PooledRequest, now: float) -> None:
        """Add a request; its id must be new."""

    def remove(self, request_id: RequestId) -> None:
        """Take a request out; it must be there."""

    def form(self, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """Choose a batch within both limits, or None. Removes nothing: the caller removes what it grants.

        A request that is larger than `max_blocks` alone is passed over, and stays for a larger limit.
        """

    def join(self, lengths: LengthRange, limits: BatchLimits, now: float) -> AlignedBatch | None:
        """Choose requests to join a running batch of these lengths, the oldest first, or None. Removes nothing.

        None as well where the policy does not care for lengths.
        """


def batch_of(chosen: list[PooledRequest]) -> AlignedBatch:
    """The batch of these requests, in the order that decode workers admit them."""
    ordered = sorted(chosen, key=lambda pooled: (pooled.context_len, pooled.arrival_s, pooled.request_id))
    return AlignedBatch(
        request_ids=tuple(pooled.request_id for pooled in ordered),
        lengths=LengthRange(ordered[0].context_len, ordered[-1].context_len + 1),
        num_blocks=sum(pooled.num_blocks for pooled in ordered),
    )
