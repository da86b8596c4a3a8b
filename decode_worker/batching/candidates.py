"""Requests at this worker that do not run: where their caches lie, and the messages that move them.

The cache of a granted candidate lies in the pool under a lease. Ahead of need it is prefetched into a prefill worker's
memory; the lease is kept meanwhile, so that plans can change. An evicted one lies in such a buffer only. Buffer blocks
that another process writes or reads are freed when that process has answered, even if the request has ended.

A request returned to the pool is tracked here until the router has learned of it from the pool and aborts it here: if
the pool were lost before that, no other component could report that the request is gone. Nor could one if the pool
lives and its link to the router is lost: so what the router does not heed for long is reported as gone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import next_step
from alignedserve.messages.caches import (
    ArenaOffered,
    BlockCopy,
    BlocksPrefetched,
    BlocksTaken,
    BlocksWritten,
    CancelPrefetch,
    LeasesReleased,
    LeasesReturned,
    PrefetchBlocks,
    RequestReturned,
    ReserveBlocks,
    ReturnOutcome,
    ReturnRequest,
)
from alignedserve.messages.events import Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.handoff import BufferSlot, BufferSpace, HandoffReceiver, Incoming
from alignedserve.worker_core.request import CacheStage

HEEDED_S = 5.0  # many times what the pool's word takes to the router, and the router's to here


class Candidates:
    """Candidate batch and candidate requests of one decode worker, in order of arrival."""

    def __init__(self, pool_name: str, block_size: int, *, knows_classes: bool = False, state_blocks: int = 0) -> None:
        self.space = BufferSpace()
        self.receiver = HandoffReceiver(self.space, block_size, state_blocks=state_blocks)
        self._pool_name = pool_name
        self._knows_classes = knows_classes
        self.version = 0  # changes with the candidates, and with which of them should be moved
        self._entries: dict[RequestId, Candidate] = {}
        self._prefetching: dict[int, BufferSlot] = {}  # by generation; being written by a prefill worker
        self._returning: dict[tuple[RequestId, int], Candidate] = {}  # being read by a prefill worker
        # The pool has them, since when; the router may not know it yet.
        self._returned: dict[RequestId, tuple[Candidate, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._entries.values())

    def get(self, request_id: RequestId) -> Candidate | None:
        return self._entries.get(request_id)

    def add(self, candidate: Candidate) -> None:
        self.version += 1
        self._entries[candidate.request.request_id] = candidate

    def take(self, candidate: Candidate) -> None:
        self.version += 1
        del self._entries[candidate.request.request_id]

    def release(self, candidate: Candidate) -> list[Send]:
        if candidate.slot is not None and candidate.stage is not CacheStage.PREFETCHING:
            self.space.free(candidate.slot)
        commands: list[Send] = []
        if candidate.stage is CacheStage.PREFETCHING and (slot := candidate.slot) is not None:
            commands.append(Send(slot.peer, CancelPrefetch(candidate.request.request_id, slot.generation)))
        if candidate.lease_id is not None:
            commands.append(Send(self._granted_by(candidate), LeasesReleased((candidate.lease_id,))))
        return commands

    def abort(self, request_id: RequestId) -> list[Send]:
        self.version += 1
        candidate = self._entries.pop(request_id)
        if candidate.stage is CacheStage.RETURNING:
            candidate.is_aborted = True  # its blocks are being read
            return []
        return self.release(candidate)

    def _granted_by(self, candidate: Candidate) -> str:
        return candidate.far_pool or self._pool_name

    def peers_in_use(self, moving: Iterable[Candidate]) -> set[str]:
        returned = (candidate for candidate, _ in self._returned.values())
        known = (*self._entries.values(), *self._returning.values(), *returned, *moving)
        buffers = (*(candidate.slot for candidate in known), *self._prefetching.values())
        lending = {slot.peer for slot in buffers if slot is not None} | self.receiver.peers()
        return lending | {self._granted_by(candidate) for candidate in known}

    def buffer_offered(self, peer: str, offered: ArenaOffered) -> None:
        is_far = offered.pool_name not in ("", self._pool_name)
        self.space.opened(peer, offered.num_blocks, is_far=is_far)

    def prefetch(self, candidate: Candidate) -> list[Send]:
        if candidate.stage is not CacheStage.AWAY or candidate.pool_copy is None or not candidate.may_prefetch:
            return []
        slot = self.space.for_prefetch(candidate.num_copied_blocks)
        if slot is None:
            return []
        candidate.go(CacheStage.PREFETCHING)
        candidate.slot = slot
        self._prefetching[slot.generation] = slot
        request_id = candidate.request.request_id
        message = PrefetchBlocks(
            request_id,
            candidate.attempt,
            candidate.pool_copy,
            slot.block_ids,
            generation=slot.generation,
            is_best_effort=self._knows_classes and not candidate.is_real_time,
        )
        return [Send(slot.peer, message)]

    def prefetched(self, message: BlocksPrefetched) -> Candidate | None:
        """Note the end of a prefetch; return the candidate if the pool's copy did not verify (a miss)."""
        slot = self._prefetching.pop(message.generation, None)
        if slot is None:
            return None
        candidate = self._entries.get(message.request_id)
        if candidate is None or candidate.slot is not slot:
            self.space.free(slot)
            return None
        if message.copy is not None:
            candidate.go(CacheStage.BUFFERED)
            candidate.buffer_copy = message.copy
            return None
        self.space.free(slot)
        self.version += 1
        candidate.go(CacheStage.AWAY)
        candidate.slot, candidate.may_prefetch = None, False
        return candidate if message.is_refused else None

    def space_for_eviction(self, num_blocks: int, *, is_best_effort: bool) -> BufferSlot | None:
        """Allocate buffer blocks for an eviction, dropping prefetched copies that the pool still has, latest first."""
        leaves_room = self._knows_classes and is_best_effort
        return self._with_dropped_copies(partial(self.space.for_eviction, num_blocks, leaves_room=leaves_room))

    def _with_dropped_copies(self, allocate: Callable[[], BufferSlot | None]) -> BufferSlot | None:
        slot = allocate()
        latest_first = list(self._entries.values())[::-1]
        for candidate in sorted(latest_first, key=self._is_dropped_late):
            if slot is not None:
                break
            if candidate.stage is CacheStage.BUFFERED and candidate.lease_id is not None and candidate.slot is not None:
                self.version += 1
                self.space.free(candidate.slot)
                candidate.go(CacheStage.AWAY)
                candidate.slot, candidate.buffer_copy = None, None
                slot = allocate()
        return slot

    def _is_dropped_late(self, candidate: Candidate) -> bool:
        return self._knows_classes and candidate.is_real_time

    def to_move(self) -> list[Candidate]:
        return sorted(self._entries.values(), key=lambda candidate: self._knows_classes and not candidate.is_real_time)

    def copy_of(self, candidate: Candidate) -> tuple[str, BlockCopy]:
        source, copy = self._granted_by(candidate), candidate.pool_copy
        if candidate.stage is CacheStage.BUFFERED and candidate.slot is not None:
            source, copy = candidate.slot.peer, candidate.buffer_copy
        assert copy is not None, "a candidate without a copy"
        return source, copy

    # --- back to the pool

    def drain_buffers(self, now: float) -> list[Send]:
        if not self.space.is_short:
            return []
        able = [
            candidate
            for candidate in self
            if candidate.lease_id is None and candidate.stage is CacheStage.BUFFERED and not candidate.must_stay
        ]
        sizes = [(not self._is_dropped_late(entry), entry.context_len, entry.request.request_id) for entry in able]
        return self.return_to_pool(able[sizes.index(max(sizes))], now) if sizes else []

    def return_to_pool(self, candidate: Candidate, now: float) -> list[Send]:
        """Return it to the pool, for another batch. A cache that lies only in a buffer is copied there first."""
        self.version += 1
        if candidate.lease_id is not None:
            lease_id, candidate.lease_id = candidate.lease_id, None
            del self._entries[candidate.request.request_id]
            self._returned[candidate.request.request_id] = candidate, now
            return [*self.release(candidate), Send(self._granted_by(candidate), LeasesReturned((lease_id,)))]
        if candidate.stage is not CacheStage.BUFFERED or candidate.slot is None or candidate.buffer_copy is None:
            return []
        candidate.go(CacheStage.RETURNING)
        request = candidate.request
        self._returning[request.request_id, candidate.attempt] = candidate
        message = ReturnRequest(
            request,
            candidate.attempt,
            tuple(candidate.generated_token_ids),
            candidate.buffer_copy,
            candidate.predicted_output_len,
            now - candidate.first_token_s,
            candidate.service_s,
        )
        return [Send(candidate.slot.peer, message)]

    def returned(self, message: RequestReturned, now: float) -> Candidate | None:
        """Note the outcome of a return to the pool; return the candidate if its cache must be considered lost.

        A candidate that the pool did not take stays, to join any running batch. A pool lost meanwhile may never have
        told the router that it had taken the request.
        """
        self.version += 1
        candidate = self._returning.pop((message.request_id, message.attempt), None)
        if candidate is None:
            return None
        assert candidate.slot is not None, "returned from no buffer"
        if message.outcome is ReturnOutcome.STAYED and not candidate.is_aborted:
            candidate.go(CacheStage.BUFFERED)
            candidate.batch_id, candidate.must_stay = NO_BATCH, True
            return None
        self.space.free(candidate.slot)
        if candidate.is_aborted:
            return None
        del self._entries[message.request_id]
        if message.outcome is not ReturnOutcome.TAKEN or candidate.has_lost_pool:
            return candidate
        self._returned[message.request_id] = candidate, now
        return None

    def forget_returned(self, request_id: RequestId, attempt: int | None) -> None:
        if request_id in self._returned and self._returned[request_id][0].is_up_to(attempt):
            del self._returned[request_id]

    def unheeded(self, now: float) -> list[Candidate]:
        late = [candidate for candidate, since_s in self._returned.values() if now - since_s >= HEEDED_S]
        for candidate in late:
            del self._returned[candidate.request.request_id]
        return late

    # --- straight from a prefill worker

    def reserve(self, peer: str, message: ReserveBlocks) -> list[Send]:
        def hold() -> Incoming | None:
            slot = self._with_dropped_copies(partial(self.space.at, peer, message.num_blocks))
            return None if slot is None else Incoming(message.attempt, slot)

        return [self.receiver.reserve(peer, message, hold)]

    def written(self, peer: str, message: BlocksWritten, now: float) -> tuple[Candidate | None, Sequence[Send]]:
        entry, refused = self.receiver.written(peer, message)
        if entry is None:
            return None, refused
        request_id = message.request.request_id
        self.receiver.end(request_id)
        candidate = Candidate.of(message, next_step(entry.attempt), NO_BATCH, CacheStage.BUFFERED, now)
        candidate.slot, candidate.buffer_copy = entry.slot, message.copy
        # In the pool a chat would wait for a batch of its length, perhaps behind all documents.
        candidate.must_stay = self.space.is_far(entry.slot) or candidate.is_real_time
        return candidate, [Send(peer, BlocksTaken(request_id, message.attempt, is_accepted=True))]

    def prefill_worker_disconnected(self, peer: str) -> list[Candidate]:
        """Remove and return candidates that lay only in its memory; those with a lease are still in the pool."""
        self.version += 1
        self.space.lost(peer)
        self._prefetching = {key: slot for key, slot in self._prefetching.items() if slot.peer != peer}
        self.receiver.cancel_all(peer)
        for key in [key for key, candidate in self._returning.items() if _is_at(candidate, peer)]:
            del self._returning[key]
        lost = []
        for candidate in [candidate for candidate in self._entries.values() if _is_at(candidate, peer)]:
            if candidate.lease_id is not None:
                candidate.go(CacheStage.AWAY)
                candidate.slot, candidate.buffer_copy = None, None
            else:
                lost.append(self._entries.pop(candidate.request.request_id))
        return lost

    def pool_disconnected(self, pool: str) -> list[Candidate]:
        """Remove and return candidates that lay only in this pool; prefetched ones stay."""
        self.version += 1
        lost = [candidate for candidate, _ in self._returned.values() if self._granted_by(candidate) == pool]
        for candidate in lost:
            del self._returned[candidate.request.request_id]
        for candidate in self._returning.values():  # out of buffers here, to the pool beside them
            candidate.has_lost_pool |= pool == self._pool_name
        for candidate in [candidate for candidate in self._entries.values() if self._granted_by(candidate) == pool]:
            candidate.lease_id = None
            if candidate.stage in (CacheStage.AWAY, CacheStage.PREFETCHING):
                lost.append(self._entries.pop(candidate.request.request_id))
        return lost

    def clear(self) -> list[Send]:
        self._returned.clear()
        self.receiver.cancel_all()
        return [command for request_id in list(self._entries) for command in self.abort(request_id)]


def _is_at(candidate: Candidate, peer: str) -> bool:
    return candidate.slot is not None and candidate.slot.peer == peer
