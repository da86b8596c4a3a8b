"""Decode workers and colocated workers as Ray actors."""

from functools import partial

import ray

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, EngineConfig, SchedulingConfig
from alignedserve.runtime.engine.model_executor import ModelExecutor, engine_sizes, hidden_block_tokens
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.process.actor_host import ActorHost
from alignedserve.runtime.process.addresses import ROUTER
from alignedserve.runtime.process.process_spec import ProcessSpec
from alignedserve.scheduling.factory import calibration_s
from alignedserve.worker_core.registration import registration_of
from decode_worker.colocated.service import ColocatedWorker
from decode_worker.factory import make_colocated_logic, make_logic, max_held, memory_of
from decode_worker.service import DecodeWorker


@ray.remote
class DecodeWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        batching: BatchingConfig,
        scheduling: SchedulingConfig,
        engine_config: EngineConfig,
        served: ServedModel,
        process_spec: ProcessSpec,
    ) -> None:
        layout = served.block_layout(engine_config.block_size)
        sizes = engine_sizes(engine_config, config.kv_cache_bytes, config.max_running_requests)
        pool_name = process_spec.pool_name

        async def build() -> DecodeWorker:
            executor = ModelExecutor(served, sizes, process_spec.progress_path())
            registered = registration_of(
                layout,
                executor.num_blocks,
                config.max_running_requests,
                pool_name,
                node=process_spec.addresses.node,
                can_decode=True,
            )
            make = partial(
                make_logic,
                registered=registered,
                config=config,
                batching=batching,
                scheduling=scheduling,
                eos_token_ids=executor.eos_token_ids,
                measured=executor.measure_iterations(
                    calibration_s(engine_config, scheduling), config.max_num_batched_tokens
                ),
            )
            worker = DecodeWorker(
                make=make,
                executor=executor,
                process_spec=process_spec,
                transport=engine_config.kv_transport,
            )
            await worker.start(router_at=ROUTER, pool_at=pool_name)
            return worker

        super().__init__(process_spec, build)


@ray.remote
class ColocatedWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its link."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        scheduling: SchedulingConfig,
        engine_config: EngineConfig,
        served: ServedModel,
        process_spec: ProcessSpec,
    ) -> None:
        layout = served.block_layout(engine_config.block_size)
        block_tokens = hidden_block_tokens(served, scheduling, engine_config.block_size)
        sizes = engine_sizes(
            engine_config,
            config.kv_cache_bytes,
            max_held(config),
            has_int8_swaps=config.has_int8_swaps,
            hidden_block_tokens=block_tokens,
        )

        async def build() -> ColocatedWorker:
            executor = ModelExecutor(served, sizes, process_spec.progress_path())
            make = partial(
                make_colocated_logic,
                registered=registration_of(
                    layout,
                    executor.num_blocks,
                    max_held(config),
                    node=process_spec.addresses.node,
                    can_prefill=True,
                    can_decode=True,
                ),
                memory=memory_of(config, layout, num_blocks=executor.num_blocks, hidden_block_tokens=block_tokens),
                config=config,
                scheduling=scheduling,
                eos_token_ids=executor.eos_token_ids,
                measured=executor.measure_iterations(engine_config.calibration_s, config.max_num_batched_tokens),
            )
            worker = ColocatedWorker(make=make, executor=executor, process_spec=process_spec)
            await worker.start(router_at=ROUTER)
            return worker

        super().__init__(process_spec, build)
