"""A gateway before upstream servers, with its batches: one process, without a cluster, an engine or a GPU."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.location import DriverStores, open_driver_stores
from alignedserve.batches.records import client_of
from alignedserve.cluster.batch_storage import BatchStorage, open_batch_storage
from alignedserve.config.sections import ClusterConfig, GatewayConfig, Observing
from alignedserve.core.errors import ConfigError, StorageError
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.quotas import RequestQuotas
from alignedserve.gateway.server import HttpServer, bind
from alignedserve.gateway.services import Services, build_services
from alignedserve.gateway.storage_metrics import Disks
from alignedserve.keys.ring import CurrentKeys
from alignedserve.keys.watch import KeysFile, KeysWatch
from alignedserve.process.background_tasks import start_background
from alignedserve.upstream.door import Door, UpstreamLineRunner

logger = logging.getLogger(__name__)

_MOST_UPSTREAMS = 64
_DRAIN_LOOK_S = 0.1
_WRITE_S = 5.0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0")  # noqa: S104  (compared, not listened on)


def checked_urls(urls: Sequence[str], config: GatewayConfig) -> tuple[str, ...]:
    """Return the upstreams' base addresses. Raises ConfigError for what is none, twice there, or this server itself."""
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


class UpstreamServer:
    """Serves from `start` to `stop`, on one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        config: ClusterConfig,
        *,
        api_keys: Sequence[str] = (),
        upstream_key: str | None = None,
        observing: Observing | None = None,
    ) -> None:
        """`upstream_key`: that the upstreams want. `observing`: None: calls are explained, and not traced. Raises
        ConfigError for addresses that cannot be upstreams."""
        self._observing = observing
        self.config = config
        self.door = Door(checked_urls(urls, config.gateway), config.gateway, upstream_key)
        self._keys = CurrentKeys()
        path = config.gateway.keys_path
        self._watch = KeysWatch(self._keys, api_keys, None if path is None else KeysFile(path))
        self._storage: BatchStorage | None = None
        self._stores: DriverStores | None = None
        self._services: Services | None = None
        self._quotas = RequestQuotas(config.gateway.requests_per_minute)
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        host = self.config.gateway.host
        return f"{self.config.gateway.scheme}://{f'[{host}]' if ':' in host else host}:{self.config.gateway.port}"

    async def start(self) -> None:
        """Look at the upstreams, open the stores and listen. Raises ConfigError, ResourceError, AddressInUse."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config.gateway
        await self._watch.look()
        self._tasks.append(start_background(self._watch.run(), "the watch of keys"))
        if self.config.batches.enabled:
            self._storage = open_batch_storage(self.config)
            self._stores = open_driver_stores(self._storage.location)
        stores, places = self._stores, {}
        if self._storage is not None and self._storage.location.folder is not None:
            places = {"state": self._storage.location.folder}
        self._quotas.start()
        services = self._services = build_services(
            config,
            name="door",
            keys=self._keys,
            files_api=FilesApi(stores, self.config.batches, self._keys) if stores is not None else None,
            quotas=self._quotas,
            observing=self._observing,
            disks=Disks(places),
            elsewhere=self.door.answer,
        )
        if services.tokens is not None:
            await services.tokens.start()
        services.questions.connect(f"door-{secrets.token_hex(4)}", lambda _: False, lambda _: 0)
        self.door.attach(services)
        await self.door.proxy.start()
        self._refuse_differences()
        self._http = HttpServer(services, bind(config.host, config.port))
        await self._http.start()
        if stores is not None:
            self._tasks.append(
                start_background(services.usage.write_on(stores.repository.usage), "the writing of usage")
            )
            self._tasks.append(start_background(self._drive(services, stores), "the driver of batches"))

    def _refuse_differences(self) -> None:
        problems = self.door.proxy.problems
        if problems:
            raise ConfigError(f"{problems[0]}; give the model another name on one of them (vLLM: --served-model-name)")

    async def _drive(self, services: Services, stores: DriverStores) -> None:
        driver = BatchDriver(
            stores=stores,
            runner=UpstreamLineRunner(services, self.door),
            config=self.config.batches,
            models=services.models,
            max_in_flight=self.config.batches.max_in_flight,
            weight_of=lambda owner: services.keys.ring.owned_by(client_of(owner)).weight,
        )
        await driver.run()

    def read_again(self) -> None:
        """Read keys and certificate again."""
        self._watch.read_again()
        if self._http is not None:
            self._http.read_again()

    async def drain(self) -> None:
        """Refuse new work, and let what is open end for at most `gateway.drain_s`."""
        loop, http = asyncio.get_running_loop(), self._http
        ends_s = loop.time() + self.config.gateway.drain_s
        while http is not None and http.close_intake() and loop.time() < ends_s:  # noqa: ASYNC110  (a count of uvicorn's)
            await asyncio.sleep(_DRAIN_LOOK_S)

    async def stop(self) -> None:
        """Stop. May be repeated."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        http, self._http = self._http, None
        if http is not None:
            await http.stop()
        await self.door.proxy.stop()
        services, self._services = self._services, None
        if services is not None:
            services.lanes.close()
            services.pictures.close()
            if services.tokens is not None:
                services.tokens.stop()
            await asyncio.to_thread(services.close)
        self._quotas.stop()
        stores, self._stores = self._stores, None
        if stores is not None:
            if services is not None:
                with contextlib.suppress(StorageError, TimeoutError):
                    async with asyncio.timeout(_WRITE_S):
                        await services.usage.write(stores.repository.usage)
            await stores.repository.close()
        storage, self._storage = self._storage, None
        if storage is not None and storage.lock is not None:
            storage.lock.release()
