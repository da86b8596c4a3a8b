"""Decode workers and colocated workers as Ray actors."""

from functools import partial
from typing import NamedTuple

import ray

from alignedserve.config.sections import (
    BatchingConfig,
    DecodeWorkerConfig,
    EngineConfig,
    PrefixCacheConfig,
    SchedulingConfig,
)
from alignedserve.runtime.engine.model_executor import ModelExecutor, engine_sizes, hidden_block_tokens
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import CandidateMemory
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.process.actor_host import ActorHost
from alignedserve.runtime.process.addresses import ROUTER
from alignedserve.runtime.process.process_spec import ProcessSpec
from alignedserve.scheduling.factory import calibration_s
from alignedserve.scheduling.policies import wants_shared_blocks
from alignedserve.worker_core.registration import registration_of
from decode_worker.colocated.service import ColocatedWorker
from decode_worker.factory import (
    colocated_registration,
    engine_places,
    make_colocated_logic,
    make_logic,
    max_held,
    memory_of,
)
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
        block_tokens = hidden_block_tokens(served, scheduling, engine_config.block_size)
        sizes = engine_sizes(
            engine_config,
            config.kv_cache_bytes,
            engine_places(config, scheduling),
            has_int8_swaps=config.has_int8_swaps,
            hidden_block_tokens=block_tokens,
        )
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
                memory=memory_of(config, layout, num_blocks=executor.num_blocks, hidden_block_tokens=block_tokens),
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


class Lending(NamedTuple):
    """Memory that an elastic worker lends to others of its node."""

    buffer_bytes: int
    peers: tuple[str, ...]  # as planned


@ray.remote
class ColocatedWorkerActor(ActorHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        scheduling: SchedulingConfig,
        engine_config: EngineConfig,
        served: ServedModel,
        lending: Lending | None,
        prefix_cache: PrefixCacheConfig,
        process_spec: ProcessSpec,
    ) -> None:
        """`lending`: None: requests do not move between workers."""
        pool_at = process_spec.pool_name if prefix_cache.pool_bytes else None
        layout = served.block_layout(engine_config.block_size)
        transport = engine_config.kv_transport
        block_tokens = hidden_block_tokens(served, scheduling, engine_config.block_size)
        sizes = engine_sizes(
            engine_config,
            config.kv_cache_bytes,
            max_held(config),
            has_int8_swaps=config.has_int8_swaps,
            hidden_block_tokens=block_tokens,
            wants_shared_blocks=wants_shared_blocks(
                scheduling, can_move=lending is not None, has_int8_swaps=config.has_int8_swaps
            ),
        )

        async def build() -> ColocatedWorker:
            executor = ModelExecutor(served, sizes, process_spec.progress_path())
            make = partial(
                make_colocated_logic,
                registered=colocated_registration(
                    layout,
                    executor.num_blocks,
                    config,
                    pool_name=process_spec.pool_name,
                    can_move=lending is not None,
                    node=process_spec.addresses.node,
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
                prefix_pool=pool_at,
            )
            memory = None
            if lending is not None:
                budget = BufferBudget(layout.blocks_in(lending.buffer_bytes), lending.peers, may_grow=True)
                memory = CandidateMemory(layout, budget, process_spec, transport=transport)
            worker = ColocatedWorker(
                make=make,
                executor=executor,
                process_spec=process_spec,
                memory=memory,
                pool_at=pool_at,
                transport=transport,
            )
            await worker.start(router_at=ROUTER, listen_at=process_spec.name if lending is not None else None)
            return worker

        super().__init__(process_spec, build)
