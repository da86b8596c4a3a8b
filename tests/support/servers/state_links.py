"""A state server and the clients of gateways on another node, joined by links with TLS, in one process."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from alignedserve.batches.location import DriverStores, stores_in
from alignedserve.batches.remote.remote_stores import SharedLimits, StateServer
from alignedserve.batches.remote.state_client import STATE, StateClient
from alignedserve.keys.open_counts import OpenPool
from alignedserve.keys.quotas import LEASE_S, QuotaPool
from alignedserve.keys.watch import SharedKeys
from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import AddressBook
from alignedserve.process.links import Identity
from alignedserve.process.tls import CertificateAuthority
from tests.support.memory_records import MemoryRecords

AUTHORITY = CertificateAuthority.new("test")
SECRET = b"s" * 32


class Entries:
    """A directory of the processes of one test."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def publish(self, name: str, entry: str) -> None:
        self._entries[name] = entry

    def look_up(self, name: str) -> str | None:
        return self._entries.get(name)


class StateHosts:
    """The head, with a state server that can be stopped and started again, and gateways elsewhere."""

    def __init__(self, folder: Path, stores: DriverStores | None = None) -> None:
        self.entries = Entries()
        self.records = MemoryRecords()
        self.keys = SharedKeys()
        self.open_requests = OpenPool(time.monotonic() - LEASE_S)  # as if everything had been told to it
        self.stores = stores or stores_in(folder / "state", self.records)
        self.book = self._book(folder, "node-0")
        self.other_book = self._book(folder, "node-1")
        self.clients: list[StateClient] = []
        self.server: StateServer | None = None

    def _book(self, folder: Path, node: str) -> AddressBook:
        (folder / node).mkdir()
        return AddressBook(folder / node, node, "127.0.0.1", self.entries)

    async def start(self, quotas: QuotaPool | None = None) -> None:
        """Start a server, in place of one that was stopped."""
        stores = self.stores
        self.server = StateServer(
            identity(STATE, Role.STATE_SERVER),
            self.book,
            records=stores.records,
            blobs=stores.blobs,
            logs=stores.logs,
            unsaved=stores.repository.unsaved,
            limits=None if quotas is None else SharedLimits(quotas, self.open_requests),
            keys=self.keys,
        )
        await self.server.start()

    async def stop(self) -> None:
        """Stop the server."""
        assert self.server is not None
        await self.server.close()

    def client(self, name: str = "gateway-1", role: Role = Role.GATEWAY) -> StateClient:
        """Return a client that is closed at the end."""
        client = StateClient(identity(name, role), self.other_book)
        client.start()
        self.clients.append(client)
        return client


def identity(name: str, role: Role) -> Identity:
    return Identity(role, name, SECRET, credentials=AUTHORITY.issue(name))


@asynccontextmanager
async def state_hosts(
    folder: Path, *, stores: DriverStores | None = None, quotas: QuotaPool | None = None
) -> AsyncIterator[StateHosts]:
    """Hosts with a server that runs."""
    hosts = StateHosts(folder, stores)
    await hosts.start(quotas)
    try:
        yield hosts
    finally:
        for client in hosts.clients:
            await client.close()
        await hosts.stop()
