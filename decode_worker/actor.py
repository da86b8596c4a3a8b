"""The decode worker as a Ray actor."""

import ray

from alignedserve.config.sections import DecodeWorkerConfig, EngineConfig, Topology
from alignedserve.messages.links import WorkerRegistered
from alignedserve.runtime.addresses import ROUTER
from alignedserve.runtime.hosting import RoomHost
from alignedserve.runtime.membership import POOL, Membership
from alignedserve.runtime.served_model import ServedModel
from alignedserve.runtime.worker_engine import EngineSizes, WorkerEngine
from decode_worker.runner import DecodeWorker


@ray.remote
class DecodeWorkerActor(RoomHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self,
        config: DecodeWorkerConfig,
        engine_config: EngineConfig,
        topology: Topology,
        served: ServedModel,
        membership: Membership,
    ) -> None:
        block_size = engine_config.block_size
        is_colocated = topology is Topology.COLOCATED
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
            )
            worker = DecodeWorker(
                config=config,
                engine=engine,
                registered=registered,
                identity=membership.identity(),
                ledger_path=membership.log_folder / f"{membership.name}.ledger.jsonl",
            )
            addresses = membership.addresses
            await worker.start(router_at=addresses.of(ROUTER), pool_at=None if is_colocated else addresses.of(POOL))
            return worker

        super().__init__(membership, build)
