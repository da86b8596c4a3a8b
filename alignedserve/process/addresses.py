"""The addresses at which the processes of one cluster listen, and how one is found by its process's name.

An address is `unix:/path`, `tls:host:port`, `tcp:host:port` (in clear), or a name: of a process of the cluster,
resolved at every attempt to reach it. On one host every process listens at a Unix socket in the cluster's private
folder. Among several hosts each also listens at a port of its host, for TLS, and publishes it; processes of the same
host keep to the sockets.
"""

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from alignedserve.core.errors import PeerError, PeerLost, ProtocolError
from alignedserve.process.background_tasks import outlived

logger = logging.getLogger(__name__)

ROUTER = "router"
FIRST_DEPLOYMENT = ""  # the id of a cluster's first deployment, whose processes have plain names
_LOOK_UP_S = 2.0
_MOST_LOOK_UPS = 4  # at a time


class Directory(Protocol):
    """The published addresses of all hosts' processes. Calls block, and raise PeerError where it does not answer."""

    def publish(self, name: str, entry: str) -> None:
        """Set the entry of this process, in place of any earlier one."""

    def look_up(self, name: str) -> str | None:
        """Return the entry of the process with this name; None: it has not published one."""


@dataclass(frozen=True, slots=True)
class Publication:
    """The place of one process, as published."""

    node: str
    address: str  # where other nodes reach it

    def encode(self) -> str:
        return f"{self.node} {self.address}"

    @classmethod
    def decode(cls, entry: str) -> "Publication":
        """Parse an entry. Raises ProtocolError when it is none."""
        node, _, address = entry.partition(" ")
        if not node or not address.startswith(("tls:", "tcp:")):
            raise ProtocolError("the published address of a process cannot be read")
        return cls(node, address)


@dataclass(frozen=True, slots=True)
class AddressBook:
    """The addresses known to one process: of its node, and the directory of other nodes."""

    folder: Path  # private, of this node
    node: str = ""
    host: str = ""  # where this node listens for other nodes; empty: a single host
    directory: Directory | None = None
    has_tls: bool = True  # between nodes

    @property
    def is_among_hosts(self) -> bool:
        return self.directory is not None

    def of(self, name: str) -> str:
        return f"unix:{self.folder / name}.sock"

    def progress_of(self, name: str) -> Path:
        return self.folder / f"{name}.progress"

    def listening(self, address: str) -> tuple[str, ...]:
        """Return where to listen for an address: a process's own name stands for all that it has."""
        if not is_name(address):
            return (address,)
        return (self.of(address), *self.beyond_node())

    def beyond_node(self) -> tuple[str, ...]:
        """Return where to listen for other nodes, at any free port; empty on a single host."""
        return (f"{'tls' if self.has_tls else 'tcp'}:{self.host}:0",) if self.directory is not None else ()


class AddressResolver:
    """Resolves names on one event loop. The last known place of a process is kept, so that it is dialled while the
    directory does not answer."""

    def __init__(self, book: AddressBook | None) -> None:
        """`book`: None: there are no names, only addresses."""
        self._book = book
        self._known: dict[str, Publication] = {}
        self._look_ups: dict[str, asyncio.Future[str | None]] = {}
        # Of their own: a directory that hangs would take the threads of everything else.
        self._threads = ThreadPoolExecutor(_MOST_LOOK_UPS, "look-ups")

    def listening(self, address: str) -> tuple[str, ...]:
        return self._book.listening(address) if self._book is not None else (address,)

    async def publish(self, name: str, address: str) -> None:
        """Publish where this process is reached from other nodes. Raises PeerError."""
        book = self._book
        directory = book.directory if book is not None else None
        assert book is not None, "published without a book"
        assert directory is not None, "published without a directory"
        await asyncio.to_thread(directory.publish, name, Publication(book.node, address).encode())

    async def resolve(self, address: str) -> str:
        """Return the address of a socket. Raises PeerLost for a name that is published nowhere."""
        if not is_name(address):
            return address
        if self._book is None:
            raise PeerLost(f"there is no address book to find {address} in")
        if self._book.directory is None:
            return self._book.of(address)
        publication = await self._look_up(address, self._book.directory)
        return self._book.of(address) if publication.node == self._book.node else publication.address

    async def _look_up(self, name: str, directory: Directory) -> Publication:
        # One question at a time: a directory that does not answer must not pile up threads.
        look_up = self._look_ups.get(name)
        if look_up is None:
            loop = asyncio.get_running_loop()
            look_up = self._look_ups[name] = loop.run_in_executor(self._threads, directory.look_up, name)
            look_up.add_done_callback(lambda _: self._look_ups.pop(name))
        try:
            async with asyncio.timeout(_LOOK_UP_S):  # Python 3.11's `wait_for` may swallow a cancellation
                entry = await outlived(look_up)
            if entry is not None:
                self._known[name] = Publication.decode(entry)
        except (PeerError, TimeoutError) as error:
            logger.debug("the directory does not say where %s is: %s", name, error or "no answer")
        publication = self._known.get(name)
        if publication is None:
            raise PeerLost(f"{name} has not published an address")
        return publication


def deployed_name(name: str, deployment_id: str) -> str:
    """Return the name that a process has in a deployment (one model with its router, pools and workers). For example
    router, and router.2 of the deployment 2. Names of two deployments of a cluster never meet."""
    return name if deployment_id == FIRST_DEPLOYMENT else f"{name}.{deployment_id}"


def numbered_deployment(number: int) -> str:
    return FIRST_DEPLOYMENT if number == 1 else str(number)


def deployment_of(name: str) -> str:
    """Return the id of the deployment to which the process of this name belongs; that of the first for others."""
    return name.partition(".")[2]


def router_of(name: str) -> str:
    return deployed_name(ROUTER, deployment_of(name))


def is_router(name: str) -> bool:
    return name.partition(".")[0] == ROUTER


def is_gateway(name: str) -> bool:
    """Return whether this is the name of a gateway; those serve all deployments."""
    return name.startswith("gateway-")


def is_name(address: str) -> bool:
    return ":" not in address


_STAGE = "-stage-"


def stage_name(worker: str, index: int) -> str:
    return deployed_name(f"{worker.partition('.')[0]}{_STAGE}{index}", deployment_of(worker))


def worker_of_stage(name: str) -> str:
    return deployed_name(name.partition(".")[0].rpartition(_STAGE)[0], deployment_of(name))


def free_ports(count: int) -> list[int]:
    """Return ports of this machine's loopback on which nobody listens now; another program may take one at any time."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
