"""The process that drives batches: a backend of its own towards the cluster, and the driver. No HTTP."""

import asyncio
import logging

import msgspec

from alignedserve.batch_worker.line_runner import ClusterLines
from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.location import BatchLocation, BatchStores, open_stores
from alignedserve.batches.run import Limits, Rooms
from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.app import build_services
from alignedserve.gateway.backend.cluster import ClusterBackend
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.server import GatewayLinks
from alignedserve.runtime.model.tokenizer import Tokenizer
from alignedserve.runtime.process.background_tasks import start_background

logger = logging.getLogger(__name__)

# Best-effort work may be paused for long; what is lost on the way is asked for again long before.
_PATIENCE_S = 3600.0


class BatchService:
    """`start`, then drive until `close`."""

    def __init__(
        self, *, links: GatewayLinks, model: ModelCard, config: GatewayConfig, place: BatchLocation, max_in_flight: int
    ) -> None:
        self._links = links
        self._model = model
        # A line may have many choices; the number of lines in flight is what bounds this process.
        self._config = msgspec.structs.replace(
            config,
            first_token_timeout_s=_PATIENCE_S,
            token_timeout_s=_PATIENCE_S,
            max_concurrent_requests=max(config.max_concurrent_requests, max_in_flight * config.max_choices),
        )
        self._place = place
        self._max_in_flight = max_in_flight
        self._backend: ClusterBackend | None = None
        self._stores: BatchStores | None = None
        self._driving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Dial the cluster and begin. Raises ModelError or StorageError."""
        tokenizer = await asyncio.to_thread(Tokenizer.load, self._model.folder)
        self._stores = open_stores(self._place)
        self._backend = ClusterBackend(
            identity=self._links.identity,
            router_address=self._links.router_address,
            own_address=self._links.own_address,
            config=self._config,
        )
        services = build_services(
            backend=self._backend,
            tokenizer=tokenizer,
            model=self._model,
            config=self._config,
            reply_to=self._links.own_address,
        )
        await self._backend.start()
        limits = self._place.config
        driver = BatchDriver(
            rooms=Rooms(self._stores.book, self._stores.blobs, self._stores.logs, ClusterLines(services)),
            limits=Limits(
                models=(self._model.name,),
                max_lines=limits.max_lines,
                max_line_bytes=limits.max_line_bytes,
                max_attempts=limits.max_attempts,
                assumed_tokens_per_s=limits.assumed_tokens_per_s,
                file_lifetime_s=limits.file_lifetime_s,
            ),
            max_in_flight=self._max_in_flight,
            lock_path=self._place.lock_path,
        )
        self._driving = start_background(driver.run(), "the driver of batches")
        logger.info("%s drives the batches of %s", self._links.identity.name, self._place.folder)

    async def close(self) -> None:
        """Stop. What runs is taken up again by whoever drives next. May be repeated."""
        driving, self._driving = self._driving, None
        if driving is not None:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.stop()
        stores, self._stores = self._stores, None
        if stores is not None:
            await stores.records.close()
