"""Starts a worker in its own process: its engine and memories, then its logic and links."""

from functools import partial
from pathlib import Path

from alignedserve.config.sections import (
    BatchingConfig,
    DecodeWorkerConfig,
    EngineConfig,
    PrefixCacheConfig,
    SchedulingConfig,
)
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.device_turns import shared_device_of
from alignedserve.runtime.engine.engine_sizes import (
    EngineSizes,
    can_stop,
    hidden_block_tokens,
    num_stops,
    swapped_bytes,
)
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.engine.stages.far_stages import far_stages
from alignedserve.runtime.executor import make_executor
from alignedserve.runtime.kv.arena_files import arena_path
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import CandidateMemory
from alignedserve.runtime.kv.transfers.transports import lends_device_memory
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.model.weights.shared_weights import share_weights
from alignedserve.scheduling.factory import calibration_s, with_yielding
from alignedserve.scheduling.policies import wants_shared_blocks
from alignedserve.worker_core.registration import num_active, registration_of
from decode_worker.colocated.service import ColocatedWorker
from decode_worker.factory import (
    colocated_registration,
    engine_places,
    make_colocated_logic,
    make_logic,
    max_held,
    memory_of,
)
from decode_worker.lending import Lending
from decode_worker.service import DecodeWorker


async def start_decode_worker(
    config: DecodeWorkerConfig,
    batching: BatchingConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    served: ServedModel,
    process_spec: ProcessSpec,
) -> DecodeWorker:
    """Start a decode worker."""
    layout = served.block_layout(engine_config.block_size)
    block_tokens = hidden_block_tokens(served, scheduling, engine_config.block_size)
    sizes = EngineSizes(
        config.kv_cache_bytes,
        engine_places(config, scheduling),
        engine_config.block_size,
        has_int8_swaps=config.has_int8_swaps,
        hidden_block_tokens=block_tokens,
        swap_space_bytes=swapped_bytes(config.swap_space_bytes, scheduling),
        max_running=config.max_running_requests,
        max_tokens=config.max_num_batched_tokens,
        loads_quietly=process_spec.joins_others,
    ).configured(engine_config)
    pool_name = process_spec.pool_name

    device = shared_device_of(process_spec, engine_config)
    executor = ModelExecutor(served, sizes, process_spec.progress_path(), device)
    calibrating_s = calibration_s(engine_config, scheduling, batching)
    if config.standby:
        share_weights(_weights_path(process_spec), process_spec.addresses.folder)
    registered = registration_of(
        layout,
        executor.num_blocks,
        config.max_running_requests,
        pool_name,
        node=process_spec.addresses.node,
        can_decode=True,
        max_adapters=served.lora.max_worker_adapters,
        num_active=num_active(config),
    )
    make = partial(
        make_logic,
        registered=registered,
        config=config,
        batching=batching,
        scheduling=scheduling,
        memory=memory_of(config, layout, num_blocks=executor.num_blocks, hidden_block_tokens=block_tokens),
        eos_token_ids=executor.eos_token_ids,
        measured=executor.measure_iterations(calibrating_s, config.max_num_batched_tokens),
    )
    worker = DecodeWorker(
        make=make,
        executor=executor,
        process_spec=process_spec,
        transport=engine_config.kv_transport,
    )
    await worker.start(router_at=process_spec.router_name, pool_at=pool_name)
    return worker


async def start_colocated_worker(
    config: DecodeWorkerConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    served: ServedModel,
    lending: Lending | None,
    prefix_cache: PrefixCacheConfig,
    process_spec: ProcessSpec,
) -> ColocatedWorker:
    """Start a worker that computes prompts and tokens. `lending`: None: requests do not move between workers."""
    scheduling = with_yielding(scheduling, can_stop=can_stop(engine_config.device, served), decodes_here=True)
    if served.encoder is not None:  # what a token's block holds depends on the tokens after it
        prefix_cache = PrefixCacheConfig(enabled=False)
    prefix_pool = process_spec.pool_name if prefix_cache.pool_bytes else None
    decode_pool = process_spec.pool_name if config.pool_bytes else None
    layout = served.block_layout(engine_config.block_size)
    transport = engine_config.kv_transport
    block_tokens = hidden_block_tokens(served, scheduling, engine_config.block_size)
    sizes = EngineSizes(
        config.kv_cache_bytes,
        max_held(config),
        engine_config.block_size,
        has_int8_swaps=config.has_int8_swaps,
        hidden_block_tokens=block_tokens,
        wants_shared_blocks=wants_shared_blocks(
            scheduling, can_move=lending is not None, has_int8_swaps=config.has_int8_swaps
        ),
        swap_space_bytes=swapped_bytes(config.swap_space_bytes, scheduling),
        max_running=config.max_running_requests,
        max_tokens=config.max_num_batched_tokens,
        loads_quietly=process_spec.joins_others,
        lent_bytes=lending.buffer_bytes if lending is not None else 0,
        stops_passes=bool(scheduling.yield_between_layers),
    ).configured(engine_config)

    device = shared_device_of(process_spec, engine_config)
    stages = far_stages(process_spec, served)
    executor = make_executor(served, sizes, process_spec.progress_path(), device, stages)
    if config.standby:
        share_weights(_weights_path(process_spec), process_spec.addresses.folder)
    make = partial(
        make_colocated_logic,
        registered=colocated_registration(
            layout,
            executor.num_blocks,
            config,
            pool_name=process_spec.pool_name,
            can_move=lending is not None,
            node=process_spec.addresses.node,
            max_adapters=served.lora.max_worker_adapters,
        ),
        memory=memory_of(
            config,
            layout,
            num_blocks=executor.num_blocks,
            hidden_block_tokens=block_tokens,
            has_shared_blocks=executor.has_shared_blocks,
        ),
        config=config,
        scheduling=scheduling,
        eos_token_ids=executor.eos_token_ids,
        measured=executor.measure_iterations(engine_config.calibration_s, config.max_num_batched_tokens),
        prefix_cache=prefix_cache,
        prefix_pool=prefix_pool,
        decode_pool=decode_pool,
        num_layers=num_stops(layout, engine_config.device),
        has_states=layout.state_bytes > 0,
    )
    memory = None
    if lending is not None:
        budget = BufferBudget(layout.blocks_in(lending.buffer_bytes), lending.peers, may_grow=True)
        lanes = executor.lanes if lends_device_memory(engine_config) else None
        memory = CandidateMemory(layout, budget, process_spec, transport=transport, lanes=lanes)
    worker = ColocatedWorker(
        make=make,
        executor=executor,
        process_spec=process_spec,
        memory=memory,
        pool_at=prefix_pool or decode_pool,
        transport=transport,
    )
    await worker.start(router_at=process_spec.router_name, listen_at=process_spec.name if lending is not None else None)
    return worker


def _weights_path(process_spec: ProcessSpec) -> Path:
    """Return the file of the weights that the workers of its node and model share."""
    return arena_path(process_spec.cluster_id, f"{process_spec.pool_name}-weights")
