"""The logic of every worker: an event comes, commands follow, and the next iteration begins.

A worker is its requests, the one iteration that is in flight at a time, and parts (part.py). An elastic worker has all
of them (logic.py). A prefill worker and a decode worker say in their own rooms what they do otherwise.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, Generic, TypeVar

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.messages.events import PeerConnected, Received, SendTo, Ticked
from alignedserve.messages.gateways import AbortRequest, PromptScored, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted, joined
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength, WorkerLoad, WorkerRegistered
from alignedserve.worker_core.iteration_log import IterationLog
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent, WorkerPart
from alignedserve.worker_core.request import WorkerRequest
from alignedserve.worker_core.request_notes import Phases, WaitingRequest
from alignedserve.worker_core.router_link import RouterLink

RequestT = TypeVar("RequestT", bound=WorkerRequest)

_NO_LOGITS = (FailureKind.INTERNAL, "the model gave no usable logits")


class UrgentCycle:
    """The pass in flight: requests that come meanwhile, the urgent iteration within it, and its end until that is over.

    One urgent iteration at a time. A pass that ends before it could stop is dealt with after the urgent one.
    """

    def __init__(self) -> None:
        self._came: dict[RequestId, None] = {}  # and have no token yet
        self._has_news = False  # since they were last asked for
        self._is_running = False
        self._kept: IterationCompleted | None = None

    @property
    def may_begin(self) -> bool:
        return self._has_news and not self._is_running

    def came(self, request_id: RequestId) -> None:
        self._came[request_id] = None
        self._has_news = True

    def pass_began(self) -> None:
        self._came.clear()
        self._has_news = False

    def ask(self) -> list[RequestId]:
        """Return, in order, the requests of which an urgent iteration may be made now."""
        self._has_news = False
        return list(self._came)

    def keep(self, request_ids: Iterable[RequestId]) -> None:
        self._came = dict.fromkeys(request_ids)

    def began(self) -> None:
        assert not self._is_running, "two urgent iterations at once"
        self._is_running = True

    def keeps(self, event: IterationCompleted) -> bool:
        """Keep the end of the pass until that of the urgent iteration; return whether it did."""
        if event.is_urgent or not self._is_running:
            return False
        self._kept = event
        return True

    def end(self) -> IterationCompleted | None:
        """Note the end of the urgent iteration; return the end of the pass, if it was kept."""
        assert self._is_running, "an urgent iteration ended that was not begun"
        self._is_running, self._has_news = False, bool(self._came)
        ended_pass, self._kept = self._kept, None
        return ended_pass


class WorkerLogic(Generic[RequestT]):
    """Touches nothing outside itself: the same state, event and now always give the same commands."""

    phases: ClassVar[Phases]
    kind: ClassVar[str] = "worker"  # in words

    def __init__(self, registered: WorkerRegistered, eos_token_ids: frozenset[int]) -> None:
        self._registered = registered
        self._parts: tuple[WorkerPart, ...] = ()  # in the order in which they take events
        self._router = RouterLink(registered)
        self.iteration_log = IterationLog()
        self._urgent_cycle = UrgentCycle()
        self._eos_token_ids = eos_token_ids
        self._has_log = self.phases is not Phases.PREFILL
        self._by_id: Mapping[RequestId, RequestT] = {}  # requests that it computes, or will
        self._started: list[tuple[float, bool]] = []  # of iterations in flight, and is it logged; an urgent one last

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
        earlier = self._by_id.get(request_id)
        if earlier is not None:
            earlier.successor, earlier.successor_s = message, now
            return aborted
        return [*aborted, *self._add(message, now, is_new=is_new)]

    def _never_fits(self, message: PrefillRequest) -> bool:
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

    @property
    def _is_computing(self) -> bool:
        return bool(self._started)

    def _start_iteration(self, now: float) -> Commands:
        raise NotImplementedError

    def _begin_iteration(
        self,
        now: float,
        members: Collection[RequestT],
        *,
        has_changed: bool,
        is_switching: bool = False,
        alone_s: float = 0.0,
    ) -> None:
        """Begin an iteration of these requests; `has_changed`: not those of the last. `alone_s`: of the real-time
        part. An iteration without requests only copies, and is not logged. A nested iteration is urgent, and
        ends first."""
        is_logged = self._has_log and bool(members)
        self._started.append((now, is_logged))
        if is_logged:
            self.iteration_log.iteration_started(
                now, members, has_changed=has_changed, is_switching=is_switching, alone_s=alone_s
            )

    def _iteration_completed(self, event: IterationCompleted, now: float) -> Commands:
        if self._urgent_cycle.keeps(event):
            return ()
        commands = self._completed(event, now)
        if not event.is_urgent:
            return [*commands, *self._pass_ended(event, now)]
        ended_pass = self._urgent_cycle.end()
        return commands if ended_pass is None else [*commands, *self._iteration_completed(ended_pass, now)]

    def _end_iteration(self, event: IterationCompleted, now: float) -> float:
        """Return how long it took."""
        assert self._started, "an iteration ended that was not started"
        started_s, is_logged = self._started.pop()
        if is_logged:
            self.iteration_log.iteration_completed(now, event)
        return event.duration_s(started_s, now)

    def _outcome(self, event: IterationCompleted) -> Commands:
        """Add the sampled tokens to their requests; return the messages: prompt scores first, reports to the router
        last."""
        commands: list[WorkerCommand] = []
        requests = self._by_id
        scored = [
            SendTo(
                requests[scores.request_id].request.reply_to,
                PromptScored(scores.request_id, scores.first_position, scores.entries),
            )
            for scores in event.prompt_scores
        ]
        eos_token_ids, leaves = self._eos_token_ids, self.phases is Phases.PREFILL  # with the first token
        sampled = [
            (running.request.reply_to, running, running.append(token, eos_token_ids))
            for token in event.sampled
            if not (running := requests[token.request_id]).is_aborted
        ]
        for _, running, delta in sampled:
            if not running.is_prefilled:
                running.is_prefilled = True
                commands += self._router.prefilled(running)
            if delta.finish_reason is not None:
                commands += self._end(running)
                commands += self._router.finished(running)
            elif leaves:
                commands += self._depart(running)
        reasons = dict(event.reasons)
        for request_id in event.failed:
            running = requests[request_id]
            commands += self._end(running)
            commands += self._router.failed(running, *reasons.get(request_id, _NO_LOGITS))
        emitted: list[SendTo] = []
        for address in dict.fromkeys([gateway for gateway, _, _ in sampled]):  # few: a pass each is cheaper
            deltas = [delta for gateway, _, delta in sampled if gateway == address]
            emitted += [SendTo(address, TokensEmitted(tuple(joined(deltas) if event.forced else deltas)))]
        return [*scored, *emitted, *commands]

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
