"""The gateway inside a running event loop: links to the cluster, deployments, app, HTTP server."""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from starlette.responses import Response
from typing_extensions import override

from alignedserve.api.backend.connection import ClusterConnection, ClusterLinks
from alignedserve.api.deployments import Deployments
from alignedserve.batches.location import BatchStores, SharedState, open_stores
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.config.sections import GatewayConfig, Observing
from alignedserve.config.sections.gateway import HEAD
from alignedserve.core.errors import AddressInUse, ConfigError, NotEnoughMemory, StorageError
from alignedserve.gateway.api_keys import HeadKeys
from alignedserve.gateway.app import build_app
from alignedserve.gateway.connections.http_protocol import BoundedHttpProtocol
from alignedserve.gateway.connections.limits import ConnectionLimits, file_shortage
from alignedserve.gateway.connections.tls_listener import TlsListener
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.quotas import RequestQuotas
from alignedserve.gateway.services import Services, build_services
from alignedserve.gateway.storage_metrics import Disks
from alignedserve.keys.ring import CurrentKeys
from alignedserve.keys.watch import KeysFile, KeysSource, KeysWatch
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.process.addresses import AddressBook
from alignedserve.process.background_tasks import start_background
from alignedserve.process.tls import ServerCertificate
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.model.served_model import DeploymentState, ServedDeployment

logger = logging.getLogger(__name__)

_UNREAD_MS = 60_000  # for which what was sent may go without the client taking any of it
_BACKLOG = 4096  # connections that wait to be accepted, when thousands come at once; the system may allow fewer
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is closed under a new request
_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_END_OF_TLS_S = 5.0  # for a client's last word


class GatewayServer:
    """A gateway that serves from `start` to `stop`, both called on its loop, in any thread; no signal handlers."""

    def __init__(
        self,
        *,
        links: ClusterLinks | None,
        deployments: Sequence[ServedDeployment],
        config: GatewayConfig,
        api_keys: Sequence[str] = (),
        state: SharedState | None = None,
        observing: Observing | None = None,
        is_restarted: bool = False,
    ) -> None:
        """`links`: None: there is no cluster, and a subclass says what answers. `deployments`: the first list; see
        `serve_models`. `state`: None: it shares nothing with other gateways.
        `observing`: None: calls are explained, and not traced.

        `is_restarted`: a process of its name died, so that the list may be of old: the current one will be told.
        """
        self._links = links
        self._first_deployments = tuple(deployments)
        self._config = config
        self._keys = CurrentKeys()
        self._plain_keys = tuple(api_keys)
        self._keys_watch: KeysWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        self._state = state or SharedState()
        self._observing = observing
        self._is_restarted = is_restarted
        self._elsewhere: Callable[..., Awaitable[Response]] | None = None  # answers calls by other servers
        self._client: StateClient | None = None
        self._quotas: RequestQuotas | None = None
        self._stores: BatchStores | None = None
        self._connection: ClusterConnection | None = None
        self._deployments: Deployments | None = None
        self._services: Services | None = None
        self._http: HttpServer | None = None
        self._usage: asyncio.Task[None] | None = None  # that writes it

    @property
    def url(self) -> str:
        host, scheme = self._config.host, self._config.scheme
        return f"{scheme}://[{host}]:{self._config.port}" if ":" in host else f"{scheme}://{host}:{self._config.port}"

    def cluster_status(self) -> ClusterStatus | None:
        """Return the last report of the first deployment's router; None while that is not connected."""
        return self._deployments.first_status() if self._deployments is not None else None

    def cluster_statuses(self) -> dict[str, ClusterStatus]:
        return self._deployments.statuses() if self._deployments is not None else {}

    def serve_models(self, deployments: Sequence[ServedDeployment]) -> tuple[DeploymentState, ...]:
        """Serve exactly these from now on; see Deployments. Only between `start` and `stop`."""
        assert self._deployments is not None, "a gateway that does not serve"
        return self._deployments.serve(deployments)

    def drain(self, is_draining: bool) -> int:
        """Say at /ready whether requests are to go elsewhere; return how many are open here. All are still served."""
        return self._http.drain(is_draining) if self._http is not None else 0

    def close_intake(self) -> int:
        """Refuse new work from now on, until the end; return how many requests are open. May be repeated."""
        return self._http.close_intake() if self._http is not None else 0

    def read_again(self) -> None:
        """Read again what may change while it serves: the certificate and the keys. From any thread."""
        if self._keys_watch is not None:
            self._keys_watch.read_again()
        if self._http is not None:
            self._http.read_again()

    @property
    def _name(self) -> str:
        return "door" if self._links is None else self._links.identity.name

    async def start(self) -> None:
        """Listen for HTTP and dial the cluster. Raises ModelError, AddressInUse, ConfigError or StorageError."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        names = ", ".join(deployed.served.name for deployed in self._first_deployments)
        logger.info("gateway %s serves %s at %s", self._name, names or "other servers' models", self.url)

    async def _start(self) -> None:
        self._open_shared_state()
        watch = self._keys_watch = KeysWatch(self._keys, self._plain_keys, self._source_of_keys())
        await watch.look()
        self._watching = start_background(watch.run(), "the watch of keys")
        batches = self._state.batches
        services = self._services = build_services(
            self._config,
            name=self._name,
            keys=self._keys,
            reply_to="" if self._links is None else self._links.own_address,
            files_api=FilesApi(self._stores, batches.config, self._keys) if batches and self._stores else None,
            quotas=self._quotas,
            observing=self._observing,
            disks=Disks(self._places()),
            elsewhere=self._elsewhere,
        )
        if services.tokens is not None:
            await services.tokens.start()
        await self._connect(services)
        if self._stores is not None:
            usage = services.usage.write_on(self._stores.repository.usage)
            self._usage = start_background(usage, "the writing of usage")
        self._http = HttpServer(
            services, bind(self._config.host, self._config.port, is_shared=self._config.shared_port)
        )
        await self._http.start()

    async def _connect(self, services: Services) -> None:
        """Find what serves the models."""
        assert self._links is not None, "a cluster without links"
        self._connection = ClusterConnection(self._links, services.timelines, services.questions)
        await self._connection.start()
        self._deployments = Deployments(services, self._connection)
        if self._is_restarted:
            self._deployments.serve_until_told(self._first_deployments)
        else:
            await self._deployments.load(self._first_deployments)

    async def _end_usage(self, services: Services | None, stores: BatchStores | None) -> None:
        task, self._usage = self._usage, None
        if task is None or services is None or stores is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await services.usage.write(stores.repository.usage)

    def _places(self) -> dict[str, Path]:
        state = self._state.batches.folder if self._state.batches is not None else None
        places = {"logs": self._links.log_folder if self._links is not None else None, "state": state}
        with contextlib.suppress(NotEnoughMemory):  # a host of gateways alone needs no blocks
            places["shared_memory"] = arena_folder()
        return {name: path for name, path in places.items() if path is not None}

    def _source_of_keys(self) -> KeysSource | None:
        path, batches = self._config.keys_path, self._state.batches
        if path is None:
            return None
        if self._config.keys_from == HEAD and batches is not None and batches.folder is None:
            assert self._client is not None, "a host without the state's folder and without the state server"
            return HeadKeys(self._client)
        return KeysFile(path)

    def _open_shared_state(self) -> None:
        assert self._links is not None, "a cluster without links"
        batches, name = self._state.batches, self._name
        has_others = shares_limits(name, self._state.gateways, self._links.book)
        if batches is not None:
            client = StateClient(self._links.identity, self._links.book)
            self._stores = open_stores(batches, client)
            is_limited = self._config.requests_per_minute is not None or self._config.keys_file is not None
            if batches.needs_state_server or (is_limited and has_others):
                self._client = client
                client.start()
        self._quotas = RequestQuotas(
            self._config.requests_per_minute,
            gateway=name,
            gateways=self._state.gateways,
            client=self._client,
            has_others=has_others,
        )
        self._quotas.start()

    async def stop(self) -> None:
        deployments, self._deployments = self._deployments, None
        connection, self._connection = self._connection, None
        http, self._http = self._http, None
        if deployments is not None:
            deployments.close()
        if connection is not None:
            await connection.close()
        if http is not None:
            await http.stop()
        services, self._services = self._services, None
        if services is not None:
            services.lanes.close()
            services.pictures.close()
            await asyncio.to_thread(services.close)
        if self._quotas is not None:
            self._quotas.stop()
        if self._watching is not None:
            self._watching.cancel()
        if services is not None and services.tokens is not None:
            services.tokens.stop()
        stores, self._stores = self._stores, None
        await self._end_usage(services, stores)
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
    """The HTTP side over any backends: uvicorn, on a listener that is already bound. With a certificate it is HTTPS."""

    def __init__(self, services: Services, listener: socket.socket) -> None:
        """Raises ConfigError when the certificate cannot be used."""
        self._services = services
        self._listener = listener
        config = services.config
        self._certificate = (
            ServerCertificate(config.tls_certificate, config.tls_key)
            if config.tls_certificate is not None and config.tls_key is not None
            else None
        )
        self._watching: asyncio.Task[None] | None = None
        shortage = file_shortage(config)
        if shortage is not None:
            logger.warning(shortage)
        self._server = _Uvicorn(
            uvicorn.Config(
                build_app(services),
                http=cast(type[asyncio.Protocol], partial(BoundedHttpProtocol, limits=ConnectionLimits.of(config))),
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                ws="none",
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            ),
            self._certificate.context if self._certificate is not None else None,
            ConnectionLimits.of(config),
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def drain(self, is_draining: bool) -> int:
        self._services.readiness.is_draining = is_draining
        return self._services.limiter.num_open

    def close_intake(self) -> int:
        self._services.intake.is_closed = True
        return self._services.intake.num_open

    def read_again(self) -> None:
        if self._certificate is not None:
            self._certificate.reload()

    async def start(self) -> None:
        """Serve in the background; return when connections are accepted."""
        serving = self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not self._server.started:
                if serving.done():
                    serving.result()
                    raise ConfigError("the HTTP server ended while starting")
                await asyncio.sleep(0.005)
        if self._certificate is not None:
            self._watching = asyncio.create_task(self._certificate.watch())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._server.should_exit = True
        serving, self._serving = self._serving, None
        if serving is not None:
            await asyncio.wait([serving], timeout=_STOP_TIMEOUT_S)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        self._listener.close()


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, handshakes: ConnectionLimits) -> None:
        super().__init__(config)
        self.servers = []
        self._tls, self._handshakes = tls, handshakes
        self._bounds = {"ssl_handshake_timeout": handshakes.header_timeout_s, "ssl_shutdown_timeout": _END_OF_TLS_S}

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop, backlog, tls = asyncio.get_running_loop(), self.config.backlog, self._tls
        for listener in sockets or ():
            if tls is None:
                self.servers.append(await loop.create_server(self._connection, sock=listener, backlog=backlog))
            else:
                tls_listener = TlsListener(listener, tls, self._connection, self._handshakes, **self._bounds)
                self.servers.append(cast(asyncio.Server, tls_listener))
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Return a listening socket. Raises AddressInUse or ConfigError naming the setting to change.

    `is_shared`: other gateways listen on the port as well; the system gives each connection to one of them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=is_shared)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Port {port} on {host} is taken by another process; set gateway.port to a free one."
            ) from error
        raise ConfigError(f"gateway.host: cannot listen on {host} port {port}: {error.strerror or error}") from error
    # Inherited by connections. uvloop sees to it itself; asyncio's own loop does not for a socket that it is given, and
    # an answer in two parts then waits 40 ms for the client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Inherited too: a client that reads nothing would keep its place, as a connection ends once what it gets has left.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    return listener
