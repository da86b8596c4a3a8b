"""The order of batches on a decode worker, and when the next replaces the running one (AlignedServe, section 3.4).

A full batch (`min_requests` or more) of similar lengths replaces the running batch in two cases: the running batch has
become too small to saturate the worker (and no longer fills its memory), or the full batch has waited for
`starvation_s`. The two mix from the new batch's first request until the last old one has left: the batch switch. A
smaller batch, or a batch of any lengths (FCFS), causes no switch: it joins the running batch, whose lengths are then no
longer similar. With a cost model, a batch may join at any time if its lengths add no cost to the running ones.

Where classes are known, real-time candidates go before best-effort ones, whichever batch came first, and these take
neither place nor memory from them: a batch of chats is due as if no document ran. A full one replaces the running batch
as above; beside documents a smaller one enters like requests that come straight from a prefill worker, and the running
batch stays as aligned as it was. None waits once the next token of one of its chats is late. Documents that have been
copied ahead keep their copies and wait, with their floor (alignedserve/core/class_floor.py).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from alignedserve.core.class_floor import ClassFloor
from alignedserve.core.ids import BatchId, RequestId
from alignedserve.messages.caches import BatchGranted, Handoff
from alignedserve.messages.fields import NO_BATCH
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.held_requests import HeldRequest
from decode_worker.state import RunningRequest


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """Limits that decide when to switch batches."""

    min_requests: int = 36  # a batch of fewer joins what runs
    low_running: int = 36  # with fewer running and no candidate requests, the next batch takes over
    starvation_s: float = 2.0
    low_blocks: int | None = None  # not while this many blocks or more are taken; None: however many
    best_effort_floor: float | None = None  # of best-effort candidates beside real-time ones; None: no classes


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits of the running batch."""

    max_running_requests: int
    switch: SwitchLimits = field(default_factory=SwitchLimits)


@dataclass(slots=True)
class WaitingBatch:
    """A batch granted to this worker; none of its requests runs yet."""

    batch_id: BatchId
    is_aligned: bool
    num_requests: int
    granted_s: float
    is_best_effort: bool = False  # all of it
    late_at_s: float = math.inf  # when the next token of one of its chats is late


def waiting_batch(batch_id: BatchId, granted: BatchGranted, now: float) -> WaitingBatch:
    chats = [handoff for handoff in granted.handoffs if handoff.request.is_real_time]
    late_at_s = min(map(partial(_late_at_s, now=now), chats), default=math.inf)
    return WaitingBatch(batch_id, granted.is_aligned, len(granted.handoffs), now, not chats, late_at_s)


def _late_at_s(chat: Handoff, now: float) -> float:
    tpot_s, is_new = chat.request.slo.tpot_s, len(chat.generated_token_ids) == 1
    return math.inf if tpot_s is None else now + tpot_s - (chat.begun_s if is_new else 0.0)


class HeldCapacity(NamedTuple):
    """What running requests hold of a worker."""

    num_requests: int = 0
    num_blocks: int = 0


_ById = Mapping[BatchId, list[Candidate]]


class BatchOrder:
    """The running batch's number and the batches behind it."""

    def __init__(
        self,
        limits: SwitchLimits,
        is_mixing_cheaper: Callable[[Collection[int]], bool] | None = None,
        *,
        packs: bool = False,
    ) -> None:
        """`is_mixing_cheaper`: whether decodes of these contexts cost less beside the running ones; None: lengths stay
        apart.
        `packs`: a batch that has waited too long joins as well.
        """
        self._limits = limits
        self._is_mixing_cheaper = is_mixing_cheaper
        self._packs = packs
        self._waiting: dict[BatchId, WaitingBatch] = {}
        self.version = 0  # changes with which batches there are
        self.running_id = NO_BATCH
        self.is_aligned = False  # whether what runs is of similar length
        self.is_best_effort = False  # whether the batch that runs was of best effort alone
        self.is_switching = False  # whether requests of the batch before may still run
        floor = limits.best_effort_floor
        self._floor = None if floor is None else ClassFloor(floor)
        self._next_tokens: int | None = None  # of the best-effort candidate that is next; None: there is none
        self.by_floor: RequestId | None = None  # the candidate that goes first by the floor, and holds up no other

    @property
    def knows_classes(self) -> bool:
        return self._floor is not None

    def granted(self, batch: WaitingBatch) -> None:
        self.version += 1
        self._waiting[batch.batch_id] = batch

    def is_outgoing(self, running: RunningRequest | HeldRequest) -> bool:
        return running.batch_id not in (self.running_id, NO_BATCH)

    def is_stray(self, candidate: Candidate) -> bool:
        return candidate.batch_id not in (self.running_id, NO_BATCH) and candidate.batch_id not in self._waiting

    def joins_running(self, candidate: Candidate) -> bool:
        return candidate.batch_id in (self.running_id, NO_BATCH)

    def is_overdue(self, now: float) -> bool:
        following = next(iter(self._waiting.values()), None)
        return following is not None and self._has_waited(following, now)

    def _has_waited(self, batch: WaitingBatch, now: float) -> bool:
        late_at_s = batch.late_at_s if self.knows_classes else math.inf
        return now >= min(batch.granted_s + self._limits.starvation_s, late_at_s)

    def choose(
        self,
        candidates: Iterable[Candidate],
        num_running: int,
        now: float,
        *,
        num_blocks: int = 0,
        real_time: HeldCapacity | None = None,
    ) -> list[Candidate]:
        """Return the candidates that may enter now, in order: candidate requests first, else the next batch's.

        `num_blocks`: held by running requests; `real_time`: of these. The next batch starts when it is due.
        """
        all_candidates, running = list(candidates), HeldCapacity(num_running, num_blocks)
        for batch_id in [batch_id for batch_id in self._waiting if batch_id not in _by_id(all_candidates)]:
            del self._waiting[batch_id]
            self.version += 1
        if self._floor is None:
            following = next(iter(self._waiting.values()), None)
            return self._choose(_by_id(all_candidates), following, running, now)
        urgent = self._choose_real_time(all_candidates, running, real_time or HeldCapacity(), now)
        urgent.sort(
            key=lambda candidate: candidate.granted_s
        )  # or those that come straight here would pass a batch without end
        others = [candidate for candidate in all_candidates if not candidate.is_real_time]
        chosen: list[Candidate] = []
        if all(batch.is_best_effort for batch in self._waiting.values()):
            following = next(iter(self._waiting.values()), None)
            chosen = self._choose(_by_id(others), following, running, now)
        return self._with_floor(self._floor, urgent, chosen, others)

    def entered(self, candidate: Candidate) -> None:
        if self._floor is None:
            return
        if not candidate.is_real_time:
            self._floor.note_own(candidate.context_len)
        elif self._next_tokens is not None:
            self._floor.note_earlier(candidate.context_len, self._next_tokens)

    def _choose_real_time(
        self, candidates: list[Candidate], running: HeldCapacity, real_time: HeldCapacity, now: float
    ) -> list[Candidate]:
        following = next((batch for batch in self._waiting.values() if not batch.is_best_effort), None)
        members = [
            candidate for candidate in candidates if following is not None and candidate.batch_id == following.batch_id
        ]
        joining = [candidate for candidate in candidates if candidate.is_real_time and self.joins_running(candidate)]
        if running.num_requests == real_time.num_requests:
            chosen = self._choose(_by_id([*joining, *members]), following, running, now)
            return [candidate for candidate in chosen if candidate.is_real_time]
        if following is None or not self._is_due(following, joining, real_time, now):
            return joining
        if self._is_full(following):
            self._take_up(following, members, running.num_requests)
        else:
            self._begin(following)
            for candidate in members:
                candidate.batch_id = NO_BATCH
        return joining + [candidate for candidate in members if candidate.is_real_time]

    def _with_floor(
        self, floor: ClassFloor, urgent: list[Candidate], chosen: list[Candidate], others: list[Candidate]
    ) -> list[Candidate]:
        following = next(iter(chosen or others), None)
        self._next_tokens = following.context_len if following is not None else None
        self.by_floor = None
        if following is None or not urgent or not floor.is_due(following.context_len):
            return urgent + chosen
        self.by_floor = following.request.request_id
        if not self.joins_running(following):
            following.batch_id = NO_BATCH
        return [following, *urgent, *(candidate for candidate in chosen if candidate is not following)]

    def _choose(
        self, by_id: _ById, following: WaitingBatch | None, running: HeldCapacity, now: float
    ) -> list[Candidate]:
        num_running = running.num_requests
        is_overdue = following is not None and self._has_waited(following, now)
        joining = by_id.get(NO_BATCH, []) + by_id.get(self.running_id, []) * (self.running_id != NO_BATCH)
        if following is None or (joining and not is_overdue):
            return joining
        members = by_id.get(following.batch_id, [])
        if (self._packs or not is_overdue) and self._should_mix(members, num_running):
            self._begin(following)
            self._join(members)
            return joining + members
        if not self._is_due(following, joining, running, now):
            return joining
        self._take_up(following, members, num_running)
        return by_id.get(NO_BATCH, []) + members

    def _is_due(self, following: WaitingBatch, joining: list[Candidate], running: HeldCapacity, now: float) -> bool:
        return self._has_waited(following, now) or (not joining and self._may_follow(following, *running))

    def _may_follow(self, following: WaitingBatch, num_running: int, num_blocks: int) -> bool:
        limits = self._limits
        fills_memory = limits.low_blocks is not None and num_blocks >= limits.low_blocks
        return not following.is_aligned or (num_running < limits.low_running and not fills_memory)

    def _is_full(self, batch: WaitingBatch) -> bool:
        return batch.is_aligned and batch.num_requests >= self._limits.min_requests

    def _should_mix(self, members: list[Candidate], num_running: int) -> bool:
        if self._is_mixing_cheaper is None or num_running == 0 or self.running_id == NO_BATCH:
            return False
        return self._is_mixing_cheaper([candidate.context_len for candidate in members])

    def _begin(self, following: WaitingBatch) -> None:
        del self._waiting[following.batch_id]
        self.version += 1

    def _take_up(self, following: WaitingBatch, members: list[Candidate], num_running: int) -> None:
        self._begin(following)
        if num_running == 0 or self._is_full(following):
            self.running_id, self.is_aligned = following.batch_id, following.is_aligned
            self.is_best_effort = following.is_best_effort
            self.is_switching = num_running > 0
            return
        self.is_aligned = False
        self._join(members)

    def _join(self, members: list[Candidate]) -> None:
        for candidate in members:
            candidate.batch_id = self.running_id


def _by_id(candidates: Iterable[Candidate]) -> dict[BatchId, list[Candidate]]:
    by_id: dict[BatchId, list[Candidate]] = {}
    for candidate in candidates:
        by_id.setdefault(candidate.batch_id, []).append(candidate)
    return by_id
