"""How a prefill worker's logic is put together, alike for live workers and for simulated ones."""

from alignedserve.config.sections import PrefillWorkerConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import Sample
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.scheduling.factory import make_iteration_scheduler
from alignedserve.scheduling.iteration_scheduler import Pacing
from alignedserve.scheduling.policy import IterationLimits
from prefill_worker.logic import PrefillLogic


def registration_of(
    config: PrefillWorkerConfig, layout: BlockLayout, *, num_blocks: int, pool_name: str
) -> WorkerRegistered:
    """What a prefill worker with so many blocks tells the router about itself."""
    return WorkerRegistered(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_running_requests=config.max_running_requests,
        pool_name=pool_name,
        can_prefill=True,
        can_decode=False,
        layout_digest=layout.digest().hex(),
    )


def buffer_blocks_of(config: PrefillWorkerConfig, layout: BlockLayout, num_decode_workers: int) -> int:
    """Blocks of the candidate buffer that each decode worker has in a prefill worker's memory."""
    return layout.blocks_in(config.candidate_buffer_bytes) // num_decode_workers


def iteration_limits(config: PrefillWorkerConfig) -> IterationLimits:
    """What bounds an iteration."""
    return IterationLimits(config.max_running_requests, config.max_num_batched_tokens)


def make_logic(
    *, registered: WorkerRegistered, config: PrefillWorkerConfig, pacing: Pacing, eos_token_ids: frozenset[int]
) -> PrefillLogic:
    """The logic of one prefill worker. `pacing`: from `alignedserve.scheduling.factory.make_iteration_scheduler`."""
    return PrefillLogic(
        registered=registered,
        max_running_requests=config.max_running_requests,
        pacing=pacing,
        eos_token_ids=eos_token_ids,
    )


def make_live_logic(
    *,
    registered: WorkerRegistered,
    config: PrefillWorkerConfig,
    scheduling: SchedulingConfig,
    eos_token_ids: frozenset[int],
    measured: tuple[Sample, ...] = (),
) -> PrefillLogic:
    """Of a worker that learns its costs and begins with `measured` iterations, from what can be recorded.

    Raises ConfigError naming what is unknown.
    """
    pacing = make_iteration_scheduler(scheduling, iteration_limits(config), measured=measured)
    return make_logic(registered=registered, config=config, pacing=pacing, eos_token_ids=eos_token_ids)
