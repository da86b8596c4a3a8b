"""The gateway as a Ray actor."""

from dataclasses import dataclass

import msgspec
import ray

from alignedserve.batches.location import SharedState
from alignedserve.config.sections import GatewayConfig, PrefixCacheConfig
from alignedserve.gateway.backend.cluster import ClusterLinks
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.prefix_hasher import PrefixHasher
from alignedserve.gateway.server import GatewayServer
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.runtime.process.actor_host import ActorHost
from alignedserve.runtime.process.process_spec import ProcessSpec


@dataclass(frozen=True, slots=True)
class _Hosted:
    server: GatewayServer

    async def close(self) -> None:
        await self.server.stop()


@ray.remote
class GatewayActor(ActorHost):
    """A gateway that Ray starts, restarts and places; all else goes over HTTP and its links."""

    def cluster_status(self) -> ClusterStatus | None:
        """Return the router's last report, for `alignedserve status`; None while no router is connected."""
        hosted = self._service
        return hosted.server.cluster_status() if isinstance(hosted, _Hosted) else None

    def drain(self, is_draining: bool) -> int:
        """Let /ready send requests elsewhere, or no more; return how many are open here. All are still served."""
        hosted = self._service
        return hosted.server.drain(is_draining) if isinstance(hosted, _Hosted) else 0

    def __init__(
        self,
        config: GatewayConfig,
        port: int,
        served: ServedModel,
        keys: tuple[str, ...],
        state: SharedState,
        prefix_cache: PrefixCacheConfig,
        block_size: int,
        process_spec: ProcessSpec,
    ) -> None:
        """`block_size`: of the workers' blocks, which requests may share."""

        async def build() -> _Hosted:
            server = GatewayServer(
                links=ClusterLinks.of(process_spec),
                model=ModelCard.of(served),
                config=msgspec.structs.replace(config, port=port),
                api_keys=keys,
                state=state,
                is_first_process=not (state.have_run or ray.get_runtime_context().was_current_actor_reconstructed),
                prefix_hasher=PrefixHasher.of(
                    served, prefix_cache, block_size=block_size, key=process_spec.prefix_key()
                ),
            )
            await server.start()
            return _Hosted(server)

        super().__init__(process_spec, build)
