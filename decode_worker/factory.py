"""Construction of the logics of decode and colocated workers, for live workers and for simulated ones."""

from dataclasses import replace

import msgspec

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.online import learned_from
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.prefix_cache.cached_blocks import budget_of
from alignedserve.prefix_cache.contexts import PrefixCache
from alignedserve.scheduling.factory import (
    admission_share,
    limits_of,
    make_decode_scheduler,
    make_scheduler,
    make_yielding,
    measured_speed,
)
from alignedserve.scheduling.policies import policy_entry
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core.router_link import num_active, registration_of, with_speed
from decode_worker.batching.batch_order import DecodeLimits, SwitchLimits
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.batching.scheduled_batch import DecodeBatch, ScheduledBatch
from decode_worker.batching.slack_packing import SlackPack
from decode_worker.colocated.logic import ColocatedLogic
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
        registered=_with_speed(registered, config, costs, measured),
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


def max_held(config: DecodeWorkerConfig) -> int:
    """Return the most requests that a worker whose policy may pause some holds; they keep their place in the engine."""
    return config.max_running_requests + config.max_waiting_requests


def colocated_registration(
    layout: BlockLayout,
    num_blocks: int,
    config: DecodeWorkerConfig,
    *,
    pool_name: str = "",
    can_move: bool = False,
    node: str = "",
    max_adapters: int = 0,
) -> WorkerRegistered:
    registered = registration_of(
        layout,
        num_blocks,
        max_held(config),
        pool_name,
        node=node,
        can_prefill=True,
        can_decode=True,
        max_adapters=max_adapters,
        num_active=num_active(config),
    )
    return msgspec.structs.replace(registered, can_move=can_move, num_places=config.max_running_requests)


def memory_of(
    config: DecodeWorkerConfig,
    layout: BlockLayout,
    *,
    num_blocks: int,
    hidden_block_tokens: int | None = None,
    has_shared_blocks: bool = False,
) -> DeviceMemory:
    """Return the empty device memory of a live worker; caches can be swapped. `hidden_block_tokens`: of a hidden
    block."""
    copy_bytes = layout.int8_block_bytes if config.has_int8_swaps else layout.block_bytes
    host_tokens = config.swap_space_bytes // copy_bytes * layout.block_size
    return DeviceMemory(
        num_blocks,
        num_blocks,
        layout.block_size,
        host_tokens,
        hidden_ratio=None if hidden_block_tokens is None else layout.block_size / hidden_block_tokens,
        has_shared_blocks=has_shared_blocks,
        swap_width=copy_bytes / layout.block_bytes,
        state_blocks=layout.state_blocks,
    )


def make_colocated_logic(
    *,
    registered: WorkerRegistered,
    memory: DeviceMemory,
    config: DecodeWorkerConfig,
    scheduling: SchedulingConfig,
    eos_token_ids: frozenset[int],
    costs: CostModel | None = None,
    measured: tuple[Sample, ...] = (),
    prefix_cache: PrefixCacheConfig | None = None,
    prefix_pool: str | None = None,
    decode_pool: str | None = None,
    num_layers: int | None = None,
    has_states: bool = False,
) -> ColocatedLogic:
    """Build the logic of one colocated worker; the rest as for `make_logic`. `prefix_cache`: None: it has none.

    `prefix_pool`, `decode_pool`: see ColocatedLogic. `num_layers`: between which a pass may stop. `has_states`: blocks
    of tokens hold recurrent states. Blocks with layer inputs or tokens of two requests are not cached: such a worker
    has no cache.
    """
    is_plain = memory.hidden_ratio is None and not memory.has_shared_blocks
    prefixes = None
    if prefix_cache is not None and prefix_cache.enabled and is_plain:
        states = budget_of(prefix_cache, memory.num_blocks, memory.state_blocks)
        prefixes = PrefixCache(memory.block_size, takes_whole=has_states or states is not None, states=states)
    yielding = make_yielding(scheduling, num_layers)
    return ColocatedLogic(
        registered=_with_speed(registered, config, costs, measured),
        memory=memory,
        scheduler=make_scheduler(scheduling, limits_of(config), costs, measured),
        eos_token_ids=eos_token_ids,
        prefixes=prefixes,
        prefix_pool=None if prefixes is None else prefix_pool,
        yielding=yielding,
        decode_pool=decode_pool,
    )


def _with_speed(
    registered: WorkerRegistered, config: DecodeWorkerConfig, costs: CostModel | None, measured: tuple[Sample, ...]
) -> WorkerRegistered:
    max_context_len = registered.num_blocks * registered.block_size
    return with_speed(registered, measured_speed(limits_of(config), costs, measured, max_context_len=max_context_len))
