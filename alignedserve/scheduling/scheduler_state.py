"""Effects of plans on a worker's requests and memory: the one place that writes the table's progress.

Shared by the worker's logic, which holds block ids and tokens, and tests that run a policy without a worker.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import (
    DeviceMemory,
    EvictionMode,
    IterationHistory,
    IterationLimits,
    IterationPlan,
    PlannedEviction,
    PlannedShare,
    PoolView,
    ScheduledRequest,
    WorkerView,
)
from alignedserve.scheduling.shared_blocks import AllocationResult, HeldBlocks, SharedBlocks
from alignedserve.scheduling.table import Bools, Ints, RequestTable
from alignedserve.scheduling.table_operations import growing_rows, note_completed, note_decodes


class EvictionResult(NamedTuple):
    """Blocks and tokens that an eviction moved."""

    num_blocks: int  # freed, the last of the request
    num_swapped: int  # tokens copied to the host
    is_last_shared: bool = False  # the last freed block has another user, and is not free


class Flight(NamedTuple):
    """An iteration in flight. No row is removed meanwhile."""

    rows: Ints
    num_tokens: Ints
    scheduled: tuple[ScheduledRequest, ...] | None  # that they are of
    work: IterationWork
    alone_s: float


@dataclass(frozen=True, slots=True)
class MovedProgress:
    """The columns of a request that moves on with its cache."""

    predicted_len: float
    num_generated: int
    num_cached: int
    num_blocks: int
    first_token_s: float
    last_token_s: float
    service_s: float = 0.0


_MOVED = tuple(field.name for field in fields(MovedProgress))


class SchedulerState:
    """The table of one worker, and its free blocks and free host memory as numbers."""

    def __init__(self, memory: DeviceMemory) -> None:
        """`memory`: empty."""
        self.table = RequestTable()
        self.shared = SharedBlocks(self.table, memory.block_size)
        self.history = IterationHistory()
        self.held_blocks: HeldBlocks | None = None  # where requests may share some
        self.pool: PoolView | None = None  # where a pool keeps decodes
        self._memory = self._seen = memory
        self.num_free = memory.num_free
        self.num_free_host = memory.num_free_host
        self.num_recomputed = 0  # tokens that were computed here or elsewhere, whose cache was lost, and are again
        self._lost: dict[RequestId, int] = {}  # of those that have less now: the tokens whose cache they had
        self.work = IterationWork()  # of the iteration in flight, like these; no row is removed meanwhile
        self.alone_s = 0.0  # of its real-time part, as in the plan
        self._rows: Ints = np.zeros(0, np.int64)
        self._num_tokens: Ints = np.zeros(0, np.int64)
        self._scheduled: tuple[ScheduledRequest, ...] | None = None  # that they are of: the same in most iterations
        self._tokens_of: dict[int, int] = {}  # tokens that rows compute in it, where blocks are shared
        self._joins: dict[int, RequestId] = {}  # rows that are to take a share of the last block of another

    def view(
        self,
        *,
        limits: IterationLimits,
        costs: CostModel,
        now: float,
        computes_prompts: bool = True,
    ) -> WorkerView:
        """Build the policy's view."""
        memory = self._seen
        if memory.num_free != self.num_free or memory.num_free_host != self.num_free_host:
            self._seen = memory = memory.with_free(self.num_free, self.num_free_host)
        shared = self.shared if memory.has_shared_blocks else None
        return WorkerView(
            *(self.table, memory, limits, self.history, costs, now),
            shared_blocks=shared,
            held_blocks=self.held_blocks,
            pool=self.pool,
            computes_prompts=computes_prompts,
        )

    def add(
        self,
        request: Request,
        now: float,
        *,
        predicted_len: float | None = None,
        num_generated: int = 0,
        begun_s: float = 0.0,
    ) -> None:
        """Add a request without any cache: it had one elsewhere if it has generated tokens, the first `begun_s` ago."""
        self.table.add(request, now, predicted_len=predicted_len, num_generated=num_generated, begun_s=begun_s)
        if num_generated:  # the cache of the last one never was
            self._lost[request.request_id] = request.prompt_len + num_generated - 1

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """Set a later prediction of all its output tokens."""
        self.table.predicted_len[self.table.row(request_id)] = max(predicted_len, 1.0)

    def remove(self, request_id: RequestId) -> int:
        """Remove a request that has ended; return the blocks that are free now."""
        row = self.table.row(request_id)
        num_blocks = int(self.table.num_blocks[row]) - (self.shared.part(request_id) is not None)
        self.num_free += num_blocks
        self.num_free_host += int(self.table.num_swapped[row])
        self._lost.pop(request_id, None)
        self.table.remove(request_id)
        return num_blocks

    # --- blocks that requests share

    def foresee(self, request_id: RequestId, num_cached: int) -> None:
        """Set the tokens that a request without blocks will find cached when it enters, as things are."""
        row = self.table.row(request_id)
        assert not self.table.num_blocks[row], "foresees what a request has"
        self.table.num_cached[row] = num_cached

    def share(self, row: int, num_blocks: int) -> None:
        """Give a request the blocks of the tokens that were foreseen; `settle` follows."""
        assert not self.table.num_blocks[row], "shares blocks in place of its own"
        self.table.num_blocks[row] = num_blocks

    def filling_rows(self) -> list[int]:
        """Return the rows that filled a block in the iteration that has just been completed."""
        num_cached, size = self.table.num_cached[self._rows], self._memory.block_size
        filling: list[int] = self._rows[num_cached // size > (num_cached - self._num_tokens) // size].tolist()
        return filling

    def settle(self, num_free: int) -> None:
        """Set the number of free blocks, where requests share some: what each holds does not add up."""
        self.num_free = num_free

    def begin(self, plan: IterationPlan) -> None:
        """Note the iteration that begins; call it before any part of its plan is applied."""
        if plan.scheduled != self._scheduled:
            self._scheduled = plan.scheduled
            self._rows = np.array([part.row for part in plan.scheduled], np.int64)
            self._num_tokens = np.array([part.num_tokens for part in plan.scheduled], np.int64)
        self.work = plan.work if plan.work is not None else work_of(self.table, plan, self._memory)
        self.alone_s = plan.alone_s
        if self._memory.has_shared_blocks:
            self._tokens_of = {part.row: part.num_tokens for part in plan.scheduled}
            self._joins = {part.row: self.table.request_ids[part.partner] for part in plan.shares}

    def set_aside(self) -> Flight:
        """Return the iteration in flight, so that another one may begin and end within it; blocks are not shared."""
        return Flight(self._rows, self._num_tokens, self._scheduled, self.work, self.alone_s)

    def take_up(self, flight: Flight) -> None:
        """Go on with an iteration that was set aside."""
        self._rows, self._num_tokens, self._scheduled, self.work, self.alone_s = flight

    def remove_beside(self, request_id: RequestId) -> int:
        """Remove a request, as `remove`, that is in no iteration in flight while there may be one."""
        row, last = self.table.row(request_id), len(self.table) - 1
        num_blocks = self.remove(request_id)
        self._rows, self._scheduled = np.where(self._rows == last, row, self._rows), None
        return num_blocks

    # --- requests that move between workers

    def hold(self, num_blocks: int) -> None:
        """Take free blocks for a request that is on its way; negative: give them back."""
        assert num_blocks <= self.num_free, "blocks held that are not free"
        self.num_free -= num_blocks

    def detach(self, request_id: RequestId) -> MovedProgress:
        """Remove a request whose cache is on the device; its blocks stay held."""
        table, row = self.table, self.table.row(request_id)
        assert not table.num_swapped[row], "part of its cache is on the host"
        assert self.shared.partner(request_id) is None, "its last block is another's as well"
        values = {name: getattr(table, name)[row].item() for name in _MOVED}
        self._lost.pop(request_id, None)
        table.remove(request_id)
        return MovedProgress(**values)

    def attach(self, request: Request, now: float, progress: MovedProgress) -> None:
        """Add a request with its cache, in blocks that are held already; it may stand in the table as one elsewhere."""
        if request.request_id not in self.table:
            self.table.add(request, now, num_generated=progress.num_generated)
        row = self.table.row(request.request_id)
        self.table.num_swapped[row] = 0
        for name in _MOVED:
            getattr(self.table, name)[row] = getattr(progress, name)

    def add_elsewhere(self, request: Request, now: float, progress: MovedProgress) -> None:
        """Add a request whose cache lies in another memory: it looks swapped out, and takes no host memory here."""
        self.attach(request, now, progress)
        row = self.table.row(request.request_id)
        self.table.num_swapped[row] = self.table.num_cached[row]

    def remove_elsewhere(self, request_id: RequestId) -> None:
        """Remove such a request."""
        self.table.remove(request_id)

    def bring_back(self, request_id: RequestId, num_blocks: int) -> None:
        """Note that the cache of such a request is here, in blocks that were held; without any: that it is lost."""
        table, row = self.table, self.table.row(request_id)
        assert table.num_swapped[row] == table.num_cached[row], "part of it was here"
        table.num_swapped[row], table.num_blocks[row] = 0, num_blocks
        if not num_blocks:
            self._lost[request_id] = int(table.num_cached[row])
            table.num_cached[row] = 0

    # --- a plan, part by part, evictions first

    def evict(self, part: PlannedEviction, now: float) -> EvictionResult:
        """Evict the cache of this request, or its last tokens, from the device."""
        table, row = self.table, part.row
        on_device = int(table.num_cached[row] - table.num_swapped[row])
        if part.how is EvictionMode.DROP:
            assert part.num_tokens is None, "a part of a cache is dropped"
            self.num_free_host += int(table.num_swapped[row])
            request_id = table.request_ids[row]
            self._lost[request_id] = max(self._lost.get(request_id, 0), int(table.num_cached[row]))
            table.num_cached[row] = table.num_swapped[row] = 0
            left = EvictionResult(int(table.num_blocks[row]), 0)
            table.is_hidden[row] = False
        else:
            leaving = on_device if part.num_tokens is None else part.num_tokens
            assert 0 < leaving <= on_device, "swaps out what is not on the device"
            assert leaving <= self.num_free_host, "no free host memory"
            blocks = self._blocks_for(row, on_device - leaving) if leaving < on_device else 0
            left = EvictionResult(int(table.num_blocks[row]) - blocks, leaving)
            table.num_swapped[row] += leaving
            self.num_free_host -= leaving
        if left.num_blocks and self.shared.part(table.request_ids[row]) is not None:
            left = left._replace(is_last_shared=True)
        self.num_free += left.num_blocks - left.is_last_shared
        table.num_blocks[row] -= left.num_blocks
        table.num_preemptions[row] += 1
        table.waits_since_s[row] = now
        return left

    def share_last_block(self, part: PlannedShare) -> None:
        """Let two requests share the last block of one of them. Call it after evictions, before any request enters."""
        request_ids = self.table.request_ids
        self.shared.share(request_ids[part.row], request_ids[part.partner])

    def grows(self) -> list[bool]:
        """Return which requests of the iteration may take blocks or come back from the host, in order; after evictions
        and shares.

        For all others `enter` changes nothing.
        """
        grows = growing_rows(self.table, self._memory, self._rows, self._num_tokens)
        if self.shared:
            sharing = self.shared.partner_rows()
            return [grown or row in sharing for row, grown in zip(self._rows.tolist(), grows, strict=True)]
        return grows

    def enter(self, part: ScheduledRequest) -> AllocationResult:
        """Allocate blocks for the tokens that the request computes and for its cache on the host."""
        table, row = self.table, part.row
        assert 0 < part.num_tokens <= table.remaining(row), "computes tokens that are not known yet"
        assert not part.is_hidden or not table.num_cached[row], "a cache changes its kind without being dropped"
        table.is_hidden[row] |= part.is_hidden
        wanted = self._blocks_for(row, int(table.num_cached[row]) + part.num_tokens)
        num_moved = self._leave_shared(row, part.num_tokens)
        num_blocks = max(wanted - int(table.num_blocks[row]), 0)
        return self._bring_in(row, num_blocks, num_moved)

    def upload(self, row: int) -> AllocationResult:
        """Allocate blocks for the request's cache on the host, though it computes nothing yet."""
        wanted = self._blocks_for(row, int(self.table.num_cached[row]))
        num_moved = self._leave_shared(row, 0)
        return self._bring_in(row, max(wanted - int(self.table.num_blocks[row]), 0), num_moved)

    def note_forced(self, request_id: RequestId, num_tokens: int, *, num_drafted: int = 0) -> None:
        """Note that a request of the iteration got `num_tokens` more than planned.

        Its grammar forced them, or of `num_drafted` so many were right; the request has their blocks. `completed`
        follows.
        """
        table, row = self.table, self.table.row(request_id)
        context_len = int(table.context_len[row])
        if num_drafted:
            self.work.add_decodes(num_drafted, num_drafted * context_len, context_len)
        else:
            self.work.add_chunk(num_tokens, context_len, is_last=False)
        table.num_generated[row] += num_tokens
        self._num_tokens[self._rows == row] += num_tokens
        self._scheduled = None

    def note_skipped(self, request_id: RequestId) -> None:
        """Note that a request of the iteration did not compute its one token. `completed` follows."""
        table, row = self.table, self.table.row(request_id)
        skipped, is_computed = IterationWork(), self._rows != row
        note_decodes(skipped, table, self._rows[~is_computed])
        self.work.subtract(skipped)
        self._rows, self._num_tokens, self._scheduled = self._rows[is_computed], self._num_tokens[is_computed], None

    def completed(self, *, now: float, duration_s: float, is_urgent: bool = False) -> Bools:
        """Note the end of the iteration; return which of its requests computed all their tokens, and so sampled.

        `is_urgent`: it ran within another one.
        """
        self.history.note(duration_s, is_urgent=is_urgent)
        if self._lost:
            self._count_recomputed()
        return note_completed(self.table, self._rows, self._num_tokens, now=now, duration_s=duration_s)

    def _count_recomputed(self) -> None:
        table = self.table
        for row, num_tokens in zip(self._rows.tolist(), self._num_tokens.tolist(), strict=True):
            request_id = table.request_ids[row]
            num_lost = self._lost.get(request_id)
            if num_lost is None:
                continue
            first = int(table.num_cached[row])
            self.num_recomputed += max(min(first + num_tokens, num_lost) - first, 0)
            if first + num_tokens >= num_lost:
                del self._lost[request_id]

    def _bring_in(self, row: int, num_blocks: int, num_moved: int) -> AllocationResult:
        joined = self._joins.pop(row, None)
        num_new = num_blocks - (joined is not None)
        assert 0 <= num_new <= self.num_free, "a plan that does not fit"
        table, entered = self.table, AllocationResult(num_new, int(self.table.num_swapped[row]), joined, num_moved)
        self.num_free -= num_new
        self.num_free_host += entered.num_swapped
        table.num_blocks[row] += num_blocks
        table.num_swapped[row] = 0
        return entered

    def _leave_shared(self, row: int, num_tokens: int) -> int:
        """Move a best-effort request without room beside its partner to a block of its own; return the moved tokens."""
        table, block_size = self.table, self._memory.block_size
        request_id = table.request_ids[row]
        other = self.shared.partner(request_id)
        if other is None or table.is_real_time[row] or row in self._joins:
            return 0
        beside = table.row(other)
        slots = self.shared.used_slots(beside, self._tokens_of.get(beside, 0))
        num_used = self.shared.used_slots(row)
        in_block = num_used + int(table.num_swapped[row]) + num_tokens
        if in_block <= block_size - slots:
            return 0
        self.shared.part(request_id)
        table.num_blocks[row] -= 1
        self.work.swap_out_tokens += self._memory.copy_tokens(num_used)
        self.work.swap_in_tokens += self._memory.copy_tokens(num_used)
        return num_used

    def _blocks_for(self, row: int, num_tokens: int) -> int:
        table = self.table
        return self._memory.blocks_for(num_tokens, is_hidden=bool(table.is_hidden[row]))


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
        row, chunk, is_constrained = int(rows[at]), (int(num_tokens[at]), int(num_cached[at])), table.is_constrained
        num_scored = table.num_scored(row, *chunk)
        kind = {"is_last": bool(is_last[at]), "is_constrained": bool(is_constrained[row])}
        work.add_chunk(*chunk, num_scored=num_scored, **kind)
    for row in (*rows[is_kept & (table.num_swapped[rows] > 0)].tolist(), *plan.uploads):
        if row not in dropped and table.num_swapped[row]:
            num_swapped, is_hidden = int(table.num_swapped[row]), bool(table.is_hidden[row])
            work.swap_in_tokens += memory.copy_tokens(num_swapped, is_hidden=is_hidden)
    return work
