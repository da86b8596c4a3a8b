"""The gateway as a Ray actor: what a cluster names to start one. All that serves is loaded where it runs."""

from typing import TYPE_CHECKING, cast

import ray

from alignedserve.batches.location import SharedState
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_model import DeploymentState, ServedDeployment

if TYPE_CHECKING:
    from alignedserve.gateway.start import HostedGateway


@ray.remote
class GatewayActor(ActorHost):
    """A gateway that Ray starts, restarts and places; all else goes over HTTP and its links."""

    def cluster_status(self) -> ClusterStatus | None:
        """Return the last report of the first deployment's router, for `alignedserve status`; None: it has none."""
        return None if self._hosted is None else self._hosted.server.cluster_status()

    def cluster_statuses(self) -> dict[str, ClusterStatus]:
        """Return the last report of every router that is connected here, by deployment."""
        return {} if self._hosted is None else self._hosted.server.cluster_statuses()

    def serve_models(self, deployments: tuple[ServedDeployment, ...]) -> tuple[DeploymentState, ...]:
        """Serve exactly these deployments from now on, of each name the one that is SERVING; return how each stands.

        May be repeated. One that is left out is closed, and what is open there fails: it is to be DRAINING until no
        gateway has requests open there. No request that comes after the return of this call goes to a draining one.
        """
        return () if self._hosted is None else self.call(self._hosted.serve_models(deployments))

    def drain(self, is_draining: bool) -> int:
        """Let /ready send requests elsewhere, or no more; return how many are open here. All are still served."""
        return 0 if self._hosted is None else self._hosted.server.drain(is_draining)

    def close_intake(self) -> int:
        """Refuse new work from now on, until the end; return how many requests are open here. May be repeated."""
        return 0 if self._hosted is None else self._hosted.server.close_intake()

    def read_again(self) -> None:
        """Read again what may change while it serves: the certificate."""
        if self._hosted is not None:
            self._hosted.server.read_again()

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

        async def build() -> "HostedGateway":
            from alignedserve.gateway.start import start_gateway

            is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
            return await start_gateway(config, port, deployments, keys, state, observing, process_spec, is_restarted)

        super().__init__(process_spec, build)

    @property
    def _hosted(self) -> "HostedGateway | None":
        return cast("HostedGateway | None", self._service)
