"""How a request's cache changes hands between workers, and between a worker and a pool: one protocol for all.

A lender has blocks in its memory that another may use. The sender's side:
1. ASKED (ReserveBlocks): the receiver looks for blocks. ReservationRefused ends the handoff.
2. RESERVED (BlocksReserved): it holds blocks for the request. The sender begins to copy when that suits it.
3. COPYING: the cache is read, and must not be freed. If the copy fails, the receiver is told
   (CancelReservation).
4. OFFERED (BlocksWritten): the receiver checks what was copied. BlocksTaken ends the handoff, whoever has it
   then.
Until it is taken the request is the sender's. If the receiver is lost, it still is, unless it was OFFERED: then the
receiver may have taken it. An answer that is not awaited is stale or a repetition, and changes nothing.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.core.request import Request
from alignedserve.messages.caches import (
    BlockCopy,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import Send
from alignedserve.messages.iterations import (
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    CloseBuffer,
    OffloadBlocks,
    OpenBuffer,
)
from alignedserve.worker_core.part import Commands, WorkerCommand


class HandoffStage(enum.Enum):
    """Stage of a handoff, by what it waits for."""

    ASKED = "asked"  # the receiver's blocks
    RESERVED = "reserved"  # the sender
    COPYING = "copying"  # the end of the copy
    OFFERED = "offered"  # the receiver's word


class HandoffEnd(enum.Enum):
    """How a handoff of a request that is still wanted ended."""

    TAKEN = "taken"  # the receiver has it
    REFUSED = "refused"  # the receiver has no blocks
    FAILED = "failed"  # the receiver is lost, or the copy failed or was not taken: the sender has it
    UNKNOWN = "unknown"  # the receiver is lost, and may have taken it


@dataclass(slots=True, eq=False)
class Outgoing:
    """One request on its way to a receiver."""

    request: Request
    attempt: int
    target: str
    stage: HandoffStage = field(default=HandoffStage.ASKED, init=False)
    reserved: BlocksReserved | None = field(default=None, init=False)
    is_target_lost: bool = field(default=False, init=False)
    is_aborted: bool = field(default=False, init=False)  # but its cache is being copied


class Contents(NamedTuple):
    """What an offer says of a request, beside where its cache is."""

    num_cached: int  # tokens
    generated_token_ids: tuple[int, ...]
    predicted_output_len: float | None
    begun_s: float  # since its first token
    service_s: float  # that it spent in iterations


OutgoingT = TypeVar("OutgoingT", bound=Outgoing)


class Sender(Generic[OutgoingT]):
    """Handoffs by request. A sender differs in four functions, and in when it asks and copies.

    `reserved` returns what follows once a receiver holds blocks, `ended` and `aborted` what follows from the end of a
    handoff, which is forgotten by then; `contents` describes what is offered.
    """

    def __init__(
        self,
        *,
        reserved: Callable[[OutgoingT], Commands],
        contents: Callable[[OutgoingT, float], Contents],
        ended: Callable[[OutgoingT, HandoffEnd, float], Commands],
        aborted: Callable[[OutgoingT], Commands],
    ) -> None:
        self._reserved = reserved
        self._contents = contents
        self._ended = ended
        self._aborted = aborted
        self._entries: dict[RequestId, OutgoingT] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[OutgoingT]:
        return iter(list(self._entries.values()))

    def get(self, request_id: RequestId) -> OutgoingT | None:
        return self._entries.get(request_id)

    def ask(
        self,
        entry: OutgoingT,
        num_blocks: int,
        *,
        is_copy: bool = False,
        may_wait: bool = False,
        is_best_effort: bool = False,
    ) -> Send:
        request_id = entry.request.request_id
        self._entries[request_id] = entry
        reserve_blocks = ReserveBlocks(request_id, entry.attempt, num_blocks, is_copy, may_wait, is_best_effort)
        return Send(entry.target, reserve_blocks)

    def answered(self, peer: str, message: BlocksReserved | ReservationRefused | BlocksTaken, now: float) -> Commands:
        entry = self._entries.get(message.request_id)
        awaited_in = HandoffStage.OFFERED if isinstance(message, BlocksTaken) else HandoffStage.ASKED
        if entry is None or (entry.target, entry.attempt, entry.stage) != (peer, message.attempt, awaited_in):
            return []
        if isinstance(message, BlocksReserved):
            entry.stage, entry.reserved = HandoffStage.RESERVED, message
            return self._reserved(entry)
        if isinstance(message, ReservationRefused):
            return self._end(entry, HandoffEnd.REFUSED, now)
        return self._end(entry, HandoffEnd.TAKEN if message.is_accepted else HandoffEnd.FAILED, now)

    def copy(self, entry: OutgoingT, block_ids: tuple[BlockId, ...]) -> OffloadBlocks:
        reserved = entry.reserved
        assert reserved is not None, "copied without a reservation"
        entry.stage = HandoffStage.COPYING
        request_id, target_ids = reserved.request_id, reserved.block_ids[: len(block_ids)]
        where = (entry.target, target_ids, reserved.generation, reserved.lease_id)
        return OffloadBlocks(request_id, reserved.attempt, block_ids, *where)

    def copied(self, event: BlocksOffloaded | BlocksRelayed, now: float) -> Commands:
        command = event.command
        entry = self._entries[command.request_id]
        assert (entry.stage, entry.attempt) == (HandoffStage.COPYING, command.attempt), "a copy that was not begun"
        if entry.is_aborted:
            return [*self._cancel(entry), *self._aborted(entry)]
        if event.runs is None or entry.is_target_lost:
            return self.give_up(entry, now)
        assert command.lease_id is not None, "a copy without a lease"
        entry.stage = HandoffStage.OFFERED
        num_cached, *described = self._contents(entry, now)
        copy = BlockCopy(command.generation, num_cached, event.runs)
        # Fields that both have, in the same order, which no type checker follows.
        written = BlocksWritten(command.lease_id, copy, entry.attempt, entry.request, *described)  # type: ignore[arg-type]
        return [Send(entry.target, written)]

    def lost(self, peer: str, now: float) -> list[WorkerCommand]:
        commands: list[WorkerCommand] = []
        for entry in [entry for entry in self if entry.target == peer]:
            entry.is_target_lost = True
            if entry.stage is not HandoffStage.COPYING:
                is_offered = entry.stage is HandoffStage.OFFERED
                commands += self._end(entry, HandoffEnd.UNKNOWN if is_offered else HandoffEnd.FAILED, now)
        return commands

    def abort(self, entry: OutgoingT) -> Commands:
        """End the handoff of a request that nobody wants any more, now or when its copy has ended."""
        entry.is_aborted = True
        return [] if entry.stage is HandoffStage.COPYING else [*self._cancel(entry), *self._aborted(entry)]

    def give_up(self, entry: OutgoingT, now: float) -> Commands:
        return [*self._cancel(entry), *self._ended(entry, HandoffEnd.FAILED, now)]

    def _end(self, entry: OutgoingT, how: HandoffEnd, now: float) -> Commands:
        del self._entries[entry.request.request_id]
        return self._ended(entry, how, now)

    def _cancel(self, entry: OutgoingT) -> list[Send]:
        del self._entries[entry.request.request_id]
        cancelled = CancelReservation(entry.request.request_id, entry.attempt)
        return [] if entry.is_target_lost else [Send(entry.target, cancelled)]


# Prefetches leave this share of a buffer free, so that an eviction finds free blocks without waiting.
_EVICTION_SHARE = 0.25
# Evictions of best effort leave this share free, so that chat finds blocks that comes straight from a prefill worker.
_CHAT_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Blocks of the buffer that this worker has in another's memory."""

    peer: str
    link_epoch: int  # of the link to it: a buffer does not outlive its link
    block_ids: tuple[BlockId, ...]
    generation: int  # stamped on them by their writer


class BufferSpace:
    """One allocator for each linked prefill worker. This worker alone places blocks in its buffers."""

    def __init__(self) -> None:
        self._allocators: dict[str, BlockAllocator] = {}
        self._far: dict[str, None] = {}  # those beside another pool
        self._link_epochs: dict[str, int] = {}
        self._num_link_epochs = 0
        self._generation = 0
        self.version = 0  # changes with the free blocks

    def opened(self, peer: str, num_blocks: int, *, is_far: bool = False) -> None:
        """Add the empty buffer that a worker offers, in place of an earlier one. `is_far`: only direct requests come
        in."""
        self._far.pop(peer, None)
        if is_far:
            self._far[peer] = None
        self._num_link_epochs += 1
        self.version += 1
        self._allocators[peer] = BlockAllocator(num_blocks)
        self._link_epochs[peer] = self._num_link_epochs

    def lost(self, peer: str) -> None:
        self._allocators.pop(peer, None)
        self._far.pop(peer, None)
        self._link_epochs.pop(peer, None)

    def holds(self, slot: BufferSlot) -> bool:
        return self._link_epochs.get(slot.peer) == slot.link_epoch

    def is_far(self, slot: BufferSlot) -> bool:
        return slot.peer in self._far

    @property
    def num_used(self) -> int:
        return sum(allocator.num_used for allocator in self._allocators.values())

    @property
    def is_short(self) -> bool:
        near = [allocator for peer, allocator in self._allocators.items() if peer not in self._far]
        free = [allocator.num_free / max(allocator.num_blocks, 1) for allocator in near]
        return bool(free) and max(free) < _EVICTION_SHARE

    def for_prefetch(self, num_blocks: int) -> BufferSlot | None:
        return self._allocate(num_blocks, _EVICTION_SHARE, None)

    def for_eviction(self, num_blocks: int, *, leaves_room: bool = False) -> BufferSlot | None:
        """Allocate in the emptiest buffer. `leaves_room`: except the share kept for chat."""
        return self._allocate(num_blocks, _CHAT_SHARE if leaves_room else 0.0, None)

    def at(self, peer: str, num_blocks: int) -> BufferSlot | None:
        return self._allocate(num_blocks, 0.0, peer)

    def free(self, slot: BufferSlot) -> None:
        self.version += 1
        if self.holds(slot):
            self._allocators[slot.peer].free(slot.block_ids)

    def _allocate(self, num_blocks: int, share_kept: float, wanted: str | None) -> BufferSlot | None:
        peers = [peer for peer in self._allocators if peer == wanted or (wanted is None and peer not in self._far)]
        peer = max(peers, key=lambda name: (self._allocators[name].num_free, name), default=None)
        if peer is None:
            return None
        allocator = self._allocators[peer]
        if allocator.num_free - num_blocks < share_kept * allocator.num_blocks:
            return None
        block_ids = allocator.allocate(num_blocks)
        assert block_ids is not None, "fewer blocks than were counted"
        self._generation += 1
        return BufferSlot(peer, self._link_epochs[peer], block_ids, self._generation)


class Lending(NamedTuple):
    """Memory that an elastic worker lends to its node."""

    buffer_bytes: int
    peers: tuple[str, ...]  # as planned


class Lender:
    """The workers that are linked, and which of them have a buffer here."""

    def __init__(self) -> None:
        self._link_epochs: dict[str, int] = {}  # of the workers linked now
        self._num_link_epochs = 0
        self._lent: dict[str, None] = {}

    def lends_to(self, peer: str) -> bool:
        return peer in self._lent

    def link_epoch(self, peer: str) -> int | None:
        return self._link_epochs.get(peer)

    def connected(self, peer: str) -> OpenBuffer:
        self._num_link_epochs += 1
        self._link_epochs[peer] = self._num_link_epochs
        return OpenBuffer(peer, self._num_link_epochs)

    def opened(self, event: BufferOpened) -> list[Send]:
        if self._link_epochs.get(event.peer) != event.link_epoch or event.offered is None:
            return []
        self._lent[event.peer] = None
        return [Send(event.peer, event.offered)]

    def disconnected(self, peer: str) -> CloseBuffer:
        del self._link_epochs[peer]
        self._lent.pop(peer, None)
        return CloseBuffer(peer)


@dataclass(slots=True, eq=False)
class Incoming:
    """One request that may come."""

    attempt: int  # of the sender
    slot: BufferSlot  # at the sender
    block_ids: tuple[BlockId, ...] = ()  # here
    written: BlocksWritten | None = None  # its cache is there
    is_aborted: bool = False


class HandoffReceiver:
    """The receiver's side: reservations by request, where the sender lends the memory to write to.

    BlocksWritten is believed of exactly what was reserved. A reservation ends with a later attempt,
    CancelReservation, the loss of its sender, or an offer that is not believed; during a load it ends with the
    load.
    """

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
        return self._entries.pop(request_id)

    def cancel(self, request_id: RequestId, attempt: int | None = None) -> None:
        """Give up a request that is to come; with an attempt, only that one and earlier ones."""
        entry = self._entries.get(request_id)
        if entry is not None and (attempt is None or entry.attempt <= attempt):
            self._give_up(request_id, entry)

    def cancel_all(self, peer: str | None = None) -> None:
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
    copy = written.copy
    if not 0 < copy.num_blocks <= len(block_ids):
        return False  # checked before the runs are expanded: they may claim anything
    covered = tuple(run.first_block + offset for run in copy.runs for offset in range(run.num_blocks))
    is_there = (copy.generation, copy.num_before) == (generation, 0) and covered == block_ids[: copy.num_blocks]
    return is_there and blocks_for(copy.context_len, block_size) + state_blocks == copy.num_blocks
