"""The batch worker as a Ray actor."""

import ray

from alignedserve.batch_worker.service import BatchService, StateServing
from alignedserve.batches.location import BatchLocation
from alignedserve.config.sections import GatewayConfig, PrefixCacheConfig
from alignedserve.gateway.backend.cluster import ClusterLinks
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.prefix_hasher import PrefixHasher
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.process.actor_host import ActorHost
from alignedserve.runtime.process.process_spec import ProcessSpec


@ray.remote
class BatchActor(ActorHost):
    """A batch worker that Ray starts, restarts and places; all else is in the stores."""

    def __init__(
        self,
        config: GatewayConfig,
        served: ServedModel,
        location: BatchLocation,
        max_in_flight: int,
        gateways: tuple[str, ...],
        num_keys: int,
        state_spec: ProcessSpec,
        prefix_cache: PrefixCacheConfig,
        block_size: int,
        process_spec: ProcessSpec,
    ) -> None:
        """`gateways`, `num_keys`, `state_spec`: see StateServing; `block_size`: see GatewayActor."""

        async def build() -> BatchService:
            service = BatchService(
                links=ClusterLinks.of(process_spec),
                model=ModelCard.of(served),
                config=config,
                location=location,
                max_in_flight=max_in_flight,
                state=StateServing(state_spec, gateways, num_keys),
                prefix_hasher=PrefixHasher.of(
                    served, prefix_cache, block_size=block_size, key=process_spec.prefix_key()
                ),
            )
            await service.start()
            return service

        super().__init__(process_spec, build)
