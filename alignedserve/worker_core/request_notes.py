"""Notes of a worker about its requests, read from its logic's events and commands.

They stand beside the logic and change nothing there: recordings and simulations know nothing of them. All kinds of
workers share them, as they say the same things with the same messages.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.messages.caches import (
    BatchGranted,
    BlocksPrefetched,
    BlocksTaken,
    BlocksWritten,
    PrefetchBlocks,
    ReservationRefused,
    ReserveBlocks,
    ReturnRequest,
)
from alignedserve.messages.events import Received, Send, SendTo, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.iterations import IterationCompleted, LoadBlocks, RunIteration
from alignedserve.messages.request_notes import Cause, NoteBuffer, RequestNote, Step
from alignedserve.messages.workers import (
    AttemptFailed,
    MoveRequest,
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    RequestPreempted,
    RequestStayed,
)

_MAX_FOLLOWED = 1 << 16
_HEARD = {
    *(PrefillRequest, BatchGranted, BlocksWritten, ReservationRefused, BlocksTaken, BlocksPrefetched),
    *(AbortRequest, MoveRequest),
}
_SAID = {
    *(PrefillCompleted, RequestFinished, AttemptFailed, RequestPreempted, RequestStayed, ReserveBlocks),
    *(BlocksWritten, PrefetchBlocks, ReturnRequest),
}


class Phases(enum.Enum):
    """What a worker does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WaitingRequest(NamedTuple):
    """A request that a worker has and does not compute now."""

    request_id: RequestId
    cause: Cause
    num_running: int = 0  # requests that it computes instead


@dataclass(slots=True)
class _Followed:
    reply_to: str
    attempt: int
    is_prefilled: bool
    is_leaving: bool = False  # it is being handed over
    copied_to: str = ""  # who gets a copy alone
    cause: Cause | None = None  # of its wait, as last noted
    iterations_before: int = 0  # of the worker, when it joined
    members_before: int = 0


class WorkerNotes:
    """An Observer (process.logic_driver) of a worker's logic."""

    def __init__(
        self, waiting: Callable[[], Iterable[WaitingRequest]], phases: Phases, *, own_pool: str | None = None
    ) -> None:
        """`waiting`: asks the logic. `own_pool`: where requests wait that stay this worker's."""
        self._waiting = waiting
        self._phases = phases
        self._own_pool = own_pool
        self._followed: dict[RequestId, _Followed] = {}
        self._notes = NoteBuffer()
        self._num_iterations = self._num_members = 0
        self._pass_size = 0  # requests of the iteration in flight
        self._urgent: list[RequestId] = []  # of the iteration that is to run within it
        self._within: dict[RequestId, None] = {}  # for which it has stood still

    def observe(self, event: Any, now: float, commands: Sequence[Any]) -> list[SendTo]:
        if type(event) is Received:
            if type(event.message) in _HEARD:
                self._heard(event.peer, event.message, now)
        elif type(event) is IterationCompleted:
            self._num_iterations += 1
            self._num_members += len(event.sampled)
            self._stop(event, now)
        for command in commands:
            kind = type(command)
            if kind is Send:
                if type(command.message) in _SAID:
                    self._said(command.peer, command.message, now)
            elif kind is LoadBlocks:
                source = command.source.partition(" ")[0]  # of the names of an arena that a process lends
                for load in command.loads:
                    self._note(load.request_id, Step.LOADING, now, peer=source)
        for command in commands:  # after the words about ended requests, which leave the engine with it
            if type(command) is RunIteration:
                self._iteration(command, now)
        return self._tick(now) if type(event) is Ticked else []

    def _tick(self, now: float) -> list[SendTo]:
        for request_id, cause, num_running in self._waiting():
            followed = self._followed.get(request_id)
            if followed is not None and followed.cause is not cause:
                followed.cause = cause
                self._note(request_id, Step.WAITING, now, cause=cause, num_requests=num_running)
        return [SendTo(address, message) for address, message in self._notes.take()]

    def _note(self, request_id: RequestId, step: Step, now: float, **fields: Any) -> None:
        followed = self._followed.get(request_id)
        if followed is not None:
            self._notes.add(followed.reply_to, RequestNote(request_id, step, now, followed.attempt, **fields))

    def _follow(self, request: Request, attempt: int, *, is_prefilled: bool) -> None:
        self._followed.pop(request.request_id, None)
        if len(self._followed) >= _MAX_FOLLOWED:
            del self._followed[next(iter(self._followed))]
        self._followed[request.request_id] = _Followed(request.reply_to, attempt, is_prefilled)

    def _heard(self, peer: str, message: Any, now: float) -> None:
        if isinstance(message, PrefillRequest):
            num_tokens = message.request.prompt_len + len(message.generated_token_ids)
            self._follow(message.request, message.attempt, is_prefilled=False)
            num_others = len(self._followed) - 1
            self._note(message.request.request_id, Step.ACCEPTED, now, num_tokens=num_tokens, num_requests=num_others)
            return
        granted = message.handoffs if isinstance(message, BatchGranted) else ()
        for handoff in (message,) if isinstance(message, BlocksWritten) else granted:
            self._follow(handoff.request, handoff.attempt, is_prefilled=True)
            num_requests = max(len(granted), 1)
            self._note(handoff.request.request_id, Step.ARRIVED, now, peer=peer, num_requests=num_requests)
        request_id = getattr(message, "request_id", RequestId(""))
        followed = self._followed.get(request_id)
        if followed is None:
            return
        match message:
            case ReservationRefused() if followed.copied_to != peer:
                self._note(request_id, Step.HANDOFF_REFUSED, now, peer=peer, cause=Cause.REFUSED)
            case BlocksTaken() if followed.copied_to != peer:
                if not message.is_accepted:
                    self._note(request_id, Step.HANDOFF_REFUSED, now, peer=peer, cause=Cause.REFUSED)
                elif followed.attempt <= message.attempt and peer != self._own_pool:
                    del self._followed[request_id]
            case BlocksPrefetched(copy=None):
                cause = Cause.REFUSED if message.is_refused else None
                self._note(request_id, Step.PREFETCH_ENDED, now, peer=peer, cause=cause)
            case BlocksPrefetched():
                self._note(request_id, Step.PREFETCHED, now, peer=peer)
            case AbortRequest() if message.attempt is None or followed.attempt <= message.attempt:
                del self._followed[request_id]
            case MoveRequest():
                followed.is_leaving = True

    def _said(self, peer: str, message: Any, now: float) -> None:
        request_id = getattr(message, "request", message).request_id
        followed = self._followed.get(request_id)
        if followed is None:
            return
        match message:
            case PrefillCompleted():
                self._note(request_id, Step.PREFILLED, now, num_tokens=message.num_tokens)
                followed.is_prefilled = True
                if self._phases is Phases.BOTH:
                    self._joined(request_id, followed, now)
            case RequestFinished():
                num_iterations = self._num_iterations - followed.iterations_before
                mean_size = round((self._num_members - followed.members_before) / max(num_iterations, 1))
                counts = {"num_requests": mean_size, "num_iterations": num_iterations}
                self._note(request_id, Step.FINISHED, now, num_tokens=message.num_generated, **counts)
            case AttemptFailed():
                self._note(request_id, Step.ATTEMPT_FAILED, now, cause=Cause.FAILED)
            case RequestStayed():
                followed.is_leaving = False
            case ReserveBlocks():
                followed.copied_to = peer if message.is_copy else ""
                if not message.is_copy:
                    self._note(request_id, Step.OFFERED, now, peer=peer)
            case BlocksWritten() if followed.copied_to != peer:
                self._note(request_id, Step.HANDED_OVER, now, peer=peer)
            case PrefetchBlocks():
                self._note(request_id, Step.PREFETCHING, now, peer=peer)
            case ReturnRequest():
                self._note(request_id, Step.RETURNED, now, peer=peer)
        if isinstance(message, RequestFinished | AttemptFailed | RequestPreempted | ReturnRequest):
            del self._followed[request_id]  # of a preempted one the router notes the reason

    def _joined(self, request_id: RequestId, followed: _Followed, now: float, **fields: Any) -> None:
        followed.iterations_before, followed.members_before = self._num_iterations, self._num_members
        self._note(request_id, Step.JOINED, now, **fields)

    def _stop(self, event: IterationCompleted, now: float) -> None:
        if event.is_urgent:
            stood_s = now if event.times is None else min(event.times.started_s, now)
            for request_id in self._urgent:
                self._note(request_id, Step.STOOD_STILL, stood_s, num_requests=self._pass_size)
            self._within |= dict.fromkeys(self._urgent)
        else:
            for request_id in self._within:
                self._note(request_id, Step.WENT_ON, now)
            self._within.clear()
        self._urgent.clear()  # where the pass ends first, it did not stop for them

    def _iteration(self, command: RunIteration, now: float) -> None:
        if command.is_urgent:
            self._urgent = [request_id for request_id, _ in command.slices]
        else:
            self._pass_size = len(command.slices)
        if command.swaps is not None:
            self._swapped(command, now)
        if self._phases is not Phases.PREFILL:  # requests leave that one with their prompts computed
            for request_id in command.removals:
                followed = self._followed.get(request_id)
                if followed is not None and not followed.is_leaving:
                    self._note(request_id, Step.EVICTED, now, cause=Cause.MEMORY)
        for addition in command.additions:
            followed = self._followed.get(addition.request.request_id)
            if followed is None:
                continue
            followed.cause = None
            cause = Cause.WITHIN if command.is_urgent else None
            counts = {"num_tokens": addition.num_cached, "num_requests": len(command.slices)}
            if followed.is_prefilled:
                self._joined(addition.request.request_id, followed, now, **counts)
            else:
                self._note(addition.request.request_id, Step.STARTED, now, cause=cause, **counts)

    def _swapped(self, command: RunIteration, now: float) -> None:
        assert command.swaps is not None, "an iteration that swaps nothing"
        outs = {swap.request_id: swap.num_tokens for swap in command.swaps.outs}
        ins = {swap.request_id: swap.num_tokens for swap in command.swaps.ins}
        for request_id, num_tokens in outs.items():
            if request_id not in ins:  # else its last block changes, and it stays
                self._note(request_id, Step.SWAPPED_OUT, now, cause=Cause.MEMORY, num_tokens=num_tokens)
        for request_id, num_tokens in ins.items():
            if request_id not in outs:
                self._note(request_id, Step.SWAPPED_IN, now, num_tokens=num_tokens)
