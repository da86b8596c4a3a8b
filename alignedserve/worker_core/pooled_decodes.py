"""Decodes of this worker that wait in the pool of its node, because others need the device's memory.

The life of such a request:
1. The policy lets it leave: it is handed over to the pool as to another worker (moves.py), and its blocks are free.
   The request stays in the worker's table, with its cache elsewhere. The pool has its length in the quad-tree.
2. The policy lets it come back: blocks are held for it, and the pool grants the copy (FetchCopy, CopyGranted), which is
   loaded while others compute.
3. Once verified it decodes on, and the lease is given back (LeasesReleased).
Whatever fails on the way there, it is decoded on; on the way back, or with the pool itself, it is computed again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.core.lifecycle import epoch_end
from alignedserve.messages.caches import (
    ArenaOffered,
    BlocksReserved,
    BlocksTaken,
    CopyGranted,
    CopyMissing,
    FetchCopy,
    LeasesReleased,
    ReservationRefused,
)
from alignedserve.messages.events import PeerDisconnected, Received, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded, BlocksOffloaded, Load, LoadBlocks, MapArena, UnmapArena
from alignedserve.messages.pools import DropRequest
from alignedserve.scheduling.policy import PoolView
from alignedserve.worker_core.handoff import HandoffEnd, HandoffStage
from alignedserve.worker_core.held_requests import HeldRequest, HeldRequests
from alignedserve.worker_core.moves import DepartingRequest, Handoffs
from alignedserve.worker_core.part import Commands, WorkerCommand, WorkerEvent
from alignedserve.worker_core.request import CacheStage

_FIRST_BYTES_PER_S = 2e9  # of a link that nothing is known of
_LEARNED_WEIGHT = 1 / 8  # of the latest copy in the mean
_REFUSED_REST_S = 1.0  # where the pool has no room


@dataclass(slots=True, eq=False)
class _Away:
    tracked: HeldRequest
    num_cached: int  # tokens
    block_ids: tuple[BlockId, ...] = ()  # to come back to; without any it waits there
    lease_id: LeaseId | None = None  # while it is loaded
    began_s: float = 0.0
    is_aborted: bool = False


def is_of_link(event: object) -> bool:
    is_offer = isinstance(event, Received) and isinstance(event.message, ArenaOffered)
    return is_offer or isinstance(event, PeerDisconnected)


class PooledDecodes(Handoffs):
    """The requests on their way to the pool of the node, those there, and those on their way back."""

    def __init__(self, held: HeldRequests, pool: str, *, swap_s: Callable[[float], float]) -> None:
        """`swap_s`: by the cost model, for tokens: what copies take while none has been seen."""
        super().__init__(held)
        self._swap_s = swap_s
        held.num_copying = self._num_copying
        self._pool = pool
        self._is_linked = False
        self._block_s = 0.0  # that a copy of a block takes; learned
        self._is_learned = False
        self._copied_s = 0.0  # when the latest copy ended
        self._rests_until_s = 0.0  # after a refusal
        self._away: dict[RequestId, _Away] = {}
        self._loading: dict[tuple[BlockId, ...], _Away] = {}
        self.num_left = 0  # requests that have left, since the worker started

    # --- for the policy

    def view(self, now: float) -> PoolView | None:
        if not self._is_linked and not self.has_copies:
            return None
        early = [entry.tracked for entry in self.sender if entry.is_early]
        return PoolView(
            block_s=self._block_s,
            has_room=self._is_linked and now >= self._rests_until_s,
            is_busy=self.has_copies,
            leaving=tuple(tracked.request.request_id for tracked in early if self._is_here(tracked)),
            num_coming=sum(self._held.num_own(entry.tracked) for entry in self.sender),
            away={request_id: bool(entry.block_ids) for request_id, entry in self._away.items()},
            num_returning=sum(len(entry.block_ids) for entry in self._away.values()),
        )

    def _is_here(self, tracked: HeldRequest) -> bool:
        return self._held.get(tracked.request.request_id) is tracked

    def rest(self, now: float) -> None:
        self._rests_until_s = now + _REFUSED_REST_S

    @property
    def has_copies(self) -> bool:
        return bool(self.sender or self._loading) or any(entry.block_ids for entry in self._away.values())

    def _num_copying(self) -> int:
        leaving = sum(len(entry.tracked.block_ids) for entry in self.sender if not entry.is_early)
        aborted = sum(len(entry.block_ids) for entry in self._loading.values() if entry.is_aborted)
        return leaving + aborted + sum(len(entry.block_ids) for entry in self._away.values())

    def exchange(self, chosen: Iterable[HeldRequest]) -> Commands:
        return [
            command for tracked in chosen for command in (self._fetch if tracked.is_away else self._depart)(tracked)
        ]

    def _depart(self, tracked: HeldRequest) -> Commands:
        if not self.can_ask(tracked):
            return ()
        return self.ask(tracked, self._pool, is_best_effort=not tracked.is_real_time)

    def _fetch(self, tracked: HeldRequest) -> Commands:
        entry = self._away[tracked.request.request_id]
        num_blocks = self._held.blocks_for(entry.num_cached)
        if num_blocks > self._held.state.num_free or self._held.is_copying_out:
            return []
        tracked.go(CacheStage.ASKING)
        entry.block_ids = self._held.hold(num_blocks)
        return [Send(self._pool, FetchCopy(tracked.request.request_id, tracked.attempt))]

    @override
    def takes(self, event: WorkerEvent) -> bool:
        match event:
            case PeerDisconnected(Role.KV_POOL, peer) | Received(peer, ArenaOffered()):
                return peer == self._pool
            case Received(peer, message):
                return peer == self._pool and isinstance(
                    message, BlocksReserved | ReservationRefused | BlocksTaken | CopyGranted | CopyMissing
                )
            case BlocksLoaded():
                return any(load.block_ids in self._loading for load in event.loads)
            case BlocksOffloaded():
                return event.command.target == self._pool and bool(event.command.request_id)
        return False

    @override
    def on_event(self, event: WorkerEvent, now: float) -> Commands:
        match event:
            case Received(_, ArenaOffered(block_bytes=block_bytes) as offered):
                self._is_linked = True
                if not self._is_learned:
                    self._block_s = self._swap_s(self._held.block_size) or block_bytes / _FIRST_BYTES_PER_S
                return [MapArena(self._pool, offered)]
            case PeerDisconnected():
                return [UnmapArena(self._pool), *self._disconnected(now)]
            case Received(peer, BlocksReserved() | ReservationRefused() | BlocksTaken() as answer):
                if isinstance(answer, ReservationRefused):
                    self.rest(now)
                return self.sender.answered(peer, answer, now)
            case Received(_, CopyGranted() as granted):
                return self._granted(granted, now)
            case Received(_, CopyMissing(request_id, attempt)):
                entry = self._asked(request_id, attempt)
                return self._lose(entry) if entry is not None else ()
            case BlocksOffloaded():
                if (leaving := self.sender.get(event.command.request_id)) is not None:
                    self._learn(event.command.block_ids, leaving.began_s, now)
                return self.sender.copied(event, now)
            case BlocksLoaded():
                return [command for load in event.loads for command in self._loaded(load, event, now)]
        raise AssertionError("an event of others")

    def _disconnected(self, now: float) -> Commands:
        self._is_linked = False
        commands: list[WorkerCommand] = [*self.sender.lost(self._pool, now)]
        for entry in [entry for entry in self._away.values() if entry.lease_id is None]:
            self._lose(entry)
        return commands

    @override
    def abort(self, request_id: RequestId, attempt: int | None) -> Commands:
        commands, entry = [*super().abort(request_id, attempt)], self._away.get(request_id)
        if entry is not None and entry.tracked.is_up_to(attempt):
            del self._away[request_id]
            entry.is_aborted = True
            if entry.lease_id is None:
                self._held.free_held(entry.block_ids)
            commands += self._drop(entry.tracked)
        return commands

    # --- the giver's side

    @override
    def can_leave(self, tracked: HeldRequest) -> bool:
        is_decoding = tracked.is_prefilled and not (tracked.is_aborted or tracked.is_finished)
        return is_decoding and self._held.is_portable(tracked.request.request_id)

    @override
    def _ended(self, entry: DepartingRequest, how: HandoffEnd, now: float) -> Commands:
        if how is HandoffEnd.UNKNOWN:  # what the pool had is gone with it
            how = HandoffEnd.FAILED
        super()._ended(entry, how, now)
        if how is HandoffEnd.TAKEN:
            assert entry.progress is not None, "taken before it was copied"
            self.num_left += 1
            self._held.send_away(entry.tracked, entry.progress, now)
            self._away[entry.request.request_id] = _Away(entry.tracked, entry.progress.num_cached)
        return ()

    @override
    def _aborted(self, entry: DepartingRequest) -> Commands:
        super()._aborted(entry)
        return self._drop(entry.tracked) if entry.stage is HandoffStage.OFFERED else ()

    # --- the way back

    def _granted(self, granted: CopyGranted, now: float) -> Commands:
        handoff = granted.handoff
        entry, copy = self._asked(handoff.request.request_id, granted.attempt), handoff.copy
        if entry is None:
            return self._release(handoff.lease_id)
        if (copy.context_len, copy.num_blocks, copy.num_before) != (entry.num_cached, len(entry.block_ids), 0):
            return [*self._release(handoff.lease_id), *self._lose(entry)]
        entry.tracked.go(CacheStage.LOADING)
        entry.lease_id, entry.began_s = handoff.lease_id, now
        self._loading[entry.block_ids] = entry
        return [LoadBlocks(self._pool, (Load(handoff.request.request_id, copy, entry.block_ids),))]

    def _asked(self, request_id: RequestId, attempt: int) -> _Away | None:
        entry = self._away.get(request_id)
        is_asked = entry is not None and entry.tracked.attempt == attempt and bool(entry.block_ids)
        return entry if is_asked and entry is not None and entry.lease_id is None else None

    def _loaded(self, load: Load, event: BlocksLoaded, now: float) -> Commands:
        entry = self._loading.pop(load.block_ids)
        assert entry.lease_id is not None, "loaded without a lease"
        self._learn(load.block_ids, now - event.duration_s if event.duration_s else entry.began_s, now)
        released = self._release(entry.lease_id)
        if entry.is_aborted:
            self._held.free_held(entry.block_ids)
        elif load.request_id in event.refused:
            self._lose(entry)
        else:
            del self._away[load.request_id]
            self._held.bring_back(entry.tracked, entry.block_ids)
        return released

    def _lose(self, entry: _Away) -> Commands:
        del self._away[entry.tracked.request.request_id]
        self._held.free_held(entry.block_ids)
        self._held.bring_back(entry.tracked, ())
        return ()

    def _release(self, lease_id: LeaseId) -> Commands:
        return [Send(self._pool, LeasesReleased((lease_id,)))] if self._is_linked else []

    def _drop(self, tracked: HeldRequest) -> list[Send]:
        message = DropRequest(tracked.request.request_id, epoch_end(tracked.attempt))
        return [Send(self._pool, message)] if self._is_linked else []

    # --- the speed of copies

    def _learn(self, block_ids: Sequence[BlockId], began_s: float, now: float) -> None:
        taken_s = max(now - max(began_s, self._copied_s), 0.0) / len(block_ids)
        self._block_s += (taken_s - self._block_s) * (_LEARNED_WEIGHT if self._is_learned else 1.0)
        self._is_learned, self._copied_s = True, now
