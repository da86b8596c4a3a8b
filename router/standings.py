"""Where requests stand that wait or run, and when a worker is likely to get those that are queued."""

from collections.abc import Iterable
from itertools import islice

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.request_notes import MAX_STANDINGS, Standing
from router.prefill_queue import Held, Turns
from router.request_registry import RouterRecords
from router.state import TrackedRequest


def standings_of(records: RouterRecords, request_ids: Iterable[RequestId], now: float) -> tuple[Standing, ...]:
    """Return the standing of each of these requests that is known; of the first few, as each looks at the queue."""
    known = (records.registry.requests.get(request_id) for request_id in islice(request_ids, MAX_STANDINGS))
    turns: Turns = {}
    return tuple(_standing(tracked, records, now, turns) for tracked in known if tracked is not None)


def _standing(tracked: TrackedRequest, records: RouterRecords, now: float, turns: Turns) -> Standing:
    request_id = tracked.request.request_id
    if tracked.stage is not Stage.QUEUED:
        where = tracked.holder or ""
        others = _others(tracked, where, records)
        return Standing(
            request_id, tracked.stage, where, num_tokens_before=others.num_tokens, num_others=others.num_requests
        )
    ahead = records.registry.queue.ahead_of(request_id, now, turns)
    if ahead is None:  # its gateway has yet to say from which token it goes on
        return Standing(request_id, tracked.stage)
    most = ahead.num_tokens_at_most
    return Standing(
        request_id,
        tracked.stage,
        num_before=ahead.num_requests,
        num_tokens_before=round(ahead.num_tokens),
        start_s=records.drain.expected_s(ahead.num_tokens),
        latest_start_s=None if most is None else records.drain.expected_s(most),
    )


def _others(tracked: TrackedRequest, where: str, records: RouterRecords) -> Held:
    worker, pool = records.placement.workers.get(where), records.placement.pools.get(where)
    if pool is not None:
        return Held(max(pool.num_pooled - 1, 0), 0)
    if worker is None:
        return Held(0, 0)
    prefill = worker.prefilling.get(tracked.request.request_id)
    if prefill is None:
        return Held(max(len(worker.decoding) - 1, 0), 0)
    return Held(len(worker.prefilling) - 1, worker.num_prefill_tokens - prefill.num_tokens)
