"""A gateway before upstream servers, with its batches: one process, without a cluster, an engine or a GPU."""

import asyncio
import time
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

from typing_extensions import override

from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.location import DriverStores, SharedState, open_driver_stores
from alignedserve.batches.records import client_of
from alignedserve.cluster.batch_storage import BatchStorage, open_batch_storage
from alignedserve.config.sections import ClusterConfig, GatewayConfig, Observing
from alignedserve.core.errors import ConfigError
from alignedserve.gateway.quotas import RequestQuotas
from alignedserve.gateway.server import GatewayServer
from alignedserve.gateway.services import Services
from alignedserve.process.background_tasks import start_background
from alignedserve.upstream.door import Door, UpstreamLineRunner

_MOST_UPSTREAMS = 64
_DRAIN_LOOK_S = 0.1
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")  # noqa: S104  (compared, not listened on)


def checked_urls(urls: Sequence[str], config: GatewayConfig) -> tuple[str, ...]:
    """Return the upstreams' base addresses. Raises ConfigError: bad, repeated, or this server."""
    bases: list[str] = []
    for url in urls:
        base = url.strip().rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(base)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise ConfigError(f"--upstream {url!r}: must be an address such as http://127.0.0.1:8001")
        if parts.username is not None or parts.password is not None:
            raise ConfigError("--upstream holds a secret; set ALIGNEDSERVE_UPSTREAM_KEY to the upstreams' key instead")
        is_here = host in (*_LOOPBACK, "::1", config.host) and port == config.port
        if is_here:
            raise ConfigError(
                f"--upstream {url} is this server itself (gateway.port {config.port}); set another --port"
            )
        if base in bases:
            raise ConfigError(f"--upstream names {base} twice")
        bases.append(base)
    if len(bases) > _MOST_UPSTREAMS:
        raise ConfigError(f"--upstream may be given {_MOST_UPSTREAMS} times at most")
    return tuple(bases)


class UpstreamServer(GatewayServer):
    """A gateway without a cluster, and the driver of its batches."""

    def __init__(
        self,
        urls: Sequence[str],
        config: ClusterConfig,
        *,
        api_keys: Sequence[str] = (),
        upstream_key: str | None = None,
        observing: Observing | None = None,
    ) -> None:
        """`upstream_key`: that the upstreams want. Raises ConfigError for addresses that cannot be upstreams."""
        super().__init__(links=None, deployments=(), config=config.gateway, api_keys=api_keys, observing=observing)
        self.config = config
        self.door = Door(checked_urls(urls, config.gateway), config.gateway, upstream_key)
        self._elsewhere = self.door.answer
        self._storage: BatchStorage | None = None
        self._driving: asyncio.Task[None] | None = None

    @override
    def _open_shared_state(self) -> None:
        if self.config.batches.enabled:
            self._storage = open_batch_storage(self.config)
            self._stores = open_driver_stores(self._storage.location)
            self._state = SharedState(self._storage.location)
        self._quotas = RequestQuotas(self.config.gateway.requests_per_minute)

    @override
    async def _connect(self, services: Services) -> None:
        self.door.attach(services)
        await self.door.proxy.start()
        if self.door.proxy.problems:
            problem = self.door.proxy.problems[0]
            raise ConfigError(f"{problem}; give the model another name on one of them (vLLM: --served-model-name)")
        if self._stores is not None:
            driver = BatchDriver(
                stores=cast(DriverStores, self._stores),
                runner=UpstreamLineRunner(services, self.door),
                config=self.config.batches,
                models=services.models,
                max_in_flight=self.config.batches.max_in_flight,
                weight_of=lambda owner: services.keys.ring.owned_by(client_of(owner)).weight,
            )
            self._driving = start_background(driver.run(), "the driver of batches")

    async def drained(self) -> None:
        """Refuse new work, and return when what is open has ended, after `gateway.drain_s` at the latest."""
        ends_s = time.monotonic() + self.config.gateway.drain_s
        while self.close_intake() and time.monotonic() < ends_s:  # noqa: ASYNC110  (counts of uvicorn's)
            await asyncio.sleep(_DRAIN_LOOK_S)

    @override
    async def stop(self) -> None:
        """Stop. May be repeated."""
        driving, self._driving = self._driving, None
        if driving is not None:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
        await super().stop()
        await self.door.proxy.stop()
        storage, self._storage = self._storage, None
        if storage is not None and storage.lock is not None:
            storage.lock.release()
