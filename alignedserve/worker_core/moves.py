"""Requests that move between the workers of a node while they decode, with their caches.

Workers lend each other buffers in their memory. A move has a giver and a receiver:
1. The router sends MoveRequest to the giver, which asks the receiver for blocks and decodes the request meanwhile.
2. The receiver holds blocks of its own and as many of its buffer at the giver: BlocksReserved. Otherwise
   ReservationRefused, and the request stays.
3. Between two iterations the giver takes the request out and copies its cache into the buffer: BlocksWritten.
4. The receiver loads and verifies it, decodes it on, and tells the giver (BlocksTaken) and the router (RequestMoved).
The giver keeps the cache until then: whatever fails, it decodes the request on (RequestStayed). Only if the receiver is
lost after BlocksWritten, when it may have taken the request, does the giver give it up: RequestPreempted.
"""

from dataclasses import dataclass

from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import next_step
from alignedserve.messages.caches import (
    ArenaOffered,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BufferOpened,
    Load,
    LoadBlocks,
    MapArena,
    UnmapArena,
)
from alignedserve.messages.workers import BlocksFetched, MoveRequest, RequestMoved, WorkerRegistered
from alignedserve.scheduling.scheduler_state import MovedProgress
from alignedserve.worker_core.block_peers import UNREACHED_REST_S, BlockPeers
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.handoff import (
    BufferSpace,
    Contents,
    HandoffEnd,
    HandoffReceiver,
    HandoffStage,
    Incoming,
    Lender,
    Outgoing,
    Sender,
)
from alignedserve.worker_core.held_requests import HeldRequest, HeldRequests
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent, WorkerPart
from alignedserve.worker_core.request import CacheStage
from alignedserve.worker_core.router_link import RouterLink


@dataclass(slots=True, eq=False)
class DepartingRequest(Outgoing):
    """One request that is to leave. From COPYING on it is in no iteration, and `progress` replaces its row."""

    tracked: HeldRequest
    progress: MovedProgress | None = None
    began_s: float = 0.0  # of its copy

    @property
    def is_early(self) -> bool:
        return self.stage in (HandoffStage.ASKED, HandoffStage.RESERVED)


class Handoffs(WorkerPart):
    """Requests that leave with their caches, for another worker or the pool; subclasses say what follows an end.

    A request is decoded on while its receiver looks for blocks, taken out between two iterations and copied. Its
    blocks stay held until the receiver takes it: whatever fails, it is decoded on.
    """

    def __init__(self, held: HeldRequests) -> None:
        self._held = held
        self.sender: Sender[DepartingRequest] = Sender(
            reserved=lambda entry: (), contents=_contents_of, ended=self._ended, aborted=self._aborted
        )

    def ask(self, tracked: HeldRequest, target: str, *, is_best_effort: bool = False) -> Commands:
        tracked.go(CacheStage.LEAVING)
        entry = DepartingRequest(tracked.request, tracked.attempt, target, tracked)
        # One more than it has: the iteration in flight may need another.
        return [self.sender.ask(entry, len(tracked.block_ids) + 1, is_best_effort=is_best_effort)]

    @override
    def leave(self, now: float) -> Commands:
        commands: list[WorkerCommand] = []
        for entry in self.sender:
            if entry.stage is not HandoffStage.RESERVED or entry.reserved is None:
                continue
            tracked = entry.tracked
            is_here = self._held.get(tracked.request.request_id) is tracked
            has_grown = len(tracked.block_ids) > len(entry.reserved.block_ids)
            if not is_here or has_grown or not self.can_leave(tracked):
                commands += self.sender.give_up(entry, now)
                continue
            entry.progress, entry.began_s = self._held.detach(tracked), now
            num_blocks = self._held.blocks_for(entry.progress.num_cached)
            commands.append(self.sender.copy(entry, tuple(tracked.block_ids[:num_blocks])))
        return commands

    @override
    def abort(self, request_id: RequestId, attempt: int | None) -> Commands:
        entry = self.sender.get(request_id)
        if entry is None or not entry.tracked.is_up_to(attempt):
            return ()
        entry.tracked.is_aborted = True
        return self.sender.abort(entry)

    @override
    def abort_all(self, now: float) -> Commands:
        commands: list[WorkerCommand] = []
        for entry in self.sender:
            request_id = entry.request.request_id
            commands += self.sender.give_up(entry, now) if entry.is_early else self.abort(request_id, None)
        return commands

    def can_ask(self, tracked: HeldRequest) -> bool:
        is_free = tracked.stage is CacheStage.HERE and self.sender.get(tracked.request.request_id) is None
        return is_free and self.can_leave(tracked)

    def can_leave(self, tracked: HeldRequest) -> bool:
        if tracked.is_aborted or tracked.is_finished or not tracked.is_prefilled:
            return False
        is_portable = self._held.is_portable(tracked.request.request_id)
        return is_portable and self._held.has_room_beside(len(tracked.block_ids), leaving=tracked)

    def _ended(self, entry: DepartingRequest, how: HandoffEnd, now: float) -> Commands:
        if how not in (HandoffEnd.REFUSED, HandoffEnd.FAILED):
            return Handoffs._aborted(self, entry)
        entry.tracked.go(CacheStage.HERE)
        if entry.progress is not None:
            self._held.attach(entry.tracked, entry.progress, now)
        return ()

    def _aborted(self, entry: DepartingRequest) -> Commands:
        if entry.progress is not None:
            self._held.free_detached(entry.tracked)
        return ()


def _contents_of(entry: DepartingRequest, now: float) -> Contents:
    tracked, progress = entry.tracked, entry.progress
    assert progress is not None, "copied without progress"
    begun_s, generated = max(now - progress.first_token_s, 0.0), tuple(tracked.generated_token_ids)
    return Contents(progress.num_cached, generated, progress.predicted_len, begun_s, progress.service_s)


def lent_by(peer: str) -> str:
    """Return the name of the arena that a worker lends; the one lent to it goes by its own name."""
    return f"{peer} lends"


class RequestMoves(Handoffs):
    """Requests on their way into this worker's lent buffers, and out of buffers of other workers."""

    def __init__(self, held: HeldRequests, router: RouterLink, registered: WorkerRegistered, peers: BlockPeers) -> None:
        super().__init__(held)
        self._router = router
        self._peers = peers
        self._max_held = registered.max_running_requests
        self._node = registered.pool_name
        self._lender = Lender()
        self._far: set[str] = set()  # workers of other nodes that lend a buffer; membership only
        self._rests_until_s: dict[str, float] = {}  # from peers whose buffers could not be read
        self._space = BufferSpace()
        self._receiver = HandoffReceiver(
            self._space, registered.block_size, held.free_held, state_blocks=held.blocks_for(0)
        )
        self.num_taken = 0

    @override
    def takes(self, event: WorkerEvent) -> bool:
        return True  # it is the last part

    @override
    def on_event(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case PeerConnected(Role.DECODE_WORKER, peer):
                return [self._lender.connected(peer)]
            case PeerDisconnected(Role.DECODE_WORKER, peer):
                closed, lost = self._lender.disconnected(peer), self.sender.lost(peer, now)
                self._space.lost(peer)
                self._far.discard(peer)
                self._receiver.cancel_all(peer)
                return [closed, *lost, UnmapArena(lent_by(peer))]
            case BufferOpened():
                return self._lender.opened(event)
            case BlocksOffloaded():
                return self.sender.copied(event, now)
            case BlocksLoaded():
                return self._loaded(event, now)
            case Received(_, MoveRequest() as ordered):
                return self._ordered(ordered)
            case Received(peer, BlocksReserved() | ReservationRefused() | BlocksTaken() as answer):
                return self.sender.answered(peer, answer, now)
            case Received(peer, ArenaOffered() as offered):
                self._space.opened(peer, offered.num_blocks)
                if offered.pool_name not in ("", self._node):
                    self._far.add(peer)
                return [MapArena(lent_by(peer), offered, stamps=True)]
            case Received(peer, ReserveBlocks() as reserve):
                self._router.observe(reserve.attempt)
                may_come = now >= self._rests_until_s.get(peer, now)
                return [self._receiver.reserve(peer, reserve, lambda: self._hold(peer, reserve) if may_come else None)]
            case Received(peer, BlocksWritten() as written):
                return self._written(peer, written)
            case Received(_, CancelReservation(request_id, attempt)):
                self._receiver.cancel(request_id, attempt)
            case Received(_, message):
                raise AssertionError(f"a colocated worker does not take {type(message).__name__}")
        return ()

    @override
    def tick(self, now: float) -> Commands:
        leaving = {entry.target for entry in self.sender}
        return self._peers.hang_up_unused(now, lambda: self._receiver.peers() | leaving)

    @override
    def abort(self, request_id: RequestId, attempt: int | None) -> Commands:
        self._receiver.cancel(request_id, attempt)
        return super().abort(request_id, attempt)

    @override
    def abort_all(self, now: float) -> Commands:
        self._receiver.cancel_all()
        return super().abort_all(now)

    # --- the giver's side

    def _ordered(self, message: MoveRequest) -> Commands:
        request_id, attempt, target = message.request_id, message.attempt, str(message.to)
        tracked = self._held.get(request_id)
        is_current = tracked is not None and tracked.attempt == attempt
        if tracked is None or not is_current or not self._lender.lends_to(target) or not self.can_ask(tracked):
            return self._router.stayed(request_id, attempt)
        return self.ask(tracked, target)

    @override
    def _ended(self, entry: DepartingRequest, how: HandoffEnd, now: float) -> Commands:
        super()._ended(entry, how, now)
        if how in (HandoffEnd.REFUSED, HandoffEnd.FAILED):
            return self._router.stayed(entry.request.request_id, entry.attempt)
        # Whether a receiver that is lost had taken it, the router alone can know. Others tell it themselves.
        return self._router.send(entry.tracked.preempted()) if how is HandoffEnd.UNKNOWN else ()

    # --- the receiver's side

    def _hold(self, peer: str, message: ReserveBlocks) -> Incoming | None:
        num_blocks = message.num_blocks
        may_come = self._held.get(message.request_id) is None and self._has_room(num_blocks)
        slot = self._space.at(peer, num_blocks) if may_come else None
        return None if slot is None else Incoming(message.attempt, slot, self._held.hold(num_blocks))

    def _has_room(self, num_blocks: int) -> bool:
        held = self._held
        has_place = len(held) + len(self._receiver) < self._max_held and not held.is_copying_out
        return has_place and held.state.num_free >= num_blocks + len(held) and held.has_room_beside(num_blocks)

    def _written(self, peer: str, message: BlocksWritten) -> Commands:
        entry, answer = self._receiver.written(peer, message)
        if entry is None:
            return answer
        load = Load(message.request.request_id, message.copy, entry.block_ids[: message.copy.num_blocks])
        return [LoadBlocks(lent_by(peer), (load,))]

    def _loaded(self, event: BlocksLoaded, now: float) -> Commands:
        commands: list[WorkerCommand] = []
        for load in event.loads:
            entry = self._receiver.end(load.request_id)
            if not event.is_reached and not entry.is_aborted:
                self._rests_until_s[entry.slot.peer] = now + UNREACHED_REST_S
            self._space.free(entry.slot)
            is_whole = not entry.is_aborted and load.request_id not in event.refused
            is_taken = is_whole and self._held.get(load.request_id) is None
            if is_taken:
                commands += self._take(entry, now)
            else:
                self._held.free_held(entry.block_ids)
            commands.append(Send(entry.slot.peer, BlocksTaken(load.request_id, entry.attempt, is_taken)))
            if is_taken and entry.slot.peer in self._far:
                fetched = BlocksFetched(entry.slot.peer, len(load.block_ids), event.duration_s)
                commands += self._router.send(fetched)
        return commands

    def _take(self, entry: Incoming, now: float) -> Commands:
        message = entry.written
        self.num_taken += 1
        assert message is not None, "loaded before it was written"
        block_ids = entry.block_ids[: message.copy.num_blocks]
        self._held.free_held(entry.block_ids[len(block_ids) :])  # the last block of a request is one with tokens
        candidate = Candidate.of(message, next_step(entry.attempt), NO_BATCH, CacheStage.BUFFERED, now)
        candidate.last_token_s = now
        self._held.enter(candidate, block_ids, message.copy.context_len, now)
        num_generated = len(message.generated_token_ids)
        return self._router.send(RequestMoved(message.request.request_id, candidate.attempt, num_generated))
