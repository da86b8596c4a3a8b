"""The batch worker: the driver of batches, over links of its own to the cluster. No HTTP server."""

import asyncio
import logging
import time
from dataclasses import dataclass

import msgspec

from alignedserve.batch_worker.line_runner import ClusterLineRunner
from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.location import BatchLocation, DriverStores, open_driver_stores
from alignedserve.batches.remote.state_server import StateServer
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.quotas import QuotaPool
from alignedserve.gateway.backend.cluster import ClusterBackend, ClusterLinks
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.prefix_hasher import PrefixHasher
from alignedserve.gateway.services import build_services
from alignedserve.runtime.process.background_tasks import start_background
from alignedserve.runtime.process.process_spec import ProcessSpec

logger = logging.getLogger(__name__)

# Best-effort requests may be paused for long; lost messages are sent again long before.
_TOKEN_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class StateServing:
    """Settings of the state server beside the driver, which serves gateways."""

    process_spec: ProcessSpec
    gateways: tuple[str, ...]  # that are there from the start, and share the limits of keys
    num_keys: int


class BatchService:
    """Drives batches from `start` to `close`."""

    def __init__(
        self,
        *,
        links: ClusterLinks,
        model: ModelCard,
        config: GatewayConfig,
        location: BatchLocation,
        max_in_flight: int,
        state: StateServing | None = None,
        prefix_hasher: PrefixHasher | None = None,
    ) -> None:
        """`state`: None: no gateway needs what is kept here. `prefix_hasher`: None: the prefix cache is off."""
        self._links = links
        self._model = model
        # A line may have many choices; only the number of lines in flight bounds this process.
        self._config = msgspec.structs.replace(
            config,
            first_token_timeout_s=_TOKEN_TIMEOUT_S,
            token_timeout_s=_TOKEN_TIMEOUT_S,
            max_concurrent_requests=max(config.max_concurrent_requests, max_in_flight * config.max_choices),
        )
        self._location = location
        self._max_in_flight = max_in_flight
        self._state = state
        self._prefix_hasher = prefix_hasher
        self._state_server: StateServer | None = None
        self._backend: ClusterBackend | None = None
        self._stores: DriverStores | None = None
        self._driver_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the cluster and start the driver. Raises ModelError or StorageError."""
        tokenizer = await asyncio.to_thread(self._model.load_tokenizer)
        self._stores = open_driver_stores(self._location)
        await self._start_state_server(self._stores)
        self._backend = ClusterBackend(self._links, self._config, self._prefix_hasher)
        services = build_services(
            backend=self._backend,
            tokenizer=tokenizer,
            model=self._model,
            config=self._config,
            reply_to=self._links.own_address,
            prefix_hasher=self._prefix_hasher,
        )
        await self._backend.start()
        driver = BatchDriver(
            stores=self._stores,
            runner=ClusterLineRunner(services),
            config=self._location.config,
            models=(self._model.name,),
            max_in_flight=self._max_in_flight,
        )
        self._driver_task = start_background(driver.run(), "the driver of batches")
        logger.info("%s drives the batches of %s", self._links.identity.name, self._location.folder)

    async def _start_state_server(self, stores: DriverStores) -> None:
        if self._state is None:
            return
        now, per_minute = time.monotonic(), self._config.requests_per_minute
        self._state_server = StateServer(
            self._state.process_spec.identity(),
            self._state.process_spec.addresses,
            records=stores.records,
            blobs=stores.blobs,
            logs=stores.logs,
            quotas=QuotaPool(per_minute, self._state.num_keys, self._state.gateways, now) if per_minute else None,
        )
        await self._state_server.start()

    async def close(self) -> None:
        """Stop; the next driver resumes the lines that run. May be repeated."""
        server, self._state_server = self._state_server, None
        if server is not None:
            await server.close()
        task, self._driver_task = self._driver_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.stop()
        stores, self._stores = self._stores, None
        if stores is not None:
            await stores.repository.close()
