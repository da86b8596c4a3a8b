"""Requests that move between the workers of a node while they decode, with their caches.

Each worker lends every other one a buffer in its memory. A move has a giver and a receiver:
1. The router sends MoveRequest to the giver, which asks the receiver for blocks and decodes the request meanwhile.
2. The receiver holds blocks of its own and as many of its buffer at the giver: BlocksReserved. Otherwise
   ReservationRefused, and the request stays.
3. Between two iterations the giver takes the request out and copies its cache into the buffer: BlocksWritten.
4. The receiver loads and verifies it, decodes it on, and tells the giver (BlocksTaken) and the router (RequestMoved).
The giver keeps the cache until then: whatever fails, it decodes the request on (RequestStayed). Only if the receiver is
lost after BlocksWritten, when it may have taken the request, does the giver give it up: RequestPreempted.
"""

from collections.abc import Sequence

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
from alignedserve.messages.events import Dial, HangUp, PeerConnected, PeerDisconnected, Received, Send, StopDialling
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BufferOpened,
    CloseBuffer,
    Load,
    LoadBlocks,
    MapArena,
    OpenBuffer,
    UnmapArena,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    BlocksFetched,
    MoveRequest,
    PeerNeeded,
    PeersChanged,
    RequestMoved,
    WorkerRegistered,
)
from alignedserve.worker_core.handoff.buffer_space import BufferSpace
from alignedserve.worker_core.handoff.lender import Lender
from alignedserve.worker_core.handoff.receiver import Incoming, Receiver
from alignedserve.worker_core.handoff.sender import HandoffEnd
from alignedserve.worker_core.router_link import RouterLink
from decode_worker.block_peers import UNREACHED_REST_S, BlockPeers
from decode_worker.colocated.handoffs import Departing, HandoffCommand, Handoffs
from decode_worker.held_requests import HeldRequests
from decode_worker.state import CacheLocation, Candidate

DepartureCommand = HandoffCommand | OpenBuffer | CloseBuffer
ArrivalCommand = Send | LoadBlocks | MapArena | UnmapArena
MoveEvent = PeerConnected | PeerDisconnected | Received | BufferOpened | BlocksOffloaded | BlocksLoaded
MoveCommand = DepartureCommand | ArrivalCommand | Dial | StopDialling


class Departures(Handoffs):
    """The requests on their way into buffers that this worker lends to others."""

    def __init__(self, held: HeldRequests, router: RouterLink) -> None:
        super().__init__(held)
        self._router = router
        self.lender = Lender()

    def ordered(self, message: MoveRequest) -> Sequence[HandoffCommand]:
        request_id, attempt, target = message.request_id, message.attempt, str(message.to)
        tracked = self._held.get(request_id)
        is_current = tracked is not None and tracked.attempt == attempt
        if tracked is None or not is_current or not self.lender.lends_to(target) or not self.can_ask(tracked):
            return self._router.stayed(request_id, attempt)
        return self.ask(tracked, target)

    @override
    def _ended(self, entry: Departing, how: HandoffEnd, now: float) -> Sequence[HandoffCommand]:
        super()._ended(entry, how, now)
        if how in (HandoffEnd.REFUSED, HandoffEnd.FAILED):
            return self._router.stayed(entry.request.request_id, entry.attempt)
        # Whether a receiver that is lost had taken it, the router alone can know. Others tell it themselves.
        return self._router.send(entry.tracked.preempted()) if how is HandoffEnd.UNKNOWN else ()


class Arrivals:
    """The buffers that other workers lend this one, and the requests on their way out of them."""

    def __init__(self, held: HeldRequests, router: RouterLink, registered: WorkerRegistered) -> None:
        self._held = held
        self._router = router
        self._max_held = registered.max_running_requests
        self._node = registered.pool_name
        self._far: set[str] = set()  # workers of other nodes that lend a buffer; membership only
        self._rests_until_s: dict[str, float] = {}  # from peers whose buffers could not be read
        self._space = BufferSpace()
        self.receiver = Receiver(self._space, registered.block_size, held.free_held, state_blocks=held.blocks_for(0))
        self.num_taken = 0

    # --- other workers

    def offered(self, peer: str, message: ArenaOffered) -> list[ArrivalCommand]:
        self._space.opened(peer, message.num_blocks)
        if message.pool_name not in ("", self._node):
            self._far.add(peer)
        return [MapArena(lent_by(peer), message, stamps=True)]

    def disconnected(self, peer: str) -> list[ArrivalCommand]:
        self._space.lost(peer)
        self._far.discard(peer)
        self.receiver.cancel_all(peer)
        return [UnmapArena(lent_by(peer))]

    # --- one request, step by step

    def reserve(self, peer: str, message: ReserveBlocks, now: float) -> list[ArrivalCommand]:
        """Hold blocks for a request, here and in the buffer, if there are enough of both.

        Not while that buffer is likely out of reach: a request is decoded by neither worker until a try has ended.
        """
        self._router.observe(message.attempt)
        may_come = now >= self._rests_until_s.get(peer, now)
        return [self.receiver.reserve(peer, message, lambda: self._hold(peer, message) if may_come else None)]

    def written(self, peer: str, message: BlocksWritten) -> list[ArrivalCommand]:
        entry, answer = self.receiver.written(peer, message)
        if entry is None:
            return [*answer]
        load = Load(message.request.request_id, message.copy, entry.block_ids[: message.copy.num_blocks])
        return [LoadBlocks(lent_by(peer), (load,))]

    def loaded(self, event: BlocksLoaded, now: float) -> list[ArrivalCommand]:
        commands: list[ArrivalCommand] = []
        for load in event.loads:
            entry = self.receiver.end(load.request_id)
            if not event.is_reached and not entry.is_aborted:
                self._rests_until_s[entry.slot.peer] = now + UNREACHED_REST_S
            self._space.free(entry.slot)
            is_taken = not entry.is_aborted and load.request_id not in event.refused
            if is_taken and self._held.get(load.request_id) is None:
                commands += self._take(entry, now)
            else:
                is_taken = False
                self._held.free_held(entry.block_ids)
            commands.append(Send(entry.slot.peer, BlocksTaken(load.request_id, entry.attempt, is_taken)))
            if is_taken and entry.slot.peer in self._far:
                fetched = BlocksFetched(entry.slot.peer, len(load.block_ids), event.duration_s)
                commands += self._router.send(fetched)
        return commands

    # --- inside

    def _hold(self, peer: str, message: ReserveBlocks) -> Incoming | None:
        num_blocks = message.num_blocks
        may_come = self._held.get(message.request_id) is None and self._has_room(num_blocks)
        slot = self._space.at(peer, num_blocks) if may_come else None
        return None if slot is None else Incoming(message.attempt, slot, self._held.hold(num_blocks))

    def _has_room(self, num_blocks: int) -> bool:
        held = self._held
        has_place = len(held) + len(self.receiver) < self._max_held and not held.is_copying_out
        return has_place and held.state.num_free >= num_blocks + len(held) and held.has_room_beside(num_blocks)

    def _take(self, entry: Incoming, now: float) -> list[ArrivalCommand]:
        message = entry.written
        self.num_taken += 1
        assert message is not None, "loaded before it was written"
        block_ids = entry.block_ids[: message.copy.num_blocks]
        self._held.free_held(entry.block_ids[len(block_ids) :])  # the last block of a request is one with tokens
        candidate = Candidate.of(message, next_step(entry.attempt), NO_BATCH, CacheLocation.BUFFER, now)
        candidate.last_token_s = now
        self._held.enter(candidate, block_ids, message.copy.context_len, now)
        num_generated = len(message.generated_token_ids)
        return [*self._router.send(RequestMoved(message.request.request_id, candidate.attempt, num_generated))]


def lent_by(peer: str) -> str:
    """Return the name of the arena that a worker lends; the one lent to it goes by its own name."""
    return f"{peer} lends"


class RequestMoves:
    """Both sides of moves on one worker."""

    def __init__(self, held: HeldRequests, router: RouterLink, registered: WorkerRegistered) -> None:
        self._departures = Departures(held, router)
        self._arrivals = Arrivals(held, router, registered)
        self._peers = BlockPeers(registered.pool_name)

    def on_event(self, event: MoveEvent, now: float) -> list[MoveCommand]:
        match event:
            case PeerConnected(Role.DECODE_WORKER, peer):
                return [self._departures.lender.connected(peer)]
            case PeerDisconnected(Role.DECODE_WORKER, peer):
                closed, lost = self._departures.lender.disconnected(peer), self._departures.sender.lost(peer, now)
                return [closed, *lost, *self._arrivals.disconnected(peer)]
            case BufferOpened():
                return [*self._departures.lender.opened(event)]
            case BlocksOffloaded():
                return [*self._departures.sender.copied(event, now)]
            case BlocksLoaded():
                return [*self._arrivals.loaded(event, now)]
            case Received(peer, message):
                return self._on_message(peer, message, now)
        return []

    @property
    def num_taken(self) -> int:
        return self._arrivals.num_taken

    def leave(self, now: float) -> list[MoveCommand]:
        """Take requests out that are to leave; to be called while no iteration is in flight."""
        return [*self._departures.leave(now)]

    def hang_up_unused(self, now: float) -> list[HangUp]:
        """Hang up on workers of other nodes that were not needed for long."""
        leaving = {entry.target for entry in self._departures.sender}
        return self._peers.hang_up_unused(now, lambda: self._arrivals.receiver.peers() | leaving)

    def abort(self, request_id: RequestId, attempt: int | None) -> list[HandoffCommand]:
        """Abort a request that is leaving or coming; with an attempt, only that one and earlier ones."""
        self._arrivals.receiver.cancel(request_id, attempt)
        return self._departures.abort(request_id, attempt)

    def abort_all(self, now: float) -> list[MoveCommand]:
        """End every move: a router is new, and knows none. What has not left yet is decoded on here."""
        self._arrivals.receiver.cancel_all()
        return [*self._departures.abort_all(now)]

    def _on_message(self, peer: str, message: Message, now: float) -> list[MoveCommand]:
        match message:
            case MoveRequest():
                return [*self._departures.ordered(message)]
            case BlocksReserved() | ReservationRefused() | BlocksTaken():
                return [*self._departures.sender.answered(peer, message, now)]
            case ArenaOffered():
                return [*self._arrivals.offered(peer, message)]
            case ReserveBlocks():
                return [*self._arrivals.reserve(peer, message, now)]
            case BlocksWritten():
                return [*self._arrivals.written(peer, message)]
            case CancelReservation(request_id, attempt):
                self._arrivals.receiver.cancel(request_id, attempt)
                return []
            case PeersChanged():
                return [*self._peers.changed(message)]
            case PeerNeeded(needed):
                return [*self._peers.needed(needed, now)]
        raise AssertionError(f"a colocated worker does not take {type(message).__name__}")
