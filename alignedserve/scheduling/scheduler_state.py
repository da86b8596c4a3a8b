"""Effects of plans on a worker's requests and memory: the one place that writes the table's progress.

Shared by the worker's logic, which holds block ids and tokens, and tests that run a policy without a worker.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.costmodel.model import CostModel, LearningCostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import (
    DeviceMemory,
    EvictionMode,
    IterationHistory,
    IterationLimits,
    IterationPlan,
    IterationPolicy,
    PlannedEviction,
    ScheduledRequest,
    WorkerView,
)
from alignedserve.scheduling.table import Bools, Ints, RequestTable
from alignedserve.scheduling.table_operations import growing_rows, note_completed, note_decodes


class EvictionResult(NamedTuple):
    """Blocks and tokens that an eviction moved."""

    num_blocks: int  # freed, the last ones of the request
    num_swapped: int  # tokens copied to the host


class AllocationResult(NamedTuple):
    """Blocks and tokens for a scheduled or uploaded request."""

    num_blocks: int  # allocated, after those that the request has
    num_swapped: int  # tokens swapped in from the host


@dataclass(frozen=True, slots=True)
class Progress:
    """The columns of a request that moves on with its cache."""

    predicted_len: float
    num_generated: int
    num_cached: int
    num_blocks: int
    first_token_s: float
    last_token_s: float
    service_s: float = 0.0


_LEAST_TOKEN_S = 1e-8  # a learned cost model may find that a prompt prolongs an iteration by nothing
_MOVED = tuple(field.name for field in fields(Progress))


class SchedulerState:
    """The table of one worker, and its free blocks and free host memory as numbers."""

    def __init__(self, memory: DeviceMemory) -> None:
        """`memory`: empty."""
        self.table = RequestTable()
        self.history = IterationHistory()
        self._memory = self._seen = memory
        self.num_free = memory.num_free
        self.num_free_host = memory.num_free_host
        self.work = IterationWork()  # of the iteration in flight, like these; no row is removed meanwhile
        self._rows: Ints = np.zeros(0, np.int64)
        self._num_tokens: Ints = np.zeros(0, np.int64)

    def view(self, *, limits: IterationLimits, costs: CostModel, now: float) -> WorkerView:
        """Build the policy's view."""
        memory = self._seen
        if memory.num_free != self.num_free or memory.num_free_host != self.num_free_host:
            self._seen = memory = memory.with_free(self.num_free, self.num_free_host)
        return WorkerView(self.table, memory, limits, self.history, costs, now)

    def add(self, request: Request, now: float, *, predicted_len: float | None = None, num_generated: int = 0) -> None:
        """Add a request without any cache."""
        self.table.add(request, now, predicted_len=predicted_len, num_generated=num_generated)

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """Set a later prediction of all its output tokens."""
        self.table.predicted_len[self.table.row(request_id)] = max(predicted_len, 1.0)

    def remove(self, request_id: RequestId) -> int:
        """Remove a request that has ended; return the blocks that it held."""
        row = self.table.row(request_id)
        num_blocks = int(self.table.num_blocks[row])
        self.num_free += num_blocks
        self.num_free_host += int(self.table.num_swapped[row])
        self.table.remove(request_id)
        return num_blocks

    def begin(self, plan: IterationPlan) -> None:
        """Note the iteration that begins; call it before any part of its plan is applied."""
        self._rows = np.array([part.row for part in plan.scheduled], np.int64)
        self._num_tokens = np.array([part.num_tokens for part in plan.scheduled], np.int64)
        self.work = plan.work if plan.work is not None else work_of(self.table, plan, self._memory)

    # --- requests that move between workers

    def hold(self, num_blocks: int) -> None:
        """Take free blocks for a request that is on its way; negative: give them back."""
        assert num_blocks <= self.num_free, "blocks held that are not free"
        self.num_free -= num_blocks

    def detach(self, request_id: RequestId) -> Progress:
        """Remove a request whose cache is on the device; its blocks stay held."""
        table, row = self.table, self.table.row(request_id)
        assert not table.num_swapped[row], "part of its cache is on the host"
        values = {name: getattr(table, name)[row].item() for name in _MOVED}
        table.remove(request_id)
        return Progress(**values)

    def attach(self, request: Request, now: float, progress: Progress) -> None:
        """Add a request with its cache, in blocks that are held already; it may stand in the table as one elsewhere."""
        if request.request_id not in self.table:
            self.table.add(request, now, num_generated=progress.num_generated)
        row = self.table.row(request.request_id)
        self.table.num_swapped[row] = 0
        for name in _MOVED:
            getattr(self.table, name)[row] = getattr(progress, name)

    def add_elsewhere(self, request: Request, now: float, progress: Progress) -> None:
        """Add a request whose cache lies in another memory: it looks swapped out, and takes no host memory here."""
        self.attach(request, now, progress)
        row = self.table.row(request.request_id)
        self.table.num_swapped[row] = self.table.num_cached[row]

    def remove_elsewhere(self, request_id: RequestId) -> None:
        """Remove such a request."""
        self.table.remove(request_id)

    # --- a plan, part by part, evictions first

    def evict(self, part: PlannedEviction, now: float) -> EvictionResult:
        """Evict the cache of this request, or its last tokens, from the device."""
        table, row = self.table, part.row
        on_device = int(table.num_cached[row] - table.num_swapped[row])
        if part.how is EvictionMode.DROP:
            assert part.num_tokens is None, "a part of a cache is dropped"
            self.num_free_host += int(table.num_swapped[row])
            table.num_cached[row] = table.num_swapped[row] = 0
            left = EvictionResult(int(table.num_blocks[row]), 0)
            table.is_hidden[row] = False
        else:
            leaving = on_device if part.num_tokens is None else part.num_tokens
            assert 0 < leaving <= on_device, "swaps out what is not on the device"
            assert leaving <= self.num_free_host, "no free host memory"
            kept = self._blocks_for(row, on_device - leaving) if leaving < on_device else 0
            left = EvictionResult(int(table.num_blocks[row]) - kept, leaving)
            table.num_swapped[row] += leaving
            self.num_free_host -= leaving
        self.num_free += left.num_blocks
        table.num_blocks[row] -= left.num_blocks
        table.num_preemptions[row] += 1
        table.waits_since_s[row] = now
        return left

    def grows(self) -> list[bool]:
        """Return which requests of the iteration take blocks or come back from the host, in order; after evictions.

        For all others `enter` changes nothing.
        """
        return growing_rows(self.table, self._memory, self._rows, self._num_tokens)

    def enter(self, part: ScheduledRequest) -> AllocationResult:
        """Allocate blocks for the tokens that the request computes and for its cache on the host."""
        table, row = self.table, part.row
        assert 0 < part.num_tokens <= table.num_remaining[row], "computes tokens that are not known yet"
        assert not part.is_hidden or not table.num_cached[row], "a cache changes its kind without being dropped"
        table.is_hidden[row] |= part.is_hidden
        wanted = self._blocks_for(row, int(table.num_cached[row]) + part.num_tokens)
        num_blocks = max(wanted - int(table.num_blocks[row]), 0)
        return self._bring_in(row, num_blocks)

    def upload(self, row: int) -> AllocationResult:
        """Allocate blocks for the request's cache on the host, though it computes nothing yet."""
        wanted = self._blocks_for(row, int(self.table.num_cached[row]))
        return self._bring_in(row, max(wanted - int(self.table.num_blocks[row]), 0))

    def completed(self, *, now: float, duration_s: float) -> Bools:
        """Note its end; return which of its requests computed all that was left, and so sampled a token."""
        self.history.note(duration_s)
        return note_completed(self.table, self._rows, self._num_tokens, now=now, duration_s=duration_s)

    def _bring_in(self, row: int, num_blocks: int) -> AllocationResult:
        assert num_blocks <= self.num_free, "a plan that does not fit"
        table, entered = self.table, AllocationResult(num_blocks, int(self.table.num_swapped[row]))
        self.num_free -= num_blocks
        self.num_free_host += entered.num_swapped
        table.num_blocks[row] += num_blocks
        table.num_swapped[row] = 0
        return entered

    def _blocks_for(self, row: int, num_tokens: int) -> int:
        table = self.table
        return self._memory.blocks_for(
            num_tokens, is_hidden=bool(table.is_hidden[row]), is_real_time=bool(table.is_real_time[row])
        )


class PromptCapacity(NamedTuple):
    """Time and speed that a worker has for prompts beside its decodes."""

    share: float  # of its time
    tokens_per_s: float  # in all of its time


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A policy with the costs and limits of its worker."""

    policy: IterationPolicy
    costs: CostModel
    limits: IterationLimits
    learner: LearningCostModel | None = None  # `costs` again, where it is one that learns

    def plan(self, state: SchedulerState, now: float) -> IterationPlan:
        """Plan the next iteration."""
        return self.policy.plan(state.view(limits=self.limits, costs=self.costs, now=now))

    def prompt_capacity(self, state: SchedulerState) -> PromptCapacity:
        """Return what an iteration's decodes leave for prompts, if it lasts as long as they allow.

        All of it without decodes that have an objective, nothing where they take all the time.
        """
        table = state.table
        decodes = np.flatnonzero(table.is_decoding & (table.num_swapped == 0))
        allowed_s = float(np.min(table.tpot_s[decodes], initial=np.inf))
        work = IterationWork()
        note_decodes(work, table, decodes)
        decodes_s = self.costs.iteration_s(work)
        share = max(0.0, 1.0 - decodes_s / allowed_s)
        num_tokens = self.limits.max_tokens
        work.add_chunk(num_tokens, 0, is_last=True)
        token_s = (self.costs.iteration_s(work) - decodes_s) / num_tokens
        return PromptCapacity(share, 1.0 / max(token_s, _LEAST_TOKEN_S))

    def completed(self, state: SchedulerState, *, now: float, duration_s: float) -> None:
        """Note the end of an iteration and learn from its duration; 0 where it was not measured."""
        state.completed(now=now, duration_s=duration_s)
        if self.learner is not None and duration_s > 0.0:
            self.learner.observe(state.work, duration_s)


def work_of(table: RequestTable, plan: IterationPlan, memory: DeviceMemory) -> IterationWork:
    """Return the tokens that a plan computes and copies; call it before any part of the plan is applied."""
    work = IterationWork()
    dropped = {part.row for part in plan.evictions if part.how is EvictionMode.DROP}
    for part in plan.evictions:
        if part.how is EvictionMode.SWAP:
            on_device = int(table.num_cached[part.row] - table.num_swapped[part.row])
            leaving = on_device if part.num_tokens is None else part.num_tokens
            work.swap_out_tokens += memory.copy_tokens(leaving, is_hidden=bool(table.is_hidden[part.row]))
    rows = np.array([part.row for part in plan.scheduled], np.int64)
    num_tokens = np.array([part.num_tokens for part in plan.scheduled], np.int64)
    is_kept = ~np.isin(rows, list(dropped)) if dropped else np.ones(len(rows), np.bool_)
    context_len, num_cached = table.prompt_len[rows] + table.num_generated[rows], table.num_cached[rows] * is_kept
    is_last = num_cached + num_tokens == context_len
    is_decode = is_last & (num_tokens == 1)
    note_decodes(work, table, rows[is_decode])
    for at in np.flatnonzero(~is_decode).tolist():
        work.add_chunk(int(num_tokens[at]), int(num_cached[at]), is_last=bool(is_last[at]))
    for row in (*rows[is_kept & (table.num_swapped[rows] > 0)].tolist(), *plan.uploads):
        if row not in dropped and table.num_swapped[row]:
            num_swapped, is_hidden = int(table.num_swapped[row]), bool(table.is_hidden[row])
            work.swap_in_tokens += memory.copy_tokens(num_swapped, is_hidden=is_hidden)
    return work
