"""Starts a prefill worker in its own process, with the candidate buffers in its memory."""

from functools import partial

from alignedserve.config.sections import EngineConfig, PrefillWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.engine_sizes import can_stop, num_stops
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.executor import make_candidate_memory
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.factory import calibration_s, with_yielding
from alignedserve.worker_core.router_link import registration_of
from alignedserve.worker_core.service import Worker, WorkerStart
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
    start = WorkerStart(config, scheduling, engine_config, served, process_spec)
    layout, most = start.layout, config.max_running_requests
    sizes = start.sizes(
        most,
        lent_bytes=config.candidate_buffer_bytes,
        is_decoding=False,
        stops_passes=bool(scheduling.yield_between_layers),
    )
    executor = ModelExecutor(served, sizes, process_spec.progress_path(), start.shared_device)
    make = partial(
        make_logic,
        registered=registration_of(layout, executor.num_blocks, most, can_prefill=True, **start.registered()),
        prefix_cache=prefix_cache,
        num_layers=num_stops(layout, engine_config.device),
        state_blocks=layout.state_blocks,
        **start.arguments(executor, calibration_s(engine_config, scheduling)),
    )
    budget = BufferBudget(
        layout.blocks_in(config.candidate_buffer_bytes),
        decoders,
        num_others=num_far_decoders,
        may_grow=bool(process_spec.addresses.beyond_node()),
    )
    memory = make_candidate_memory(executor, budget, process_spec, engine_config)
    pool_at = process_spec.pool_name
    worker = Worker(make=make, executor=executor, process_spec=process_spec, memory=memory, pool_at=pool_at)
    return await start.started(worker, listens=True)
