"""Runs the length predictor on a thread beside the router's event loop.

The thread handles events in order: the same events give the same predictions. The logic never waits: a prediction comes
back as LengthPredicted, perhaps too late, or not at all if the thread is behind.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.messages.events import PeerDisconnected, Received, Send
from alignedserve.messages.gateways import AbortRequest, RequestFailed, RequestRejected, ResumeRequest, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.workers import RequestFinished
from alignedserve.process.worker_threads import WorkerThreads
from router.logic import RouterEvent, RouterLogic
from router.prediction.encoders import PromptCode
from router.prediction.journal import LearntLengths, LearntRequest
from router.prediction.predictor import LengthPredictor
from router.state import LengthPredicted

logger = logging.getLogger(__name__)

_MAX_WAITING = 256  # predictions requested and not made; more would come too late to be of use
_MAX_ENCODED = 16_384  # prompts kept until their request ends, as the router does; the oldest go first
_LONGEST_TURN_S = 0.005  # of the thread, before its predictions are delivered
_THREAD = "length predictor"

_Work = Callable[[], LengthPredicted | None]


@dataclass(frozen=True, slots=True)
class _EncodedRequest:
    gateway: str
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
        self._queued: deque[_Work] = deque()  # filled on the loop, emptied on the thread
        self._is_busy = self._is_closed = False
        self._encoded: dict[RequestId, _EncodedRequest] = {}  # of the thread
        if journal is not None:
            self._threads.submit(_THREAD, lambda: self._learn_again(journal), _ignore)

    def observe(self, event: RouterEvent, commands: Sequence[Send] = ()) -> None:
        """Queue the event's work for the thread; return at once. `commands`: what was decided about it."""
        refused = [
            command.message.request_id
            for command in commands
            if isinstance(command.message, RequestRejected | RequestFailed)
        ]
        match event:
            case Received(gateway, SubmitRequest(request=request) | ResumeRequest(request=request)):
                if self._num_pending < _MAX_WAITING and request.request_id not in refused:
                    self._num_pending += 1
                    self._put(partial(self._predict, gateway, request))
                return  # a duplicate is refused, and the request goes on
            case Received(_, RequestFinished() as message):
                self._put(partial(self._learn, message.request_id, message.num_generated))
            case Received(_, AbortRequest() as message):
                self._put(partial(self._forget, [message.request_id]))
            case PeerDisconnected(Role.GATEWAY, gateway):
                self._put(partial(self._forget_gateway, gateway))
        if refused:
            self._put(partial(self._forget, refused))

    def close(self) -> None:
        self._is_closed = True
        self._threads.close()
        if self._journal is not None:
            self._journal.close()

    def _put(self, work: _Work) -> None:
        self._queued.append(work)
        if not self._is_busy:
            self._is_busy = True
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if not self._is_closed:  # perhaps in this turn of the loop
            self._threads.submit(_THREAD, self._work_off, self._handed_back)

    def _handed_back(self, predictions: list[LengthPredicted]) -> None:
        self._num_pending -= len(predictions)
        for event in predictions:
            self._deliver(event)
        if self._queued:
            self._hand_over()
        else:
            self._is_busy = False

    # --- on the thread

    def _work_off(self) -> list[LengthPredicted]:
        predictions, end_s = [], time.monotonic() + _LONGEST_TURN_S
        while self._queued and time.monotonic() < end_s:
            predicted = self._queued.popleft()()
            if predicted is not None:
                predictions.append(predicted)
        return predictions

    def _predict(self, gateway: str, request: Request) -> LengthPredicted:
        code = self._predictor.encode(request)
        self._encoded.pop(request.request_id, None)  # a resumed request is the youngest again
        self._encoded[request.request_id] = _EncodedRequest(gateway, request, code)
        if len(self._encoded) > _MAX_ENCODED:
            del self._encoded[next(iter(self._encoded))]
        return LengthPredicted(request.request_id, self._predictor.predict(request, code).output_len)

    def _forget(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._encoded.pop(request_id, None)

    def _forget_gateway(self, gateway: str) -> None:
        self._forget([request_id for request_id, encoded in self._encoded.items() if encoded.gateway == gateway])

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
        commands = self._logic.on_event(event, now)
        self._predictor.observe(event, commands)
        return commands


def _ignore(_: object) -> None: ...
