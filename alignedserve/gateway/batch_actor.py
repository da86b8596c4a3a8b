"""The driver of batches as a Ray actor."""

import ray

from alignedserve.batches.place import BatchPlace
from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.actor import gateway_links, gateway_model
from alignedserve.gateway.batch_service import BatchService
from alignedserve.runtime.hosting import RoomHost
from alignedserve.runtime.membership import Membership
from alignedserve.runtime.served_model import ServedModel


@ray.remote
class BatchActor(RoomHost):
    """Started, restarted and placed by Ray; everything else is in the stores."""

    def __init__(
        self,
        config: GatewayConfig,
        served: ServedModel,
        place: BatchPlace,
        max_in_flight: int,
        membership: Membership,
    ) -> None:
        async def build() -> BatchService:
            service = BatchService(
                links=gateway_links(membership),
                model=gateway_model(served),
                config=config,
                place=place,
                max_in_flight=max_in_flight,
            )
            await service.start()
            return service

        super().__init__(membership, build)
