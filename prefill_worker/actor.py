"""The prefill worker as a Ray actor."""

import ray

from alignedserve.config.sections import EngineConfig, PrefillWorkerConfig
from alignedserve.messages.links import WorkerRegistered
from alignedserve.runtime.addresses import ROUTER
from alignedserve.runtime.candidate_memory import BufferSizes, CandidateMemory
from alignedserve.runtime.hosting import RoomHost
from alignedserve.runtime.membership import POOL, Membership
from alignedserve.runtime.served_model import ServedModel
from alignedserve.runtime.worker_engine import EngineSizes, WorkerEngine
from prefill_worker.runner import PrefillWorker


@ray.remote
class PrefillWorkerActor(RoomHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: PrefillWorkerConfig,
        engine_config: EngineConfig,
        num_decode_workers: int,
        served: ServedModel,
        membership: Membership,
    ) -> None:
        block_size = engine_config.block_size
        sizes = EngineSizes(config.memory_bytes, config.max_running, block_size, engine_config.threads_per_worker)
        layout = served.block_layout(block_size)
        buffer_blocks = config.buffer_bytes // layout.block_bytes // num_decode_workers

        async def build() -> PrefillWorker:
            engine = WorkerEngine(served, sizes)
            registered = WorkerRegistered(
                num_blocks=engine.num_blocks,
                block_size=block_size,
                max_running=config.max_running,
                pool_name=POOL,
                can_prefill=True,
                can_decode=False,
                layout_digest=layout.digest().hex(),
            )
            worker = PrefillWorker(
                config=config,
                engine=engine,
                memory=CandidateMemory(layout, BufferSizes(buffer_blocks, engine_config.kv_transport), membership),
                registered=registered,
                identity=membership.identity(),
            )
            addresses = membership.addresses
            await worker.start(
                listen_at=membership.own_address(), router_at=addresses.of(ROUTER), pool_at=addresses.of(POOL)
            )
            return worker

        super().__init__(membership, build)
