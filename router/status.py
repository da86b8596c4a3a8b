"""Builds the counts for /metrics and /ready from the router's records."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from alignedserve.core.lifecycle import Stage
from alignedserve.messages.gateways import ClusterStatus, Demand, LengthTotals, WorkerLean
from alignedserve.messages.iteration_log import IterationLogTotals
from router.placement import Placement
from router.policies.prefill_order import first_token_s
from router.state import TrackedRequest


@dataclass(slots=True)
class RouterCounters:
    """Totals since the router started."""

    num_preemptions: int = 0
    num_handoffs_refused: int = 0
    iteration_log: IterationLogTotals = field(default_factory=IterationLogTotals)
    lengths: LengthTotals = field(default_factory=LengthTotals)

    def count_preemption(self, *, is_refused: bool) -> None:
        """Count a request that went back to the queue, for lack of memory or because its handoff was refused."""
        self.num_handoffs_refused += is_refused
        self.num_preemptions += not is_refused

    def add_iteration_log(self, gained: IterationLogTotals) -> None:
        """Add what a decode worker's iteration log gained; a restarted worker subtracts nothing."""
        self.iteration_log = self.iteration_log.plus(gained)

    def count_length(self, tracked: TrackedRequest, num_generated: int) -> None:
        """Count a finished request and the error of the length predicted on its arrival."""
        self.lengths = LengthTotals(
            num_finished=self.lengths.num_finished + 1,
            num_predicted=self.lengths.num_predicted + tracked.is_length_predicted,
            num_tokens=self.lengths.num_tokens + num_generated,
            error_tokens=self.lengths.error_tokens + abs(tracked.predicted_output_len - num_generated),
        )


@dataclass(frozen=True, slots=True)
class QueueForecast:
    """Forecast wait of the last real-time request of the queue, from `now` on; 0 s when there is none."""

    now: float
    wait_s: float


def demand_of(requests: Collection[TrackedRequest], placement: Placement, queue: QueueForecast) -> Demand:
    """Return what clients ask; workers that drain have no places."""
    decoders = [one for one in placement.workers.values() if one.registered.can_decode and not one.is_draining]
    return Demand(
        num_real_time=sum(tracked.is_real_time for tracked in requests),
        num_decode_places=sum(worker.registered.max_running_requests for worker in decoders),
        queue_wait_s=queue.wait_s,
        num_at_risk=sum(_is_at_risk(tracked, queue) for tracked in requests),
    )


def _is_at_risk(tracked: TrackedRequest, queue: QueueForecast) -> bool:
    """Return whether its first token, which it has not had, is due before the queue is through. Batches add no node."""
    if tracked.stage is not Stage.QUEUED or tracked.generated_token_ids or not tracked.is_real_time:
        return False
    return tracked.request.arrival_s + first_token_s(tracked.request) < queue.now + queue.wait_s


def status_of(
    requests: Collection[TrackedRequest],
    placement: Placement,
    counters: RouterCounters,
    latest_attempt: int,
    queue: QueueForecast,
) -> ClusterStatus:
    """Return the current counts of the cluster."""
    workers, pools = placement.workers.values(), placement.pools.values()
    stages = Counter(tracked.stage for tracked in requests)
    return ClusterStatus(
        num_queued=stages[Stage.QUEUED],
        num_prefilling=stages[Stage.PREFILLING],
        num_pooled=stages[Stage.POOLED],
        num_decoding=stages[Stage.DECODING],
        num_prefill_workers=sum(worker.registered.can_prefill for worker in workers),
        num_decode_workers=sum(worker.registered.can_decode for worker in workers),
        num_pool_blocks=sum(pool.num_blocks for pool in pools),
        num_pool_blocks_used=sum(pool.num_blocks_used for pool in pools),
        num_worker_blocks=sum(worker.registered.num_blocks for worker in workers),
        num_worker_blocks_used=sum(worker.num_blocks_used for worker in workers),
        num_preemptions=counters.num_preemptions,
        num_handoffs_verified=sum(worker.load.num_handoffs_verified for worker in workers if worker.load is not None),
        num_handoffs_refused=counters.num_handoffs_refused,
        num_evictions=sum(worker.load.num_evictions for worker in workers if worker.load is not None),
        num_reused_tokens=sum(worker.load.num_reused_tokens for worker in workers if worker.load is not None),
        num_recomputed_tokens=sum(worker.load.num_recomputed_tokens for worker in workers if worker.load is not None),
        num_pool_blocks_kept=sum(pool.num_blocks_kept for pool in pools),
        iteration_log=counters.iteration_log,
        lengths=counters.lengths,
        latest_attempt=latest_attempt,
        demand=demand_of(requests, placement, queue),
        leans=tuple(WorkerLean(one.name, one.lean) for one in workers if one.registered.can_move),
    )
