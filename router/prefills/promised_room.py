"""Room at decode workers that is promised to prompts, until the load of a worker tells that it is taken.

A prompt that was given out for the room of a decode worker counts while it is computed, while its blocks are on their
way, and until that worker has told a load since it has the request: what was told before says nothing of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.workers import WorkerLoad
from router.state import TrackedRequest, WorkerRecord

_MORE_TOKENS = 96  # for what it grows by until the others are there, and for time of its own that it adds to iterations


@dataclass(slots=True)
class _Promise:
    num_tokens: int
    load: WorkerLoad | None = None  # of the worker that has it, as it was told before it had it
    has_arrived: bool = False


class PromisedRoom:
    """What is promised. Reads requests and workers."""

    def __init__(self, requests: Mapping[RequestId, TrackedRequest], workers: Mapping[str, WorkerRecord]) -> None:
        self._requests = requests
        self._workers = workers
        self._promises: dict[RequestId, _Promise] = {}
        self._promised: dict[str, None] = {}  # workers whose room is

    def add(self, tracked: TrackedRequest) -> None:
        self._promises[tracked.request.request_id] = _Promise(tracked.num_prefill_tokens + _MORE_TOKENS)

    def count(self) -> None:
        for name in self._promised:
            if (worker := self._workers.get(name)) is not None:
                worker.num_promised = 0
        self._promised = {}
        for request_id, promise in list(self._promises.items()):
            tracked = self._requests.get(request_id)
            if tracked is None or self._is_settled(tracked, promise):
                del self._promises[request_id]
                continue
            having = tracked.destination if tracked.stage is Stage.PREFILLING else tracked.holder
            if (worker := self._workers.get(having or "")) is not None:
                of_states = worker.registered.state_blocks * worker.registered.block_size
                worker.num_promised += promise.num_tokens + of_states
                self._promised[worker.name] = None

    def _is_settled(self, tracked: TrackedRequest, promise: _Promise) -> bool:
        if tracked.stage not in (Stage.PREFILLING, Stage.DECODING):
            return True
        worker = self._workers.get(tracked.holder or "")
        if tracked.stage is Stage.PREFILLING or worker is None:
            return worker is None
        if not promise.has_arrived:
            promise.has_arrived, promise.load = True, worker.load
            return False
        return worker.load is not promise.load
