"""What the logic of every worker does with an event: commands follow, and the next iteration begins.

A worker is its requests, the one iteration that is in flight at a time, and parts (part.py). An elastic worker has all
of them (logic.py). A prefill worker and a decode worker say in their own rooms what they do otherwise.
"""

from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

from alignedserve.core.ids import RequestId
from alignedserve.messages.events import PeerConnected, Received, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength, WorkerLoad, WorkerRegistered
from alignedserve.worker_core.iteration_cycle import IterationCycle, UrgentCycle
from alignedserve.worker_core.iteration_log import IterationLog
from alignedserve.worker_core.part import Commands, Part, WorkerEvent
from alignedserve.worker_core.request import WorkerRequest
from alignedserve.worker_core.request_notes import Phases, WaitingRequest
from alignedserve.worker_core.router_link import RouterLink

RequestT = TypeVar("RequestT", bound=WorkerRequest)


class WorkerLogic(Generic[RequestT]):
    """Touches nothing outside itself: the same state, event and now always give the same commands."""

    phases: ClassVar[Phases]
    kind: ClassVar[str] = "worker"  # in words

    def __init__(self, registered: WorkerRegistered, eos_token_ids: frozenset[int]) -> None:
        self._registered = registered
        self._parts: tuple[Part, ...] = ()  # in the order in which they take events
        self._router = RouterLink(registered)
        self.iteration_log = IterationLog()
        self._urgent_cycle = UrgentCycle()
        leaves = self.phases is Phases.PREFILL  # with its first token
        self._iterations: IterationCycle[RequestT] = IterationCycle(
            router=self._router,
            eos_token_ids=eos_token_ids,
            release=self._end,
            proceed=self._depart if leaves else None,
            iteration_log=None if leaves else self.iteration_log,
        )

    def on_event(self, event: WorkerEvent, now: float) -> Commands:
        """Return the commands that follow."""
        commands = self._handle(event, now)
        # The next iteration first: it computes while the messages about the last one are sent.
        started, moved = self._start_iteration(now), self._move(now)
        load = self._load(is_due=isinstance(event, Ticked) or self._router.is_load_awaited)
        return [*started, *commands, *moved, *(self._router.load(load) if load is not None else ())]

    def _handle(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case IterationCompleted():
                return self._iteration_completed(event, now)
            case Received(_, PrefillRequest() as message):
                return self._accept(message, now)
            case Received(_, SetPredictedLength() as message):
                self._set_predicted_length(message)
                return ()
            case Received(_, AbortRequest(request_id=request_id, attempt=attempt)):
                return self._abort(request_id, attempt)
            case PeerConnected(Role.ROUTER, peer):
                return self._router_connected(peer, now)
            case Ticked():
                return self._tick(now)
        for part in self._parts:
            if part.takes(event):
                return part.on_event(event, now)
        return self._on_other(event, now)

    def _on_other(self, event: WorkerEvent, now: float) -> Commands:
        """Take an event that no part takes."""
        assert not isinstance(event, Received), f"a {self.kind} does not take {type(event.message).__name__}"
        return ()

    # --- a request comes, and is given up

    def _accept(self, message: PrefillRequest, now: float, *, is_new: bool = True) -> Commands:
        request_id = message.request.request_id
        self._router.observe(message.attempt)
        # What an earlier attempt left here is stale: its abort is on the way, over another link.
        aborted = self._abort(request_id, message.attempt - 1)
        if self._never_fits(message):  # it would wait for ever, and all behind it
            return [*aborted, *self._router.too_large(message, self.kind)]
        earlier = self._get(request_id)
        if earlier is not None:
            earlier.successor, earlier.successor_s = message, now
            return aborted
        return [*aborted, *self._add(message, now, is_new=is_new)]

    def _never_fits(self, message: PrefillRequest) -> bool:
        raise NotImplementedError

    def _get(self, request_id: RequestId) -> RequestT | None:
        raise NotImplementedError

    def _add(self, message: PrefillRequest, now: float, *, is_new: bool) -> Commands:
        raise NotImplementedError

    def _abort(self, request_id: RequestId, attempt: int | None = None) -> Commands:
        raise NotImplementedError

    def _set_predicted_length(self, message: SetPredictedLength) -> None:
        raise NotImplementedError

    def _router_connected(self, peer: str, now: float) -> Commands:
        raise NotImplementedError

    # --- iterations

    def _start_iteration(self, now: float) -> Commands:
        raise NotImplementedError

    def _iteration_completed(self, event: IterationCompleted, now: float) -> Commands:
        if self._urgent_cycle.keeps(event):
            return ()
        commands = self._completed(event, now)
        if not event.is_urgent:
            return [*commands, *self._pass_ended(event, now)]
        ended_pass = self._urgent_cycle.end()
        return commands if ended_pass is None else [*commands, *self._iteration_completed(ended_pass, now)]

    def _completed(self, event: IterationCompleted, now: float) -> Commands:
        raise NotImplementedError

    def _pass_ended(self, event: IterationCompleted, now: float) -> Commands:
        """Let go of what the pass was still reading or writing."""
        raise NotImplementedError

    def _end(self, request: RequestT) -> Commands:
        """Note that a request has had its last token, or has failed."""
        raise NotImplementedError

    def _depart(self, request: RequestT) -> Commands:
        """Let a request leave that has had its first token."""
        raise NotImplementedError

    # --- beside them

    def waiting(self) -> Iterable[WaitingRequest]:
        """Return the requests that are here and are not computed now, each with its cause."""
        raise NotImplementedError

    def _move(self, now: float) -> Commands:
        return ()

    def _tick(self, now: float) -> Commands:
        raise NotImplementedError

    def _load(self, *, is_due: bool) -> WorkerLoad | None:
        raise NotImplementedError
