"""The receiver's side of a handoff, where the sender lends it the memory to write to.

ReserveBlocks holds a slot of its buffer at the sender, and blocks of its own if it is to load the cache; or it is
refused. BlocksWritten is believed of exactly what was reserved. A reservation ends with a later attempt, with
CancelReservation, with its sender, or with an offer that is not believed; one that is being loaded ends with that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.messages.caches import (
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import Send
from alignedserve.worker_core.handoff.buffer_space import BufferSlot, BufferSpace


@dataclass(slots=True, eq=False)
class Incoming:
    """One request that may come."""

    attempt: int  # of the sender
    slot: BufferSlot  # at the sender
    block_ids: tuple[BlockId, ...] = ()  # here
    written: BlocksWritten | None = None  # its cache is there
    is_aborted: bool = False


class Receiver:
    """Reservations by request."""

    def __init__(
        self,
        space: BufferSpace,
        block_size: int,
        free: Callable[[tuple[BlockId, ...]], None] | None = None,
        *,
        state_blocks: int = 0,
    ) -> None:
        """`free`: frees blocks that are held here for a request that does not come. `state_blocks`: of each request,
        before those of its tokens."""
        self._space = space
        self._block_size, self._state_blocks = block_size, state_blocks
        self._free = free
        self._entries: dict[RequestId, Incoming] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def peers(self) -> set[str]:
        """Return the senders; for membership only."""
        return {entry.slot.peer for entry in self._entries.values()}

    def reserve(self, peer: str, message: ReserveBlocks, hold: Callable[[], Incoming | None]) -> Send:
        """Answer ReserveBlocks, again if it comes twice. `hold`: takes free blocks for it; None: there are none."""
        request_id, attempt = message.request_id, message.attempt
        self.cancel(request_id, attempt - 1)
        entry = self._entries.get(request_id)
        if entry is None and (held := hold()) is not None:
            entry = self._entries[request_id] = held
        if entry is None or entry.is_aborted or (entry.attempt, entry.slot.peer) != (attempt, peer):
            return Send(peer, ReservationRefused(request_id, attempt))
        slot = entry.slot
        return Send(
            peer, BlocksReserved(request_id, attempt, LeaseId(slot.generation), slot.generation, slot.block_ids)
        )

    def written(self, peer: str, message: BlocksWritten) -> tuple[Incoming | None, Sequence[Send]]:
        """Return the reservation that an offer is of, with its cache; without one, the answer."""
        request_id = message.request.request_id
        entry = self._entries.get(request_id)
        if entry is not None and (entry.attempt, entry.slot.peer) == (message.attempt, peer):
            if entry.written is not None:
                return None, ()  # it has come twice, and is answered once
            if self._is_of(entry.slot, message):
                entry.written = message
                return entry, ()
            self._give_up(request_id, entry)
        return None, [Send(peer, BlocksTaken(request_id, message.attempt, is_accepted=False))]

    def end(self, request_id: RequestId) -> Incoming:
        """Remove a reservation whose cache has come, and return it: what it holds is the caller's now."""
        return self._entries.pop(request_id)

    def cancel(self, request_id: RequestId, attempt: int | None = None) -> None:
        """Give up a request that is to come; with an attempt, only that one and earlier ones."""
        entry = self._entries.get(request_id)
        if entry is not None and (attempt is None or entry.attempt <= attempt):
            self._give_up(request_id, entry)

    def cancel_all(self, peer: str | None = None) -> None:
        """Give up all that is to come, or what is to come from this sender."""
        for request_id, entry in list(self._entries.items()):
            if peer in (None, entry.slot.peer):
                self._give_up(request_id, entry)

    def _is_of(self, slot: BufferSlot, message: BlocksWritten) -> bool:
        num_tokens = message.request.prompt_len + len(message.generated_token_ids)
        is_whole = bool(message.generated_token_ids) and message.copy.context_len == num_tokens - 1
        return is_whole and is_described(message, slot.block_ids, slot.generation, self._block_size, self._state_blocks)

    def _give_up(self, request_id: RequestId, entry: Incoming) -> None:
        if entry.written is not None:  # it is being loaded
            entry.is_aborted = True
            return
        del self._entries[request_id]
        self._space.free(entry.slot)
        if self._free is not None:
            self._free(entry.block_ids)


def is_described(
    written: BlocksWritten, block_ids: tuple[BlockId, ...], generation: int, block_size: int, state_blocks: int
) -> bool:
    """Return whether an offer is of exactly the first of these blocks, as many as its context takes.

    `state_blocks`: of those, before the ones of its tokens.
    """
    copy = written.copy
    if not 0 < copy.num_blocks <= len(block_ids):
        return False  # checked before the runs are expanded: they may claim anything
    covered = tuple(run.first_block + offset for run in copy.runs for offset in range(run.num_blocks))
    is_there = (copy.generation, copy.num_before) == (generation, 0) and covered == block_ids[: copy.num_blocks]
    return is_there and blocks_for(copy.context_len, block_size) + state_blocks == copy.num_blocks
