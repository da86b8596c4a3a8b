"""The gateway inside a running event loop: links to the cluster, app, HTTP server, readiness probe."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from alignedserve.batches.location import BatchStores, SharedState, open_stores
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import AddressInUse, ConfigError
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.app import build_app
from alignedserve.gateway.backend.cluster import ClusterBackend, ClusterLinks
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.prefix_hasher import PrefixHasher
from alignedserve.gateway.request_quotas import RequestQuotas
from alignedserve.gateway.services import Services, build_services
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.runtime.model.tokenizer import Tokenizer
from alignedserve.runtime.process.addresses import AddressBook
from alignedserve.runtime.process.background_tasks import start_background

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is closed under a new request
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0


class GatewayServer:
    """A gateway that serves from `start` to `stop`, both called on its loop, in any thread; no signal handlers."""

    def __init__(
        self,
        *,
        links: ClusterLinks,
        model: ModelCard,
        config: GatewayConfig,
        api_keys: Sequence[str] = (),
        state: SharedState | None = None,
        is_first_process: bool = True,
        prefix_hasher: PrefixHasher | None = None,
    ) -> None:
        """`state`: None: it shares nothing with other gateways. `is_first_process`: none of its name ran before.

        `prefix_hasher`: None: the prefix cache is off.
        """
        self._links = links
        self._model = model
        self._config = config
        self._api_keys = tuple(api_keys)
        self._state = state or SharedState()
        self._is_first_process = is_first_process
        self._prefix_hasher = prefix_hasher
        self._client: StateClient | None = None
        self._quotas: RequestQuotas | None = None
        self._stores: BatchStores | None = None
        self._backend: ClusterBackend | None = None
        self._http: HttpServer | None = None

    @property
    def url(self) -> str:
        """The address that clients connect to."""
        host = self._config.host
        return f"http://[{host}]:{self._config.port}" if ":" in host else f"http://{host}:{self._config.port}"

    def cluster_status(self) -> ClusterStatus | None:
        """Return the router's last report; None while no router is connected."""
        return self._backend.status() if self._backend is not None else None

    def drain(self, is_draining: bool) -> int:
        """Say at /ready whether requests are to go elsewhere; return how many are open here. All are still served."""
        return self._http.drain(is_draining) if self._http is not None else 0

    async def start(self) -> None:
        """Listen for HTTP and dial the cluster. Raises ModelError, AddressInUse, ConfigError or StorageError."""
        tokenizer = await asyncio.to_thread(self._model.load_tokenizer)
        try:
            await self._start(tokenizer)
        except BaseException:
            await self.stop()
            raise
        logger.info("gateway %s serves %s at %s", self._links.identity.name, self._model.name, self.url)

    async def _start(self, tokenizer: Tokenizer) -> None:
        self._backend = ClusterBackend(self._links, self._config, self._prefix_hasher)
        self._open_shared_state()
        batches = self._state.batches
        services = build_services(
            backend=self._backend,
            tokenizer=tokenizer,
            model=self._model,
            config=self._config,
            api_keys=self._api_keys,
            reply_to=self._links.own_address,
            files_api=FilesApi(self._stores, batches.config) if batches and self._stores else None,
            quotas=self._quotas,
            prefix_hasher=self._prefix_hasher,
        )
        self._http = HttpServer(services, bind(self._config.host, self._config.port))
        await self._backend.start()
        await self._http.start()

    def _open_shared_state(self) -> None:
        """Open the stores and the count of requests, and dial the state server where one of them needs it."""
        batches, name = self._state.batches, self._links.identity.name
        if batches is not None:
            client = StateClient(self._links.identity, self._links.book)
            self._stores = open_stores(batches, client)
            is_limited = self._config.requests_per_minute is not None
            if batches.folder is None or (is_limited and shares_limits(name, self._state.gateways, self._links.book)):
                self._client = client
                client.start()
        self._quotas = RequestQuotas(
            self._config.requests_per_minute,
            ApiKeys(self._api_keys).num_owners,
            gateway=name,
            gateways=self._state.gateways,
            client=self._client,
            is_first_process=self._is_first_process,
        )
        self._quotas.start()

    async def stop(self) -> None:
        """Close every connection and link; open requests fail. May be repeated."""
        backend, self._backend = self._backend, None
        http, self._http = self._http, None
        if backend is not None:
            await backend.stop()
        if http is not None:
            await http.stop()
        if self._quotas is not None:
            self._quotas.stop()
        stores, self._stores = self._stores, None
        if stores is not None:
            await stores.repository.close()
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def shares_limits(name: str, gateways: tuple[str, ...], book: AddressBook | None) -> bool:
    """Return whether other gateways count requests of the same keys: those of the start, and those that may join.

    Those that join own no share: they depend on the pool having the shares of all others.
    """
    return gateways != (name,) or (book is not None and book.is_among_hosts)


class HttpServer:
    """The HTTP side over any backend: uvicorn and the readiness probe, on a listener that is already bound."""

    def __init__(self, services: Services, listener: socket.socket) -> None:
        self._services = services
        self._listener = listener
        self._server = _Uvicorn(
            uvicorn.Config(
                build_app(services),
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                ws="none",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """The port listened on."""
        return int(self._listener.getsockname()[1])

    def drain(self, is_draining: bool) -> int:
        """See GatewayServer."""
        self._services.readiness_probe.is_draining = is_draining
        return self._services.limiter.num_open

    async def start(self) -> None:
        """Serve in the background; return when connections are accepted."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._tasks = [serving, start_background(self._services.readiness_probe.run(), "the readiness probe")]
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not self._server.started:
                if serving.done():
                    serving.result()
                    raise ConfigError("the HTTP server ended while starting")
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop accepting connections and close the open ones."""
        self._server.should_exit = True
        for probing in self._tasks[1:]:
            probing.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._listener.close()


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signal handlers: signals belong to the process's owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises AddressInUse or ConfigError naming the setting to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Port {port} on {host} is taken by another process; set gateway.port to a free one."
            ) from error
        raise ConfigError(f"gateway.host: cannot listen on {host} port {port}: {error.strerror or error}") from error
    # Inherited by connections. uvloop sees to it itself; asyncio's own loop does not for a socket that it is given, and
    # an answer in two parts then waits 40 ms for the client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
