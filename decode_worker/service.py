"""Starts a decode worker in its own process."""

from functools import partial

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, EngineConfig, SchedulingConfig
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.factory import calibration_s
from alignedserve.worker_core.router_link import num_active, registration_of
from alignedserve.worker_core.service import Worker, WorkerStart
from decode_worker.factory import engine_places, make_logic


async def start_decode_worker(
    config: DecodeWorkerConfig,
    batching: BatchingConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    served: ServedModel,
    process_spec: ProcessSpec,
) -> Worker:
    start = WorkerStart(config, scheduling, engine_config, served, process_spec)
    sizes = start.sizes(engine_places(config, scheduling)).configured(engine_config)
    executor = ModelExecutor(served, sizes, process_spec.progress_path(), start.shared_device)
    start.share_weights()
    pool_name = process_spec.pool_name
    registered = registration_of(
        start.layout,
        executor.num_blocks,
        config.max_running_requests,
        pool_name,
        node=process_spec.addresses.node,
        can_decode=True,
        max_adapters=served.lora.max_worker_adapters,
        num_active=num_active(config),
    )
    calibrating_s = calibration_s(engine_config, scheduling, batching)
    make = partial(
        make_logic,
        registered=registered,
        config=config,
        batching=batching,
        scheduling=scheduling,
        memory=start.memory(executor),
        eos_token_ids=executor.eos_token_ids,
        measured=executor.measure_iterations(calibrating_s, config.max_num_batched_tokens),
    )
    worker = Worker(
        make=make,
        executor=executor,
        process_spec=process_spec,
        pool_at=pool_name,
        transport=engine_config.kv_transport,
    )
    await worker.start(router_at=process_spec.router_name)
    return worker
