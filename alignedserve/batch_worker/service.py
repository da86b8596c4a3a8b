"""The batch worker: the driver of batches, over links of its own to the cluster. No HTTP server."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from alignedserve.api.backend.connection import ClusterConnection, ClusterLinks
from alignedserve.api.deployments import Deployments
from alignedserve.api.services import ApiServices
from alignedserve.batch_worker.lines import ClusterLineRunner
from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.location import BatchLocation, DriverStores, open_driver_stores
from alignedserve.batches.records import client_of
from alignedserve.batches.remote.remote_stores import SharedLimits, StateServer
from alignedserve.batches.stores.namespace_claim import claim_on, folder_id
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.keys.ring import CurrentKeys
from alignedserve.keys.watch import KeysFile, KeysWatch, SharedKeys
from alignedserve.process.background_tasks import start_background
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.runtime.model.served_model import DeploymentState, ServedDeployment

logger = logging.getLogger(__name__)

# Best-effort requests may be paused for long; lost messages are sent again long before.
_TOKEN_TIMEOUT_S = 3600.0
_NO_LIMIT = 1 << 30  # of requests: the lines in flight bound this process


@dataclass(frozen=True, slots=True)
class StateServing:
    """Settings of the state server beside the driver, which serves gateways."""

    process_spec: ProcessSpec
    gateways: tuple[str, ...]  # that are there from the start, and share the limits of keys


class BatchService:
    """Drives batches from `start` to `close`."""

    def __init__(
        self,
        *,
        links: ClusterLinks,
        deployments: tuple[ServedDeployment, ...],
        config: GatewayConfig,
        location: BatchLocation,
        state: StateServing | None = None,
        api_keys: Sequence[str] = (),
        observing: Observing | None = None,
        is_restarted: bool = False,
    ) -> None:
        """`deployments`, `is_restarted`: see GatewayServer. `state`: None: no gateway needs what is kept here."""
        self._links = links
        self._first_deployments = deployments
        # A line may have many choices; only the number of lines in flight bounds this process.
        self._config = msgspec.structs.replace(
            config,
            first_token_timeout_s=_TOKEN_TIMEOUT_S,
            token_timeout_s=_TOKEN_TIMEOUT_S,
            max_concurrent_requests=_NO_LIMIT,
        )
        self._location = location
        self._state = state
        self._keys = CurrentKeys()
        self._shared_keys = SharedKeys()
        source = None if config.keys_path is None else KeysFile(config.keys_path)
        self._keys_watch = KeysWatch(self._keys, api_keys, source, self._shared_keys)
        self._watching: asyncio.Task[None] | None = None
        self._claiming: asyncio.Task[None] | None = None
        self._observing = observing
        self._services: ApiServices | None = None
        self._is_restarted = is_restarted
        self._state_server: StateServer | None = None
        self._connection: ClusterConnection | None = None
        self._deployments: Deployments | None = None
        self._stores: DriverStores | None = None
        self._driver: BatchDriver | None = None
        self._driver_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the cluster and start the driver. Raises ModelError or StorageError."""
        await self._keys_watch.look()
        self._watching = start_background(self._keys_watch.run(), "the watch of keys")
        self._stores = open_driver_stores(self._location)
        folder = self._location.folder
        if self._location.redis is not None and folder is not None:
            claim = claim_on(self._stores.records, folder_id(folder), self._location.config.namespace)
            self._claiming = start_background(claim, "the claim of the namespace")
        await self._start_state_server(self._stores)
        services = ApiServices.of(
            self._config, reply_to=self._links.own_address, observing=self._observing, keys=self._keys
        )
        self._services = services
        self._connection = ClusterConnection(self._links, services.timelines, services.questions)
        await self._connection.start()
        deployments = self._deployments = Deployments(services, self._connection, self._models_of_waiting_lines)
        if self._is_restarted:
            deployments.serve_until_told(self._first_deployments)
        else:
            await deployments.load(self._first_deployments)
        driver = self._driver = BatchDriver(
            stores=self._stores,
            runner=ClusterLineRunner(services, self._stores.responses.events),
            config=self._location.config,
            models=services.models,
            max_in_flight=self._location.config.max_in_flight,
            weight_of=lambda owner: services.keys.ring.owned_by(client_of(owner)).weight,
        )
        self._driver_task = start_background(_drive(driver, deployments), "the driver of batches")
        logger.info("%s drives the batches of %s", self._links.identity.name, self._location.folder)

    async def _start_state_server(self, stores: DriverStores) -> None:
        if self._state is None:
            return
        self._state_server = StateServer(
            self._state.process_spec.identity(),
            self._state.process_spec.addresses,
            records=stores.records,
            blobs=stores.blobs,
            logs=stores.logs,
            unsaved=stores.repository.unsaved,
            limits=SharedLimits.beginning(time.monotonic()),
            keys=self._shared_keys,
        )
        await self._state_server.start()

    async def serve_models(self, deployments: tuple[ServedDeployment, ...]) -> tuple[DeploymentState, ...]:
        """Run lines with exactly these deployments from now on; see Deployments. Only between `start` and `close`."""
        assert self._deployments is not None, "a batch worker that does not run"
        return self._deployments.serve(deployments)

    def _models_of_waiting_lines(self) -> Collection[str]:
        return self._driver.models_of_waiting_lines() if self._driver is not None else ()

    async def pause(self) -> None:
        """Let lines that run go back to their batches, which the next driver resumes. May be repeated.

        The state server serves on: gateways store what they still answer.
        """
        task, self._driver_task = self._driver_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            logger.info("%s drives no batches any more", self._links.identity.name)

    async def close(self) -> None:
        for task in (self._watching, self._claiming):
            if task is not None:
                task.cancel()
        server, self._state_server = self._state_server, None
        if server is not None:
            await server.close()
        await self.pause()
        deployments, self._deployments = self._deployments, None
        if deployments is not None:
            deployments.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        services, self._services = self._services, None
        if services is not None:
            await asyncio.to_thread(services.close)
        stores, self._stores = self._stores, None
        if stores is not None:
            await stores.repository.close()


async def _drive(driver: BatchDriver, deployments: Deployments) -> None:
    await deployments.told()
    await driver.run()
