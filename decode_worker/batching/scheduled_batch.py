"""The running batch where a policy decides it: which requests decode, pause, or leave for the host or to be
recomputed.

Its requests are the rows of the policy's table, as on a colocated worker. Candidates that fit are loaded beside an
iteration, like those of a whole batch. Others stand in the table with their cache elsewhere, as if on the host: if
the policy chooses one, evicting requests for it, its blocks are held and it is loaded. A plan that swaps requests
out for a candidate frees their blocks only; the copies out of them come first, and so the next plan chooses again.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
from typing_extensions import override

from alignedserve.core.class_floor import TurnClass
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.iterations import IterationCompleted
from alignedserve.scheduling.policy import CandidateChoice, DeviceMemory, EvictionMode, IterationPlan
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.table import Bools, RequestTable
from alignedserve.scheduling.table_operations import decode_s, is_mixing_cheaper, note_decodes
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.held_requests import HeldRequest, HeldRequests
from alignedserve.worker_core.plan_performer import PlanPerformer
from alignedserve.worker_core.request import WorkerRequest
from decode_worker.batching.running_batch import (
    FORESEEN_TOKENS,
    Begun,
    Leaving,
    LoadingCandidates,
    RunningBatch,
    growth_of,
)
from decode_worker.batching.slack_packing import note_candidate
from decode_worker.state import LoadingCandidate

_STARVATION_S = 60.0  # a candidate that has waited so long here enters as if nothing had an objective
_OVERDUE_S = 30.0  # a late candidate that has waited so long here counts as on time


class AdmissionRoom:
    """Room for candidates that enter at one moment; each entry is noted.

    A decode worker with free blocks would take every candidate, however long its iterations. So a candidate enters
    only if the iteration with it, by the cost model, is within a share of the tightest mean gap that a running
    request can still hold. For a real-time candidate only real-time requests count: best effort pauses for them.

    Example: decodes with gaps of 40 ms run, an iteration takes 34 ms, and each candidate adds 1.5 ms. With a share
    of 0.9 one enters (35.5 ms), and the next waits until a request has ended.
    """

    def __init__(
        self, costs: CostModel, work: IterationWork, chats: IterationWork, allowed_s: float, share: float, now: float
    ) -> None:
        self._costs = costs
        self._work = work
        self._chats = chats
        self._allowed_s = allowed_s
        self._share = share
        self._now = now

    def admits(self, candidate: Candidate) -> bool:
        beside = self._chats if candidate.is_real_time else self._work
        if not beside.num_decodes or self._now - candidate.granted_s >= _STARVATION_S:
            return True
        trial = beside.copy()
        note_candidate(trial, candidate)
        return self._costs.iteration_s(trial) <= self._allowed_s

    def note(self, candidate: Candidate) -> None:
        note_candidate(self._work, candidate)
        if not candidate.is_real_time:
            return
        note_candidate(self._chats, candidate)
        tpot_s = candidate.request.slo.tpot_s
        if tpot_s is not None:
            self._allowed_s = min(self._allowed_s, self._share * tpot_s)


class ObjectiveAdmission:
    """The bound of one worker. Reads its table, and changes nothing."""

    def __init__(self, table: RequestTable, costs: CostModel, share: float) -> None:
        """`share`: of an objective that an iteration may take; the rest is for errors of the cost model."""
        self._table = table
        self._costs = costs
        self._share = share

    def within(
        self,
        candidates: Iterable[Candidate],
        loading: Iterable[Candidate],
        now: float,
        *,
        by_floor: RequestId | None = None,
    ) -> Iterator[Candidate]:
        """Yield the candidates that may enter beside running and loading requests, up to the first that may not.

        Real-time candidates go first, those that can hold their mean gap before late ones. `by_floor`: goes before all,
        and holds up none.
        """
        table, work, chats, least_s = self._table, IterationWork(), IterationWork(), self._least_s()
        note_decodes(work, table, np.flatnonzero(table.num_blocks > 0))
        note_decodes(chats, table, np.flatnonzero((table.num_blocks > 0) & table.is_real_time))
        room = AdmissionRoom(self._costs, work, chats, self._share * self._tightest_s(), self._share, now)
        for candidate in loading:
            room.note(candidate)

        def turn(candidate: Candidate) -> tuple[bool, TurnClass]:
            return candidate.request.request_id != by_floor, _class_of(candidate, now, least_s=least_s)

        for candidate in sorted(candidates, key=turn):
            if room.admits(candidate):
                room.note(candidate)
                yield candidate
            elif candidate.request.request_id != by_floor:
                return

    def _least_s(self) -> float:
        work = IterationWork()
        work.add_decode(0)
        return self._costs.iteration_s(work)

    def _tightest_s(self) -> float:
        table = self._table
        counts = table.is_real_time & (table.num_blocks > 0) & (self._share * table.tpot_s >= self._least_s())
        return float(np.min(table.tpot_s, where=counts, initial=np.inf))


def _class_of(candidate: Candidate, now: float, *, least_s: float) -> TurnClass:
    request, tpot_s = candidate.request, candidate.request.slo.tpot_s
    if not candidate.is_real_time:
        return TurnClass.BEST_EFFORT
    if tpot_s is None:
        return TurnClass.LATE
    num_generated = len(candidate.generated_token_ids)
    expected = candidate.predicted_output_len or request.sampling.max_tokens
    num_left = max(expected - num_generated, 1.0)
    due_s = candidate.first_token_s + (num_generated + num_left - 1) * tpot_s
    # One that is late waits no longer than the pool lets it, or those on time would keep it from ever entering.
    is_overdue = now - candidate.granted_s >= _OVERDUE_S
    return TurnClass.ON_TIME if is_overdue or due_s - now >= num_left * least_s else TurnClass.LATE


class ScheduledBatch(HeldRequests):
    """Requests in the policy's table, and those whose cache is being copied in or out."""

    packing = None  # the policy bounds iterations

    def __init__(
        self,
        *,
        memory: DeviceMemory,
        scheduler: Scheduler,
        max_running_requests: int,
        max_held: int,
        choice: CandidateChoice,
        admission_share: float | None = None,
    ) -> None:
        """`max_held`: requests that the engine has places for. `choice`: the candidates among which the policy chooses.
        `admission_share`: of a TPOT objective that an iteration may take; None: candidates enter while blocks are free.
        """
        super().__init__(memory)
        self.costs = scheduler.costs
        self._scheduler = scheduler
        self.table = self.state.table
        self.admission = None
        if admission_share is not None:
            self.admission = ObjectiveAdmission(self.table, self.costs, admission_share)
        self._performer = PlanPerformer(self)
        self._max_running_requests = max_running_requests
        self._max_held = max_held
        self._choice = choice
        self.loading = LoadingCandidates()
        self._in_view: dict[RequestId, Candidate] = {}  # candidates in the table
        self._members: tuple[HeldRequest, ...] = ()  # of the latest iteration
        self._num_dropped = 0  # preemptions after which those without a cache have left
        self.version = 0  # changes with the requests

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def has_place(self) -> bool:
        return self.num_holding < self._max_running_requests

    @property
    def num_free(self) -> int:
        return self.state.num_free

    @property
    def num_holding(self) -> int:
        return len(self) + len(self.loading)

    @property
    def num_preemptions(self) -> int:
        return self._performer.num_preemptions

    def never_fits(self, candidate: Candidate) -> bool:
        return self.blocks_for(candidate.max_context_len) > self.num_blocks

    def blocks_if_fits(self, candidate: Candidate) -> tuple[BlockId, ...] | None:
        if self._is_here(candidate.request.request_id) or self.is_copying_out or not self.has_place:
            return None
        if self._blocks_with_growth(candidate) + self._foreseen_blocks() > self.num_free:
            return None
        return self.hold(self.blocks_for(candidate.num_cached))

    def view(self, candidates: Iterable[Candidate], now: float) -> None:
        """Let the policy choose among these candidates too, in order, within the places and blocks that may be held.

        Candidates that displace best effort alone come up to the first that would not fit if all of it left, as in
        `blocks_if_fits`: else the policy would drop other chats a few tokens later.
        """
        chosen: dict[RequestId, Candidate] = {}
        room = self._room_without_best_effort() if self._choice is CandidateChoice.OVER_BEST_EFFORT else math.inf
        for candidate in candidates if self._has_choice() else ():
            request_id = candidate.request.request_id
            if self._is_here(request_id) or not (candidate.is_real_time or self._choice is CandidateChoice.ALL):
                continue
            room -= self._blocks_with_growth(candidate)
            if room < 0 or self.num_holding + len(chosen) >= self._max_held:
                break
            chosen[request_id] = candidate
        for request_id, candidate in list(self._in_view.items()):
            if chosen.get(request_id) is not candidate:
                del self._in_view[request_id]
                self.state.remove_elsewhere(request_id)
        for request_id, candidate in chosen.items():
            if request_id not in self._in_view:
                self._in_view[request_id] = candidate
                num_cached = candidate.num_cached
                self.state.add_elsewhere(candidate.request, now, candidate.progress(num_cached, 0))

    def load(self, loading: LoadingCandidate) -> None:
        # Its row stays for now: iterations know rows by number.
        self.loading[loading.candidate.request.request_id] = loading

    def loaded(self, request_id: RequestId) -> LoadingCandidate:
        return self.loading.pop(request_id)

    @override
    def enter(self, candidate: Candidate, block_ids: Sequence[BlockId], num_cached: int, now: float) -> None:
        self.version += 1
        self._in_view.pop(candidate.request.request_id, None)
        super().enter(candidate, block_ids, num_cached, now)

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        if request_id in self.table:
            self.state.set_predicted_length(request_id, predicted_len)

    def begin(self, now: float) -> Begun | None:
        if not len(self.table) or not self._has_room_for_any():
            return None
        device_plan, chosen = self._split(self._scheduler.plan(self.state, now))
        has_copies_out = any(part.how is EvictionMode.SWAP for part in device_plan.evictions)
        if not device_plan.scheduled and not has_copies_out:
            self._performer.evict(device_plan.evictions, now)
            loads = self._hold(chosen)
            return Begun(None, (), loads=loads) if loads else None
        members = self.of_parts(device_plan.scheduled)
        self.state.begin(device_plan)
        command = self._performer.perform(device_plan, members, now)
        loads = () if has_copies_out else self._hold(chosen)
        has_changed, self._members = members != self._members, members
        return Begun(command, members, has_changed=has_changed, loads=loads, alone_s=device_plan.alone_s)

    def completed(self, event: IterationCompleted, now: float, duration_s: float) -> None:
        self._performer.completed()
        for request_id, num_tokens in event.forced:
            self.state.note_forced(request_id, num_tokens)
        for request_id in event.skipped:
            self.state.note_skipped(request_id)
        self._scheduler.completed(self.state, now=now, duration_s=duration_s, grammar_s=event.grammar_s)

    def take_dropped(self) -> list[HeldRequest]:
        """Remove and return the requests whose whole cache plans have dropped: prefill workers compute them again."""
        if self.num_preemptions == self._num_dropped:
            return []
        self._num_dropped = self.num_preemptions
        table = self.table
        rows = np.flatnonzero((table.num_blocks == 0) & (table.num_cached == 0) & (table.num_swapped == 0))
        held = [self.get(table.request_ids[row]) for row in rows.tolist()]
        dropped = [request for request in held if request is not None and not request.is_aborted]
        for request in dropped:
            self.drop(request)
        return dropped

    @override
    def drop(self, tracked: WorkerRequest) -> None:
        self.version += 1
        super().drop(self[tracked.request.request_id])

    def begin_eviction(self, running: WorkerRequest) -> Leaving:
        self.version += 1
        leaving = self[running.request.request_id]
        progress = self.detach(leaving)
        since_s = (progress.first_token_s, progress.last_token_s)
        return Leaving(tuple(leaving.block_ids), progress.num_cached, *since_s, progress.service_s)

    free = end_eviction = HeldRequests.free_held

    def decode_s(self) -> float | None:
        return decode_s(self.table, self.costs)

    def is_mixing_cheaper(self, context_lens: Collection[int]) -> bool:
        return is_mixing_cheaper(self.table, self.costs, context_lens)

    def _is_here(self, request_id: RequestId) -> bool:
        return request_id in self.loading or self.get(request_id) is not None

    def _split(self, plan: IterationPlan) -> tuple[IterationPlan, tuple[Candidate, ...]]:
        request_ids, in_view = self.table.request_ids, self._in_view
        if not in_view:
            return plan, ()
        wanted = [*(part.row for part in plan.scheduled), *plan.uploads]
        chosen = tuple(in_view[request_ids[row]] for row in wanted if request_ids[row] in in_view)
        iteration_plan = IterationPlan(
            tuple(part for part in plan.scheduled if request_ids[part.row] not in in_view),
            tuple(part for part in plan.evictions if request_ids[part.row] not in in_view),
            tuple(row for row in plan.uploads if request_ids[row] not in in_view),
            alone_s=plan.alone_s,
        )
        return iteration_plan, chosen

    def _hold(self, chosen: Iterable[Candidate]) -> tuple[LoadingCandidate, ...]:
        loads = []
        for candidate in chosen:
            num_blocks = self.blocks_for(candidate.num_cached)
            if num_blocks <= self.num_free:
                loads.append(LoadingCandidate(candidate, self.hold(num_blocks)))
        return tuple(loads)

    def _has_choice(self) -> bool:
        if self._choice is CandidateChoice.OVER_BEST_EFFORT:
            table = self.table
            return bool(np.any(~table.is_real_time & (table.num_blocks > 0)))
        return self._choice is CandidateChoice.ALL

    def _has_room_for_any(self) -> bool:
        num_away = self.num_away
        if not num_away:
            return True
        table = self.table
        longest = int(np.max(table.prompt_len + table.num_generated))
        return self.blocks_for(longest) <= self.num_blocks - num_away

    def _room_without_best_effort(self) -> int:
        table, is_real_time = self.table, self.table.is_real_time
        return self.num_free + int(table.num_blocks[~is_real_time].sum()) - self._foreseen_blocks(is_real_time)

    def _blocks_with_growth(self, candidate: Candidate) -> int:
        num_blocks = self.blocks_for(candidate.num_cached)
        return num_blocks + growth_of(candidate, num_blocks - self.blocks_for(0), self.block_size)

    def _foreseen_blocks(self, counts: Bools | bool = True) -> int:
        table = self.table
        foreseen = np.minimum(table.context_len + FORESEEN_TOKENS, table.prompt_len + table.max_tokens)
        growth = -(-foreseen // self.block_size) + self.blocks_for(0) - table.num_blocks
        running = int(growth[(table.num_blocks > 0) & (growth > 0) & counts].sum())
        return running + self.loading.growth(self.block_size, self.blocks_for(0))


# The running batch of a decode worker: whole in every iteration, or as a policy decides.
DecodeBatch = RunningBatch | ScheduledBatch
