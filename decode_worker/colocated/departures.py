"""Requests that this worker hands over to others of its node, with their caches; see moves.py."""

import enum
from collections.abc import Sequence
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
from alignedserve.messages.iterations import BlocksOffloaded, BufferOpened, CloseBuffer, OffloadBlocks, OpenBuffer
from alignedserve.messages.workers import MoveRequest
from alignedserve.scheduling.scheduler_state import Progress
from alignedserve.worker_core.router_link import RouterLink
from decode_worker.held_requests import HeldRequest, HeldRequests

DepartureCommand = Send | OffloadBlocks | OpenBuffer | CloseBuffer


class DepartureStage(enum.Enum):
    """Stage of a request that leaves."""

    ASKED = "asked"  # decoded here, while its receiver reserves blocks
    RESERVED = "reserved"  # decoded here, until the iteration in flight has ended
    COPYING = "copying"  # on its way into the buffer of its receiver
    OFFERED = "offered"  # in that buffer; its receiver may have taken it


@dataclass(slots=True, eq=False)
class Departing:
    """One request that is to leave. From COPYING on it is in no iteration, and `progress` replaces its row."""

    tracked: HeldRequest
    target: str
    stage: DepartureStage = DepartureStage.ASKED
    reserved: BlocksReserved | None = None
    progress: Progress | None = None
    is_target_lost: bool = False


class Departures:
    """The buffers lent to other workers, and the requests on their way into them."""

    def __init__(self, held: HeldRequests, router: RouterLink, block_size: int) -> None:
        self._held = held
        self._router = router
        self._block_size = block_size
        self._entries: dict[RequestId, Departing] = {}
        self._link_epochs: dict[str, int] = {}
        self._num_link_epochs = 0
        self._lent: dict[str, None] = {}  # workers that have a buffer here

    # --- other workers

    def connected(self, peer: str) -> list[DepartureCommand]:
        """Open a buffer for a worker that is new or back."""
        self._num_link_epochs += 1
        self._link_epochs[peer] = self._num_link_epochs
        return [OpenBuffer(peer, self._num_link_epochs)]

    def opened(self, event: BufferOpened) -> list[DepartureCommand]:
        """Offer the buffer to the worker that it was made for, if that one is still connected."""
        if self._link_epochs.get(event.peer) != event.link_epoch or event.offered is None:
            return []
        self._lent[event.peer] = None
        return [Send(event.peer, event.offered)]

    def disconnected(self, peer: str, now: float) -> list[DepartureCommand]:
        """Close the buffer of a worker that is gone; what was not offered to it stays."""
        del self._link_epochs[peer]
        self._lent.pop(peer, None)
        commands: list[DepartureCommand] = [CloseBuffer(peer)]
        for entry in [entry for entry in self._entries.values() if entry.target == peer]:
            entry.is_target_lost = True
            if entry.stage is DepartureStage.OFFERED:  # the router alone can know whether it was taken
                self._end(entry)
                commands += self._router.send(entry.tracked.preempted())
            elif entry.stage is not DepartureStage.COPYING:
                commands += self._stay(entry, now)
        return commands

    # --- one request, step by step

    def ordered(self, message: MoveRequest, now: float) -> list[DepartureCommand]:
        """Ask the receiver for blocks, if the request can leave."""
        request_id, attempt, target = message.request_id, message.attempt, str(message.to)
        tracked = self._held.get(request_id)
        is_current = tracked is not None and tracked.attempt == attempt and request_id not in self._entries
        if tracked is None or not is_current or target not in self._lent or not self._can_leave(tracked):
            return [*self._router.stayed(request_id, attempt)]
        self._entries[request_id] = Departing(tracked, target)
        # One more than it has: the iteration in flight may need another.
        return [Send(target, ReserveBlocks(request_id, attempt, len(tracked.block_ids) + 1, may_wait=False))]

    def answered(self, peer: str, message: BlocksReserved | ReservationRefused, now: float) -> list[DepartureCommand]:
        """Note the receiver's answer to ReserveBlocks."""
        entry = self._entry(peer, message.request_id, message.attempt, DepartureStage.ASKED)
        if isinstance(message, ReservationRefused):
            return self._stay(entry, now) if entry is not None else []
        if entry is None:
            return [Send(peer, CancelReservation(message.request_id, message.attempt))]
        entry.stage, entry.reserved = DepartureStage.RESERVED, message
        return []

    def leave(self, now: float) -> list[DepartureCommand]:
        """Copy out what may leave; to be called while no iteration is in flight."""
        commands: list[DepartureCommand] = []
        for entry in [one for one in self._entries.values() if one.stage is DepartureStage.RESERVED]:
            tracked, reserved = entry.tracked, entry.reserved
            assert reserved is not None, "reserved without blocks"
            is_here = self._held.get(tracked.request.request_id) is tracked
            has_grown = len(tracked.block_ids) > len(reserved.block_ids)
            if not is_here or has_grown or not self._can_leave(tracked):
                commands += self._stay(entry, now)
                continue
            entry.progress = self._held.detach(tracked)
            entry.stage = DepartureStage.COPYING
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

    def offloaded(self, event: BlocksOffloaded, now: float) -> list[DepartureCommand]:
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

    def taken(self, peer: str, message: BlocksTaken, now: float) -> list[DepartureCommand]:
        """Free the blocks if the receiver has taken the request; otherwise keep it here."""
        entry = self._entry(peer, message.request_id, message.attempt, DepartureStage.OFFERED)
        if entry is None:
            return []
        if not message.is_accepted:
            return self._stay(entry, now)
        self._end(entry)
        return []

    def abort(self, request_id: RequestId, attempt: int | None) -> None:
        """Abort a request that is leaving; with an attempt, only that one and earlier ones."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.tracked.is_up_to(attempt):
            return
        entry.tracked.is_aborted = True
        if entry.stage is DepartureStage.OFFERED:
            self._end(entry)  # if it was taken, the router learns of it and tells the receiver

    def stay_all(self, now: float) -> list[DepartureCommand]:
        """Decode on here what has not been copied yet."""
        early = (DepartureStage.ASKED, DepartureStage.RESERVED)
        entries = [entry for entry in self._entries.values() if entry.stage in early]
        return [command for entry in entries for command in self._stay(entry, now)]

    def request_ids(self) -> Sequence[RequestId]:
        """Return the requests that are leaving."""
        return list(self._entries)

    # --- inside

    def _can_leave(self, tracked: HeldRequest) -> bool:
        """Return whether it decodes, can be copied, and leaves room for the others while its blocks are held."""
        if tracked.is_aborted or tracked.is_finished or not tracked.is_prefilled:
            return False
        is_portable = self._held.is_portable(tracked.request.request_id)
        return is_portable and self._held.has_room_beside(len(tracked.block_ids), leaving=tracked)

    def _entry(self, peer: str, request_id: RequestId, attempt: int, stage: DepartureStage) -> Departing | None:
        entry = self._entries.get(request_id)
        if entry is None or (entry.target, entry.tracked.attempt, entry.stage) != (peer, attempt, stage):
            return None
        return entry

    def _stay(self, entry: Departing, now: float) -> list[DepartureCommand]:
        """Decode the request on here."""
        tracked = entry.tracked
        del self._entries[tracked.request.request_id]
        if entry.progress is not None:
            self._held.attach(tracked, entry.progress, now)
        stayed = self._router.stayed(tracked.request.request_id, tracked.attempt)
        return [*self._cancel(entry), *stayed]

    def _cancel(self, entry: Departing) -> list[DepartureCommand]:
        if entry.is_target_lost or entry.reserved is None:
            return []
        return [Send(entry.target, CancelReservation(entry.tracked.request.request_id, entry.tracked.attempt))]

    def _end(self, entry: Departing) -> None:
        del self._entries[entry.tracked.request.request_id]
        self._held.free_detached(entry.tracked)
