"""Who computes how many tokens on a worker where everybody holds what it needs, and nobody can be evicted.

Prefill workers ask about prompts whose blocks are all there, decode workers about the running batch.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from alignedserve.core.ids import RequestId
from alignedserve.core.progress import plan_chunks
from alignedserve.core.request import Request
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import note_decodes
from alignedserve.scheduling.policy import DeviceMemory, IterationPlan
from alignedserve.scheduling.worker_state import Scheduler, WorkerState

# Blocks are the worker's own affair here: the policy sees a memory of one block for each request, and sees all held.
_BLOCK_TOKENS = 1 << 40
_MIXING_TOLERANCE = 0.1  # a learned cost model is about so exact

Slices = tuple[tuple[RequestId, int], ...]


class InOrder:
    """Whoever came first computes first, as much as an iteration may have."""

    lets_real_time_by = False  # to blocks and places

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._remaining: dict[RequestId, int] = {}

    def enter(
        self, request: Request, now: float, *, num_cached: int, num_generated: int, predicted_len: float | None
    ) -> None:
        """See PolicyPacing. Neither time nor prediction matters to this one."""
        self._remaining[request.request_id] = request.prompt_len + num_generated - num_cached

    def leave(self, request_id: RequestId) -> None:
        """See PolicyPacing."""
        self._remaining.pop(request_id, None)

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """See PolicyPacing. The order does not depend on it."""

    def choose(self, now: float, *, stalled: Collection[RequestId] = ()) -> Slices:
        """See PolicyPacing."""
        slices = plan_chunks(
            ((request_id, left) for request_id, left in self._remaining.items() if request_id not in stalled),
            self._max_tokens,
        )
        for request_id, num_tokens in slices:
            self._remaining[request_id] -= num_tokens
        return slices

    def completed(self, now: float, duration_s: float) -> None:
        """See PolicyPacing."""


class PolicyPacing:
    """As a policy says. Told of everybody who comes, goes and computes; asked once per iteration."""

    lets_real_time_by = True

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._state = WorkerState(DeviceMemory(1 << 30, 1 << 30, _BLOCK_TOKENS))

    def enter(
        self, request: Request, now: float, *, num_cached: int, num_generated: int, predicted_len: float | None
    ) -> None:
        """A request with the cache of so many tokens can compute from now on."""
        self._state.add(request, now, predicted_len=predicted_len, num_generated=num_generated)
        row = self._state.table.row(request.request_id)
        self._state.table.num_cached[row] = num_cached
        self._state.table.num_blocks[row] = 1
        self._state.num_free -= 1

    def leave(self, request_id: RequestId) -> None:
        """It computes no more here; to be said between two iterations. It may be gone already."""
        if request_id in self._state.table:
            self._state.remove(request_id)

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """A prediction that came late; of somebody who is not here it is nothing new."""
        if request_id in self._state.table:
            self._state.set_predicted_length(request_id, predicted_len)

    def is_worth_mixing(self, context_lens: Collection[int]) -> bool:
        """Whether decodes of these contexts add no more to the iteration of those here than to one among their like.

        By the cost model: always, where attention costs the sum of the contexts; where the longest is a straggler, only
        for contexts that are alike. Among their like is how they would be computed otherwise, not as they came: a batch
        that has a straggler of its own would cost no more beside another one, and neither would ever be parted from it.
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
        """Who computes how many tokens in the iteration that begins now; who is stalled cannot."""
        view = self._state.view(limits=self._scheduler.limits, costs=self._scheduler.costs, now=now)
        plan = self._scheduler.policy.plan(replace(view, can_evict=False))
        assert not plan.evictions, "evicts where nobody can be evicted"
        request_ids = self._state.table.request_ids
        if stalled:
            plan = IterationPlan(tuple(share for share in plan.shares if request_ids[share.row] not in stalled))
        self._state.begin(plan)
        return tuple((request_ids[share.row], share.num_tokens) for share in plan.shares)

    def completed(self, now: float, duration_s: float) -> None:
        """The iteration is over; to be said before anybody leaves for it."""
        self._scheduler.completed(self._state, now=now, duration_s=duration_s)


Pacing = InOrder | PolicyPacing
