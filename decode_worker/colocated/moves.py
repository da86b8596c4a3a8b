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

from alignedserve.core.ids import RequestId
from alignedserve.messages.caches import (
    ArenaOffered,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import Dial, PeerConnected, PeerDisconnected, Received, StopDialling
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded, BlocksOffloaded, BufferOpened
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import MoveRequest, PeersChanged, WorkerRegistered
from alignedserve.worker_core.router_link import RouterLink
from decode_worker.block_peers import BlockPeers
from decode_worker.colocated.arrivals import ArrivalCommand, Arrivals
from decode_worker.colocated.departures import DepartureCommand, Departures
from decode_worker.held_requests import HeldRequests

MoveEvent = PeerConnected | PeerDisconnected | Received | BufferOpened | BlocksOffloaded | BlocksLoaded
MoveCommand = DepartureCommand | ArrivalCommand | Dial | StopDialling


class RequestMoves:
    """Both sides of moves on one worker."""

    def __init__(self, held: HeldRequests, router: RouterLink, registered: WorkerRegistered) -> None:
        self._departures = Departures(held, router, registered.block_size)
        self._arrivals = Arrivals(held, router, registered.max_running_requests)
        self._peers = BlockPeers(registered.pool_name)

    def on_event(self, event: MoveEvent, now: float) -> list[MoveCommand]:
        """Return the commands that follow from an event about moves."""
        match event:
            case PeerConnected(Role.DECODE_WORKER, peer):
                return [*self._departures.connected(peer)]
            case PeerDisconnected(Role.DECODE_WORKER, peer):
                return [*self._departures.disconnected(peer, now), *self._arrivals.disconnected(peer)]
            case BufferOpened():
                return [*self._departures.opened(event)]
            case BlocksOffloaded():
                return [*self._departures.offloaded(event, now)]
            case BlocksLoaded():
                return [*self._arrivals.loaded(event, now)]
            case Received(peer, message):
                return self._on_message(peer, message, now)
        return []

    @property
    def num_taken(self) -> int:
        """Number of requests taken over from others."""
        return self._arrivals.num_taken

    def leave(self, now: float) -> list[MoveCommand]:
        """Take requests out that are to leave; to be called while no iteration is in flight."""
        return [*self._departures.leave(now)]

    def abort(self, request_id: RequestId, attempt: int | None) -> None:
        """Abort a request that is leaving or coming; with an attempt, only that one and earlier ones."""
        self._departures.abort(request_id, attempt)
        self._arrivals.cancel(request_id, attempt)

    def abort_all(self, now: float) -> list[MoveCommand]:
        """End every move: a router is new, and knows none. What has not left yet is decoded on here."""
        commands: list[MoveCommand] = [*self._departures.stay_all(now)]
        for request_id in (*self._departures.request_ids(), *self._arrivals.request_ids()):
            self.abort(request_id, None)
        return commands

    def _on_message(self, peer: str, message: Message, now: float) -> list[MoveCommand]:
        match message:
            case MoveRequest():
                return [*self._departures.ordered(message, now)]
            case BlocksReserved() | ReservationRefused():
                return [*self._departures.answered(peer, message, now)]
            case BlocksTaken():
                return [*self._departures.taken(peer, message, now)]
            case ArenaOffered():
                return [*self._arrivals.offered(peer, message)]
            case ReserveBlocks():
                return [*self._arrivals.reserve(peer, message)]
            case BlocksWritten():
                return [*self._arrivals.written(peer, message)]
            case CancelReservation(request_id, attempt):
                self._arrivals.cancel(request_id, attempt)
                return []
            case PeersChanged():
                return [*self._peers.changed(message)]
        raise AssertionError(f"a colocated worker does not take {type(message).__name__}")
