"""The giver's side of a handoff: a request leaves with its cache, for another worker or for the pool of the node.

1. The receiver is asked for blocks (ReserveBlocks) while the request is decoded on.
2. BlocksReserved: between two iterations it is taken out, and its cache is copied. ReservationRefused: it stays.
3. BlocksWritten: the receiver checks what was copied, and answers BlocksTaken. Until then its blocks are held here, so
   that whatever fails it is decoded on.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import RequestId
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
from alignedserve.messages.iterations import BlocksOffloaded, OffloadBlocks
from alignedserve.scheduling.scheduler_state import Progress
from decode_worker.held_requests import HeldRequest, HeldRequests

HandoffCommand = Send | OffloadBlocks


class DepartureStage(enum.Enum):
    """Stage of a request that leaves."""

    ASKED = "asked"  # decoded here, while its receiver reserves blocks
    RESERVED = "reserved"  # decoded here, until the iteration in flight has ended
    COPYING = "copying"  # on its way into the blocks that its receiver has reserved
    OFFERED = "offered"  # in those; its receiver may have taken it


@dataclass(slots=True, eq=False)
class Departing:
    """One request that is to leave. From COPYING on it is in no iteration, and `progress` replaces its row."""

    tracked: HeldRequest
    target: str
    stage: DepartureStage = DepartureStage.ASKED
    reserved: BlocksReserved | None = None
    progress: Progress | None = None
    began_s: float = 0.0  # of its copy
    is_target_lost: bool = False

    @property
    def is_early(self) -> bool:
        """True while it is decoded here."""
        return self.stage in (DepartureStage.ASKED, DepartureStage.RESERVED)


class Handoffs:
    """The requests that leave. What follows from the end of a handoff is for its kinds to say."""

    def __init__(self, held: HeldRequests, block_size: int) -> None:
        self._held = held
        self._block_size = block_size
        self._entries: dict[RequestId, Departing] = {}

    # --- what its kinds say

    def _stayed(self, entry: Departing, now: float) -> Sequence[HandoffCommand]:
        """Return what follows for others from a request that is decoded on here."""
        raise NotImplementedError

    def _left(self, entry: Departing, now: float) -> Sequence[HandoffCommand]:
        """Return what follows from a request that its receiver has taken; its blocks are free."""
        raise NotImplementedError

    def _offered_to_lost(self, entry: Departing, now: float) -> Sequence[HandoffCommand]:
        """Return what follows from a request whose receiver is lost, and may have taken it."""
        raise NotImplementedError

    # --- one request, step by step

    def ask(self, tracked: HeldRequest, target: str, *, is_best_effort: bool = False) -> list[HandoffCommand]:
        """Ask the receiver for blocks, for a request that can leave."""
        request_id, attempt = tracked.request.request_id, tracked.attempt
        self._entries[request_id] = Departing(tracked, target)
        tracked.is_leaving = True
        # One more than it has: the iteration in flight may need another.
        num_blocks = len(tracked.block_ids) + 1
        asked = ReserveBlocks(request_id, attempt, num_blocks, may_wait=False, is_best_effort=is_best_effort)
        return [Send(target, asked)]

    def answered(self, peer: str, message: BlocksReserved | ReservationRefused, now: float) -> list[HandoffCommand]:
        """Note the receiver's answer to ReserveBlocks."""
        entry = self._entry(peer, message.request_id, message.attempt, DepartureStage.ASKED)
        if isinstance(message, ReservationRefused):
            return self._stay(entry, now) if entry is not None else []
        if entry is None:
            return [Send(peer, CancelReservation(message.request_id, message.attempt))]
        entry.stage, entry.reserved = DepartureStage.RESERVED, message
        return []

    def leave(self, now: float) -> list[HandoffCommand]:
        """Copy out what may leave; to be called while no iteration is in flight."""
        commands: list[HandoffCommand] = []
        for entry in [one for one in self._entries.values() if one.stage is DepartureStage.RESERVED]:
            tracked, reserved = entry.tracked, entry.reserved
            assert reserved is not None, "reserved without blocks"
            is_here = self._held.get(tracked.request.request_id) is tracked
            has_grown = len(tracked.block_ids) > len(reserved.block_ids)
            if not is_here or has_grown or not self.can_leave(tracked):
                commands += self._stay(entry, now)
                continue
            entry.progress = self._held.detach(tracked)
            entry.stage, entry.began_s = DepartureStage.COPYING, now
            num_blocks = blocks_for(entry.progress.num_cached, self._block_size)
            commands.append(
                OffloadBlocks(
                    reserved.request_id,
                    reserved.attempt,
                    tuple(tracked.block_ids[:num_blocks]),
                    entry.target,
                    reserved.block_ids[:num_blocks],
                    reserved.generation,
                    reserved.lease_id,
                )
            )
        return commands

    def offloaded(self, event: BlocksOffloaded, now: float) -> list[HandoffCommand]:
        """Offer the request to its receiver, or keep it if the copy failed."""
        command = event.command
        entry = self._entry(command.target, command.request_id, command.attempt, DepartureStage.COPYING)
        assert entry is not None, "a copy ended that was not started"
        assert entry.progress is not None, "copied without progress"
        assert command.lease_id is not None, "copied without a lease"
        tracked = entry.tracked
        if tracked.is_aborted:
            self._end(entry)
            return self._cancel(entry)
        if event.runs is None or entry.is_target_lost:
            return self._stay(entry, now)
        entry.stage = DepartureStage.OFFERED
        progress = entry.progress
        written = BlocksWritten(
            command.lease_id,
            BlockCopy(command.generation, progress.num_cached, event.runs),
            tracked.attempt,
            tracked.request,
            tuple(tracked.generated_token_ids),
            progress.predicted_len,
            max(now - progress.first_token_s, 0.0),
        )
        return [Send(entry.target, written)]

    def taken(self, peer: str, message: BlocksTaken, now: float) -> list[HandoffCommand]:
        """Free the blocks if the receiver has taken the request; otherwise keep it here."""
        entry = self._entry(peer, message.request_id, message.attempt, DepartureStage.OFFERED)
        if entry is None:
            return []
        if not message.is_accepted:
            return self._stay(entry, now)
        self._end(entry)
        return [*self._left(entry, now)]

    def lost(self, peer: str, now: float) -> list[HandoffCommand]:
        """Keep what was to go to a receiver that is gone."""
        commands: list[HandoffCommand] = []
        for entry in [entry for entry in self._entries.values() if entry.target == peer]:
            entry.is_target_lost = True
            if entry.stage is DepartureStage.OFFERED:
                commands += self._offered_to_lost(entry, now)
            elif entry.stage is not DepartureStage.COPYING:
                commands += self._stay(entry, now)
        return commands

    def abort(self, request_id: RequestId, attempt: int | None) -> Departing | None:
        """Abort a request that is leaving; with an attempt, only that one and earlier ones.

        Return it if its receiver may have taken it.
        """
        entry = self._entries.get(request_id)
        if entry is None or not entry.tracked.is_up_to(attempt):
            return None
        entry.tracked.is_aborted = True
        if entry.stage is not DepartureStage.OFFERED:
            return None
        self._end(entry)
        return entry

    def stay_all(self, now: float) -> list[HandoffCommand]:
        """Decode on here what has not been copied yet."""
        entries = [entry for entry in self._entries.values() if entry.is_early]
        return [command for entry in entries for command in self._stay(entry, now)]

    def entries(self) -> Iterable[Departing]:
        """Return the requests that are leaving."""
        return self._entries.values()

    def request_ids(self) -> Sequence[RequestId]:
        """Return the requests that are leaving."""
        return list(self._entries)

    def peers(self) -> set[str]:
        """Return the workers that they are on their way to."""
        return {entry.target for entry in self._entries.values()}

    def can_ask(self, tracked: HeldRequest) -> bool:
        """Return whether it can leave, and neither does already nor follows an attempt that still does."""
        is_free = not tracked.is_leaving and tracked.request.request_id not in self._entries
        return is_free and self.can_leave(tracked)

    def can_leave(self, tracked: HeldRequest) -> bool:
        """Return whether it decodes, can be copied, and leaves room for the others while its blocks are held."""
        if tracked.is_aborted or tracked.is_finished or not tracked.is_prefilled:
            return False
        is_portable = self._held.is_portable(tracked.request.request_id)
        return is_portable and self._held.has_room_beside(len(tracked.block_ids), leaving=tracked)

    # --- inside

    def _entry(self, peer: str, request_id: RequestId, attempt: int, stage: DepartureStage) -> Departing | None:
        entry = self._entries.get(request_id)
        if entry is None or (entry.target, entry.tracked.attempt, entry.stage) != (peer, attempt, stage):
            return None
        return entry

    def _stay(self, entry: Departing, now: float) -> list[HandoffCommand]:
        """Decode the request on here."""
        tracked = entry.tracked
        tracked.is_leaving = False
        del self._entries[tracked.request.request_id]
        if entry.progress is not None:
            self._held.attach(tracked, entry.progress, now)
        return [*self._cancel(entry), *self._stayed(entry, now)]

    def _cancel(self, entry: Departing) -> list[HandoffCommand]:
        if entry.is_target_lost or entry.reserved is None:
            return []
        return [Send(entry.target, CancelReservation(entry.tracked.request.request_id, entry.tracked.attempt))]

    def _end(self, entry: Departing) -> None:
        entry.tracked.is_leaving = False
        del self._entries[entry.tracked.request.request_id]
        self._held.free_detached(entry.tracked)
