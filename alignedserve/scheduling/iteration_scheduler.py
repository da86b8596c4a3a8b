"""Schedulers of iterations on prefill and decode workers, where each request holds its blocks and none is evicted.

Prefill workers schedule prompts whose blocks are all allocated, decode workers the running batch.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.core.progress import plan_chunks
from alignedserve.core.request import Request
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import note_decodes
from alignedserve.scheduling.policy import DeviceMemory, IterationPlan
from alignedserve.scheduling.scheduler_state import Scheduler, SchedulerState
from alignedserve.scheduling.table import RequestTable

# The worker manages its blocks itself: the policy sees a memory of one block per request, all of them held and none
# free, so that memory is nothing to choose by.
_BLOCK_TOKENS = 1 << 40
_MIXING_TOLERANCE = 0.1  # about the error of a learned cost model

Slices = tuple[tuple[RequestId, int], ...]


class FcfsIterationScheduler:
    """First come, first served: each request computes as many tokens as the iteration has left."""

    prioritizes_real_time = False  # when blocks are allocated

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._remaining: dict[RequestId, int] = {}

    def enter(
        self, request: Request, now: float, *, num_cached: int, num_generated: int, predicted_len: float | None
    ) -> None:
        """See PolicyIterationScheduler. Time and prediction are ignored here."""
        self._remaining[request.request_id] = request.prompt_len + num_generated - num_cached

    def leave(self, request_id: RequestId) -> None:
        """See PolicyIterationScheduler."""
        self._remaining.pop(request_id, None)

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """See PolicyIterationScheduler. The order does not depend on it."""

    def choose(self, now: float, *, stalled: Collection[RequestId] = ()) -> Slices:
        """See PolicyIterationScheduler."""
        slices = plan_chunks(
            ((request_id, left) for request_id, left in self._remaining.items() if request_id not in stalled),
            self._max_tokens,
        )
        for request_id, num_tokens in slices:
            self._remaining[request_id] -= num_tokens
        return slices

    def completed(self, now: float, duration_s: float) -> None:
        """See PolicyIterationScheduler."""


class PolicyIterationScheduler:
    """Scheduling by an iteration policy. Tracks every request that enters, leaves and computes."""

    prioritizes_real_time = True

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._state = SchedulerState(DeviceMemory(num_blocks=0, num_free=0, block_size=_BLOCK_TOKENS))

    @property
    def table(self) -> RequestTable:
        """The requests that have entered, to be read."""
        return self._state.table

    @property
    def costs(self) -> CostModel:
        """The cost model, to be asked."""
        return self._scheduler.costs

    def enter(
        self,
        request: Request,
        now: float,
        *,
        num_cached: int,
        num_generated: int,
        predicted_len: float | None,
        first_token_s: float | None = None,
    ) -> None:
        """Add a request that has the cache of `num_cached` tokens and can compute from now on.

        `first_token_s`: when it had its first token, if it had one; None: now.
        """
        self._state.add(request, now, predicted_len=predicted_len, num_generated=num_generated)
        row = self._state.table.row(request.request_id)
        self._state.table.num_cached[row] = num_cached
        self._state.table.num_blocks[row] = 1
        if num_generated and first_token_s is not None:
            self._state.table.first_token_s[row] = first_token_s

    def leave(self, request_id: RequestId) -> None:
        """Remove a request, between two iterations. It may be gone already."""
        if request_id in self._state.table:
            num_blocks = self._state.remove(request_id)
            self._state.num_free -= num_blocks  # they go with it

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """Set a prediction that came late; requests that are not here are ignored."""
        if request_id in self._state.table:
            self._state.set_predicted_length(request_id, predicted_len)

    def decode_s(self) -> float | None:
        """Return the time of an iteration of all decodes here, by the cost model; None: there are none."""
        table = self._state.table
        work = IterationWork()
        note_decodes(work, table, np.flatnonzero(table.num_remaining == 1))
        return self._scheduler.costs.iteration_s(work) if work.num_decodes else None

    def is_mixing_cheaper(self, context_lens: Collection[int]) -> bool:
        """Return whether decodes of these contexts cost no more in the running iteration than in one of equal lengths.

        By the cost model: always if attention costs the sum of the contexts; if the longest one is a straggler, only
        for similar contexts. The comparison is with equal lengths, not with the lengths given: otherwise two batches
        with stragglers of their own would be mixed, and never be separated again.
        """
        table = self._state.table
        here, among_like = IterationWork(), IterationWork()
        note_decodes(here, table, np.flatnonzero(table.num_remaining == 1))
        num_others, sum_others = len(context_lens), sum(context_lens)
        among_like.add_decodes(num_others, sum_others, -(-sum_others // num_others))
        both = here.copy()
        both.add_decodes(num_others, sum_others, max(context_lens))
        empty = IterationWork()
        empty.add_decode(0)
        iteration_s = self._scheduler.costs.iteration_s
        added_s, own_s = iteration_s(both) - iteration_s(here), iteration_s(among_like) - iteration_s(empty)
        return added_s <= (1.0 + _MIXING_TOLERANCE) * own_s

    def choose(self, now: float, *, stalled: Collection[RequestId] = ()) -> Slices:
        """Choose how many tokens each request computes in the iteration that begins now; stalled ones cannot."""
        view = self._state.view(limits=self._scheduler.limits, costs=self._scheduler.costs, now=now)
        view = replace(view, memory=replace(view.memory, num_blocks=len(view.table)), can_evict=False)
        plan = self._scheduler.policy.plan(view)
        assert not plan.evictions, "evictions on a worker that cannot evict"
        request_ids = self._state.table.request_ids
        if stalled:
            plan = IterationPlan(tuple(part for part in plan.scheduled if request_ids[part.row] not in stalled))
        self._state.begin(plan)
        return tuple((request_ids[part.row], part.num_tokens) for part in plan.scheduled)

    def completed(self, now: float, duration_s: float) -> None:
        """Note the end of the iteration, before any request leaves because of it."""
        self._scheduler.completed(self._state, now=now, duration_s=duration_s)


IterationScheduler = FcfsIterationScheduler | PolicyIterationScheduler
