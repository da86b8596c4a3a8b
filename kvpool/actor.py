"""The KV pool as a Ray actor."""

import ray

from alignedserve.config.sections import BatchingConfig, PoolConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.addresses import ROUTER
from alignedserve.runtime.arena import arena_path
from alignedserve.runtime.hosting import RoomHost
from alignedserve.runtime.membership import Membership
from kvpool.storage import KvPool


@ray.remote
class KvPoolActor(RoomHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self, config: PoolConfig, batching: BatchingConfig, layout: BlockLayout, membership: Membership
    ) -> None:
        async def build() -> KvPool:
            pool = KvPool(
                config=config,
                batching=batching,
                layout=layout,
                arena_path=arena_path(membership.cluster_id, membership.name),
                membership=membership,
            )
            await pool.start(listen_at=membership.own_address(), router_at=membership.addresses.of(ROUTER))
            return pool

        super().__init__(membership, build)
