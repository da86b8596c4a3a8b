"""The decode worker as a Ray actor."""

import ray

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, EngineConfig
from alignedserve.messages.links import WorkerRegistered
from alignedserve.runtime.addresses import ROUTER
from alignedserve.runtime.hosting import RoomHost
from alignedserve.runtime.membership import POOL, Membership
from alignedserve.runtime.served_model import ServedModel
from alignedserve.runtime.worker_engine import EngineSizes, WorkerEngine
from decode_worker.runner import DecodeWorker, limits_of


@ray.remote
class DecodeWorkerActor(RoomHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        batching: BatchingConfig,
        engine_config: EngineConfig,
        prefillers: tuple[str, ...],
        served: ServedModel,
        membership: Membership,
    ) -> None:
        """`prefillers`: names of the prefill workers; none: a colocated worker, which computes prompts itself."""
        block_size = engine_config.block_size
        is_colocated = not prefillers
        layout = served.block_layout(block_size)
        sizes = EngineSizes(config.memory_bytes, config.max_running, block_size, engine_config.threads_per_worker)

        async def build() -> DecodeWorker:
            engine = WorkerEngine(served, sizes)
            registered = WorkerRegistered(
                num_blocks=engine.num_blocks,
                block_size=block_size,
                max_running=config.max_running,
                pool_name=POOL,
                can_prefill=is_colocated,
                can_decode=True,
                layout_digest=layout.digest().hex(),
            )
            worker = DecodeWorker(
                limits=limits_of(config, batching),
                engine=engine,
                registered=registered,
                membership=membership,
                transport=engine_config.kv_transport,
            )
            addresses = membership.addresses
            await worker.start(
                router_at=addresses.of(ROUTER),
                pool_at=None if is_colocated else addresses.of(POOL),
                prefillers_at=[addresses.of(name) for name in prefillers],
            )
            return worker

        super().__init__(membership, build)
