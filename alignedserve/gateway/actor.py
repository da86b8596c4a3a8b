"""The gateway as a Ray actor."""

from dataclasses import dataclass

import msgspec
import ray

from alignedserve.api.backend.connection import ClusterLinks
from alignedserve.api.work_lanes import favour_the_loop
from alignedserve.batches.location import SharedState
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.gateway.connections.limits import raise_file_limit
from alignedserve.gateway.server import GatewayServer
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_deployment import DeploymentState, ServedDeployment


@dataclass(frozen=True, slots=True)
class _Hosted:
    server: GatewayServer

    async def serve_models(self, deployments: tuple[ServedDeployment, ...]) -> tuple[DeploymentState, ...]:
        """See GatewayServer."""
        return self.server.serve_models(deployments)

    async def close(self) -> None:
        await self.server.stop()


@ray.remote
class GatewayActor(ActorHost):
    """A gateway that Ray starts, restarts and places; all else goes over HTTP and its links."""

    def cluster_status(self) -> ClusterStatus | None:
        """Return the last report of the first deployment's router, for `alignedserve status`; None: it has none."""
        hosted = self._service
        return hosted.server.cluster_status() if isinstance(hosted, _Hosted) else None

    def cluster_statuses(self) -> dict[str, ClusterStatus]:
        """Return the last report of every router that is connected here, by deployment."""
        hosted = self._service
        return hosted.server.cluster_statuses() if isinstance(hosted, _Hosted) else {}

    def serve_models(self, deployments: tuple[ServedDeployment, ...]) -> tuple[DeploymentState, ...]:
        """Serve exactly these deployments from now on, of each name the one that is SERVING; return how each stands.

        May be repeated. One that is left out is closed, and what is open there fails: it is to be DRAINING until no
        gateway has requests open there. No request that comes after the return of this call goes to a draining one.
        """
        hosted = self._service
        return self.call(hosted.serve_models(deployments)) if isinstance(hosted, _Hosted) else ()

    def drain(self, is_draining: bool) -> int:
        """Let /ready send requests elsewhere, or no more; return how many are open here. All are still served."""
        hosted = self._service
        return hosted.server.drain(is_draining) if isinstance(hosted, _Hosted) else 0

    def close_intake(self) -> int:
        """Refuse new work from now on, until the end; return how many requests are open here. May be repeated."""
        hosted = self._service
        return hosted.server.close_intake() if isinstance(hosted, _Hosted) else 0

    def read_again(self) -> None:
        """Read again what may change while it serves: the certificate."""
        hosted = self._service
        if isinstance(hosted, _Hosted):
            hosted.server.read_again()

    def __init__(
        self,
        config: GatewayConfig,
        port: int,
        deployments: tuple[ServedDeployment, ...],
        keys: tuple[str, ...],
        state: SharedState,
        observing: Observing,
        process_spec: ProcessSpec,
    ) -> None:
        """`deployments`: the first list; see `serve_models`."""

        favour_the_loop()
        raise_file_limit()

        async def build() -> _Hosted:
            server = GatewayServer(
                links=ClusterLinks.of(process_spec),
                deployments=deployments,
                config=msgspec.structs.replace(config, port=port),
                api_keys=keys,
                state=state,
                observing=observing,
                is_restarted=ray.get_runtime_context().was_current_actor_reconstructed,
            )
            await server.start()
            return _Hosted(server)

        super().__init__(process_spec, build)
