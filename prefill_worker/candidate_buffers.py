"""The candidate buffers that decode workers have in this worker's memory (AlignedServe, sections 3.2 and 3.4).

The decode worker allocates the blocks of its buffer. This worker opens it, copies candidates into it from the pool
ahead of need, and returns evicted requests from it to the pool. One such copy runs at a time for each buffer, so that
plans can change for all others; copies of other buffers and offloads of computed prompts do not wait for it.

A request on its way back to the pool:
1. ReturnRequest: the worker asks the pool for blocks. 2. BlocksReserved: copied from buffer to arena, BlocksWritten.
3. BlocksTaken: RequestReturned tells the decode worker, which frees the buffer's blocks.
If this fails before the blocks were offered to the pool, the request stays in the buffer.
"""

from collections import deque
from typing import NamedTuple

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import (
    BlockCopy,
    BlocksPrefetched,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelPrefetch,
    CancelReservation,
    PrefetchBlocks,
    RequestReturned,
    ReservationRefused,
    ReserveBlocks,
    ReturnOutcome,
    ReturnRequest,
)
from alignedserve.messages.events import Send
from alignedserve.messages.iterations import BlocksRelayed, BufferOpened, CloseBuffer, OpenBuffer, RelayBlocks
from prefill_worker.state import ReturningRequest

BufferCommand = Send | RelayBlocks | OpenBuffer | CloseBuffer


class _WaitingCopy(NamedTuple):
    peer: str  # the decode worker
    relay: RelayBlocks
    is_best_effort: bool = False  # goes after others


class CandidateBuffers:
    """Copies between the pool and the buffers, and the decode workers that they are for."""

    def __init__(self, pool_name: str) -> None:
        self._pool_name = pool_name
        self._has_pool = False
        self._link_epochs: dict[str, int] = {}  # of the decode workers linked now
        self._offered: dict[str, None] = {}  # those that have a buffer
        self._num_link_epochs = 0
        self._waiting: deque[_WaitingCopy] = deque()  # in order
        self._relaying: dict[str, tuple[int, RelayBlocks]] = {}  # by decode worker: the link epoch it began in
        self._returning: dict[RequestId, ReturningRequest] = {}

    def has_buffer(self, peer: str) -> bool:
        """Return whether this decode worker is connected and was offered a buffer."""
        return peer in self._offered

    # --- decode workers

    def connected(self, peer: str) -> list[BufferCommand]:
        """Open a buffer for a decode worker that is new or back."""
        self._num_link_epochs += 1
        self._link_epochs[peer] = self._num_link_epochs
        return [OpenBuffer(peer, self._num_link_epochs)]

    def disconnected(self, peer: str) -> list[BufferCommand]:
        """Close the buffer of a decode worker that is gone."""
        del self._link_epochs[peer]
        self._offered.pop(peer, None)
        self._waiting = deque(entry for entry in self._waiting if entry.peer != peer)
        commands: list[BufferCommand] = [CloseBuffer(peer)]
        for request_id, entry in list(self._returning.items()):
            if entry.peer == peer and not self._is_under_way(request_id):
                commands += self._fail_return(request_id)
        return commands

    def opened(self, event: BufferOpened) -> list[BufferCommand]:
        """Offer the buffer to the decode worker that it was made for, if that one is still connected."""
        if self._link_epochs.get(event.peer) != event.link_epoch or event.offered is None:
            return []
        self._offered[event.peer] = None
        return [Send(event.peer, event.offered)]

    def prefetch(self, peer: str, message: PrefetchBlocks) -> list[BufferCommand]:
        """Queue a copy from the pool into this decode worker's buffer."""
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
        self._queue_prefetch(peer, relay, is_best_effort=message.is_best_effort)
        return self._next()

    def _queue_prefetch(self, peer: str, relay: RelayBlocks, *, is_best_effort: bool) -> None:
        """Queue it behind those of its class: a chat is not copied after documents."""
        place = len(self._waiting)
        while place and not is_best_effort and self._waiting[place - 1].is_best_effort:
            place -= 1
        self._waiting.insert(place, _WaitingCopy(peer, relay, is_best_effort))

    def cancel(self, peer: str, message: CancelPrefetch) -> list[BufferCommand]:
        """Remove a prefetch from the queue; one that has started continues and is answered as usual."""
        commands: list[BufferCommand] = []
        for entry in [entry for entry in self._waiting if entry.peer == peer and _is_of(entry.relay, message)]:
            self._waiting.remove(entry)
            commands.append(_not_prefetched(peer, entry.relay))
        return commands

    def return_to_pool(self, peer: str, message: ReturnRequest) -> list[BufferCommand]:
        """Ask the pool for blocks for a request that this decode worker evicted."""
        request_id = message.request.request_id
        if not self._has_pool or request_id in self._returning:
            return [Send(peer, RequestReturned(request_id, message.attempt, ReturnOutcome.STAYED))]
        self._returning[request_id] = ReturningRequest(peer, self._link_epochs[peer], message)
        reserve = ReserveBlocks(
            request_id,
            message.attempt,
            message.copy.num_blocks,
            may_wait=False,
            is_best_effort=message.request.request_class is RequestClass.BEST_EFFORT,
        )
        return [Send(self._pool_name, reserve)]

    # --- the pool

    def pool_connected(self) -> None:
        """Note that the pool is connected."""
        self._has_pool = True

    def pool_disconnected(self) -> list[BufferCommand]:
        """Cancel all queued copies: leases are void, and requests on their way back did not arrive."""
        self._has_pool = False
        waiting, self._waiting = self._waiting, deque()
        commands: list[BufferCommand] = []
        for peer, relay, _ in waiting:
            if relay.target == peer:
                commands.append(_not_prefetched(peer, relay))
        for request_id in list(self._returning):
            if not self._is_under_way(request_id):
                commands += self._fail_return(request_id)
        return commands

    def answered(self, message: BlocksReserved | BlocksTaken | ReservationRefused) -> list[BufferCommand]:
        """Handle the pool's answer; return nothing when it concerns no request on its way back."""
        match message:
            case BlocksReserved():
                return self._reserved(message)
            case BlocksTaken():
                return self._taken(message)
            case ReservationRefused():
                return self._refused(message)

    def _reserved(self, message: BlocksReserved) -> list[BufferCommand]:
        """Queue the copy to the reserved blocks."""
        entry = self._returning_at(message.request_id, message.attempt)
        if entry is None or entry.is_reserved:
            return []
        entry.is_reserved = True
        relay = RelayBlocks(
            message.request_id,
            message.attempt,
            entry.peer,
            entry.message.copy,
            self._pool_name,
            message.block_ids,
            message.generation,
            message.lease_id,
        )
        self._waiting.appendleft(_WaitingCopy(entry.peer, relay))  # before prefetches: it frees buffer blocks
        return self._next()

    def _taken(self, message: BlocksTaken) -> list[BufferCommand]:
        """Tell the decode worker whether the pool took its request."""
        entry = self._returning_at(message.request_id, message.attempt)
        if entry is None or not entry.is_written:
            return []
        outcome = ReturnOutcome.TAKEN if message.is_accepted else ReturnOutcome.STAYED
        return self._answer(message.request_id, outcome)

    def _refused(self, message: ReservationRefused) -> list[BufferCommand]:
        """Tell the decode worker that its request stays: the pool has no free blocks for it now."""
        entry = self._returning_at(message.request_id, message.attempt)
        if entry is None or entry.is_reserved:
            return []
        return self._answer(message.request_id, ReturnOutcome.STAYED)

    # --- copies

    def relayed(self, event: BlocksRelayed) -> list[BufferCommand]:
        """Report a finished copy and start the next."""
        peer = event.command.source if event.command.target == self._pool_name else event.command.target
        assert peer in self._relaying, "a copy ended that was not started"
        link_epoch, relay = self._relaying.pop(peer)
        is_there = self._link_epochs.get(peer) == link_epoch
        if relay.target == self._pool_name:
            commands = self._returned(relay, event, is_there=is_there)
        else:
            commands = self._prefetched(peer, event) if is_there else []
        return commands + self._next()

    def _prefetched(self, peer: str, event: BlocksRelayed) -> list[BufferCommand]:
        relay = event.command
        if event.runs is None:
            return [Send(peer, BlocksPrefetched(relay.request_id, relay.generation, None, is_refused=True))]
        copy = BlockCopy(relay.generation, relay.copy.context_len, event.runs)
        return [Send(peer, BlocksPrefetched(relay.request_id, relay.generation, copy))]

    def _returned(self, relay: RelayBlocks, event: BlocksRelayed, *, is_there: bool) -> list[BufferCommand]:
        entry = self._returning[relay.request_id]
        if event.runs is None or not is_there or not self._has_pool:
            return self._fail_return(relay.request_id)
        assert relay.lease_id is not None, "a copy to the pool without a lease"
        entry.is_written = True
        message = entry.message
        copy = BlockCopy(relay.generation, message.copy.context_len, event.runs)
        written = BlocksWritten(
            relay.lease_id,
            copy,
            relay.attempt,
            message.request,
            message.generated_token_ids,
            message.predicted_output_len,
            message.begun_s,
        )
        return [Send(self._pool_name, written)]

    def _next(self) -> list[BufferCommand]:
        """Start the first waiting copy of every buffer that has none under way."""
        started: list[BufferCommand] = []
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            if entry.peer in self._relaying:
                self._waiting.append(entry)
            else:
                self._relaying[entry.peer] = (self._link_epochs[entry.peer], entry.relay)
                started.append(entry.relay)
        return started

    # --- ends

    def _returning_at(self, request_id: RequestId, attempt: int) -> ReturningRequest | None:
        entry = self._returning.get(request_id)
        return entry if entry is not None and entry.message.attempt == attempt else None

    def _is_under_way(self, request_id: RequestId) -> bool:
        """Return whether this request is being copied to the pool now; it is handled when that is done."""
        relays = (relay for _, relay in self._relaying.values())
        return any(relay.target == self._pool_name and relay.request_id == request_id for relay in relays)

    def _fail_return(self, request_id: RequestId) -> list[BufferCommand]:
        entry = self._returning[request_id]
        cancel = CancelReservation(request_id, entry.message.attempt)
        cancels: list[BufferCommand] = [Send(self._pool_name, cancel)] if self._has_pool else []
        outcome = ReturnOutcome.UNKNOWN if entry.is_written else ReturnOutcome.STAYED
        return cancels + self._answer(request_id, outcome)

    def _answer(self, request_id: RequestId, outcome: ReturnOutcome) -> list[BufferCommand]:
        entry = self._returning.pop(request_id)
        if self._link_epochs.get(entry.peer) != entry.link_epoch:
            return []
        return [Send(entry.peer, RequestReturned(request_id, entry.message.attempt, outcome))]


def _is_of(relay: RelayBlocks, message: CancelPrefetch) -> bool:
    return (relay.request_id, relay.generation, relay.lease_id) == (message.request_id, message.generation, None)


def _not_prefetched(peer: str, relay: RelayBlocks) -> Send:
    return Send(peer, BlocksPrefetched(relay.request_id, relay.generation, None))
