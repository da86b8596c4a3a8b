"""Load of a decode worker, as reported to the router."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from alignedserve.messages.caches import DecodePace
from alignedserve.messages.events import Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.request_notes import Cause
from alignedserve.messages.workers import PACKED_FROM, JoinedBatch, WorkerLoad
from alignedserve.scheduling.policy import IterationHistory
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.request import CacheStage
from alignedserve.worker_core.request_notes import WaitingRequest
from decode_worker.batching.batch_order import BatchOrder
from decode_worker.batching.candidates import Candidates
from decode_worker.batching.eviction import Evictions
from decode_worker.batching.running_batch import span_of
from decode_worker.batching.scheduled_batch import DecodeBatch

_WIDEST_JOIN = 1.5  # longest over shortest of the lengths that may join
_SPAN_STEP = 16  # tokens; the running range is reported in such steps
_ROOM_ITERATIONS = 4  # where slack is packed, the room is counted again after so many


class _CandidateCounts(NamedTuple):
    num_joining: int = 0  # candidates of the running batch
    num_following: int = 0  # and of the next
    num_blocks: int = 0  # that both will take
    num_real_time: int = 0  # of those that follow, where classes are known; of all, where slack is packed


class LoadCounter:
    """Counts for placement. Called at every event, so what takes a loop is counted only when it has changed."""

    def __init__(self, batch: DecodeBatch, candidates: Candidates, order: BatchOrder, evictions: Evictions) -> None:
        self._batch = batch
        self._candidates = candidates
        self._order = order
        self._evictions = evictions
        self._waiting_of: tuple[int, int] | None = None  # versions for which `_waiting` was counted
        self._waiting = _CandidateCounts()
        self._range_of: tuple[int, int, int, int] | None = None
        self._range: JoinedBatch | None = None
        self._reported: WorkerLoad | None = None

    def report(self, num_verified: int, num_iterations: int, *, is_due: bool) -> WorkerLoad | None:
        waiting = self._count_waiting()
        load = WorkerLoad(
            num_running=self._batch.num_holding,
            num_candidate_requests=waiting.num_joining,
            num_batch_candidates=waiting.num_following,
            num_candidate_blocks=waiting.num_blocks,
            num_handoffs_verified=num_verified,
            num_evictions=self._evictions.num_evictions + self._batch.num_preemptions,
            running=self._running_range(num_iterations),
            num_real_time_candidates=waiting.num_real_time,
        )
        if load == self._reported and not is_due:
            return None
        self._reported = load
        return msgspec.structs.replace(load, num_free_blocks=self._batch.num_free)

    def waiting(self) -> Iterator[WaitingRequest]:
        num_running = self._batch.num_holding
        for candidate in self._candidates:
            yield WaitingRequest(candidate.request.request_id, self._cause_of(candidate), num_running)

    def _cause_of(self, candidate: Candidate) -> Cause:
        if not self._order.joins_running(candidate):
            return Cause.EARLIER_BATCH
        if candidate.stage is CacheStage.PREFETCHING:
            return Cause.PREFETCH
        if not self._batch.has_place:
            return Cause.BATCH_FULL
        is_short = self._batch.num_free < self._batch.blocks_for(candidate.context_len)
        return Cause.BLOCKS_SHORT if is_short else Cause.OTHERS_FIRST

    def _count_waiting(self) -> _CandidateCounts:
        versions = (self._candidates.version, self._order.version)
        if versions != self._waiting_of:
            staying = [candidate for candidate in self._candidates if candidate.stage is not CacheStage.RETURNING]
            num_joining = sum(self._order.joins_running(candidate) for candidate in staying)
            num_blocks = sum(self._batch.blocks_for(candidate.context_len) for candidate in staying)
            self._waiting_of = versions
            following = [candidate for candidate in staying if not self._order.joins_running(candidate)]
            counted = following if self._order.knows_classes else staying if self._batch.packing is not None else ()
            num_real_time = sum(candidate.is_real_time for candidate in counted)
            self._waiting = _CandidateCounts(num_joining, len(staying) - num_joining, num_blocks, num_real_time)
        return self._waiting

    def _running_range(self, num_iterations: int) -> JoinedBatch | None:
        packing = self._batch.packing
        step = _SPAN_STEP if packing is None else _ROOM_ITERATIONS
        state = (self._batch.version, self._order.version, num_iterations // step, self._batch.num_holding)
        if state != self._range_of:
            self._range_of, self._range = state, self._count_range()
        if packing is not None and self._range is not None and not packing.wants_more(self._waiting.num_joining):
            return None
        return self._range

    def _count_range(self) -> JoinedBatch | None:
        packing = self._batch.packing
        if packing is not None and len(self._batch) and packing.mixes_freely():
            room = packing.room(self._batch.loading.candidates())
            return JoinedBatch(self._order.running_id, PACKED_FROM, room) if room else None
        span = span_of(self._batch, self._order.running_id) if self._order.is_aligned else None
        if span is None:
            return None
        # A batch that had to be widened to be large enough does not stay wide by requests that join it.
        shortest, longest = max(span[0], int(span[1] / _WIDEST_JOIN)), span[1]
        start, stop = shortest // _SPAN_STEP * _SPAN_STEP, -(-(longest + 1) // _SPAN_STEP) * _SPAN_STEP
        return JoinedBatch(self._order.running_id, start, stop)


_LEAST_CHANGE = 0.1  # share of what was told last


class Pace:
    """Seconds that an iteration of the running batch takes: by the cost model, or without one a mean of the latest."""

    def __init__(self, pool_name: str, decode_s: Callable[[], float | None] | None) -> None:
        """`decode_s`: by the cost model; None: there is none. It gives None where nothing decodes."""
        self._pool_name = pool_name
        self._decode_s = decode_s
        self._history = IterationHistory()
        self._reported_s: float | None = None  # None: the pool is not linked

    def connected(self, role: Role, peer: str) -> None:
        if role is Role.KV_POOL and peer == self._pool_name:
            self._reported_s = 0.0

    def disconnected(self, peer: str) -> None:
        if peer == self._pool_name:
            self._reported_s = None

    def note(self, duration_s: float) -> None:
        self._history.note(duration_s)

    def report(self) -> list[Send]:
        iteration_s = self.iteration_s()
        if self._reported_s is None or abs(iteration_s - self._reported_s) <= _LEAST_CHANGE * self._reported_s:
            return []
        self._reported_s = iteration_s
        return [Send(self._pool_name, DecodePace(iteration_s))]

    def iteration_s(self) -> float:
        predicted_s = self._decode_s() if self._decode_s is not None else None
        return self._history.mean_s if predicted_s is None else predicted_s
