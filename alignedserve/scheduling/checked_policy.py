"""A policy of another package, whose plans a worker checks before it follows them."""

from alignedserve.core.errors import PolicyError
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, IterationPolicy, WorkerView


class CheckedPolicy:
    """The policy; raises PolicyError for a plan beyond the worker's memory, its limits or a request's tokens."""

    def __init__(self, name: str, policy: IterationPolicy) -> None:
        self._name, self._policy = name, policy

    def plan(self, view: WorkerView) -> IterationPlan:
        plan = self._policy.plan(view)
        if (reason := refusal_of(plan, view)) is not None:
            raise PolicyError(f"policy {self._name!r} planned {reason}")
        return plan


def refusal_of(plan: IterationPlan, view: WorkerView) -> str | None:
    """Return what a worker cannot do of this plan, by packing it again; None: it can do all of it."""
    table, packer = view.table, Packer(view)
    rows = [part.row for part in plan.scheduled]
    away = [*(eviction.row for eviction in plan.evictions), *plan.departures]
    everyone = (*rows, *away, *plan.uploads, *plan.returns)
    if unknown := [row for row in everyone if not 0 <= row < len(table)]:
        return f"row {unknown[0]}, and there are {len(table)} requests"
    for group in (rows, away, [*plan.uploads, *plan.returns]):
        if len(set(group)) < len(group):
            return "one request twice"
    if away and not view.can_evict:
        return "evictions on a worker that cannot evict"
    for eviction in plan.evictions:
        if not table.num_cached[eviction.row] - table.num_swapped[eviction.row]:
            return "an eviction of a request without a cache here"
        packer.evict(eviction.row, eviction.how, eviction.num_tokens)
    packer.num_free += len(plan.shares)
    for part in plan.scheduled:
        if not 0 < part.num_tokens <= packer.remaining(part.row):
            return f"{part.num_tokens} tokens of a request that has {packer.remaining(part.row)} to compute"
        if not packer.add(part.row, part.num_tokens, is_hidden=part.is_hidden):
            return _beyond(packer, view, part.num_tokens)
    if not all(map(packer.upload, plan.uploads)) or not all(map(packer.bring_back, plan.returns)):
        return "more caches to bring back than free blocks hold"
    return None


def _beyond(packer: Packer, view: WorkerView, num_tokens: int) -> str:
    if packer.num_places_left < 1:
        return f"more than {view.limits.max_running_requests} requests in one iteration"
    if num_tokens > packer.num_tokens_left:
        return f"more than {view.limits.max_tokens} tokens in one iteration"
    return f"more blocks than are free ({view.memory.num_free} before its evictions)"
