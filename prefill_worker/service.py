"""Starts a prefill worker in its own process, with the candidate buffers in its memory."""

from functools import partial

from alignedserve.config.sections import EngineConfig, PrefillWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.engine_sizes import EngineSizes, can_stop, num_stops
from alignedserve.runtime.engine.model_executor import ModelExecutor, shared_device_of
from alignedserve.runtime.executor import make_candidate_memory
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.factory import calibration_s, with_yielding
from alignedserve.worker_core.router_link import registration_of
from alignedserve.worker_core.service import Worker
from prefill_worker.logic import make_logic


async def start_prefill_worker(
    config: PrefillWorkerConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    decoders: tuple[str, ...],
    num_far_decoders: int,
    served: ServedModel,
    prefix_cache: PrefixCacheConfig,
    process_spec: ProcessSpec,
) -> Worker:
    """`decoders`: names of the decode workers of this node; `num_far_decoders`: how many other nodes have, at first."""
    scheduling = with_yielding(scheduling, can_stop=can_stop(engine_config.device, served), decodes_here=False)
    layout, pool_name = served.block_layout(engine_config.block_size), process_spec.pool_name
    budget = BufferBudget(
        layout.blocks_in(config.candidate_buffer_bytes),
        decoders,
        num_others=num_far_decoders,
        may_grow=bool(process_spec.addresses.beyond_node()),
    )
    sizes = _sizes(config, scheduling, engine_config, loads_quietly=process_spec.joins_others)
    device = shared_device_of(process_spec, engine_config)
    executor = ModelExecutor(served, sizes, process_spec.progress_path(), device)
    registered = registration_of(
        layout,
        executor.num_blocks,
        config.max_running_requests,
        pool_name,
        node=process_spec.addresses.node,
        can_prefill=True,
        max_adapters=served.lora.max_worker_adapters,
    )
    make = partial(
        make_logic,
        registered=registered,
        config=config,
        scheduling=scheduling,
        eos_token_ids=executor.eos_token_ids,
        measured=executor.measure_iterations(calibration_s(engine_config, scheduling), config.max_num_batched_tokens),
        prefix_cache=prefix_cache,
        num_layers=num_stops(layout, engine_config.device),
        state_blocks=layout.state_blocks,
    )
    memory = make_candidate_memory(executor, budget, process_spec, engine_config)
    worker = Worker(make=make, executor=executor, process_spec=process_spec, memory=memory, pool_at=pool_name)
    await worker.start(router_at=process_spec.router_name, listen_at=process_spec.name)
    return worker


def _sizes(
    config: PrefillWorkerConfig, scheduling: SchedulingConfig, engine: EngineConfig, *, loads_quietly: bool
) -> EngineSizes:
    return EngineSizes(
        config.kv_cache_bytes,
        config.max_running_requests,
        engine.block_size,
        loads_quietly=loads_quietly,
        lent_bytes=config.candidate_buffer_bytes,
        is_decoding=False,
        max_tokens=config.max_num_batched_tokens,
        stops_passes=bool(scheduling.yield_between_layers),
    ).configured(engine)
