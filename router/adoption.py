"""Adoption: requests that workers go on decoding while they have no router, and that the next one takes over there.

A worker tells what it decodes when it registers (WorkerRegistered.decoding), a gateway what it waits for and from whom
(ResumeRequest.holder). They come in any order:
- The worker first: the request is *unclaimed* until its gateway resumes it. After a while without, the worker is told
  to release it: its client has gone, or its gateway.
- The gateway first: the request is *awaited* from the worker that it names, and queued when that one registers without
  it, or does not come in time, or the gateway loses its link to it.
Both: the request stays where it is, under the attempt that the worker has. Unless tokens are missing to the client,
which were sent by a worker before that one: then it is computed again.
"""

from dataclasses import dataclass

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage, epoch_end, is_same_epoch
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
        for awaited in [one for one in self._awaited.values() if one.holder == worker.name]:
            self._queue(awaited)
        return commands

    def worker_lost(self, worker: str) -> None:
        self._unclaimed = {key: one for key, one in self._unclaimed.items() if one.worker != worker}

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
        """Forget a request that has ended at its worker, or for its client, before it was claimed."""
        unclaimed = self._unclaimed.pop(request_id, None)
        return [] if unclaimed is None else [unclaimed.release()]

    def num_at(self, worker: str) -> int:
        """Return how many requests a worker has, or may have, that are not adopted yet."""
        unclaimed = sum(one.worker == worker for one in self._unclaimed.values())
        return unclaimed + sum(one.holder == worker for one in self._awaited.values())

    def tick(self, now: float) -> list[Send]:
        """Queue what was awaited for too long, and have released what was not claimed in time."""
        for awaited in [one for one in self._awaited.values() if one.until_s <= now]:
            self._queue(awaited)
        late = [request_id for request_id, one in self._unclaimed.items() if one.until_s <= now]
        return [self._unclaimed.pop(request_id).release() for request_id in late]

    def _found(self, worker: WorkerRecord, decoded: DecodedRequest, now: float) -> list[Send]:
        request_id = decoded.request_id
        found = _Unclaimed(worker.name, decoded, now + _UNCLAIMED_S)
        tracked = self._registry.requests.get(request_id)
        if tracked is not None:
            return [] if self._adopt(tracked, worker, decoded) else [found.release()]
        other = self._unclaimed.get(request_id)
        if other is not None and other.decoded.attempt >= decoded.attempt:
            return [found.release()]
        self._unclaimed[request_id] = found
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
