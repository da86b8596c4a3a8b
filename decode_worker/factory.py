"""How the logics of decode and colocated workers are put together, alike for live workers and for simulated ones."""

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.scheduling.factory import make_decode_iteration_scheduler, make_scheduler
from alignedserve.scheduling.iteration_scheduler import PolicyPacing
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits
from alignedserve.scheduling.worker_state import Scheduler
from decode_worker.batching.batch_order import SwitchLimits
from decode_worker.colocated.logic import ColocatedLogic
from decode_worker.logic import DecodeLimits, DecodeLogic


def registration_of(
    config: DecodeWorkerConfig, layout: BlockLayout, *, num_blocks: int, pool_name: str
) -> WorkerRegistered:
    """What a decode worker with so many blocks tells the router about itself."""
    return WorkerRegistered(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_running_requests=config.max_running_requests,
        pool_name=pool_name,
        can_prefill=False,
        can_decode=True,
        layout_digest=layout.digest().hex(),
    )


def limits_of(config: DecodeWorkerConfig, batching: BatchingConfig, *, num_blocks: int) -> DecodeLimits:
    """What bounds the running batch of a worker with so many blocks.

    `min_requests` saturate any worker, however many places it has; and so do fewer that fill its memory.
    """
    share = batching.low_running_share
    low_running = max(min(int(share * config.max_running_requests), batching.min_requests), 1)
    enough = batching.enough_requests(config.max_running_requests)
    switch = SwitchLimits(enough, low_running, batching.starvation_s, int(share * num_blocks))
    return DecodeLimits(config.max_running_requests, switch)


def make_logic(
    *,
    registered: WorkerRegistered,
    limits: DecodeLimits,
    pacing: PolicyPacing | None,
    eos_token_ids: frozenset[int],
) -> DecodeLogic:
    """Build the logic of one decode worker; `pacing` decides who computes how many tokens."""
    return DecodeLogic(registered=registered, limits=limits, eos_token_ids=eos_token_ids, pacing=pacing)


def make_live_logic(
    *,
    registered: WorkerRegistered,
    config: DecodeWorkerConfig,
    batching: BatchingConfig,
    scheduling: SchedulingConfig,
    eos_token_ids: frozenset[int],
    measured: tuple[Sample, ...] = (),
) -> DecodeLogic:
    """Of a worker that learns its costs and begins with `measured` iterations, from what can be recorded.

    Raises ConfigError naming what is unknown.
    """
    pacing = make_decode_iteration_scheduler(scheduling, iteration_limits(config), measured=measured)
    limits = limits_of(config, batching, num_blocks=registered.num_blocks)
    return make_logic(registered=registered, limits=limits, pacing=pacing, eos_token_ids=eos_token_ids)


def max_held(config: DecodeWorkerConfig) -> int:
    """Requests that a colocated worker holds at most; who pauses keeps its place in the engine."""
    return config.max_running_requests + config.max_waiting_requests


def colocated_registration_of(config: DecodeWorkerConfig, layout: BlockLayout, *, num_blocks: int) -> WorkerRegistered:
    """What a colocated worker with so many blocks tells the router about itself."""
    return WorkerRegistered(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_running_requests=max_held(config),
        pool_name="",
        can_prefill=True,
        can_decode=True,
        layout_digest=layout.digest().hex(),
    )


def memory_of(
    config: DecodeWorkerConfig, layout: BlockLayout, *, num_blocks: int, hidden_block_tokens: int | None = None
) -> DeviceMemory:
    """What a live colocated worker's policy has to work with, nothing in it yet; whole caches can be swapped.
    `hidden_block_tokens`: tokens whose layer inputs a block holds; None: there are no hidden caches."""
    copy_bytes = layout.int8_block_bytes if config.has_int8_swaps else layout.block_bytes
    host_tokens = config.swap_space_bytes // copy_bytes * layout.block_size
    return DeviceMemory(
        num_blocks,
        num_blocks,
        layout.block_size,
        host_tokens,
        hidden_ratio=None if hidden_block_tokens is None else layout.block_size / hidden_block_tokens,
        swap_width=copy_bytes / layout.block_bytes,
    )


def iteration_limits(config: DecodeWorkerConfig) -> IterationLimits:
    """What bounds an iteration."""
    return IterationLimits(config.max_running_requests, config.max_num_batched_tokens)


def make_colocated_logic(
    *, registered: WorkerRegistered, memory: DeviceMemory, scheduler: Scheduler, eos_token_ids: frozenset[int]
) -> ColocatedLogic:
    """The logic of one colocated worker."""
    return ColocatedLogic(registered=registered, memory=memory, scheduler=scheduler, eos_token_ids=eos_token_ids)


def make_live_colocated_logic(
    *,
    registered: WorkerRegistered,
    memory: DeviceMemory,
    config: DecodeWorkerConfig,
    scheduling: SchedulingConfig,
    eos_token_ids: frozenset[int],
    measured: tuple[Sample, ...] = (),
) -> ColocatedLogic:
    """Of a worker that learns its costs and begins with `measured` iterations, from what can be recorded.

    Raises ConfigError naming what is unknown.
    """
    scheduler = make_scheduler(scheduling, iteration_limits(config), measured=measured)
    return make_colocated_logic(registered=registered, memory=memory, scheduler=scheduler, eos_token_ids=eos_token_ids)
