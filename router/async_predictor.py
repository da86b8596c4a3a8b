"""Runs the length predictor on a thread beside the router's event loop.

The thread handles events in order, so the same events give the same predictions. The logic never waits for it: a
prediction comes back as LengthPredicted, perhaps too late, or not at all if the thread is behind.
"""

import logging
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
from router.prediction.journal import LearntLengths, LearntRequest
from router.prediction.predictor import LengthPredictor
from router.state import LengthPredicted

logger = logging.getLogger(__name__)

_MAX_WAITING = 256  # predictions requested and not made; more would come too late to be of use
_MAX_ENCODED = 16_384  # prompts kept until their request finishes; the oldest go first
_THREAD = "length predictor"


@dataclass(frozen=True, slots=True)
class _EncodedRequest:
    request: Request
    code: PromptCode


class AsyncLengthPredictor:
    """Predicts for, and learns from, the requests in the router's events; delivers LengthPredicted on the loop."""

    def __init__(
        self,
        predictor: LengthPredictor,
        deliver: Callable[[LengthPredicted], None],
        journal: LearntLengths | None = None,
    ) -> None:
        """`journal`: read first, on the thread, and then written; None: what is learnt ends with the process."""
        self._predictor = predictor
        self._journal = journal
        self._deliver = deliver
        self._threads = WorkerThreads()
        self._num_pending = 0
        self._encoded: dict[RequestId, _EncodedRequest] = {}  # of the thread
        if journal is not None:
            self._threads.submit(_THREAD, lambda: self._learn_again(journal), _ignore)

    def observe(self, event: RouterEvent) -> None:
        """Queue the event's work on the thread; return at once."""
        match event:
            case Received(_, SubmitRequest(request=request) | ResumeRequest(request=request)):
                if self._num_pending < _MAX_WAITING:
                    self._num_pending += 1
                    self._threads.submit(_THREAD, lambda: self._predict(request), self._predicted)
            case Received(_, RequestFinished(request_id=request_id, num_generated=num_generated)):
                self._threads.submit(_THREAD, lambda: self._learn(request_id, num_generated), _ignore)
            case Received(_, AbortRequest(request_id=request_id)):
                self._threads.submit(_THREAD, lambda: self._encoded.pop(request_id, None), _ignore)

    def close(self) -> None:
        """Stop the thread and drop the work it has not begun."""
        self._threads.close()
        if self._journal is not None:
            self._journal.close()

    def _predicted(self, event: LengthPredicted) -> None:
        self._num_pending -= 1
        self._deliver(event)

    # --- on the thread

    def _predict(self, request: Request) -> LengthPredicted:
        code = self._predictor.encode(request)
        self._encoded.pop(request.request_id, None)  # a resumed request is the youngest again
        self._encoded[request.request_id] = _EncodedRequest(request, code)
        if len(self._encoded) > _MAX_ENCODED:
            del self._encoded[next(iter(self._encoded))]
        return LengthPredicted(request.request_id, self._predictor.predict(request, code).output_len)

    def _learn(self, request_id: RequestId, num_generated: int) -> None:
        encoded = self._encoded.pop(request_id, None)
        if encoded is not None:
            self._predictor.learn(encoded.request, encoded.code, num_generated)
            if self._journal is not None:
                self._journal.append(LearntRequest(encoded.request, encoded.code, num_generated))

    def _learn_again(self, journal: LearntLengths) -> None:
        num_learnt = 0
        for learnt in journal.open():
            self._predictor.learn(*learnt)
            num_learnt += 1
        logger.info("the lengths of %d finished requests are known from before", num_learnt)


class PredictingLogic:
    """The router's logic with every event also passed to the predictor, after it is decided."""

    def __init__(self, logic: RouterLogic, predictor: AsyncLengthPredictor) -> None:
        self._logic = logic
        self._predictor = predictor

    def on_event(self, event: RouterEvent, now: float) -> list[Send]:
        """See RouterLogic."""
        commands = self._logic.on_event(event, now)
        self._predictor.observe(event)
        return commands


def _ignore(_: object) -> None:
    """Drop the result of work that only learns."""
