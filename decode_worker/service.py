"""Starts a decode worker in its own process."""

from functools import partial

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, EngineConfig, SchedulingConfig
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.factory import calibration_s
from alignedserve.worker_core.router_link import num_active, registration_of
from alignedserve.worker_core.service import DecodingStart, Worker
from decode_worker.factory import engine_places, make_logic


async def start_decode_worker(
    config: DecodeWorkerConfig,
    batching: BatchingConfig,
    scheduling: SchedulingConfig,
    engine_config: EngineConfig,
    served: ServedModel,
    process_spec: ProcessSpec,
) -> Worker:
    start = DecodingStart(config, scheduling, engine_config, served, process_spec)
    sizes = start.decoding_sizes(engine_places(config, scheduling))
    executor = ModelExecutor(served, sizes, process_spec.progress_path(), start.shared_device)
    start.share_weights()
    most, fields = config.max_running_requests, start.registered()
    make = partial(
        make_logic,
        registered=registration_of(
            start.layout, executor.num_blocks, most, can_decode=True, num_active=num_active(config), **fields
        ),
        batching=batching,
        memory=start.memory(executor),
        **start.arguments(executor, calibration_s(engine_config, scheduling, batching)),
    )
    pool_at, transport = process_spec.pool_name, engine_config.kv_transport
    worker = Worker(make=make, executor=executor, process_spec=process_spec, pool_at=pool_at, transport=transport)
    return await start.started(worker)
