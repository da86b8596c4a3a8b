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

    def add(self, tracked: TrackedRequest) -> None:
        """Promise room to a prompt that is given out."""
        self._promises[tracked.request.request_id] = _Promise(tracked.num_prefill_tokens)

    def num_tokens(self) -> int:
        """Return the tokens of all prompts that have a promise still."""
        for request_id, promise in list(self._promises.items()):
            if self._is_settled(self._requests.get(request_id), promise):
                del self._promises[request_id]
        return sum(promise.num_tokens for promise in self._promises.values())

    def _is_settled(self, tracked: TrackedRequest | None, promise: _Promise) -> bool:
        """Return whether it counts no more: it waits elsewhere, has ended, or is in its worker's load."""
        if tracked is None or tracked.stage not in (Stage.PREFILLING, Stage.DECODING):
            return True
        worker = self._workers.get(tracked.holder or "")
        if tracked.stage is Stage.PREFILLING or worker is None:
            return worker is None
        if not promise.has_arrived:
            promise.has_arrived, promise.load = True, worker.load
            return False
        return worker.load is not promise.load
