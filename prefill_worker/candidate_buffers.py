"""The candidate buffers that decode workers have in this worker's memory (AlignedServe, sections 3.2 and 3.4).

The decode worker allocates the blocks of its buffer. This worker opens it, copies candidates into it from the pool
ahead of need, and returns evicted requests from it to the pool. One such copy runs at a time for each buffer, so that
plans can change for all others; copies of other buffers and offloads of computed prompts do not wait for it.

ReturnRequest begins a handoff to the pool (worker_core/handoff.py), of what lies in a buffer. RequestReturned
tells the decode worker how it ended: unless the pool has the request, or may have it, it stays in the buffer.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from alignedserve.core.class_floor import ClassFloor, OverdueFloor, TurnClass
from alignedserve.messages.caches import (
    BlockCopy,
    BlocksPrefetched,
    CancelPrefetch,
    PrefetchBlocks,
    RequestReturned,
    ReturnOutcome,
    ReturnRequest,
)
from alignedserve.messages.events import PeerConnected, Received, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksRelayed, BufferOpened, RelayBlocks
from alignedserve.worker_core.handoff import Contents, HandoffEnd, HandoffStage, Lender, Outgoing, Sender
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent, WorkerPart
from alignedserve.worker_core.request import CacheStage
from prefill_worker.state import PrefillJob

_OUTCOMES = {HandoffEnd.TAKEN: ReturnOutcome.TAKEN, HandoffEnd.UNKNOWN: ReturnOutcome.UNKNOWN}


@dataclass(slots=True, eq=False)
class _Returning(Outgoing):
    peer: str  # the decode worker that evicted it
    message: ReturnRequest


class _WaitingCopy(NamedTuple):
    peer: str  # the decode worker
    relay: RelayBlocks
    is_best_effort: bool = False  # goes after others
    returning: _Returning | None = None


class CandidateBuffers(WorkerPart):
    """Copies between the pool and the buffers, and the decode workers that they are for."""

    def __init__(self, pool_name: str) -> None:
        self._pool_name = pool_name
        self._has_pool = False
        self.lender = Lender()
        self._waiting: deque[_WaitingCopy] = deque()  # in order
        self._relaying: dict[str, int | None] = {}  # decode workers with a copy under way: the link epoch it began in
        self.returns: Sender[_Returning] = Sender(
            reserved=self._reserved, contents=_contents_of, ended=self._returned, aborted=lambda entry: ()
        )

    @override
    def takes(self, event: WorkerEvent) -> bool:
        match event:
            case PeerConnected(role, _):
                return role is Role.DECODE_WORKER
            case Received(_, message):
                return isinstance(message, PrefetchBlocks | CancelPrefetch | ReturnRequest)
        return isinstance(event, BlocksRelayed | BufferOpened)

    @override
    def on_event(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case BlocksRelayed():
                return self._relayed(event, now)
            case BufferOpened():
                return self.lender.opened(event)
            case PeerConnected(_, peer):
                return [self.lender.connected(peer)]
            case Received(peer, PrefetchBlocks() as message):
                return self._prefetch(peer, message)
            case Received(peer, CancelPrefetch() as message):
                return self._cancel(peer, message)
            case Received(peer, ReturnRequest() as message):
                return self._return_to_pool(peer, message)
        raise AssertionError("an event of others")

    def disconnected(self, peer: str) -> Commands:
        self._waiting = deque(entry for entry in self._waiting if entry.peer != peer)
        commands: list[WorkerCommand] = [self.lender.disconnected(peer)]
        for entry in self.returns:
            if entry.peer == peer:
                commands += self.returns.abort(entry)
        return commands

    def _prefetch(self, peer: str, message: PrefetchBlocks) -> Commands:
        relay = RelayBlocks(
            message.request_id,
            message.attempt,
            self._pool_name,
            message.source,
            peer,
            message.block_ids,
            message.generation,
        )
        if not self._has_pool:
            return [_not_prefetched(peer, relay)]
        index = len(self._waiting)
        while index and not message.is_best_effort and self._waiting[index - 1].is_best_effort:
            index -= 1
        self._waiting.insert(index, _WaitingCopy(peer, relay, message.is_best_effort))
        return self._next()

    def _cancel(self, peer: str, message: CancelPrefetch) -> Commands:
        commands: list[WorkerCommand] = []
        for entry in [entry for entry in self._waiting if entry.peer == peer and _is_of(entry.relay, message)]:
            self._waiting.remove(entry)
            commands.append(_not_prefetched(peer, entry.relay))
        return commands

    def _return_to_pool(self, peer: str, message: ReturnRequest) -> Commands:
        request = message.request
        if not self._has_pool or self.returns.get(request.request_id) is not None:
            return [Send(peer, RequestReturned(request.request_id, message.attempt, ReturnOutcome.STAYED))]
        entry = _Returning(request, message.attempt, self._pool_name, peer, message)
        is_best_effort = not request.is_real_time
        return [self.returns.ask(entry, message.copy.num_blocks, is_best_effort=is_best_effort)]

    def pool_connected(self) -> None:
        self._has_pool = True

    def pool_disconnected(self, now: float) -> Commands:
        """Cancel all queued copies: leases are void, and requests on their way back did not arrive."""
        self._has_pool = False
        waiting, self._waiting = self._waiting, deque()
        prefetches = [entry for entry in waiting if entry.returning is None]
        ended = [_not_prefetched(entry.peer, entry.relay) for entry in prefetches]
        return [*ended, *self.returns.lost(self._pool_name, now)]

    def _reserved(self, entry: _Returning) -> Commands:
        reserved = entry.reserved
        assert reserved is not None, "reserved without blocks"
        relay = RelayBlocks(
            reserved.request_id,
            reserved.attempt,
            entry.peer,
            entry.message.copy,
            self._pool_name,
            reserved.block_ids,
            reserved.generation,
            reserved.lease_id,
        )
        waiting = _WaitingCopy(entry.peer, relay, returning=entry)
        self._waiting.appendleft(waiting)  # before prefetches: it frees buffer blocks
        return self._next()

    def _returned(self, entry: _Returning, how: HandoffEnd, now: float) -> Commands:
        outcome = _OUTCOMES.get(how, ReturnOutcome.STAYED)
        return [Send(entry.peer, RequestReturned(entry.request.request_id, entry.attempt, outcome))]

    def _relayed(self, event: BlocksRelayed, now: float) -> Commands:
        is_return = event.command.target == self._pool_name
        peer = event.command.source if is_return else event.command.target
        assert peer in self._relaying, "a copy ended that was not started"
        link_epoch = self._relaying.pop(peer)
        commands: list[WorkerCommand] = []
        if is_return:
            commands += self.returns.copied(event, now)
        elif self.lender.link_epoch(peer) == link_epoch:
            commands += self._prefetched(peer, event)
        return [*commands, *self._next()]

    def _prefetched(self, peer: str, event: BlocksRelayed) -> Commands:
        relay = event.command
        if event.runs is None:
            ended = BlocksPrefetched(relay.request_id, relay.generation, None, is_refused=event.is_reached)
            return [Send(peer, ended)]
        copy = BlockCopy(relay.generation, relay.copy.context_len, event.runs)
        return [Send(peer, BlocksPrefetched(relay.request_id, relay.generation, copy))]

    def _next(self) -> Commands:
        started: list[WorkerCommand] = []
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            if entry.peer in self._relaying:
                self._waiting.append(entry)
            else:
                self._relaying[entry.peer] = self.lender.link_epoch(entry.peer)
                if entry.returning is not None:
                    entry.returning.stage = HandoffStage.COPYING
                started.append(entry.relay)
        return started


def _contents_of(entry: _Returning, now: float) -> Contents:
    message = entry.message
    described = (message.generated_token_ids, message.predicted_output_len, message.begun_s, message.service_s)
    return Contents(message.copy.context_len, *described)


def _is_of(relay: RelayBlocks, message: CancelPrefetch) -> bool:
    return (relay.request_id, relay.generation, relay.lease_id) == (message.request_id, message.generation, None)


def _not_prefetched(peer: str, relay: RelayBlocks) -> Send:
    return Send(peer, BlocksPrefetched(relay.request_id, relay.generation, None))


_MOST_NOT_COMPUTED = 2  # documents: one computed by the policy's floor, and the next


class PlaceOrder:
    """Orders jobs for places and blocks: on time, late, best effort, each by arrival.

    An overdue late job goes before punctual ones by a floor (core/class_floor.py), and so does a waiting document,
    while fewer than two documents with a place are not computed yet: in an overload chats always wait here.
    """

    def __init__(self, *, knows_classes: bool, floor: float = 0.0) -> None:
        """`knows_classes`: where the policy does; else all go in order of arrival. `floor`: of best effort, as a share
        of the tokens that get a place."""
        self.knows_classes = knows_classes
        self._floor = OverdueFloor()
        self._late: PrefillJob | None = None  # the first of the late ones that wait
        self._document_floor = ClassFloor(floor)
        self._document: PrefillJob | None = None  # the first best-effort one that waits
        self.by_floor: PrefillJob | None = None  # a best-effort one that goes before all, and holds up none

    def of(self, jobs: Iterable[PrefillJob], now: float) -> list[PrefillJob]:
        waiting, placed = [], 0
        for job in jobs:
            if job.stage is CacheStage.WAITING:
                waiting.append(job)
            else:
                placed += job.stage is not CacheStage.LEAVING and not job.is_real_time
        if not self.knows_classes:
            return waiting
        by_class: dict[TurnClass, list[PrefillJob]] = {turn_class: [] for turn_class in TurnClass}
        for job in waiting:
            by_class[_class_of(job, now)].append(job)
        waiting = [job for of_class in by_class.values() for job in of_class]
        late = self._late = next(iter(by_class[TurnClass.LATE]), None)
        if late is not None and self._floor.lets(late.context_len, late.request.arrival_s, late.turn_due_s, now):
            waiting.remove(late)
            waiting.insert(0, late)
        first = self._document = next(iter(by_class[TurnClass.BEST_EFFORT]), None)
        self.by_floor = None
        has_turn = first is not None and first is not waiting[0] and placed < _MOST_NOT_COMPUTED
        if first is not None and has_turn and self._document_floor.is_due(first.context_len):
            self.by_floor = first
            waiting.remove(first)
            waiting.insert(0, first)
        return waiting

    def note(self, job: PrefillJob, now: float) -> None:
        if not self.knows_classes:
            return
        turn_class = _class_of(job, now)
        if turn_class is TurnClass.BEST_EFFORT:
            self._document_floor.note_own(job.context_len)
            return
        if self._document is not None:
            self._document_floor.note_earlier(job.context_len, self._document.context_len)
        if job.turn_due_s < math.inf:  # it waits for its first token
            self._floor.note_wait(now - job.request.arrival_s)
        if turn_class is TurnClass.LATE:
            self._floor.note_own(job.context_len)
        elif turn_class is TurnClass.ON_TIME and self._late is not None:
            self._floor.note_earlier(job.context_len, self._late.context_len)


def _class_of(job: PrefillJob, now: float) -> TurnClass:
    if not job.is_real_time:
        return TurnClass.BEST_EFFORT
    return TurnClass.LATE if job.turn_due_s <= now else TurnClass.ON_TIME
