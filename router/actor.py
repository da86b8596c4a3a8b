"""The router as a Ray actor. What it decides with is loaded where it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.errors import PeerLost
from alignedserve.process.actor_host import ActorHost
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_model import ServedModel

if TYPE_CHECKING:
    from router.service import RouterService


@ray.remote
class RouterActor(ActorHost):
    """Actor started, restarted and placed by Ray; all other communication uses its links."""

    def __init__(
        self,
        config: RouterConfig,
        batching: BatchingConfig,
        served: ServedModel,
        state_folder: Path | None,
        process_spec: ProcessSpec,
    ) -> None:
        async def build() -> "RouterService":
            from router.service import RouterService

            router = RouterService(
                config=config, batching=batching, served=served, process_spec=process_spec, state_folder=state_folder
            )
            await router.start(listen_at=process_spec.name)
            return router

        super().__init__(process_spec, build)

    def drain(self, draining: tuple[str, ...], moved: tuple[str, ...]) -> dict[str, int]:
        """Drain only these workers and pools (DrainRequested); return what each still has. Raises PeerLost without a
        router."""
        return self.call(self._router().drain(draining, moved))

    def num_left(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return how many requests each of these workers has. Raises PeerLost without a router."""
        return self.call(self._router().num_left(names))

    def registrations(self) -> dict[str, str]:
        """Return what tells each worker's registration from its next. Raises PeerLost without a router."""
        return self.call(self._router().registrations())

    def _router(self) -> "RouterService":
        if self._service is None:
            raise PeerLost("the router is not up")
        return cast("RouterService", self._service)
