"""The gateway as a Ray actor."""

from dataclasses import dataclass

import msgspec
import ray

from alignedserve.batches.place import BatchPlace
from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.model import ServedModel as GatewayModel
from alignedserve.gateway.server import GatewayLinks, GatewayServer
from alignedserve.runtime.addresses import ROUTER
from alignedserve.runtime.hosting import RoomHost
from alignedserve.runtime.membership import Membership
from alignedserve.runtime.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class _Hosted:
    server: GatewayServer

    async def close(self) -> None:
        await self.server.stop()


@ray.remote
class GatewayActor(RoomHost):
    """Started, restarted and placed by Ray; everything else goes over HTTP and its links."""

    def __init__(
        self,
        config: GatewayConfig,
        port: int,
        served: ServedModel,
        keys: tuple[str, ...],
        batches: BatchPlace | None,
        membership: Membership,
    ) -> None:
        async def build() -> _Hosted:
            server = GatewayServer(
                links=gateway_links(membership),
                model=gateway_model(served),
                config=msgspec.structs.replace(config, port=port),
                api_keys=keys,
                batches=batches,
            )
            await server.start()
            return _Hosted(server)

        super().__init__(membership, build)


def gateway_links(membership: Membership) -> GatewayLinks:
    """How this member reaches the cluster."""
    return GatewayLinks(
        identity=membership.identity(),
        router_address=membership.addresses.of(ROUTER),
        own_address=membership.own_address(),
    )


def gateway_model(served: ServedModel) -> GatewayModel:
    """What a gateway has to know of the model."""
    return GatewayModel(
        name=served.name,
        folder=served.folder,
        max_context_len=served.max_context_len,
        eos_token_ids=served.config.eos_token_ids,
    )
