"""Requests at this worker that do not run: where their caches lie, and what is asked of whom to move them.

A granted candidate lies in the pool under a lease. Ahead of need it is prefetched into a prefill worker's memory; the
lease is kept meanwhile, so that plans can change. An evicted one lies in such a buffer only. Buffer blocks that
somebody else writes or reads are free again when that one has answered, whatever has become of the request.

A request that went back to the pool is still ours until the router has heard of it from the pool (it tells us to let
go): should the pool be lost before, nobody else would know that it is gone.
"""

from collections.abc import Iterator

from alignedserve.core.attempts import next_step
from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.messages.caches import (
    BlockCopy,
    BlocksPrefetched,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelPrefetch,
    LeasesReleased,
    LeasesReturned,
    PrefetchBlocks,
    RequestReturned,
    ReservationRefused,
    ReserveBlocks,
    ReturnOutcome,
    ReturnRequest,
)
from alignedserve.messages.events import Send
from alignedserve.messages.fields import NO_BATCH
from decode_worker.batching.buffer_space import BufferSpace
from decode_worker.state import BufferSlot, CachePlace, Candidate


class Candidates:
    """Candidate batch and candidate requests of one decode worker, in order of their coming."""

    def __init__(self, pool_name: str) -> None:
        self.space = BufferSpace()
        self._pool_name = pool_name
        self.version = 0  # changes with who is here, and with who should be moved elsewhere
        self._entries: dict[RequestId, Candidate] = {}
        self._prefetching: dict[int, BufferSlot] = {}  # by generation; written by somebody else now
        self._returning: dict[tuple[RequestId, int], Candidate] = {}  # read by somebody else now
        self._given_back: dict[RequestId, Candidate] = {}  # the pool has them, and the router does not know it yet
        self._reserved: dict[RequestId, tuple[int, BufferSlot]] = {}  # for requests straight from a prefill worker

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._entries.values())

    def get(self, request_id: RequestId) -> Candidate | None:
        """The candidate, if it is here."""
        return self._entries.get(request_id)

    def add(self, candidate: Candidate) -> None:
        """A request that is granted, evicted, or put back."""
        self.version += 1
        self._entries[candidate.request.request_id] = candidate

    def take(self, candidate: Candidate) -> None:
        """It enters the running batch; its lease and buffer blocks stay its own until `let_go`."""
        self.version += 1
        del self._entries[candidate.request.request_id]

    def let_go(self, candidate: Candidate) -> list[Send]:
        """Give back all that a candidate which is here no more holds elsewhere."""
        if candidate.slot is not None and candidate.place is not CachePlace.COMING:
            self.space.free(candidate.slot)
        commands: list[Send] = []
        if candidate.place is CachePlace.COMING and candidate.slot is not None:
            commands.append(_cancel(candidate, candidate.slot))
        return commands + self._release(candidate.lease_id)

    def abort(self, request_id: RequestId) -> list[Send]:
        """The request is over."""
        self.version += 1
        candidate = self._entries.pop(request_id)
        if candidate.place is CachePlace.RETURNING:
            candidate.is_aborted = True  # its blocks are being read
            return []
        return self.let_go(candidate)

    def _release(self, lease_id: LeaseId | None) -> list[Send]:
        return [Send(self._pool_name, LeasesReleased((lease_id,)))] if lease_id is not None else []

    # --- prefetch

    def prefetch(self, candidate: Candidate) -> list[Send]:
        """Have it copied from the pool into a buffer, if there is room."""
        if candidate.place is not CachePlace.POOL or candidate.pool_copy is None or not candidate.may_prefetch:
            return []
        slot = self.space.for_prefetch(candidate.num_copied_blocks)
        if slot is None:
            return []
        candidate.place, candidate.slot = CachePlace.COMING, slot
        self._prefetching[slot.generation] = slot
        request_id = candidate.request.request_id
        message = PrefetchBlocks(
            request_id, candidate.attempt, candidate.pool_copy, slot.block_ids, generation=slot.generation
        )
        return [Send(slot.peer, message)]

    def prefetched(self, message: BlocksPrefetched) -> Candidate | None:
        """A prefetch is over. Returns the candidate when what lay in the pool did not verify: a miss."""
        slot = self._prefetching.pop(message.generation, None)
        if slot is None:
            return None
        candidate = self._entries.get(message.request_id)
        if candidate is None or candidate.slot is not slot:
            self.space.free(slot)
            return None
        if message.copy is not None:
            candidate.place, candidate.buffer_copy = CachePlace.BUFFER, message.copy
            return None
        self.space.free(slot)
        self.version += 1
        candidate.place, candidate.slot, candidate.may_prefetch = CachePlace.POOL, None, False
        return candidate if message.is_refused else None

    def make_room(self, num_blocks: int) -> BufferSlot | None:
        """Room for an eviction; prefetched ones that still lie in the pool give way, the last to come first."""
        slot = self.space.for_eviction(num_blocks)
        for candidate in reversed(list(self._entries.values())):
            if slot is not None:
                break
            if candidate.place is CachePlace.BUFFER and candidate.lease_id is not None and candidate.slot is not None:
                self.version += 1
                self.space.free(candidate.slot)
                candidate.place, candidate.slot, candidate.buffer_copy = CachePlace.POOL, None, None
                slot = self.space.for_eviction(num_blocks)
        return slot

    def copy_of(self, candidate: Candidate) -> tuple[str, BlockCopy]:
        """From whom to load its cache, and where it lies there."""
        source, copy = self._pool_name, candidate.pool_copy
        if candidate.place is CachePlace.BUFFER and candidate.slot is not None:
            source, copy = candidate.slot.peer, candidate.buffer_copy
        assert copy is not None, "a candidate without a copy"
        return source, copy

    # --- back to the pool

    def relieve_buffers(self) -> list[Send]:
        """Back to the pool with the longest of the evicted, when the next victim would find no room."""
        if not self.space.is_short:
            return []
        able = [one for one in self if one.lease_id is None and one.place is CachePlace.BUFFER and not one.must_stay]
        longest = max(able, key=lambda one: (one.context_len, one.request.request_id), default=None)
        return self.give_back(longest) if longest is not None else []

    def give_back(self, candidate: Candidate) -> list[Send]:
        """Back to the pool, to be put into another batch. One that lies only in a buffer is brought there."""
        self.version += 1
        if candidate.lease_id is not None:
            lease_id, candidate.lease_id = candidate.lease_id, None
            del self._entries[candidate.request.request_id]
            self._given_back[candidate.request.request_id] = candidate
            return [*self.let_go(candidate), Send(self._pool_name, LeasesReturned((lease_id,)))]
        if candidate.place is not CachePlace.BUFFER or candidate.slot is None or candidate.buffer_copy is None:
            return []
        candidate.place = CachePlace.RETURNING
        request = candidate.request
        self._returning[request.request_id, candidate.attempt] = candidate
        generated, predicted = tuple(candidate.generated_token_ids), candidate.predicted_output_len
        message = ReturnRequest(request, candidate.attempt, generated, candidate.buffer_copy, predicted)
        return [Send(candidate.slot.peer, message)]

    def returned(self, message: RequestReturned) -> Candidate | None:
        """The pool has it now; or it stays, to run beside whatever does. If nobody knows, it is given up: returned.

        So it is when the pool was lost since: the router may never hear from it that it had taken the request.
        """
        self.version += 1
        candidate = self._returning.pop((message.request_id, message.attempt), None)
        if candidate is None:
            return None
        assert candidate.slot is not None, "returned from no buffer"
        if message.outcome is ReturnOutcome.STAYED and not candidate.is_aborted:
            candidate.place, candidate.batch_id, candidate.must_stay = CachePlace.BUFFER, NO_BATCH, True
            return None
        self.space.free(candidate.slot)
        if candidate.is_aborted:
            return None
        del self._entries[message.request_id]
        if message.outcome is not ReturnOutcome.TAKEN or candidate.has_lost_pool:
            return candidate
        self._given_back[message.request_id] = candidate
        return None

    def forget_given_back(self, request_id: RequestId, attempt: int | None) -> None:
        """The router knows where this attempt has gone, or that it is over."""
        candidate = self._given_back.get(request_id)
        if candidate is not None and (attempt is None or candidate.attempt <= attempt):
            del self._given_back[request_id]

    # --- straight from a prefill worker

    def reserve(self, peer: str, message: ReserveBlocks) -> list[Send]:
        """Room in the buffer at this prefill worker for a request that cannot wait."""
        self.cancel_reservation(message.request_id, message.attempt)
        slot = self.space.at(peer, message.num_blocks)
        if slot is None:
            return [Send(peer, ReservationRefused(message.request_id, message.attempt))]
        self._reserved[message.request_id] = (message.attempt, slot)
        lease_id = LeaseId(slot.generation)
        reserved = BlocksReserved(message.request_id, message.attempt, lease_id, slot.generation, slot.block_ids)
        return [Send(peer, reserved)]

    def cancel_reservation(self, request_id: RequestId, attempt: int) -> None:
        """It does not come after all."""
        entry = self._reserved.get(request_id)
        if entry is not None and entry[0] <= attempt:
            self.space.free(self._reserved.pop(request_id)[1])

    def written(self, peer: str, message: BlocksWritten, now: float) -> tuple[Candidate | None, list[Send]]:
        """It is in the buffer: the candidate, and the answer to the prefill worker."""
        request_id = message.request.request_id
        attempt, slot = self._reserved.get(request_id, (0, None))
        told = (message.attempt, message.copy.generation, peer)
        is_accepted = (
            slot is not None
            and (attempt, slot.generation, slot.peer) == told
            and message.copy.num_blocks == len(slot.block_ids)
        )
        answer = [Send(peer, BlocksTaken(request_id, message.attempt, is_accepted))]
        if slot is None or not is_accepted:
            return None, answer
        del self._reserved[request_id]
        candidate = Candidate(
            message.request,
            next_step(attempt),
            list(message.generated_token_ids),
            NO_BATCH,
            CachePlace.BUFFER,
            slot=slot,
            buffer_copy=message.copy,
            granted_s=now,
            predicted_output_len=message.predicted_output_len,
        )
        return candidate, answer

    # --- losses

    def prefill_worker_lost(self, peer: str) -> list[Candidate]:
        """What lay only in its memory, to be computed again; the others are still in the pool."""
        self.version += 1
        self.space.lost(peer)
        self._prefetching = {key: slot for key, slot in self._prefetching.items() if slot.peer != peer}
        self._reserved = {key: entry for key, entry in self._reserved.items() if entry[1].peer != peer}
        for key in [key for key, candidate in self._returning.items() if _is_at(candidate, peer)]:
            del self._returning[key]
        lost = []
        for candidate in [candidate for candidate in self._entries.values() if _is_at(candidate, peer)]:
            if candidate.lease_id is not None:
                candidate.place, candidate.slot, candidate.buffer_copy = CachePlace.POOL, None, None
            else:
                lost.append(self._entries.pop(candidate.request.request_id))
        return lost

    def pool_lost(self) -> list[Candidate]:
        """What lay only in the pool, to be computed again; what was prefetched from it goes on."""
        self.version += 1
        lost = list(self._given_back.values())
        self._given_back.clear()
        for candidate in self._returning.values():
            candidate.has_lost_pool = True
        for candidate in list(self._entries.values()):
            candidate.lease_id = None
            if candidate.place in (CachePlace.POOL, CachePlace.COMING):
                lost.append(self._entries.pop(candidate.request.request_id))
        return lost

    def clear(self) -> list[Send]:
        """Everything here is over."""
        self._given_back.clear()
        for request_id in list(self._reserved):
            self.space.free(self._reserved.pop(request_id)[1])
        return [command for request_id in list(self._entries) for command in self.abort(request_id)]


def _is_at(candidate: Candidate, peer: str) -> bool:
    return candidate.slot is not None and candidate.slot.peer == peer


def _cancel(candidate: Candidate, slot: BufferSlot) -> Send:
    return Send(slot.peer, CancelPrefetch(candidate.request.request_id, slot.generation))
