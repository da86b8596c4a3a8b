"""Construction of a prefill worker's logic, for live workers and for simulated ones."""

import msgspec

from alignedserve.config.sections import PrefillWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.prefix_cache.contexts import PrefixCache
from alignedserve.prefix_cache.kept_states import budget_of
from alignedserve.scheduling.factory import limits_of, make_iteration_scheduler, measured_speed
from alignedserve.worker_core.registration import with_speed
from prefill_worker.logic import PrefillLogic


def buffer_blocks_of(config: PrefillWorkerConfig, layout: BlockLayout, num_decode_workers: int) -> int:
    """Return the blocks of the candidate buffer that each decode worker has in a prefill worker's memory."""
    return layout.blocks_in(config.candidate_buffer_bytes) // num_decode_workers


def make_logic(
    *,
    registered: WorkerRegistered,
    config: PrefillWorkerConfig,
    scheduling: SchedulingConfig,
    eos_token_ids: frozenset[int],
    costs: CostModel | None = None,
    measured: tuple[Sample, ...] = (),
    prefix_cache: PrefixCacheConfig | None = None,
    num_layers: int | None = None,
    state_blocks: int = 0,
) -> PrefillLogic:
    """Build the logic of one prefill worker. Without `costs` it learns them, beginning with `measured` iterations.

    `prefix_cache`: None: it has none. `num_layers`: of the model, between which a pass may stop. `state_blocks`: of
    every request, before those of its tokens. Raises ConfigError naming what is unknown.
    """
    max_context_len = registered.num_blocks * registered.block_size
    speed = measured_speed(limits_of(config), costs, measured, max_context_len=max_context_len)
    scheduler = make_iteration_scheduler(scheduling, limits_of(config), costs, measured, num_layers)
    told = msgspec.structs.replace(registered, is_fcfs=not scheduler.prioritizes_real_time)
    return PrefillLogic(
        registered=with_speed(told, speed),
        max_running_requests=config.max_running_requests,
        scheduler=scheduler,
        eos_token_ids=eos_token_ids,
        prefixes=_prefixes(registered, prefix_cache, state_blocks),
        state_blocks=state_blocks,
    )


def _prefixes(registered: WorkerRegistered, config: PrefixCacheConfig | None, state_blocks: int) -> PrefixCache | None:
    if config is None or not config.enabled:
        return None
    return PrefixCache(registered.block_size, states=budget_of(config, registered.num_blocks, state_blocks))
