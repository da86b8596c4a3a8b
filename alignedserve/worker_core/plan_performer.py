"""Performs a policy's plan on the requests of a worker: frees and allocates blocks, and informs the engine."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Addition, RunIteration, StateKept, Swap, Swaps
from alignedserve.prefix_cache.contexts import Passed
from alignedserve.scheduling.iteration_scheduler import Slices
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, PlannedEviction, PlannedShare, ScheduledRequest
from alignedserve.scheduling.shared_blocks import AllocationResult
from alignedserve.worker_core.held_requests import HeldRequest, HeldRequests


class _Entered(NamedTuple):
    additions: tuple[Addition, ...]
    extensions: tuple[tuple[RequestId, tuple[BlockId, ...]], ...]


class _Swaps(NamedTuple):
    outs: list[Swap]
    ins: list[Swap]


class _LatestSlices(NamedTuple):
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
        swaps = _Swaps(list(self.evict(plan.evictions, now)), [])
        entering = [tracked for tracked in members if not tracked.is_in_engine]
        for tracked in entering:
            self._held.share_cached(tracked)
        joined = {part.row: self._share(part) for part in plan.shares}
        grows = self._state.grows()
        entered = _Entered((), ())
        if entering or any(grows):
            entered = self._enter(zip(plan.scheduled, members, grows, strict=True), joined, swaps)
        for row in plan.uploads:
            self._bring_in(self._held.of_row(row), self._state.upload(row), (), swaps)
        removals, forgotten = self._held.take_removals(), self._held.take_forgotten()
        moves = Swaps(forgotten, tuple(swaps.outs), tuple(swaps.ins)) if forgotten or swaps.outs or swaps.ins else None
        slices, copies = self._slices(plan.scheduled, members), self._held.begin_copies()
        self._held.is_copying_out |= bool(swaps.outs or copies)
        replacements, states = self._held.take_replacements(), self._begin_states(members, plan.scheduled)
        return RunIteration(removals, *entered, slices, moves, replacements, copies, states=states)

    def _begin_states(
        self, members: Sequence[HeldRequest], scheduled: Sequence[ScheduledRequest]
    ) -> tuple[StateKept, ...]:
        keeper = self._held.states
        if not keeper.are_kept:
            return ()
        states: list[StateKept] = []
        for tracked, part in zip(members, scheduled, strict=True):
            if tracked.context is not None:
                first = int(self._state.table.num_cached[part.row])
                slice_ = Passed(first, first + part.num_tokens, tracked.is_prefilled)
                # Beside them every request may need a block soon.
                request_id = tracked.request.request_id
                states += keeper.begin(request_id, tracked.context, slice_, num_kept_free=len(self._held))
        self._state.settle(self._held.allocator.num_free)
        return tuple(states)

    def completed(self) -> None:
        self._held.is_copying_out = False

    def evict(self, evictions: Sequence[PlannedEviction], now: float) -> tuple[Swap, ...]:
        return tuple(swap for part in evictions if (swap := self._evict(part, now)) is not None)

    def _share(self, part: PlannedShare) -> tuple[BlockId, ...]:
        self._state.share_last_block(part)
        return tuple(self._held.of_row(part.partner).block_ids[-1:])

    def _enter(
        self,
        scheduled: Iterable[tuple[ScheduledRequest, HeldRequest, bool]],
        joined: Mapping[int, tuple[BlockId, ...]],
        swaps: _Swaps,
    ) -> _Entered:
        additions: list[Addition] = []
        extensions: list[tuple[RequestId, tuple[BlockId, ...]]] = []
        table = self._state.table
        for part, tracked, grows in scheduled:
            if tracked.is_in_engine and not grows:  # as most decodes, in most iterations
                continue
            request_id, num_cached = tracked.request.request_id, int(table.num_cached[part.row])
            shared = joined.get(part.row, ())
            block_ids = self._bring_in(tracked, self._state.enter(part), shared, swaps)
            if not tracked.is_in_engine:
                generated, is_hidden = tuple(tracked.generated_token_ids), bool(table.is_hidden[part.row])
                block_ids, is_reversed = tuple(tracked.block_ids), self._held.is_reversed(tracked)
                additions.append(Addition(tracked.request, generated, block_ids, num_cached, is_hidden, is_reversed))
                tracked.is_in_engine = True
            elif block_ids:
                extensions.append((request_id, block_ids))
        return _Entered(tuple(additions), tuple(extensions))

    def _slices(self, scheduled: tuple[ScheduledRequest, ...], members: tuple[HeldRequest, ...]) -> Slices:
        latest = self._latest
        if scheduled != latest.scheduled or members != latest.members:
            pairs = zip(members, scheduled, strict=True)
            slices = tuple([(tracked.request.request_id, part.num_tokens) for tracked, part in pairs])
            self._latest = latest = _LatestSlices(scheduled, members, slices)
        return latest.slices

    def _bring_in(
        self, tracked: HeldRequest, entered: AllocationResult, shared: tuple[BlockId, ...], swaps: _Swaps
    ) -> tuple[BlockId, ...]:
        allocated = self._held.allocator.allocate(entered.num_blocks)
        assert allocated is not None, "a plan that does not fit"
        num_brought = entered.num_swapped + entered.num_moved
        num_states = self._held.blocks_for(0) - self._held.num_of_states(tracked) if allocated else 0
        if num_states:  # that it enters with
            tracked.block_ids[:0], allocated = allocated[:num_states], allocated[num_states:]
        block_ids = allocated + shared
        first_token = self._held.num_cached(tracked) - num_brought
        if entered.num_moved:
            left = (tracked.block_ids.pop(),)
            swaps.outs.append(self._swap(tracked, entered.num_moved, left, first_token))
            self._held.leave_engine(tracked)
        tracked.block_ids += block_ids
        if num_brought:
            swaps.ins.append(self._swap(tracked, num_brought, tuple(tracked.block_ids), first_token))
            tracked.is_on_host = False
        return block_ids

    def _evict(self, part: PlannedEviction, now: float) -> Swap | None:
        tracked = self._held.of_row(part.row)
        left = self._state.evict(part, now)
        num_kept, is_swapped = len(tracked.block_ids) - left.num_blocks, part.how is EvictionMode.SWAP
        first_token = self._held.num_cached(tracked) - int(self._state.table.num_swapped[part.row])
        holding = tuple(tracked.block_ids[first_token // self._held.block_size :])
        self._held.leave_blocks(tracked, num_kept, is_swapped=is_swapped, shares_last=left.is_last_shared)
        self.num_preemptions += 1
        self._held.leave_engine(tracked)
        if is_swapped:
            tracked.is_on_host = True
            return self._swap(tracked, left.num_swapped, holding, first_token)
        self._held.forget_host_copy(tracked)
        return None

    def _swap(self, tracked: HeldRequest, num_tokens: int, block_ids: tuple[BlockId, ...], first_token: int) -> Swap:
        is_reversed = self._held.is_reversed(tracked)
        return Swap(tracked.request.request_id, num_tokens, block_ids, first_token, is_reversed)
