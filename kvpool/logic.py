"""What the KV pool decides. It owns the arena's blocks and says who may touch them; it never touches a byte of them.

The life of a request in the pool:
1. A worker with a finished prefill sends ReserveBlocks; when there is room (in order) it gets a lease: BlocksReserved.
2. It copies its blocks into the arena and sends BlocksWritten; the request is indexed and the router hears of it.
3. The router sends FormBatch for a decode worker; the batch former chooses; the worker gets BatchGranted.
4. The decode worker copies, verifies and sends LeasesReleased; the blocks are free and their generation is void.
A lease whose holder is lost or late is taken back. What was in it is recomputed elsewhere: a lost pool entry is a
miss, never data.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from alignedserve.core.blocks import BlockAllocator, blocks_for
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.messages.events import CommonEvent, PeerLinked, PeerLost, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    ArenaOffered,
    BatchFormed,
    BatchGranted,
    BlocksReserved,
    BlocksWritten,
    CancelReservation,
    DropRequest,
    FormBatch,
    Handoff,
    LeasesReleased,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
    RequestPreempted,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.wire import Message
from kvpool.policies.batch_former import BatchFormer, BatchLimits
from kvpool.state import Lease, LeaseStage, PooledRequest, Reservation

NO_GENERATION = 0


@dataclass(frozen=True, slots=True)
class StampBlocks:
    """Command: write this generation into the arena's table for these blocks."""

    block_ids: tuple[BlockId, ...]
    generation: int


PoolCommand = Send | StampBlocks


class PoolLogic:
    """Leases, reservations and the index. `arena` describes what workers map; `lease_s` bounds every lease in use."""

    def __init__(self, *, arena: ArenaOffered, block_size: int, batch_former: BatchFormer, lease_s: float) -> None:
        self._arena = arena
        self._block_size = block_size
        self._former = batch_former
        self._lease_s = lease_s
        self._allocator = BlockAllocator(arena.num_blocks)
        self._leases: dict[LeaseId, Lease] = {}
        self._lease_of: dict[RequestId, LeaseId] = {}
        self._reservations: deque[Reservation] = deque()
        self._router: str | None = None
        self._next_lease = NO_GENERATION + 1
        self._num_pooled = 0
        self._reported: PoolLoad | None = None

    def on_event(self, event: CommonEvent, now: float) -> list[PoolCommand]:
        """Same state, event and now always give the same commands. Touches nothing outside self."""
        match event:
            case Received(peer, message):
                commands = self._on_message(peer, message, now)
            case PeerLinked(role, peer):
                commands = self._on_linked(role, peer, now)
            case PeerLost(_, peer):
                commands = self._on_lost(peer, now)
            case Ticked():
                commands = self._take_back(lambda lease: self._is_overdue(lease, now), now)
        return commands + self._report()

    # --- peers

    def _on_linked(self, role: Role, peer: str, now: float) -> list[PoolCommand]:
        if role is not Role.ROUTER:
            return [Send(peer, self._arena)]
        self._router = peer
        self._reported = None
        # Whatever a router knew of us ended with its link: it recomputes those requests, so their copies go.
        dropped = self._take_back(lambda lease: lease.stage is LeaseStage.POOLED, now)
        return [Send(peer, PoolRegistered(self._allocator.num_blocks)), *dropped]

    def _on_lost(self, peer: str, now: float) -> list[PoolCommand]:
        if peer == self._router:
            self._router = None
            return []
        self._reservations = deque(entry for entry in self._reservations if entry.worker != peer)
        return self._take_back(lambda lease: lease.stage is not LeaseStage.POOLED and lease.holder == peer, now)

    # --- messages

    def _on_message(self, peer: str, message: Message, now: float) -> list[PoolCommand]:
        match message:
            case ReserveBlocks():
                return self._reserve(Reservation(message.request_id, message.num_blocks, peer), now)
            case CancelReservation():
                return self._drop(message.request_id, now)
            case BlocksWritten():
                return self._written(peer, message)
            case FormBatch():
                return self._form(message, now)
            case LeasesReleased():
                return self._released(peer, message.lease_ids, now)
            case DropRequest():
                return self._drop(message.request_id, now)
            case _:
                raise AssertionError(f"the pool does not take {type(message).__name__}")

    def _reserve(self, reservation: Reservation, now: float) -> list[PoolCommand]:
        if reservation.num_blocks > self._allocator.num_blocks:
            return [Send(reservation.worker, ReservationRefused(reservation.request_id))]
        # A request that comes again (its first lease is void) must not hold two.
        commands = self._drop(reservation.request_id, now)
        self._reservations.append(reservation)
        return commands + self._serve_reservations(now)

    def _serve_reservations(self, now: float) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        while self._reservations:
            block_ids = self._allocator.allocate(self._reservations[0].num_blocks)
            if block_ids is None:
                break
            commands += self._lease(self._reservations.popleft(), block_ids, now)
        return commands

    def _lease(self, reservation: Reservation, block_ids: tuple[BlockId, ...], now: float) -> list[PoolCommand]:
        lease_id = LeaseId(self._next_lease)
        self._next_lease += 1
        request_id = reservation.request_id
        deadline_s = now + self._lease_s
        lease = Lease(lease_id, request_id, block_ids, LeaseStage.RESERVED, reservation.worker, deadline_s)
        self._leases[lease_id] = lease
        self._lease_of[request_id] = lease_id
        reserved = BlocksReserved(request_id, lease_id, lease_id, block_ids)
        return [StampBlocks(block_ids, lease_id), Send(reservation.worker, reserved)]

    def _written(self, peer: str, written: BlocksWritten) -> list[PoolCommand]:
        lease = self._leases.get(written.lease_id)
        if lease is None or lease.stage is not LeaseStage.RESERVED or not self._describes(lease, peer, written):
            # Stale or malformed: what it says about the arena is not believed, but the request itself goes on.
            missed = RequestPreempted(written.request, written.generated_token_ids, handoff_refused=True)
            return self._to_router(missed)
        lease.stage = LeaseStage.POOLED
        lease.content = written
        self._num_pooled += 1
        self._former.insert(_indexed(lease, written))
        return self._to_router(RequestPooled(lease.request_id, written.context_len, len(lease.block_ids)))

    def _describes(self, lease: Lease, peer: str, written: BlocksWritten) -> bool:
        covered = tuple(run.first_block + offset for run in written.runs for offset in range(run.num_blocks))
        return (
            lease.holder == peer
            and written.generation == lease.lease_id
            and written.request.request_id == lease.request_id
            and covered == lease.block_ids
            and blocks_for(written.context_len, self._block_size) == len(lease.block_ids)
        )

    def _form(self, message: FormBatch, now: float) -> list[PoolCommand]:
        batch = self._former.form(BatchLimits(message.max_blocks, message.max_requests), now)
        if batch is None:
            return self._to_router(BatchFormed(message.batch_id, message.worker, (), 0))
        handoffs = tuple(self._grant(request_id, message.worker, now) for request_id in batch.request_ids)
        formed = BatchFormed(message.batch_id, message.worker, batch.request_ids, batch.num_blocks)
        # The router hears first, so that no report of the worker about these requests can surprise it.
        return [*self._to_router(formed), Send(message.worker, BatchGranted(message.batch_id, handoffs))]

    def _grant(self, request_id: RequestId, worker: str, now: float) -> Handoff:
        lease = self._leases[self._lease_of[request_id]]
        assert lease.content is not None, "an indexed request without content"
        self._former.remove(request_id)
        self._num_pooled -= 1
        lease.stage = LeaseStage.GRANTED
        lease.holder = worker
        lease.deadline_s = float("inf")  # read when its turn comes; ends with the link to the worker
        content = lease.content
        return Handoff(
            request=content.request,
            generated_token_ids=content.generated_token_ids,
            lease_id=lease.lease_id,
            generation=content.generation,
            context_len=content.context_len,
            runs=content.runs,
        )

    def _released(self, peer: str, lease_ids: Iterable[LeaseId], now: float) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.stage is LeaseStage.GRANTED and lease.holder == peer:
                commands += self._free(lease)
        return commands + self._serve_reservations(now)

    def _drop(self, request_id: RequestId, now: float) -> list[PoolCommand]:
        self._reservations = deque(entry for entry in self._reservations if entry.request_id != request_id)
        lease_id = self._lease_of.get(request_id)
        # A granted lease is its worker's to release; a reserved one may be being written, and its generation is voided.
        if lease_id is None or self._leases[lease_id].stage is LeaseStage.GRANTED:
            return []
        return self._free(self._leases[lease_id]) + self._serve_reservations(now)

    # --- ends of leases

    def _is_overdue(self, lease: Lease, now: float) -> bool:
        return lease.stage is LeaseStage.RESERVED and lease.deadline_s < now

    def _take_back(self, is_void: Callable[[Lease], bool], now: float) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        for lease in [lease for lease in self._leases.values() if is_void(lease)]:
            commands += self._free(lease)
        return commands + self._serve_reservations(now)

    def _free(self, lease: Lease) -> list[PoolCommand]:
        if lease.stage is LeaseStage.POOLED:
            self._former.remove(lease.request_id)
            self._num_pooled -= 1
        self._allocator.free(lease.block_ids)
        del self._leases[lease.lease_id], self._lease_of[lease.request_id]
        return [StampBlocks(lease.block_ids, NO_GENERATION)]

    # --- reports

    def _to_router(self, message: Message) -> list[PoolCommand]:
        return [Send(self._router, message)] if self._router is not None else []

    def _report(self) -> list[PoolCommand]:
        load = PoolLoad(self._allocator.num_used, self._num_pooled, len(self._reservations))
        if load == self._reported or self._router is None:
            return []
        self._reported = load
        return self._to_router(load)


def _indexed(lease: Lease, written: BlocksWritten) -> PooledRequest:
    request = written.request
    slo = request.slo
    deadline_s = None if slo.deadline_s is None else request.arrival_s + slo.deadline_s
    return PooledRequest(lease.request_id, written.context_len, len(lease.block_ids), request.arrival_s, deadline_s)
