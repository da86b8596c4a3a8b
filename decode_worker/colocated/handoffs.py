"""Requests that leave with their caches while they decode: for another worker, or for the pool of the node.

While its receiver looks for blocks (worker_core/handoff/sender.py), a request is decoded on. Between two iterations it
is taken out and copied. Its blocks are held here until it is taken, so that whatever fails it is decoded on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.core.ids import RequestId
from alignedserve.messages.events import Send
from alignedserve.messages.iterations import OffloadBlocks
from alignedserve.scheduling.scheduler_state import MovedProgress
from alignedserve.worker_core.handoff.sender import Contents, HandoffEnd, HandoffStage, Outgoing, Sender
from decode_worker.held_requests import HeldRequest, HeldRequests

HandoffCommand = Send | OffloadBlocks


@dataclass(slots=True, eq=False)
class Departing(Outgoing):
    """One request that is to leave. From COPYING on it is in no iteration, and `progress` replaces its row."""

    tracked: HeldRequest
    progress: MovedProgress | None = None
    began_s: float = 0.0  # of its copy

    @property
    def is_early(self) -> bool:
        return self.stage in (HandoffStage.ASKED, HandoffStage.RESERVED)


class Handoffs:
    """The requests that leave. What follows from the end of a handoff is for its kinds to say."""

    def __init__(self, held: HeldRequests) -> None:
        self._held = held
        self.sender: Sender[Departing, HandoffCommand] = Sender(
            reserved=lambda entry: (), contents=_contents_of, ended=self._ended, aborted=self._aborted
        )

    def ask(self, tracked: HeldRequest, target: str, *, is_best_effort: bool = False) -> list[HandoffCommand]:
        tracked.is_leaving = True
        entry = Departing(tracked.request, tracked.attempt, target, tracked)
        # One more than it has: the iteration in flight may need another.
        return [self.sender.ask(entry, len(tracked.block_ids) + 1, is_best_effort=is_best_effort)]

    def leave(self, now: float) -> list[HandoffCommand]:
        """Copy out what may leave; to be called while no iteration is in flight."""
        commands: list[HandoffCommand] = []
        for entry in self.sender:
            if entry.stage is not HandoffStage.RESERVED or entry.reserved is None:
                continue
            tracked = entry.tracked
            is_here = self._held.get(tracked.request.request_id) is tracked
            has_grown = len(tracked.block_ids) > len(entry.reserved.block_ids)
            if not is_here or has_grown or not self.can_leave(tracked):
                commands += self.sender.give_up(entry, now)
                continue
            entry.progress, entry.began_s = self._held.detach(tracked), now
            num_blocks = self._held.blocks_for(entry.progress.num_cached)
            commands.append(self.sender.copy(entry, tuple(tracked.block_ids[:num_blocks])))
        return commands

    def abort(self, request_id: RequestId, attempt: int | None) -> list[HandoffCommand]:
        entry = self.sender.get(request_id)
        if entry is None or not entry.tracked.is_up_to(attempt):
            return []
        entry.tracked.is_aborted = True
        return [*self.sender.abort(entry)]

    def abort_all(self, now: float) -> list[HandoffCommand]:
        """Decode on here what has not been copied yet, and abort the rest."""
        commands: list[HandoffCommand] = []
        for entry in self.sender:
            request_id = entry.request.request_id
            commands += self.sender.give_up(entry, now) if entry.is_early else self.abort(request_id, None)
        return commands

    def can_ask(self, tracked: HeldRequest) -> bool:
        is_free = not tracked.is_leaving and self.sender.get(tracked.request.request_id) is None
        return is_free and self.can_leave(tracked)

    def can_leave(self, tracked: HeldRequest) -> bool:
        if tracked.is_aborted or tracked.is_finished or not tracked.is_prefilled:
            return False
        is_portable = self._held.is_portable(tracked.request.request_id)
        return is_portable and self._held.has_room_beside(len(tracked.block_ids), leaving=tracked)

    def _ended(self, entry: Departing, how: HandoffEnd, now: float) -> Sequence[HandoffCommand]:
        if how not in (HandoffEnd.REFUSED, HandoffEnd.FAILED):
            return Handoffs._aborted(self, entry)
        entry.tracked.is_leaving = False
        if entry.progress is not None:
            self._held.attach(entry.tracked, entry.progress, now)
        return ()

    def _aborted(self, entry: Departing) -> Sequence[HandoffCommand]:
        entry.tracked.is_leaving = False
        if entry.progress is not None:
            self._held.free_detached(entry.tracked)
        return ()


def _contents_of(entry: Departing, now: float) -> Contents:
    tracked, progress = entry.tracked, entry.progress
    assert progress is not None, "copied without progress"
    begun_s, generated = max(now - progress.first_token_s, 0.0), tuple(tracked.generated_token_ids)
    return Contents(progress.num_cached, generated, progress.predicted_len, begun_s, progress.service_s)
