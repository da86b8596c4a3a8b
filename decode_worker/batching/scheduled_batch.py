"""The running batch where a policy decides it: which requests decode, pause, or leave for the host or to be recomputed.

Its requests are the rows of the policy's table, as on a colocated worker. Candidates that fit are loaded beside an
iteration, like those of a whole batch. Those that do not fit stand in the table as well, with all their cache elsewhere
(as if it were on the host): if the policy chooses one, evicting others for it, its blocks are held and it is loaded.
A plan that swaps others out for it frees their blocks only; the copies out of them come first, and so the next plan
chooses again.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import IterationCompleted
from alignedserve.scheduling.policy import CandidateChoice, DeviceMemory, EvictionMode, IterationPlan
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.table import Bools
from alignedserve.scheduling.table_operations import decode_s, is_mixing_cheaper
from alignedserve.worker_core.request import WorkerRequest
from decode_worker.batching.admission import Admission
from decode_worker.batching.begun import FORESEEN_TOKENS, Begun, Leaving, LoadingCandidates, growth_of
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.held_requests import HeldRequest, HeldRequests
from decode_worker.plan_performer import PlanPerformer
from decode_worker.state import Candidate, Loading


class _Split(NamedTuple):
    own: IterationPlan
    chosen: tuple[Candidate, ...]


class ScheduledBatch:
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
        """`memory`: empty. `max_held`: requests that the engine has places for, paused ones included.

        `choice`: the candidates that do not fit among which the policy chooses; it must know caches in other memories.
        `admission_share`: of a TPOT objective that an iteration may take; None: candidates enter while blocks are free.
        """
        self.costs = scheduler.costs
        self._scheduler = scheduler
        self._held = HeldRequests(memory)
        self._state = self._held.state
        self.table = self._state.table
        self.admission = None
        if admission_share is not None:
            self.admission = Admission(self.table, self.costs, admission_share)
        self._performer = PlanPerformer(self._held)
        self._block_size = memory.block_size
        self._max_running_requests = max_running_requests
        self._max_held = max_held
        self._choice = choice
        self.loading = LoadingCandidates()
        self._in_view: dict[RequestId, Candidate] = {}  # candidates in the table
        self._members: tuple[HeldRequest, ...] = ()  # of the latest iteration
        self._num_dropped = 0  # preemptions after which those without a cache have left
        self.version = 0  # changes with the requests

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(self._held)

    def __getitem__(self, request_id: RequestId) -> HeldRequest:
        return self._held[request_id]

    def get(self, request_id: RequestId) -> HeldRequest | None:
        """Return the request, if it is here."""
        return self._held.get(request_id)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the worker."""
        return self._held.allocator.num_blocks

    @property
    def has_place(self) -> bool:
        """True if one more request may be here without the policy's choice."""
        return self.num_holding < self._max_running_requests

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return self._state.num_free

    @property
    def num_holding(self) -> int:
        """Number of requests that are here, paused ones included, or are being loaded."""
        return len(self._held) + len(self.loading)

    @property
    def num_preemptions(self) -> int:
        """Number of caches that left the device for want of blocks."""
        return self._performer.num_preemptions

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return self._held.blocks_for(num_tokens)

    def never_fits(self, candidate: Candidate) -> bool:
        """Return whether the request could not end here even alone."""
        return self.blocks_for(candidate.max_context_len) > self.num_blocks

    # --- coming in

    def blocks_if_fits(self, candidate: Candidate) -> tuple[BlockId, ...] | None:
        """Hold blocks for this candidate's context, if the next iterations of all will fit as well."""
        if self._is_here(candidate.request.request_id) or self._held.is_copying_out or not self.has_place:
            return None
        if self._blocks_with_growth(candidate) + self._foreseen_blocks() > self.num_free:
            return None
        return self._held.hold(self.blocks_for(candidate.num_cached))

    def view(self, candidates: Iterable[Candidate], now: float) -> None:
        """Let the policy choose among these candidates too, in order, within the places and blocks that may be held.

        Those that displace best-effort requests alone come up to the first that would not fit if all of these left, as
        in `blocks_if_fits`: the policy keeps less for growth, and would drop other chats a few tokens later.
        """
        chosen: dict[RequestId, Candidate] = {}
        room = self._room_without_best_effort() if self._choice is CandidateChoice.OVER_BEST_EFFORT else math.inf
        for candidate in candidates if self._has_choice() else ():
            request_id = candidate.request.request_id
            if self._is_here(request_id) or not self._may_displace(candidate):
                continue
            room -= self._blocks_with_growth(candidate)
            if room < 0 or self.num_holding + len(chosen) >= self._max_held:
                break
            chosen[request_id] = candidate
        for request_id, candidate in list(self._in_view.items()):
            if chosen.get(request_id) is not candidate:
                self._forget(request_id)
        for request_id, candidate in chosen.items():
            if request_id not in self._in_view:
                self._in_view[request_id] = candidate
                num_cached = candidate.num_cached
                self._state.add_elsewhere(candidate.request, now, candidate.progress(num_cached, 0))

    def load(self, loading: Loading) -> None:
        """Add a candidate whose cache is being copied in. Its row stays for now: iterations know rows by number."""
        self.loading.add(loading)

    def loaded(self, request_id: RequestId) -> Loading:
        """Remove and return an entry whose copy has ended, successfully or not."""
        return self.loading.pop(request_id)

    def enter(self, candidate: Candidate, block_ids: tuple[BlockId, ...], num_cached: int, now: float) -> None:
        """Add a request with the cache of `num_cached` tokens in these blocks."""
        self.version += 1
        self._in_view.pop(candidate.request.request_id, None)
        self._held.enter(candidate, block_ids, num_cached, now)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Free the blocks of a request that was to be loaded and is not."""
        self._held.free_held(tuple(block_ids))

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """Set a prediction that came late, if the request is in the table."""
        if request_id in self.table:
            self._state.set_predicted_length(request_id, predicted_len)

    # --- iterations

    def begin(self, now: float) -> Begun | None:
        """Plan and begin the next iteration; None: there is nothing to do."""
        if not len(self.table) or not self._has_room_for_any():
            return None
        own, chosen = self._split(self._scheduler.plan(self._state, now))
        has_copies_out = any(part.how is EvictionMode.SWAP for part in own.evictions)
        if not own.scheduled and not has_copies_out:
            self._performer.evict(own.evictions, now)
            loads = self._hold(chosen)
            return Begun(None, (), loads=loads) if loads else None
        members = self._held.of_parts(own.scheduled)
        self._state.begin(own)
        command = self._performer.perform(own, members, now)
        loads = () if has_copies_out else self._hold(chosen)
        has_changed, self._members = members != self._members, members
        return Begun(command, members, has_changed=has_changed, loads=loads, alone_s=own.alone_s)

    def completed(self, event: IterationCompleted, now: float, duration_s: float) -> None:
        """Note the end of the iteration, before any request leaves because of it."""
        self._performer.completed()
        for request_id, num_tokens in event.forced:
            self._state.note_forced(request_id, num_tokens)
        self._scheduler.completed(self._state, now=now, duration_s=duration_s, grammar_s=event.grammar_s)

    # --- leaving

    def take_dropped(self) -> list[HeldRequest]:
        """Remove and return the requests of which plans have dropped the whole cache since the last call.

        Prefill workers compute them again. Here their prompts would be in everyone's iterations, and while chat fills
        the memory they would be dropped again before they have their next token.
        """
        if self.num_preemptions == self._num_dropped:
            return []
        self._num_dropped = self.num_preemptions
        table = self.table
        rows = np.flatnonzero((table.num_blocks == 0) & (table.num_cached == 0) & (table.num_swapped == 0))
        held = [self._held.get(table.request_ids[row]) for row in rows.tolist()]
        dropped = [one for one in held if one is not None and not one.is_aborted]
        for one in dropped:
            self.drop(one)
        return dropped

    def drop(self, running: WorkerRequest) -> None:
        """Remove a request and free its blocks."""
        self.version += 1
        self._held.drop(self._held[running.request.request_id])

    def can_leave(self, running: WorkerRequest) -> bool:
        """Return whether it can be copied out: its whole cache is here, and only its next token is missing."""
        return self._held.is_portable(running.request.request_id)

    def num_cached(self, running: WorkerRequest) -> int:
        """Return the tokens of the request whose cache exists."""
        return int(self.table.num_cached[self.table.row(running.request.request_id)])

    def begin_eviction(self, running: WorkerRequest) -> Leaving:
        """Remove a request that can leave; its blocks stay held until `end_eviction`."""
        self.version += 1
        leaving = self._held[running.request.request_id]
        progress = self._held.detach(leaving)
        since_s = (progress.first_token_s, progress.last_token_s)
        return Leaving(tuple(leaving.block_ids), progress.num_cached, *since_s, progress.service_s)

    def end_eviction(self, block_ids: tuple[BlockId, ...]) -> None:
        """Free the blocks of an evicted request, whose copy is complete."""
        self._held.free_held(block_ids)

    # --- times

    def decode_s(self) -> float | None:
        """Return the time of an iteration of all decodes here, by the cost model; None: there are none."""
        return decode_s(self.table, self.costs)

    def is_mixing_cheaper(self, context_lens: Collection[int]) -> bool:
        """Return whether decodes of these contexts cost less beside the running ones than after them."""
        return is_mixing_cheaper(self.table, self.costs, context_lens)

    # --- inside

    def _is_here(self, request_id: RequestId) -> bool:
        return request_id in self.loading or self._held.get(request_id) is not None

    def _split(self, plan: IterationPlan) -> _Split:
        request_ids, in_view = self.table.request_ids, self._in_view
        if not in_view:
            return _Split(plan, ())
        wanted = [*(part.row for part in plan.scheduled), *plan.uploads]
        chosen = tuple(in_view[request_ids[row]] for row in wanted if request_ids[row] in in_view)
        iteration_plan = IterationPlan(
            tuple(part for part in plan.scheduled if request_ids[part.row] not in in_view),
            tuple(part for part in plan.evictions if request_ids[part.row] not in in_view),
            tuple(row for row in plan.uploads if request_ids[row] not in in_view),
            alone_s=plan.alone_s,
        )
        return _Split(iteration_plan, chosen)

    def _hold(self, chosen: Iterable[Candidate]) -> tuple[Loading, ...]:
        loads = []
        for candidate in chosen:
            num_blocks = self.blocks_for(candidate.num_cached)
            if num_blocks <= self.num_free:
                loads.append(Loading(candidate, self._held.hold(num_blocks)))
        return tuple(loads)

    def _forget(self, request_id: RequestId) -> None:
        if self._in_view.pop(request_id, None) is not None:
            self._state.remove_elsewhere(request_id)

    def _has_choice(self) -> bool:
        if self._choice is CandidateChoice.OVER_BEST_EFFORT:
            table = self.table
            return bool(np.any(~table.is_real_time & (table.num_blocks > 0)))
        return self._choice is CandidateChoice.ALL

    def _may_displace(self, candidate: Candidate) -> bool:
        return candidate.is_real_time or self._choice is CandidateChoice.ALL

    def _has_room_for_any(self) -> bool:
        """Return whether every request in the table would fit alone, beside the blocks of those being copied.

        Else the policy waits for the end of a copy: it could not make room even by evicting all.
        """
        num_away = self._held.num_away
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
        return num_blocks + growth_of(candidate, num_blocks - self.blocks_for(0), self._block_size)

    def _foreseen_blocks(self, counts: Bools | bool = True) -> int:
        table = self.table
        foreseen = np.minimum(table.context_len + FORESEEN_TOKENS, table.prompt_len + table.max_tokens)
        growth = -(-foreseen // self._block_size) + self.blocks_for(0) - table.num_blocks
        running = int(growth[(table.num_blocks > 0) & (growth > 0) & counts].sum())
        return running + self.loading.growth(self._block_size, self.blocks_for(0))


# The running batch of a decode worker: whole in every iteration, or as a policy decides.
DecodeBatch = RunningBatch | ScheduledBatch
