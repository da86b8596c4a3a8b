"""The batch worker: the driver of batches, over links of its own to the cluster. No HTTP server."""

import asyncio
import logging

import msgspec

from alignedserve.batch_worker.line_runner import ClusterLineRunner
from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.location import BatchLocation, BatchStores, open_stores
from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.backend.cluster import ClusterBackend, ClusterLinks
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.services import build_services
from alignedserve.runtime.model.tokenizer import Tokenizer
from alignedserve.runtime.process.background_tasks import start_background

logger = logging.getLogger(__name__)

# Best-effort requests may be paused for long; lost messages are sent again long before.
_TOKEN_TIMEOUT_S = 3600.0


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
    ) -> None:
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
        self._backend: ClusterBackend | None = None
        self._stores: BatchStores | None = None
        self._driver_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the cluster and start the driver. Raises ModelError or StorageError."""
        tokenizer = await asyncio.to_thread(Tokenizer.load, self._model.folder, self._model.vocab_size)
        self._stores = open_stores(self._location)
        self._backend = ClusterBackend(self._links, self._config)
        services = build_services(
            backend=self._backend,
            tokenizer=tokenizer,
            model=self._model,
            config=self._config,
            reply_to=self._links.own_address,
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

    async def close(self) -> None:
        """Stop; the next driver resumes the lines that run. May be repeated."""
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
