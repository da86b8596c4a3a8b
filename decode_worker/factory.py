"""Construction of decode workers' logics, for live workers and for simulated ones."""

from dataclasses import replace

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, SchedulingConfig
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.online import learned_from
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.scheduling.factory import admission_share, limits_of, make_decode_scheduler
from alignedserve.scheduling.policies import policy_entry
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core.factory import max_held, with_measured_speed
from decode_worker.batching.batch_order import DecodeLimits, SwitchLimits
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.batching.scheduled_batch import DecodeBatch, ScheduledBatch
from decode_worker.batching.slack_packing import SlackPack
from decode_worker.logic import DecodeLogic


def batch_limits_of(config: DecodeWorkerConfig, batching: BatchingConfig, *, num_blocks: int) -> DecodeLimits:
    share = batching.low_running_share
    low_running = max(min(int(share * config.max_running_requests), batching.min_requests), 1)
    enough = batching.enough_requests(config.max_running_requests)
    switch = SwitchLimits(
        enough, low_running, batching.starvation_s, int(share * num_blocks), batching.best_effort_floor
    )
    return DecodeLimits(config.max_running_requests, switch)


def make_logic(
    *,
    registered: WorkerRegistered,
    config: DecodeWorkerConfig,
    batching: BatchingConfig,
    scheduling: SchedulingConfig,
    memory: DeviceMemory,
    eos_token_ids: frozenset[int],
    costs: CostModel | None = None,
    measured: tuple[Sample, ...] = (),
) -> DecodeLogic:
    """Build the logic of one decode worker. Without `costs` it learns them, beginning with `measured` iterations.

    `memory`: empty; caches come and go in whole blocks, so none is shared. Raises ConfigError naming what is unknown.
    """
    scheduler = make_decode_scheduler(scheduling, limits_of(config), costs, measured)
    batch: DecodeBatch | None = None
    if scheduler is not None:
        batch = ScheduledBatch(
            memory=replace(memory, has_shared_blocks=False),
            scheduler=scheduler,
            max_running_requests=config.max_running_requests,
            max_held=max_held(config),
            choice=policy_entry(scheduling.policy).candidate_choice,
            admission_share=admission_share(scheduling),
        )
    elif batching.pack_share is not None:
        packing = _packing(batching.pack_share, costs, measured)
        batch = RunningBatch.of_worker(registered, config.max_running_requests, packing, memory.state_blocks)
    return DecodeLogic(
        registered=with_measured_speed(registered, config, costs, measured),
        limits=batch_limits_of(config, batching, num_blocks=registered.num_blocks),
        eos_token_ids=eos_token_ids,
        batch=batch,
        state_blocks=memory.state_blocks,
    )


def _packing(share: float, costs: CostModel | None, measured: tuple[Sample, ...]) -> SlackPack:
    if costs is not None:
        return SlackPack(share, costs)
    learned = learned_from(measured)
    return SlackPack(share, learned, learned)


def engine_places(config: DecodeWorkerConfig, scheduling: SchedulingConfig) -> int:
    return max_held(config) if policy_entry(scheduling.policy).schedules_iterations else config.max_running_requests
