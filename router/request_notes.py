"""Notes of the router about requests, read from what its logic is told and what it decides, and the reasons of waits.

It stands beside the logic and changes nothing there, as worker_core/request_notes.py does in workers.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.events import PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.gateways import RequestInterrupted, ResumeRequest, SubmitRequest
from alignedserve.messages.pools import BatchFormed, RequestPooled
from alignedserve.messages.request_notes import MAX_STANDINGS, Cause, NoteBuffer, RequestNote, Standing, Step
from alignedserve.messages.workers import MoveRequest, PrefillRequest, RequestMoved, RequestPreempted, RequestStayed
from router.placement import Placement
from router.prefill_queue import QueuedLoad, Turns
from router.request_registry import RouterRecords
from router.state import LengthPredicted, TrackedRequest

_MAX_TOLD = 4096  # requests that are told at once why they wait
_MAX_COUNTED = 1024  # a queue longer than this is not searched for who is first
_MAX_COUNTED_SHARED = 256  # nor one longer than this where tenants share it, which takes longer


class RouterNotes:
    """An Observer (process.logic_driver) of the router's logic."""

    def __init__(self, records: RouterRecords) -> None:
        self._records = records
        self._notes = NoteBuffer()
        self._queue_cause: Cause | None = None  # as last told to waiting requests, like the next
        self._pool_cause: Cause | None = None

    def observe(self, event: Any, now: float, commands: Sequence[Any]) -> list[Send]:
        kind = type(event)
        if kind is Received:
            heard = _HEARD.get(type(event.message))
            if heard is not None:
                heard(self, event.peer, event.message, now)
        elif kind is LengthPredicted:
            self._note(event.request_id, Step.PREDICTED, now, predicted_len=event.predicted_len)
        for command in commands:
            said = _SAID.get(type(command.message))
            if said is not None:
                said(self, command, event, now)
        return self._tick(now) if kind is Ticked else []

    def _note(self, request_id: RequestId, step: Step, now: float, **fields: Any) -> None:
        tracked = self._records.registry.requests.get(request_id)
        if tracked is not None:
            self._notes.add(tracked.gateway, RequestNote(request_id, step, now, tracked.attempt, **fields))

    # --- what the router hears

    def _resumed(self, peer: str, message: ResumeRequest, now: float) -> None:
        """Note only what has come back to the queue: a silent request is asked for again, and most are well."""
        tracked = self._records.registry.requests.get(message.request.request_id)
        if tracked is not None and tracked.stage is Stage.QUEUED:
            self._submitted(peer, message, now)

    def _submitted(self, peer: str, message: SubmitRequest | ResumeRequest, now: float) -> None:
        request, queue = message.request, self._records.registry.queue
        tracked = self._records.registry.requests.get(request.request_id)
        if tracked is None or tracked.gateway != peer:
            return
        if tracked.stage is not Stage.QUEUED:  # it had not to wait
            self._notes.add(peer, RequestNote(request.request_id, Step.QUEUED, now))
            return
        most = _MAX_COUNTED_SHARED if queue.is_shared(now) else _MAX_COUNTED
        num_before = queue.num_before(request.request_id, now) if len(queue) <= most else len(queue) - 1
        num_tokens = max(queue.num_tokens - tracked.num_prefill_tokens, 0)
        cause = queue_cause(self._records.placement)
        self._note(request.request_id, Step.QUEUED, now, cause=cause, num_requests=num_before, num_tokens=num_tokens)

    def _pooled(self, peer: str, message: RequestPooled, now: float) -> None:
        cause, num_tokens = pool_cause(self._records.placement), message.context_len
        self._note(message.request_id, Step.POOLED, now, peer=peer, cause=cause, num_tokens=num_tokens)

    def _formed(self, peer: str, message: BatchFormed, now: float) -> None:
        for request_id, _ in message.members:
            self._note(request_id, Step.GRANTED, now, peer=message.worker, num_requests=len(message.members))

    def _moved(self, peer: str, message: RequestMoved, now: float) -> None:
        self._note(message.request_id, Step.MOVED, now, peer=peer, num_tokens=message.num_generated)

    def _stayed(self, peer: str, message: RequestStayed, now: float) -> None:
        self._note(message.request_id, Step.STAYED, now, peer=peer)

    def _preempted(self, peer: str, message: RequestPreempted, now: float) -> None:
        cause = Cause.REFUSED if message.handoff_refused else Cause.MEMORY
        num_tokens = len(message.generated_token_ids)
        self._note(message.request_id, Step.PREEMPTED, now, peer=peer, cause=cause, num_tokens=num_tokens)

    # --- what it says

    def _dispatched(self, command: Send, event: Any, now: float) -> None:
        message = command.message
        assert isinstance(message, PrefillRequest), "handled by its type"
        self._note(
            message.request.request_id,
            Step.DISPATCHED,
            now,
            peer=command.peer,
            cause=Cause.URGENT if message.bypass_to is not None else None,
            num_tokens=message.request.prompt_len + len(message.generated_token_ids),
            predicted_len=message.predicted_output_len,
        )

    def _interrupted(self, command: Send, event: Any, now: float) -> None:
        message = command.message
        assert isinstance(message, RequestInterrupted), "handled by its type"
        is_lost = type(event) is PeerDisconnected
        cause, peer = (Cause.WORKER_LOST, event.peer) if is_lost else (Cause.DRAINED, "")
        self._note(message.request_id, Step.INTERRUPTED, now, cause=cause, peer=peer)

    def _move_ordered(self, command: Send, event: Any, now: float) -> None:
        message = command.message
        assert isinstance(message, MoveRequest), "handled by its type"
        self._note(message.request_id, Step.MOVE_ORDERED, now, peer=message.to)

    # --- what goes on waiting

    def _tick(self, now: float) -> list[Send]:
        registry, placement = self._records.registry, self._records.placement
        if len(registry.queue):
            cause, self._queue_cause = self._queue_cause, queue_cause(placement)
            if cause is not None and self._queue_cause is not cause:
                self._tell(registry.queue, self._queue_cause, now)
        if placement.num_pooled:
            cause, self._pool_cause = self._pool_cause, pool_cause(placement)
            if cause is not None and self._pool_cause is not cause:
                pooled = (request_id for pool in placement.pools.values() for request_id in pool.pooled)
                self._tell(pooled, self._pool_cause, now)
        return [Send(gateway, message) for gateway, message in self._notes.take()]

    def _tell(self, request_ids: Iterable[RequestId], cause: Cause, now: float) -> None:
        for request_id in islice(request_ids, _MAX_TOLD):
            self._note(request_id, Step.WAITING, now, cause=cause)


def queue_cause(placement: Placement) -> Cause:
    if not any(worker.registered.can_prefill and not worker.is_draining for worker in placement.workers.values()):
        return Cause.NO_WORKER
    if placement.least_loaded_prefiller() is None:
        return Cause.POOL_FULL
    return Cause.WORKERS_BUSY


def pool_cause(placement: Placement) -> Cause:
    """Return why requests in pools are in no batch: no worker has a place, or too few of them are alike."""
    has_slot = any(worker.has_free_slot for worker in placement.workers.values())
    return Cause.BATCH_NOT_FULL if has_slot else Cause.NO_SLOT


_HEARD: dict[type, Callable[[RouterNotes, str, Any, float], None]] = {
    SubmitRequest: RouterNotes._submitted,
    ResumeRequest: RouterNotes._resumed,
    RequestPooled: RouterNotes._pooled,
    BatchFormed: RouterNotes._formed,
    RequestMoved: RouterNotes._moved,
    RequestStayed: RouterNotes._stayed,
    RequestPreempted: RouterNotes._preempted,
}
_SAID: dict[type, Callable[[RouterNotes, Send, Any, float], None]] = {
    PrefillRequest: RouterNotes._dispatched,
    RequestInterrupted: RouterNotes._interrupted,
    MoveRequest: RouterNotes._move_ordered,
}


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
    if ahead is None:  # until its gateway tells the token to go on from
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


def _others(tracked: TrackedRequest, where: str, records: RouterRecords) -> QueuedLoad:
    worker, pool = records.placement.workers.get(where), records.placement.pools.get(where)
    if pool is not None:
        return QueuedLoad(max(pool.num_pooled - 1, 0), 0)
    if worker is None:
        return QueuedLoad(0, 0)
    prefill = worker.prefilling.get(tracked.request.request_id)
    if prefill is None:
        return QueuedLoad(max(len(worker.decoding) - 1, 0), 0)
    return QueuedLoad(len(worker.prefilling) - 1, worker.num_prefill_tokens - prefill.num_tokens)
