"""The KV pool as a Ray actor. What it decides with is loaded where it runs."""

from typing import TYPE_CHECKING

import ray

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.kv.arena_files import arena_path

if TYPE_CHECKING:
    from kvpool.service import KvPool


@ray.remote
class KvPoolActor(ActorHost):
    """Actor started, restarted and placed by Ray; all other communication uses its links."""

    def __init__(
        self,
        config: PoolConfig,
        batching: BatchingConfig,
        layout: BlockLayout,
        takes_requests: bool,
        process_spec: ProcessSpec,
    ) -> None:
        """`takes_requests`: on their way between workers; False: it keeps prefix blocks alone."""

        async def build() -> "KvPool":
            from kvpool.service import KvPool

            pool = KvPool(
                config=config,
                batching=batching,
                layout=layout,
                takes_requests=takes_requests,
                arena_path=arena_path(process_spec.cluster_id, process_spec.name),
                process_spec=process_spec,
            )
            await pool.start(listen_at=process_spec.name, router_at=process_spec.router_name)
            return pool

        super().__init__(process_spec, build)
