"""Builds a gateway in the process that serves it. Whoever only names the actor loads none of what it serves with."""

from dataclasses import dataclass

import msgspec

from alignedserve.api.backend.connection import ClusterLinks
from alignedserve.api.work_lanes import favour_the_loop
from alignedserve.batches.location import SharedState
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.gateway.connections.limits import raise_file_limit
from alignedserve.gateway.server import GatewayServer
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_model import DeploymentState, ServedDeployment


@dataclass(frozen=True, slots=True)
class HostedGateway:
    """A gateway that runs."""

    server: GatewayServer

    async def serve_models(self, deployments: tuple[ServedDeployment, ...]) -> tuple[DeploymentState, ...]:
        return self.server.serve_models(deployments)

    async def close(self) -> None:
        await self.server.stop()


async def start_gateway(
    config: GatewayConfig,
    port: int,
    deployments: tuple[ServedDeployment, ...],
    keys: tuple[str, ...],
    state: SharedState,
    observing: Observing,
    process_spec: ProcessSpec,
    is_restarted: bool,
) -> HostedGateway:
    """Start a gateway. Raises an error of the tree."""
    favour_the_loop()
    raise_file_limit()
    server = GatewayServer(
        links=ClusterLinks.of(process_spec),
        deployments=deployments,
        config=msgspec.structs.replace(config, port=port),
        api_keys=keys,
        state=state,
        observing=observing,
        is_restarted=is_restarted,
    )
    await server.start()
    return HostedGateway(server)
