"""Decides for the KV pool which process may read or write which blocks of the arena. It never touches the bytes.

The life of a request in the pool:
1. After a prefill a worker sends ReserveBlocks; when blocks are free (in order) it gets a lease: BlocksReserved.
2. It copies its blocks into the arena and sends BlocksWritten; the request is indexed, the router is notified, and the
   worker may forget it (BlocksTaken). A request that bypassed the pool comes as a copy, and is only kept.
3. The router sends FormBatch for a decode worker; once that has a link, the batch former chooses; the worker gets
   BatchGranted, the router BatchFormed from the pool and BatchReceived from the worker.
4. LeasesReleased: the worker has what it needs. The copy is kept while blocks are free; best-effort copies are evicted
   first and the oldest real-time one last. LeasesReturned: plans have changed, and the request is indexed again.
5. After the loss of a worker, the worker that recomputes the request asks for the copy first: FetchCopy.
6. DropRequest: the request has ended. All its blocks are freed and their generation is void.
Of workers that do both phases it keeps decodes, as each asks (takes_requests=False): a request is indexed until the
worker that wrote it fetches it or is lost, no router is told, and no copy stays.
A lease whose holder is lost or late is revoked. A lost pool entry is a miss, never data: it is computed again.
"""

from itertools import chain

from msgspec.structs import replace

from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.lifecycle import is_same_epoch, next_step
from alignedserve.messages.caches import (
    ArenaOffered,
    BatchGranted,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    CopyGranted,
    CopyMissing,
    DecodePace,
    FetchCopy,
    Handoff,
    LeasesReleased,
    LeasesReturned,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.cluster_view import FormedBatch
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import (
    BatchFormed,
    CopyKept,
    CopyLost,
    DropRequest,
    FormBatch,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
)
from alignedserve.messages.prefixes import (
    FindPrefix,
    PrefixBlocksWritten,
    PrefixReleased,
    StorePrefixBlocks,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import SetPredictedLength
from kvpool.lease_table import LeaseTable
from kvpool.policies.batch_former import AlignedBatch, BatchFormer, BatchLimits, LengthRange
from kvpool.prefix_store import PrefixStore, StoreCommand
from kvpool.reservations import WaitingReservations
from kvpool.state import NO_GENERATION, Lease, LeaseStage, PooledRequest, Reservation, SetBlockGeneration
from kvpool.waiting_forms import LINK_WAIT_S, WaitingForms

PoolCommand = StoreCommand


class PoolLogic:
    """The pool's state machine. `arena` describes the memory that workers map; `lease_s` bounds the time to write."""

    def __init__(
        self,
        *,
        arena: ArenaOffered,
        block_size: int,
        batch_former: BatchFormer,
        lease_s: float,
        first_lease: int = NO_GENERATION + 1,
        link_wait_s: float = LINK_WAIT_S,
        takes_requests: bool = True,
        state_blocks: int = 0,
        floor: float = 0.0,
    ) -> None:
        """`link_wait_s`: time that a batch waits for the link of its worker; 0: links that are not there never come.
        `state_blocks`: of every request, before those of its tokens. `floor`: of best effort in reserved blocks.
        `takes_requests`: from routers, with which it registers; False: it keeps what workers give it for themselves.
        """
        self._takes_requests = takes_requests
        self._arena = arena
        self._block_size, self._state_blocks = block_size, state_blocks
        self._former = batch_former
        self._lease_s = lease_s
        self._lease_table = LeaseTable(arena.num_blocks, first_lease)
        allocator, take_lease = self._lease_table.allocator, self._lease_table.take_number
        self._prefixes = PrefixStore(
            allocator, block_size, take_lease=take_lease, lease_s=lease_s, state_blocks=state_blocks
        )
        self._pooled: dict[RequestId, Lease] = {}
        self._reservations = WaitingReservations(arena.num_blocks, self._can_allocate, floor=floor)
        self._router: str | None = None
        self._known_attempt = 0  # the latest at any request
        self._workers: dict[str, None] = {}  # linked now
        self._pace_s: dict[str, float] = {}  # of decode workers: an iteration, and so each token, takes so long
        self._link_wait_s = link_wait_s
        self._waiting_forms = WaitingForms(link_wait_s)
        self._reported: PoolLoad | None = None
        self._formed: FormedBatch | None = None  # the last one

    def on_event(self, event: CommonEvent, now: float) -> list[PoolCommand]:
        """Return the commands that follow from an event.

        Same state, event and now always give the same commands. Touches nothing outside self.
        """
        match event:
            case Received(peer, message):
                commands = self._on_message(peer, message, now)
            case PeerConnected(role, peer):
                commands = self._on_connected(role, peer, now)
            case PeerDisconnected(_, peer):
                commands = self._on_disconnected(peer, now)
            case Ticked():
                refused = [self._refused(form) for form in self._waiting_forms.expired(now)]
                commands = [*self._end_expired(now), *chain(*refused), *self._report()]
        return commands

    # --- peers

    def _on_connected(self, role: Role, peer: str, now: float) -> list[PoolCommand]:
        if role is not Role.ROUTER:
            self._workers[peer] = None
            asked = [self._form(form, now) for form in self._waiting_forms.linked(peer)]
            return [Send(peer, self._arena), *chain(*asked)]
        self._router = peer
        changed = self._prefixes.cached.told_all()
        kept = [] if changed is None else [Send(peer, changed)]
        if not self._takes_requests:
            return [*kept]
        self._reported = None
        # What a router knew of this pool ended with its link: it recomputes those requests, so their blocks are freed.
        # Workers still wait for theirs, and are told to drop what they have written.
        self._waiting_forms.clear()
        commands = [command for lease in self._lease_table.all() for command in self._invalidate(lease)]
        return [
            Send(peer, PoolRegistered(self._lease_table.num_blocks, self._arena.layout_digest, self._known_attempt)),
            *kept,
            *commands,
            *self._serve_reservations(now),
        ]

    def _on_disconnected(self, peer: str, now: float) -> list[PoolCommand]:
        if peer == self._router:
            self._router = None
            return []
        self._workers.pop(peer, None)
        self._pace_s.pop(peer, None)
        self._reservations.forget_worker(peer)
        commands: list[PoolCommand] = self._prefixes.lose(peer)
        for lease in self._lease_table.all():
            if lease.holder != peer:
                continue
            if lease.stage is LeaseStage.RESERVED or (lease.stage is LeaseStage.POOLED and not self._takes_requests):
                commands += self._end(lease)
            elif lease.stage is LeaseStage.GRANTED:
                # The router finds out whether it was used; the blocks here are intact.
                lost = CopyLost(lease.request_id, lease.attempt, lease.holder, lease.batch_id)
                commands += self._to_router(lost) + self._release(lease)
        return commands + self._serve_reservations(now)

    # --- messages

    def _on_message(self, peer: str, message: Message, now: float) -> list[PoolCommand]:
        match message:
            case ReserveBlocks():
                return self._reserve(peer, message, now)
            case CancelReservation():
                return self._drop(message.request_id, message.attempt, LeaseStage.RESERVED, now)
            case BlocksWritten():
                return self._written(peer, message, now)
            case FormBatch():
                return self._form(message, now)
            case LeasesReleased():
                commands = [command for lease in self._granted(peer, message) for command in self._release(lease)]
                return commands + self._serve_reservations(now)
            case LeasesReturned():
                commands = [command for lease in self._granted(peer, message) for command in self._index(lease, now)]
                return commands + self._serve_reservations(now)
            case DecodePace():
                self._pace_s[peer] = message.iteration_s
                return []
            case SetPredictedLength():
                return self._predicted(message)
            case FetchCopy():
                return self._fetch_copy(peer, message, now)
            case DropRequest():
                return self._drop(message.request_id, message.attempt, None, now)
            case StorePrefixBlocks() | PrefixBlocksWritten() | FindPrefix() | PrefixReleased():
                commands = self._prefixes.on_message(peer, message, now, may_write=not self._reservations)
                return commands + self._serve_reservations(now)
            case _:
                raise AssertionError(f"the pool does not take {type(message).__name__}")

    # --- blocks to write

    def _reserve(self, peer: str, message: ReserveBlocks, now: float) -> list[PoolCommand]:
        request_id, attempt, num_blocks = message.request_id, message.attempt, message.num_blocks
        self._known_attempt = max(self._known_attempt, attempt)
        is_hopeless = num_blocks > self._lease_table.num_blocks or attempt < self._latest_attempt(request_id)
        reservation = Reservation(request_id, attempt, num_blocks, peer, message.is_copy, message.is_best_effort)
        if is_hopeless or (not message.may_wait and self._reservations.must_wait(reservation)):
            return [Send(peer, ReservationRefused(request_id, attempt))]
        # A retried request must not be pooled or written twice; a copy stays until there is a better one.
        commands = self._end_earlier(request_id, attempt, (LeaseStage.RESERVED, LeaseStage.POOLED))
        self._reservations.cancel(request_id, attempt)
        self._reservations.add(reservation)
        return commands + self._serve_reservations(now)

    def _latest_attempt(self, request_id: RequestId) -> int:
        waiting = self._reservations.latest_attempt(request_id)
        return max([waiting, *(lease.attempt for lease in self._lease_table.of_request(request_id))])

    def _serve_reservations(self, now: float) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        while (reservation := self._reservations.take()) is not None:
            commands += self._prefixes.make_room(reservation.num_blocks)
            for lease in self._lease_table.copies_to_evict(reservation.num_blocks):
                commands += self._end(lease)
            lease = self._lease_table.open(reservation, now + self._lease_s)
            number = lease.lease_id
            reserved = BlocksReserved(lease.request_id, lease.attempt, number, number, lease.block_ids)
            commands += [SetBlockGeneration(lease.block_ids, number), Send(lease.holder, reserved)]
        return commands

    def _can_allocate(self, num_blocks: int) -> bool:
        return self._lease_table.can_allocate(num_blocks - self._prefixes.num_unused)

    def _written(self, peer: str, written: BlocksWritten, now: float) -> list[PoolCommand]:
        lease = self._lease_table.get(written.lease_id)
        is_accepted = lease is not None and lease.is_described_by(peer, written, self._block_size, self._state_blocks)
        taken = Send(peer, BlocksTaken(written.request.request_id, written.attempt, is_accepted))
        if lease is None or not is_accepted:
            return [taken]  # stale or malformed: its blocks are not believed
        lease.content, lease.written_s = written, now
        surplus = self._lease_table.shorten(lease, written.copy.num_blocks)
        stages = (LeaseStage.POOLED, LeaseStage.KEPT, LeaseStage.GRANTED)
        earlier = self._end_earlier(lease.request_id, lease.attempt, stages, but=lease)
        earlier += [SetBlockGeneration(surplus, NO_GENERATION)] if surplus else []
        if not lease.is_copy:
            return [taken, *earlier, *self._index(lease, now), *self._serve_reservations(now)]
        self._lease_table.move(lease, LeaseStage.KEPT)
        router = self._to_router(CopyKept(lease.request_id, lease.attempt))
        return [taken, *earlier, *router, *self._serve_reservations(now)]

    def _index(self, lease: Lease, now: float) -> list[PoolCommand]:
        assert lease.content is not None, "nothing to index"
        if lease.is_void:
            return self._end(lease)
        lease.attempt = next_step(lease.attempt)
        self._lease_table.move(lease, LeaseStage.POOLED)
        self._pooled[lease.request_id] = lease
        self._former.insert(PooledRequest.of(lease, max(self._pace_s.values(), default=None)), now)
        context_len, num_blocks = lease.content.copy.context_len, len(lease.block_ids)
        return self._to_router(RequestPooled(lease.request_id, lease.attempt, context_len, num_blocks))

    # --- blocks to read

    def _form(self, message: FormBatch, now: float) -> list[PoolCommand]:
        if message.worker not in self._workers:  # it would never get the grant, nor release it
            if not self._link_wait_s:
                return self._refused(message)
            self._waiting_forms.add(message, now)
            return []
        batch = self._choose(message, now)
        if batch is None:
            return self._refused(message)
        leases = [self._pooled[request_id] for request_id in batch.request_ids]
        handoffs = tuple(self._grant(lease, message.worker, now, message.batch_id) for lease in leases)
        members = tuple((handoff.request.request_id, handoff.attempt) for handoff in handoffs)
        self._formed = batch.as_formed(message.batch_id, message.worker)
        formed = BatchFormed(message.batch_id, message.worker, members)
        joins = message.joins.batch_id if message.joins is not None else None
        if message.by_turn:
            joins = NO_BATCH  # they enter beside what runs, whatever that is
        granted = BatchGranted(message.batch_id, handoffs, joins, self._former.is_aligned)
        return [*self._to_router(formed), Send(message.worker, granted)]

    def _refused(self, message: FormBatch) -> list[PoolCommand]:
        return self._to_router(BatchFormed(message.batch_id, message.worker, ()))

    def _choose(self, message: FormBatch, now: float) -> AlignedBatch | None:
        limits = BatchLimits(
            *(message.max_blocks, message.max_requests, message.min_requests),
            is_for_real_time=message.is_for_real_time,
            by_turn=message.by_turn,
        )
        if message.joins is None:
            return self._former.form(limits, now)
        return self._former.join(LengthRange(message.joins.start, message.joins.stop), limits, now)

    def _grant(self, lease: Lease, worker: str, now: float, batch_id: BatchId = NO_BATCH) -> Handoff:
        if lease.stage is LeaseStage.POOLED:
            self._unindex(lease)
            lease.attempt = next_step(lease.attempt)
        self._lease_table.move(lease, LeaseStage.GRANTED)
        lease.holder, lease.batch_id = worker, batch_id
        return lease.handoff(now)

    def _granted(self, peer: str, message: LeasesReleased | LeasesReturned) -> list[Lease]:
        leases = [self._lease_table.get(lease_id) for lease_id in dict.fromkeys(message.lease_ids)]
        return [
            lease
            for lease in leases
            if lease is not None and lease.stage is LeaseStage.GRANTED and lease.holder == peer
        ]

    def _release(self, lease: Lease) -> list[PoolCommand]:
        if lease.is_void or not self._takes_requests:
            return self._end(lease)
        self._lease_table.move(lease, LeaseStage.KEPT)
        return []

    def _predicted(self, message: SetPredictedLength) -> list[PoolCommand]:
        for lease in self._lease_table.of_request(message.request_id):
            if lease.content is not None and is_same_epoch(lease.attempt, message.attempt):
                lease.content = replace(lease.content, predicted_output_len=message.predicted_output_len)
        return []

    def _fetch_copy(self, peer: str, message: FetchCopy, now: float) -> list[PoolCommand]:
        leases = self._lease_table.of_request(message.request_id)
        kept = [lease for lease in leases if lease.stage is LeaseStage.KEPT and lease.attempt <= message.attempt]
        if not self._takes_requests:
            kept = [lease for lease in leases if lease.stage is LeaseStage.POOLED and lease.holder == peer]
        if not kept:
            return [Send(peer, CopyMissing(message.request_id, message.attempt))]
        best = max(kept, key=lambda lease: lease.attempt)
        return [Send(peer, CopyGranted(self._grant(best, peer, now), message.attempt))]

    # --- ends of leases

    def _drop(self, request_id: RequestId, attempt: int, stage: LeaseStage | None, now: float) -> list[PoolCommand]:
        self._reservations.cancel(request_id, attempt)
        commands = self._end_earlier(request_id, attempt, tuple(LeaseStage) if stage is None else (stage,))
        return commands + self._serve_reservations(now)

    def _end_earlier(
        self, request_id: RequestId, attempt: int, stages: tuple[LeaseStage, ...], but: Lease | None = None
    ) -> list[PoolCommand]:
        commands: list[PoolCommand] = []
        for lease in self._lease_table.of_request(request_id):
            if lease is not but and lease.attempt <= attempt and lease.stage in stages:
                commands += self._invalidate(lease)
        return commands

    def _invalidate(self, lease: Lease) -> list[PoolCommand]:
        if lease.stage is LeaseStage.GRANTED:
            lease.is_void = True
            return []
        return self._end(lease)

    def _end_expired(self, now: float) -> list[PoolCommand]:
        overdue = [lease for lease in self._lease_table.reserved() if lease.deadline_s < now]
        commands = [command for lease in overdue for command in self._end(lease)]
        return [*commands, *self._prefixes.end_expired(now), *self._serve_reservations(now)]

    def _end(self, lease: Lease) -> list[PoolCommand]:
        if lease.stage is LeaseStage.POOLED:
            self._unindex(lease)
        return [SetBlockGeneration(self._lease_table.close(lease), NO_GENERATION)]

    def _unindex(self, lease: Lease) -> None:
        self._former.remove(lease.request_id)
        del self._pooled[lease.request_id]

    # --- reports

    def _to_router(self, message: Message) -> list[PoolCommand]:
        return [Send(self._router, message)] if self._router is not None and self._takes_requests else []

    def _report(self) -> list[PoolCommand]:
        num_kept = self._lease_table.num_kept + self._prefixes.num_unused
        lengths = replace(self._former.seen(), formed=self._formed)
        load = PoolLoad(self._lease_table.num_used, len(self._pooled), len(self._reservations), num_kept, lengths)
        changed = self._prefixes.cached.told_changes() if self._router is not None else None
        commands: list[PoolCommand] = []
        if changed is not None and self._router is not None:
            commands.append(Send(self._router, changed))
        if load == self._reported or self._router is None or not self._takes_requests:
            return commands
        self._reported = load
        return [*commands, *self._to_router(load)]
