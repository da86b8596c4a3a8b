"""What the router is told of this worker's load."""

from alignedserve.messages.links import JoinedBatch, WorkerLoad
from decode_worker.batches import BatchOrder
from decode_worker.candidates import Candidates
from decode_worker.eviction import Evictions
from decode_worker.running import RunningBatch
from decode_worker.state import CachePlace

_SPAN_STEP = 16  # tokens; the running range is told to the router in such steps


def load_of(
    batch: RunningBatch, candidates: Candidates, order: BatchOrder, evictions: Evictions, num_verified: int
) -> WorkerLoad:
    """Counts for placement. What is on its way back to the pool counts no more."""
    num_joining = num_following = num_blocks = 0
    for candidate in candidates:
        if candidate.place is CachePlace.RETURNING:
            continue
        is_joining = order.joins_running(candidate)
        num_joining += is_joining
        num_following += not is_joining
        num_blocks += batch.blocks_for(candidate.context_len)
    return WorkerLoad(
        num_running=batch.num_holding,
        num_candidate_requests=num_joining,
        num_batch_candidates=num_following,
        num_candidate_blocks=num_blocks,
        num_free_blocks=batch.num_free,
        num_handoffs_verified=num_verified,
        num_evictions=evictions.num_evictions,
        running=_running_range(batch, order),
    )


def _running_range(batch: RunningBatch, order: BatchOrder) -> JoinedBatch | None:
    """The lengths that others may join, in steps of tokens so that it is not news at every iteration."""
    span = batch.span(order.running_id) if order.is_aligned else None
    if span is None:
        return None
    start, stop = span[0] // _SPAN_STEP * _SPAN_STEP, -(-(span[1] + 1) // _SPAN_STEP) * _SPAN_STEP
    return JoinedBatch(order.running_id, start, stop)
