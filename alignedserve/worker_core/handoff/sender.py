"""The sender's side of a handoff: a request leaves with its cache, for another worker or for a pool.

1. ASKED (ReserveBlocks): the receiver looks for blocks. ReservationRefused ends the handoff.
2. RESERVED (BlocksReserved): it holds blocks for the request. The sender begins to copy when that suits it.
3. COPYING: the cache is read, and must not be freed. If the copy fails, the receiver is told (CancelReservation).
4. OFFERED (BlocksWritten): the receiver checks what was copied. BlocksTaken ends the handoff, whoever has it then.
Until it is taken the request is the sender's. If the receiver is lost, it still is, unless it was OFFERED: then the
receiver may have taken it. An answer that is not awaited is stale, or has come twice, and changes nothing.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from alignedserve.core.ids import BlockId, RequestId
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
from alignedserve.messages.iterations import BlocksOffloaded, BlocksRelayed, OffloadBlocks


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
CommandT = TypeVar("CommandT")


class Sender(Generic[OutgoingT, CommandT]):
    """Handoffs by request. A sender differs in four functions, and in when it asks and copies.

    `reserved` returns what follows once a receiver holds blocks, `ended` and `aborted` what follows from the end of a
    handoff, which is forgotten by then; `contents` describes what is offered.
    """

    def __init__(
        self,
        *,
        reserved: Callable[[OutgoingT], Sequence[CommandT]],
        contents: Callable[[OutgoingT, float], Contents],
        ended: Callable[[OutgoingT, HandoffEnd, float], Sequence[CommandT]],
        aborted: Callable[[OutgoingT], Sequence[CommandT]],
    ) -> None:
        self._reserved = reserved
        self._contents = contents
        self._ended = ended
        self._aborted = aborted
        self._entries: dict[RequestId, OutgoingT] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[OutgoingT]:
        """Iterate over all handoffs as they are now, in the order in which they began."""
        return iter(list(self._entries.values()))

    def get(self, request_id: RequestId) -> OutgoingT | None:
        """Return the handoff of this request, if there is one."""
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
        """Begin a handoff: ask the receiver for blocks."""
        request_id = entry.request.request_id
        self._entries[request_id] = entry
        reserve_blocks = ReserveBlocks(request_id, entry.attempt, num_blocks, is_copy, may_wait, is_best_effort)
        return Send(entry.target, reserve_blocks)

    def answered(
        self, peer: str, message: BlocksReserved | ReservationRefused | BlocksTaken, now: float
    ) -> Sequence[CommandT]:
        """Return what follows from a receiver's answer."""
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
        """Begin to copy a cache out of these blocks of the sender."""
        reserved = entry.reserved
        assert reserved is not None, "copied without a reservation"
        entry.stage = HandoffStage.COPYING
        request_id, target_ids = reserved.request_id, reserved.block_ids[: len(block_ids)]
        where = (entry.target, target_ids, reserved.generation, reserved.lease_id)
        return OffloadBlocks(request_id, reserved.attempt, block_ids, *where)

    def copied(self, event: BlocksOffloaded | BlocksRelayed, now: float) -> Sequence[CommandT | Send]:
        """Offer what was copied, unless that failed, or is in vain."""
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

    def lost(self, peer: str, now: float) -> list[CommandT]:
        """End the handoffs to a receiver that is gone; copies go on to their end."""
        commands: list[CommandT] = []
        for entry in [entry for entry in self if entry.target == peer]:
            entry.is_target_lost = True
            if entry.stage is not HandoffStage.COPYING:
                is_offered = entry.stage is HandoffStage.OFFERED
                commands += self._end(entry, HandoffEnd.UNKNOWN if is_offered else HandoffEnd.FAILED, now)
        return commands

    def abort(self, entry: OutgoingT) -> Sequence[CommandT | Send]:
        """End the handoff of a request that nobody wants any more, now or when its copy has ended."""
        entry.is_aborted = True
        return [] if entry.stage is HandoffStage.COPYING else [*self._cancel(entry), *self._aborted(entry)]

    def give_up(self, entry: OutgoingT, now: float) -> Sequence[CommandT | Send]:
        """End a handoff that cannot go on: the sender keeps the request."""
        return [*self._cancel(entry), *self._ended(entry, HandoffEnd.FAILED, now)]

    def _end(self, entry: OutgoingT, how: HandoffEnd, now: float) -> Sequence[CommandT]:
        del self._entries[entry.request.request_id]
        return self._ended(entry, how, now)

    def _cancel(self, entry: OutgoingT) -> list[Send]:
        del self._entries[entry.request.request_id]
        cancelled = CancelReservation(entry.request.request_id, entry.attempt)
        return [] if entry.is_target_lost else [Send(entry.target, cancelled)]
