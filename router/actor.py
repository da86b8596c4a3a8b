"""The router as a Ray actor."""

import ray

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.runtime.hosting import RoomHost
from alignedserve.runtime.membership import Membership
from alignedserve.runtime.served_model import ServedModel
from router.service import Router


@ray.remote
class RouterActor(RoomHost):
    """Started, restarted and placed by Ray; everything else goes over its links."""

    def __init__(
        self, config: RouterConfig, batching: BatchingConfig, served: ServedModel, membership: Membership
    ) -> None:
        async def build() -> Router:
            router = Router(config=config, batching=batching, served=served, membership=membership)
            await router.start(listen_at=membership.own_address())
            return router

        super().__init__(membership, build)
