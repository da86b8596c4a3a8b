"""Builds the counts for /metrics and /ready from the router's records."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass
from alignedserve.messages.cluster_view import (
    MAX_ADAPTERS,
    AdapterLoad,
    AdapterLoads,
    BatchShape,
    IterationLogTotals,
    PlacedTree,
    RequestTimes,
    TierLoad,
    TimeSpread,
    WorkerSpeed,
    WorkerStatus,
    tree_of,
)
from alignedserve.messages.gateways import ClusterStatus, Demand, LengthTotals, PrefixTotals, WorkerLean
from alignedserve.messages.workers import IterationLogReport
from router.placement import Placement
from router.policies import first_token_s
from router.state import TrackedRequest, WorkerRecord

_SMALLEST_RANGE = 16  # tokens; of the tree of the router's own requests
_NUM_LEVELS = 6  # of that tree: 16 * 4 ** 6 tokens are 65 536
_COUNTED = (Stage.QUEUED, Stage.PREFILLING, Stage.POOLED, Stage.DECODING)


@dataclass(slots=True)
class RouterCounters:
    """Totals since the router started."""

    num_preemptions: int = 0
    num_handoffs_refused: int = 0
    iteration_log: IterationLogTotals = field(default_factory=IterationLogTotals)
    lengths: LengthTotals = field(default_factory=LengthTotals)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    queue_times: TimeSpread = field(default_factory=TimeSpread)
    prefill_times: TimeSpread = field(default_factory=TimeSpread)
    inference_times: TimeSpread = field(default_factory=TimeSpread)

    def count_preemption(self, *, is_refused: bool) -> None:
        self.num_handoffs_refused += is_refused
        self.num_preemptions += not is_refused

    def add_iterations(self, report: IterationLogReport, worker: WorkerRecord | None) -> None:
        self.iteration_log = self.iteration_log.plus(report.gained)
        self.num_tokens += report.num_tokens
        if worker is not None:
            worker.done.add(report)
            if report.speed != WorkerSpeed():
                worker.registered = msgspec.structs.replace(worker.registered, speed=report.speed)

    def count_dispatch(self, tracked: TrackedRequest, now: float) -> None:
        if tracked.dispatched_s is None:
            tracked.dispatched_s = now
            self.queue_times = self.queue_times.with_time(now - tracked.request.arrival_s)

    def count_prefill(self, tracked: TrackedRequest | None, worker: WorkerRecord, num_tokens: int, now: float) -> None:
        """Count a prompt that a worker has computed, and its time, once. `tracked`: None: the request has ended."""
        worker.done.num_prompt_tokens += num_tokens
        self.num_prompt_tokens += num_tokens
        if tracked is not None and tracked.dispatched_s is not None and tracked.prefilled_s is None:
            tracked.prefilled_s = now
            self.prefill_times = self.prefill_times.with_time(now - tracked.dispatched_s)

    def count_finished(self, tracked: TrackedRequest, num_generated: int, now: float) -> None:
        if tracked.dispatched_s is not None:
            self.inference_times = self.inference_times.with_time(now - tracked.dispatched_s)
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


def demand_of(requests: Iterable[TrackedRequest], placement: Placement, queue: QueueForecast) -> Demand:
    real_time = [tracked for tracked in requests if tracked.is_real_time]
    return Demand(
        num_real_time=len(real_time),
        num_decode_places=sum(worker.num_places for worker in placement.workers.values() if not worker.is_draining),
        queue_wait_s=queue.wait_s,
        num_at_risk=_num_at_risk(real_time, queue),
    )


def _num_at_risk(real_time: Iterable[TrackedRequest], queue: QueueForecast) -> int:
    through_s = queue.now + queue.wait_s
    waiting = [
        tracked.request for tracked in real_time if tracked.stage is Stage.QUEUED and not tracked.generated_token_ids
    ]
    return sum(request.arrival_s + first_token_s(request) < through_s for request in waiting)


def _num_by_stage(requests: Iterable[TrackedRequest]) -> dict[Stage, int]:
    stages = [tracked.stage for tracked in requests]
    return {stage: stages.count(stage) for stage in _COUNTED}


def status_of(
    requests: Collection[TrackedRequest],
    placement: Placement,
    counters: RouterCounters,
    latest_attempt: int,
    queue: QueueForecast,
) -> ClusterStatus:
    workers, pools = placement.workers.values(), placement.pools.values()
    demand = demand_of(requests, placement, queue)
    loads = [worker.load for worker in workers if worker.load is not None]
    stages = _num_by_stage(requests)
    return ClusterStatus(
        num_queued=stages[Stage.QUEUED],
        num_prefilling=stages[Stage.PREFILLING],
        num_pooled=stages[Stage.POOLED],
        num_decoding=stages[Stage.DECODING],
        num_prefill_workers=sum(worker.registered.can_prefill for worker in workers),
        num_decode_workers=sum(worker.registered.can_decode and not worker.is_standby for worker in workers),
        num_standby_workers=sum(worker.is_standby for worker in workers),
        num_pool_blocks=sum(pool.num_blocks for pool in pools),
        num_pool_blocks_used=sum(pool.num_blocks_used for pool in pools),
        num_worker_blocks=sum(worker.registered.num_blocks for worker in workers if not worker.is_standby),
        num_worker_blocks_used=sum(worker.num_blocks_used for worker in workers),
        num_preemptions=counters.num_preemptions,
        num_handoffs_verified=sum(load.num_handoffs_verified for load in loads),
        num_handoffs_refused=counters.num_handoffs_refused,
        num_evictions=sum(load.num_evictions for load in loads),
        num_reused_tokens=sum(load.num_reused_tokens for load in loads),
        num_recomputed_tokens=sum(load.num_recomputed_tokens for load in loads),
        num_pool_blocks_kept=sum(pool.num_blocks_kept for pool in pools),
        iteration_log=counters.iteration_log,
        lengths=counters.lengths,
        latest_attempt=latest_attempt,
        demand=demand,
        leans=tuple(WorkerLean(worker.name, worker.lean) for worker in workers if worker.registered.can_move),
        prefixes=PrefixTotals(
            sum(load.num_prefix_query_tokens for load in loads),
            sum(load.num_prefix_hit_tokens for load in loads),
            sum(load.num_prefix_blocks for load in loads),
            sum(load.num_prefix_evictions for load in loads),
        ),
        num_places=demand.num_decode_places,
        real_time=tier_load(requests, RequestClass.REAL_TIME, queue.now),
        best_effort=tier_load(requests, RequestClass.BEST_EFFORT, queue.now),
        workers=tuple(worker_status(worker) for worker in workers),
        trees=trees_of(requests, placement),
        times=RequestTimes(counters.queue_times, counters.prefill_times, counters.inference_times),
        num_prompt_tokens=counters.num_prompt_tokens,
        num_tokens=counters.num_tokens,
        block_size=max((worker.registered.block_size for worker in workers), default=0),
        num_poolless_workers=sum(
            (not worker.registered.can_decode and worker.registered.pool_name not in placement.pools)
            for worker in workers
        ),
        speed=slowest(workers),
        adapters=adapter_loads(requests, workers),
    )


def adapter_loads(requests: Iterable[TrackedRequest], workers: Iterable[WorkerRecord]) -> AdapterLoads:
    max_adapters = min(
        (worker.registered.max_adapters for worker in workers if worker.registered.max_adapters), default=0
    )
    if not max_adapters:
        return AdapterLoads()
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for tracked in requests:
        if tracked.request.adapter is not None:
            counted = waiting if tracked.stage is Stage.QUEUED else running
            counted[tracked.request.adapter.name] += 1
    loads = [AdapterLoad(name, running[name], waiting[name]) for name in sorted({*running, *waiting})]
    loads.sort(key=lambda load: -(load.num_running + load.num_waiting))
    return AdapterLoads(max_adapters, tuple(loads[:MAX_ADAPTERS]))


def slowest(workers: Iterable[WorkerRecord]) -> WorkerSpeed:
    speed = WorkerSpeed()
    for worker in workers:
        measured, registered = worker.registered.speed, worker.registered
        prompts = (measured.short_prompt_s, measured.prompt_s) if registered.can_prefill else (0.0, 0.0)
        tokens = (measured.token_s, measured.shared_token_s) if registered.can_decode else (0.0, 0.0)
        speed = speed.slower(WorkerSpeed(*prompts, *tokens))
    return speed


def tier_load(requests: Collection[TrackedRequest], request_class: RequestClass, now: float) -> TierLoad:
    members = [tracked for tracked in requests if tracked.request.request_class is request_class]
    stages = [tracked.stage for tracked in members]
    arrivals_s = [tracked.request.arrival_s for tracked in members if tracked.stage is Stage.QUEUED]
    return TierLoad(
        num_queued=len(arrivals_s),
        num_prefilling=stages.count(Stage.PREFILLING),
        num_pooled=stages.count(Stage.POOLED),
        num_decoding=stages.count(Stage.DECODING),
        oldest_queued_s=max(now - min(arrivals_s, default=now), 0.0),
    )


def worker_status(worker: WorkerRecord) -> WorkerStatus:
    registered, load, done = worker.registered, worker.load, worker.done
    num_running = load.num_running if load is not None else 0
    return WorkerStatus(
        worker=worker.name,
        node=registered.node,
        can_prefill=registered.can_prefill,
        can_decode=registered.can_decode,
        is_elastic=registered.can_move,
        is_draining=worker.is_draining,
        lean=worker.lean,
        num_waiting=load.num_waiting if load is not None else len(worker.prefilling),
        num_running=num_running,
        num_places=worker.num_places,
        num_blocks=registered.num_blocks,
        num_blocks_used=worker.num_blocks_used,
        num_prompt_tokens=done.num_prompt_tokens,
        num_tokens=done.num_tokens,
        wall_s=done.wall_s,
        compute_s=done.compute_s,
        batch=done.batch if num_running else BatchShape(),
    )


def trees_of(requests: Collection[TrackedRequest], placement: Placement) -> tuple[PlacedTree, ...]:
    """Return the trees of all pools; where requests wait in none, that of contexts on their arrival."""
    pools = [pool for pool in placement.pools.values() if pool.lengths.max_len]
    if pools:
        return tuple(PlacedTree(pool.name, pool.lengths) for pool in pools)
    leaves: dict[int, tuple[int, int]] = {}
    for tracked in requests:
        index = min((tracked.num_prefill_tokens - 1) // _SMALLEST_RANGE, 4**_NUM_LEVELS - 1)
        leaves[index] = (leaves.get(index, (0, 0))[0] + 1, 0)
    tree = tree_of(leaves, leaf_len=_SMALLEST_RANGE, max_len=_SMALLEST_RANGE * 4**_NUM_LEVELS)
    return (PlacedTree("", tree),)
