"""Adoption: requests that workers go on decoding without a router, and that the next router takes over there.

A worker tells what it decodes when it registers (WorkerRegistered.decoding), a gateway what it waits for and from whom
(ResumeRequest.holder). They come in any order:
- - The worker first: the request is *unclaimed* until its gateway resumes it. After a while without, its client or
  gateway has gone, and the worker is told to release it.
- - The gateway first: the request is *awaited* from the named worker. It is queued when the worker registers without it
  or does not come in time, or when the gateway loses its link to the worker.
- - Both: the request stays with the worker, under the worker's attempt. If an earlier worker's tokens never reached the
  client, it is computed again.
"""

from dataclasses import dataclass

from alignedserve.core.attempts import epoch_end, is_same_epoch
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.workers import DecodedRequest
from router.placement import Placement
from router.request_registry import RequestRegistry
from router.state import TrackedRequest, WorkerRecord

_UNCLAIMED_S = 5.0  # many times what links take to come back
_AWAITED_S = 5.0


@dataclass(frozen=True, slots=True)
class _Unclaimed:
    worker: str
    decoded: DecodedRequest
    until_s: float

    def release(self) -> Send:
        return Send(self.worker, AbortRequest(self.decoded.request_id, epoch_end(self.decoded.attempt)))


@dataclass(frozen=True, slots=True)
class _Awaited:
    tracked: TrackedRequest
    holder: str
    until_s: float


class Adoption:
    """Brings together what workers decode and what gateways resume."""

    def __init__(self, *, registry: RequestRegistry, placement: Placement) -> None:
        self._registry = registry
        self._placement = placement
        self._unclaimed: dict[RequestId, _Unclaimed] = {}
        self._awaited: dict[RequestId, _Awaited] = {}

    def worker_registered(self, worker: WorkerRecord, decoding: tuple[DecodedRequest, ...], now: float) -> list[Send]:
        self.worker_lost(worker.name)
        commands = []
        for decoded in decoding:
            commands += self._found(worker, decoded, now)
        for awaited in [awaited for awaited in self._awaited.values() if awaited.holder == worker.name]:
            self._queue(awaited)
        return commands

    def worker_lost(self, worker: str) -> None:
        self._unclaimed = {key: entry for key, entry in self._unclaimed.items() if entry.worker != worker}

    def resume(self, tracked: TrackedRequest, holder: str, now: float) -> list[Send]:
        """Track a request that the router does not know: adopted, awaited of its holder, or queued."""
        request_id = tracked.request.request_id
        unclaimed = self._unclaimed.pop(request_id, None)
        self._registry.track(tracked)
        commands = []
        if unclaimed is not None:
            if self._adopt(tracked, self._placement.workers[unclaimed.worker], unclaimed.decoded):
                return []
            commands.append(unclaimed.release())
        elif holder and holder not in self._placement.workers:
            self._awaited[request_id] = _Awaited(tracked, holder, now + _AWAITED_S)
            return []
        self._registry.enqueue(tracked)
        return commands

    def await_no_more(self, request_id: RequestId) -> None:
        self._awaited.pop(request_id, None)

    def ended(self, request_id: RequestId) -> list[Send]:
        unclaimed = self._unclaimed.pop(request_id, None)
        return [] if unclaimed is None else [unclaimed.release()]

    def num_at(self, worker: str) -> int:
        unclaimed = sum(entry.worker == worker for entry in self._unclaimed.values())
        return unclaimed + sum(entry.holder == worker for entry in self._awaited.values())

    def tick(self, now: float) -> list[Send]:
        for awaited in [entry for entry in self._awaited.values() if entry.until_s <= now]:
            self._queue(awaited)
        late = [request_id for request_id, entry in self._unclaimed.items() if entry.until_s <= now]
        return [self._unclaimed.pop(request_id).release() for request_id in late]

    def _found(self, worker: WorkerRecord, decoded: DecodedRequest, now: float) -> list[Send]:
        request_id = decoded.request_id
        unclaimed = _Unclaimed(worker.name, decoded, now + _UNCLAIMED_S)
        tracked = self._registry.requests.get(request_id)
        if tracked is not None:
            return [] if self._adopt(tracked, worker, decoded) else [unclaimed.release()]
        other = self._unclaimed.get(request_id)
        if other is not None and other.decoded.attempt >= decoded.attempt:
            return [unclaimed.release()]
        self._unclaimed[request_id] = unclaimed
        return [] if other is None else [other.release()]

    def _adopt(self, tracked: TrackedRequest, worker: WorkerRecord, decoded: DecodedRequest) -> bool:
        is_latest = not tracked.attempt or (
            is_same_epoch(decoded.attempt, tracked.attempt) and decoded.attempt >= tracked.attempt
        )
        if tracked.stage is not Stage.QUEUED or not is_latest or decoded.num_received > tracked.num_emitted:
            return False
        request_id = tracked.request.request_id
        self.await_no_more(request_id)
        self._registry.queue.discard(request_id)
        self._placement.set_decoding(tracked, worker)
        if tracked.adapter:
            self._placement.adapters.use(worker, tracked.adapter)
        tracked.attempt = decoded.attempt
        tracked.generated_token_ids, tracked.num_emitted = (), decoded.num_received
        return True

    def _queue(self, awaited: _Awaited) -> None:
        tracked = awaited.tracked
        request_id = tracked.request.request_id
        del self._awaited[request_id]
        if self._registry.requests.get(request_id) is tracked and tracked.stage is Stage.QUEUED:
            self._registry.enqueue(tracked)
