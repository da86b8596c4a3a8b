"""The batch worker as a Ray actor. All that it runs is loaded where it runs."""

import asyncio
from typing import TYPE_CHECKING, cast

import ray

from alignedserve.batches.location import BatchLocation
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.worker_threads import run_quietly
from alignedserve.runtime.model.served_model import DeploymentState, ServedDeployment

if TYPE_CHECKING:
    from alignedserve.batch_worker.service import BatchService


@ray.remote
class BatchActor(ActorHost):
    """A batch worker that Ray starts, restarts and places; all else is in the stores."""

    def serve_models(self, deployments: tuple[ServedDeployment, ...]) -> tuple[DeploymentState, ...]:
        """Run lines with exactly these deployments from now on; see GatewayActor."""
        return () if self._hosted is None else self.call(self._hosted.serve_models(deployments))

    def pause(self) -> None:
        """See BatchService; a process that is not up, or restarts, is asked again."""
        if self._hosted is not None:
            self.call(self._hosted.pause())

    def __init__(
        self,
        config: GatewayConfig,
        deployments: tuple[ServedDeployment, ...],
        location: BatchLocation,
        gateways: tuple[str, ...],
        keys: tuple[str, ...],
        state_spec: ProcessSpec,
        observing: Observing,
        process_spec: ProcessSpec,
    ) -> None:
        """`deployments`: the first list; see `serve_models`. `gateways`, `state_spec`: see StateServing."""

        def load() -> None:
            """Load all that it runs: a second of a processor, which chat's processes need more while they start."""
            import alignedserve.batch_worker.service  # noqa: F401

        async def build() -> "BatchService":
            is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
            if not is_restarted:
                await asyncio.to_thread(run_quietly, load)
            from alignedserve.api.backend.connection import ClusterLinks
            from alignedserve.batch_worker.service import BatchService, StateServing

            service = BatchService(
                links=ClusterLinks.of(process_spec),
                deployments=deployments,
                config=config,
                location=location,
                state=StateServing(state_spec, gateways),
                api_keys=keys,
                observing=observing,
                is_restarted=is_restarted,
            )
            await service.start()
            return service

        super().__init__(process_spec, build)

    @property
    def _hosted(self) -> "BatchService | None":
        return cast("BatchService | None", self._service)
