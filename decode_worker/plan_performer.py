"""Performs a policy's plan on the requests of a worker: blocks are freed and allocated, and the engine is told."""

from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Addition, RunIteration, Swap, Swaps
from alignedserve.scheduling.iteration_scheduler import Slices
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, PlannedEviction, ScheduledRequest
from alignedserve.scheduling.scheduler_state import AllocationResult
from decode_worker.held_requests import HeldRequest, HeldRequests


class _Entered(NamedTuple):
    """Additions to the scheduled requests, for the engine."""

    additions: tuple[Addition, ...]
    extensions: tuple[tuple[RequestId, tuple[BlockId, ...]], ...]


class _LatestSlices(NamedTuple):
    """The slices of the latest iteration, and what they were made of."""

    scheduled: tuple[ScheduledRequest, ...]
    members: tuple[HeldRequest, ...]
    slices: Slices


class PlanPerformer:
    """The one place where plans change which blocks a request has."""

    def __init__(self, held: HeldRequests) -> None:
        self._held = held
        self._state = held.state
        self._latest = _LatestSlices((), (), ())
        self.num_preemptions = 0

    def perform(self, plan: IterationPlan, members: tuple[HeldRequest, ...], now: float) -> RunIteration:
        """Allocate and free blocks by the plan; return the command for the engine. `members`: the scheduled ones."""
        outs = self.evict(plan.evictions, now)
        self._held.is_copying_out = bool(outs)
        ins: list[Swap] = []
        entered = self._enter(plan.scheduled, members, ins)
        for row in plan.uploads:
            self._bring_in(self._held.of_row(row), self._state.upload(row), ins)
        removals, forgotten = self._held.take_removals(), self._held.take_forgotten()
        swaps = Swaps(forgotten, outs, tuple(ins)) if forgotten or outs or ins else None
        return RunIteration(removals, *entered, self._slices(plan.scheduled, members), swaps)

    def completed(self) -> None:
        """Note the end of the iteration: its copies are made."""
        self._held.is_copying_out = False

    def evict(self, evictions: Sequence[PlannedEviction], now: float) -> tuple[Swap, ...]:
        """Free the blocks of these requests; return the copies to the host that the engine has to make first."""
        return tuple(swap for part in evictions if (swap := self._evict(part, now)) is not None)

    def _enter(
        self, scheduled: Sequence[ScheduledRequest], members: Sequence[HeldRequest], ins: list[Swap]
    ) -> _Entered:
        additions: list[Addition] = []
        extensions: list[tuple[RequestId, tuple[BlockId, ...]]] = []
        table = self._state.table
        for part, tracked, grows in zip(scheduled, members, self._state.grows(), strict=True):
            if tracked.is_in_engine and not grows:  # as most decodes, in most iterations
                continue
            request_id, num_cached = tracked.request.request_id, int(table.num_cached[part.row])
            block_ids = self._bring_in(tracked, self._state.enter(part), ins)
            if not tracked.is_in_engine:
                generated, is_hidden = tuple(tracked.generated_token_ids), bool(table.is_hidden[part.row])
                additions.append(Addition(tracked.request, generated, tuple(tracked.block_ids), num_cached, is_hidden))
                tracked.is_in_engine = True
            elif block_ids:
                extensions.append((request_id, block_ids))
        return _Entered(tuple(additions), tuple(extensions))

    def _slices(self, scheduled: tuple[ScheduledRequest, ...], members: tuple[HeldRequest, ...]) -> Slices:
        """Return the slices of the iteration.

        They are the same object as last time if they are the same, so that none has to be looked at again.
        """
        latest = self._latest
        if scheduled != latest.scheduled or members != latest.members:
            pairs = zip(members, scheduled, strict=True)
            slices = tuple([(tracked.request.request_id, part.num_tokens) for tracked, part in pairs])
            self._latest = latest = _LatestSlices(scheduled, members, slices)
        return latest.slices

    def _bring_in(self, tracked: HeldRequest, entered: AllocationResult, ins: list[Swap]) -> tuple[BlockId, ...]:
        """Allocate the request's new blocks; its cache on the host is swapped in with the iteration."""
        block_ids = self._held.allocator.allocate(entered.num_blocks)
        assert block_ids is not None, "a plan that does not fit"
        tracked.block_ids += block_ids
        if entered.num_swapped:
            ins.append(Swap(tracked.request.request_id, entered.num_swapped, tuple(tracked.block_ids)))
            tracked.is_on_host = False
        return block_ids

    def _evict(self, part: PlannedEviction, now: float) -> Swap | None:
        tracked = self._held.of_row(part.row)
        left = self._state.evict(part, now)
        num_kept = len(tracked.block_ids) - left.num_blocks
        leaving, tracked.block_ids = tuple(tracked.block_ids[num_kept:]), tracked.block_ids[:num_kept]
        self._held.allocator.free(leaving)
        self.num_preemptions += 1
        self._held.leave_engine(tracked)
        if part.how is EvictionMode.SWAP:
            tracked.is_on_host = True
            return Swap(tracked.request.request_id, left.num_swapped, leaving)
        self._held.forget_host_copy(tracked)
        return None
