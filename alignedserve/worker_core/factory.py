"""Construction of elastic workers' logics, for live workers and for simulated ones, and what decode workers share."""

from typing import Any

from alignedserve.config.sections import DecodeWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.prefix_cache.cached_blocks import budget_of
from alignedserve.prefix_cache.contexts import PrefixCache
from alignedserve.scheduling.drafting import DraftLimits
from alignedserve.scheduling.factory import limits_of, make_scheduler, make_yielding, measured_speed
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core.logic import ColocatedLogic
from alignedserve.worker_core.router_link import num_active, registration_of, with_speed


def max_held(config: DecodeWorkerConfig) -> int:
    """Return the most requests that a worker whose policy may pause some holds; they keep their place in the engine."""
    return config.max_running_requests + config.max_waiting_requests


def colocated_registration(
    layout: BlockLayout, num_blocks: int, config: DecodeWorkerConfig, **fields: Any
) -> WorkerRegistered:
    """`fields`: others of WorkerRegistered."""
    fields |= {"num_active": num_active(config), "num_places": config.max_running_requests}
    return registration_of(layout, num_blocks, max_held(config), can_prefill=True, can_decode=True, **fields)


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
    may_draft: bool = False,
) -> ColocatedLogic:
    """Build the logic of one colocated worker. Without `costs` it learns them, beginning with `measured` iterations.

    `prefix_cache`: None: it has none.
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
        registered=with_measured_speed(registered, config, costs, measured),
        memory=memory,
        scheduler=make_scheduler(scheduling, limits_of(config), costs, measured),
        eos_token_ids=eos_token_ids,
        prefixes=prefixes,
        prefix_pool=None if prefixes is None else prefix_pool,
        yielding=yielding,
        decode_pool=decode_pool,
        drafting=DraftLimits() if may_draft else None,
    )


def with_measured_speed(
    registered: WorkerRegistered, config: DecodeWorkerConfig, costs: CostModel | None, measured: tuple[Sample, ...]
) -> WorkerRegistered:
    max_context_len = registered.num_blocks * registered.block_size
    return with_speed(registered, measured_speed(limits_of(config), costs, measured, max_context_len=max_context_len))
