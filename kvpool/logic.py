"""What the KV pool decides. It owns the arena's blocks and says who may touch them; it never touches a byte of them.

The life of a request in the pool:
1. A worker with a finished prefill sends ReserveBlocks; when there is room (in order) it gets a lease: BlocksReserved.
2. It copies its blocks into the arena and sends BlocksWritten; the request is indexed, the router hears of it, and
   the worker may forget it (BlocksTaken).
3. The router sends FormBatch for a decode worker; the batch former chooses; the worker gets BatchGranted, the router
   hears of it from us and from the worker.
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
    BlockCopy,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    CopyLost,
    DropRequest,
    FormBatch,
    Handoff,
    LeasesReleased,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
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
    """Leases, reservations and the index. `arena` describes what workers map; `lease_s` bounds every lease in use.

    Leases are numbered from `first_lease`, which should differ from one life of a pool to the next: a worker may still
    act on a lease of the one before, and must not hit one of this.
    """

    def __init__(
        self,
        *,
        arena: ArenaOffered,
        block_size: int,
        batch_former: BatchFormer,
        lease_s: float,
        first_lease: int = NO_GENERATION + 1,
    ) -> None:
        self._arena = arena
        self._block_size = block_size
        self._former = batch_former
        self._lease_s = lease_s
        self._allocator = BlockAllocator(arena.num_blocks)
        self._leases: dict[LeaseId, Lease] = {}
        self._lease_of: dict[RequestId, LeaseId] = {}  # reserved and pooled ones
        self._reservations: deque[Reservation] = deque()
        self._router: str | None = None
        self._workers: dict[str, None] = {}  # linked now
        self._next_lease = first_lease
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
            self._workers[peer] = None
            return [Send(peer, self._arena)]
        self._router = peer
        self._reported = None
        # Whatever a router knew of us ended with its link: it recomputes those requests, so their copies go.
        self._reservations.clear()
        dropped = self._take_back(lambda lease: lease.stage is not LeaseStage.GRANTED, now)
        return [Send(peer, PoolRegistered(self._allocator.num_blocks)), *dropped]

    def _on_lost(self, peer: str, now: float) -> list[PoolCommand]:
        if peer == self._router:
            self._router = None
            return []
        self._workers.pop(peer, None)
        self._reservations = deque(entry for entry in self._reservations if entry.worker != peer)
        return self._take_back(lambda lease: lease.stage is not LeaseStage.POOLED and lease.holder == peer, now)

    # --- messages

    def _on_message(self, peer: str, message: Message, now: float) -> list[PoolCommand]:
        match message:
            case ReserveBlocks():
                return self._reserve(Reservation(message.request_id, message.attempt, message.num_blocks, peer), now)
            case CancelReservation():
                return self._drop(message.request_id, message.attempt, now)
            case BlocksWritten():
                return self._written(peer, message, now)
            case FormBatch():
                return self._form(message, now)
            case LeasesReleased():
                return self._released(peer, message.lease_ids, now)
            case DropRequest():
                return self._drop(message.request_id, message.attempt, now)
            case _:
                raise AssertionError(f"the pool does not take {type(message).__name__}")

    def _reserve(self, reservation: Reservation, now: float) -> list[PoolCommand]:
        request_id, attempt = reservation.request_id, reservation.attempt
        if reservation.num_blocks > self._allocator.num_blocks or attempt < self._latest_attempt(request_id):
            return [Send(reservation.worker, ReservationRefused(request_id, attempt))]
        # A request that comes again must not hold two leases.
        commands = self._drop(request_id, attempt, now)
        self._reservations.append(reservation)
        return commands + self._serve_reservations(now)

    def _latest_attempt(self, request_id: RequestId) -> int:
        """The latest attempt at a request that reserves or holds anything here; 0 when none does."""
        attempts = [entry.attempt for entry in self._reservations if entry.request_id == request_id]
        if request_id in self._lease_of:
            attempts.append(self._leases[self._lease_of[request_id]].attempt)
        return max(attempts, default=0)

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
        request_id, attempt, worker = reservation.request_id, reservation.attempt, reservation.worker
        deadline_s = now + self._lease_s
        self._leases[lease_id] = Lease(
            lease_id, request_id, attempt, block_ids, LeaseStage.RESERVED, worker, deadline_s
        )
        self._lease_of[request_id] = lease_id
        reserved = BlocksReserved(request_id, attempt, lease_id, lease_id, block_ids)
        return [StampBlocks(block_ids, lease_id), Send(reservation.worker, reserved)]

    def _written(self, peer: str, written: BlocksWritten, now: float) -> list[PoolCommand]:
        lease = self._leases.get(written.lease_id)
        is_accepted = lease is not None and self._describes(lease, peer, written)
        taken = Send(peer, BlocksTaken(written.request.request_id, written.attempt, is_accepted))
        if lease is None or not is_accepted:
            return [taken]  # stale or malformed: nothing that it says about the arena is believed
        lease.stage = LeaseStage.POOLED
        lease.content = written
        self._num_pooled += 1
        self._former.insert(_indexed(lease, written), now)
        num_blocks = len(lease.block_ids)
        pooled = RequestPooled(lease.request_id, lease.attempt, written.context_len, num_blocks)
        return [taken, *self._to_router(pooled)]

    def _describes(self, lease: Lease, peer: str, written: BlocksWritten) -> bool:
        if sum(run.num_blocks for run in written.runs) != len(lease.block_ids):
            return False  # before the runs are spelt out: they may say anything
        covered = tuple(run.first_block + offset for run in written.runs for offset in range(run.num_blocks))
        return (
            lease.stage is LeaseStage.RESERVED
            and lease.holder == peer
            and written.generation == lease.lease_id
            and (written.request.request_id, written.attempt) == (lease.request_id, lease.attempt)
            and covered == lease.block_ids
            and blocks_for(written.context_len, self._block_size) == len(lease.block_ids)
        )

    def _form(self, message: FormBatch, now: float) -> list[PoolCommand]:
        limits = BatchLimits(message.max_blocks, message.max_requests)
        # A worker whose link is down would never get its grant, nor release it.
        batch = self._former.form(limits, now) if message.worker in self._workers else None
        if batch is None:
            return self._to_router(BatchFormed(message.batch_id, message.worker, ()))
        handoffs = tuple(self._grant(request_id, message.worker, now) for request_id in batch.request_ids)
        members = tuple((handoff.request.request_id, handoff.attempt) for handoff in handoffs)
        formed = BatchFormed(message.batch_id, message.worker, members)
        return [*self._to_router(formed), Send(message.worker, BatchGranted(message.batch_id, handoffs))]

    def _grant(self, request_id: RequestId, worker: str, now: float) -> Handoff:
        # From here on the request may come again (refused, recomputed) while this lease still waits for its release.
        lease = self._leases[self._lease_of.pop(request_id)]
        assert lease.content is not None, "an indexed request without content"
        self._former.remove(request_id)
        self._num_pooled -= 1
        lease.stage = LeaseStage.GRANTED
        lease.holder = worker
        lease.deadline_s = float("inf")  # read when its turn comes; ends with the link to the worker
        content = lease.content
        return Handoff(
            request=content.request,
            attempt=lease.attempt,
            generated_token_ids=content.generated_token_ids,
            lease_id=lease.lease_id,
            copy=BlockCopy(content.generation, content.context_len, content.runs),
        )

    def _released(self, peer: str, lease_ids: Iterable[LeaseId], now: float) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease.stage is LeaseStage.GRANTED and lease.holder == peer:
                commands += self._free(lease)
        return commands + self._serve_reservations(now)

    def _drop(self, request_id: RequestId, attempt: int, now: float) -> list[PoolCommand]:
        """End what is reserved or pooled of this attempt at a request and earlier ones."""
        self._reservations = deque(
            entry for entry in self._reservations if entry.request_id != request_id or entry.attempt > attempt
        )
        lease_id = self._lease_of.get(request_id)
        # A granted lease is its worker's to release; a reserved one may be being written, and its generation is voided.
        lease = self._leases[lease_id] if lease_id is not None else None
        freed = self._free(lease) if lease is not None and lease.attempt <= attempt else []
        return freed + self._serve_reservations(now)

    # --- ends of leases

    def _is_overdue(self, lease: Lease, now: float) -> bool:
        return lease.stage is LeaseStage.RESERVED and lease.deadline_s < now

    def _take_back(self, is_void: Callable[[Lease], bool], now: float) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        for lease in [lease for lease in self._leases.values() if is_void(lease)]:
            if lease.stage is LeaseStage.GRANTED:
                commands += self._to_router(CopyLost(lease.request_id, lease.attempt))
            commands += self._free(lease)
        return commands + self._serve_reservations(now)

    def _free(self, lease: Lease) -> list[PoolCommand]:
        if lease.stage is LeaseStage.POOLED:
            self._former.remove(lease.request_id)
            self._num_pooled -= 1
        self._allocator.free(lease.block_ids)
        del self._leases[lease.lease_id]
        if lease.stage is not LeaseStage.GRANTED:
            del self._lease_of[lease.request_id]
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
    urgent_at_s = None if slo.deadline_s is None else request.arrival_s + slo.deadline_s
    return PooledRequest(lease.request_id, written.context_len, len(lease.block_ids), request.arrival_s, urgent_at_s)
