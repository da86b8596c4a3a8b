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
            heard = _HEARD.get(type(event.message))
            if heard is not None:
                heard(self, event.peer, event.message, now)
        elif type(event) is IterationCompleted:
            self._num_iterations += 1
            self._num_members += len(event.sampled)
            self._stop(event, now)
        for command in commands:
            kind = type(command)
            if kind is Send:
                said = _SAID.get(type(command.message))
                if said is not None:
                    said(self, command.peer, command.message, now)
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

    # --- what the worker hears

    def _accepted(self, peer: str, message: PrefillRequest, now: float) -> None:
        request = message.request
        self._follow(request, message.attempt, is_prefilled=False)
        num_tokens = request.prompt_len + len(message.generated_token_ids)
        num_others = len(self._followed) - 1
        self._note(request.request_id, Step.ACCEPTED, now, num_tokens=num_tokens, num_requests=num_others)

    def _granted(self, peer: str, message: BatchGranted, now: float) -> None:
        for handoff in message.handoffs:
            self._follow(handoff.request, handoff.attempt, is_prefilled=True)
            request_id, num_requests = handoff.request.request_id, len(message.handoffs)
            self._note(request_id, Step.ARRIVED, now, peer=peer, num_requests=num_requests)

    def _handed(self, peer: str, message: BlocksWritten, now: float) -> None:
        self._follow(message.request, message.attempt, is_prefilled=True)
        self._note(message.request.request_id, Step.ARRIVED, now, peer=peer, num_requests=1)

    def _refused(self, peer: str, message: ReservationRefused, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is not None and followed.copied_to != peer:
            self._note(message.request_id, Step.HANDOFF_REFUSED, now, peer=peer, cause=Cause.REFUSED)

    def _taken(self, peer: str, message: BlocksTaken, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is None or followed.copied_to == peer:
            return
        if not message.is_accepted:
            self._note(message.request_id, Step.HANDOFF_REFUSED, now, peer=peer, cause=Cause.REFUSED)
        elif followed.attempt <= message.attempt and peer != self._own_pool:
            del self._followed[message.request_id]

    def _prefetched(self, peer: str, message: BlocksPrefetched, now: float) -> None:
        if message.copy is not None:
            self._note(message.request_id, Step.PREFETCHED, now, peer=peer)
        else:
            cause = Cause.REFUSED if message.is_refused else None
            self._note(message.request_id, Step.PREFETCH_ENDED, now, peer=peer, cause=cause)

    def _aborted(self, peer: str, message: AbortRequest, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is not None and (message.attempt is None or followed.attempt <= message.attempt):
            del self._followed[message.request_id]

    def _leaving(self, peer: str, message: MoveRequest, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is not None:
            followed.is_leaving = True

    # --- what it says

    def _prefilled(self, peer: str, message: PrefillCompleted, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is None:
            return
        self._note(message.request_id, Step.PREFILLED, now, num_tokens=message.num_tokens)
        followed.is_prefilled = True
        if self._phases is Phases.BOTH:
            self._joined(message.request_id, followed, now)

    def _joined(self, request_id: RequestId, followed: _Followed, now: float, **fields: Any) -> None:
        followed.iterations_before, followed.members_before = self._num_iterations, self._num_members
        self._note(request_id, Step.JOINED, now, **fields)

    def _finished(self, peer: str, message: RequestFinished, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is None:
            return
        num_iterations = self._num_iterations - followed.iterations_before
        mean_size = round((self._num_members - followed.members_before) / max(num_iterations, 1))
        counts = {"num_tokens": message.num_generated, "num_requests": mean_size, "num_iterations": num_iterations}
        self._note(message.request_id, Step.FINISHED, now, **counts)
        del self._followed[message.request_id]

    def _failed(self, peer: str, message: AttemptFailed, now: float) -> None:
        self._note(message.request_id, Step.ATTEMPT_FAILED, now, cause=Cause.FAILED)
        self._followed.pop(message.request_id, None)

    def _preempted(self, peer: str, message: RequestPreempted, now: float) -> None:
        self._followed.pop(message.request_id, None)  # the router notes it, with its reason

    def _offering(self, peer: str, message: ReserveBlocks, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is None:
            return
        followed.copied_to = peer if message.is_copy else ""
        if not message.is_copy:
            self._note(message.request_id, Step.OFFERED, now, peer=peer)

    def _handing_over(self, peer: str, message: BlocksWritten, now: float) -> None:
        followed = self._followed.get(message.request.request_id)
        if followed is not None and followed.copied_to != peer:
            self._note(message.request.request_id, Step.HANDED_OVER, now, peer=peer)

    def _staying(self, peer: str, message: RequestStayed, now: float) -> None:
        followed = self._followed.get(message.request_id)
        if followed is not None:
            followed.is_leaving = False

    def _prefetching(self, peer: str, message: PrefetchBlocks, now: float) -> None:
        self._note(message.request_id, Step.PREFETCHING, now, peer=peer)

    def _returning(self, peer: str, message: ReturnRequest, now: float) -> None:
        self._note(message.request.request_id, Step.RETURNED, now, peer=peer)
        self._followed.pop(message.request.request_id, None)

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


_Handler = Callable[[WorkerNotes, str, Any, float], None]
_HEARD: dict[type, _Handler] = {
    PrefillRequest: WorkerNotes._accepted,
    BatchGranted: WorkerNotes._granted,
    BlocksWritten: WorkerNotes._handed,
    ReservationRefused: WorkerNotes._refused,
    BlocksTaken: WorkerNotes._taken,
    BlocksPrefetched: WorkerNotes._prefetched,
    AbortRequest: WorkerNotes._aborted,
    MoveRequest: WorkerNotes._leaving,
}
_SAID: dict[type, _Handler] = {
    PrefillCompleted: WorkerNotes._prefilled,
    RequestFinished: WorkerNotes._finished,
    AttemptFailed: WorkerNotes._failed,
    RequestPreempted: WorkerNotes._preempted,
    RequestStayed: WorkerNotes._staying,
    ReserveBlocks: WorkerNotes._offering,
    BlocksWritten: WorkerNotes._handing_over,
    PrefetchBlocks: WorkerNotes._prefetching,
    ReturnRequest: WorkerNotes._returning,
}
