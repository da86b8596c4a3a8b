"""Predicting output lengths beside the router's loop: one thread, which learns from what finishes.

The thread does everything in the order of the events, so the same events give the same predictions. The logic waits
for none of it: a prediction comes back as LengthPredicted, or too late, or not at all when the thread is behind.
"""

from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.messages.events import Received, Send
from alignedserve.messages.gateways import AbortRequest, ResumeRequest, SubmitRequest
from alignedserve.messages.workers import RequestFinished
from alignedserve.runtime.process.worker_threads import WorkerThreads
from router.logic import RouterEvent, RouterLogic
from router.prediction.encoders import PromptCode
from router.prediction.predictor import LengthPredictor
from router.state import LengthPredicted

_MAX_WAITING = 256  # predictions asked for and not made; more would come too late to be of use
_MAX_KNOWN = 16_384  # prompts kept until their request finishes; the oldest go first
_THREAD = "length predictor"


@dataclass(frozen=True, slots=True)
class _EncodedRequest:
    request: Request
    code: PromptCode


class AsyncLengthPredictor:
    """Sees every event that the logic sees, and gives back LengthPredicted on the loop."""

    def __init__(self, predictor: LengthPredictor, deliver: Callable[[LengthPredicted], None]) -> None:
        self._predictor = predictor
        self._deliver = deliver
        self._threads = WorkerThreads()
        self._num_pending = 0
        self._known: dict[RequestId, _EncodedRequest] = {}  # the thread's own

    def note(self, event: RouterEvent) -> None:
        """Returns at once."""
        match event:
            case Received(_, SubmitRequest(request=request) | ResumeRequest(request=request)):
                if self._num_pending < _MAX_WAITING:
                    self._num_pending += 1
                    self._threads.submit(_THREAD, lambda: self._predict(request), self._predicted)
            case Received(_, RequestFinished(request_id=request_id, num_generated=num_generated)):
                self._threads.submit(_THREAD, lambda: self._learn(request_id, num_generated), _nothing)
            case Received(_, AbortRequest(request_id=request_id)):
                self._threads.submit(_THREAD, lambda: self._known.pop(request_id, None), _nothing)

    def close(self) -> None:
        """End the thread; what it has not begun it does not do."""
        self._threads.close()

    def _predicted(self, event: LengthPredicted) -> None:
        self._num_pending -= 1
        self._deliver(event)

    # --- on the thread

    def _predict(self, request: Request) -> LengthPredicted:
        code = self._predictor.encode(request)
        self._known.pop(request.request_id, None)  # a request that is resumed is the youngest again
        self._known[request.request_id] = _EncodedRequest(request, code)
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return LengthPredicted(request.request_id, self._predictor.predict(request, code).output_len)

    def _learn(self, request_id: RequestId, num_generated: int) -> None:
        known = self._known.pop(request_id, None)
        if known is not None:
            self._predictor.learn(known.request, known.code, num_generated)


class PredictingLogic:
    """The router's logic, with every event shown to the runner once it is decided."""

    def __init__(self, logic: RouterLogic, runner: AsyncLengthPredictor) -> None:
        self._logic = logic
        self._runner = runner

    def on_event(self, event: RouterEvent, now: float) -> list[Send]:
        """See RouterLogic."""
        commands = self._logic.on_event(event, now)
        self._runner.note(event)
        return commands


def _nothing(_: object) -> None:
    """Nobody waits for what was learnt."""
