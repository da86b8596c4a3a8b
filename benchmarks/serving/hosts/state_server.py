"""Costs of the state server: calls one after the other, requests that are counted at once, and contents.

The server is a process of its own, linked over TLS on this host, as with a gateway of another node; in turn with the
same contents written and read by a gateway of the head itself.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from alignedserve.batches.interfaces import ContentStore
from alignedserve.batches.location import stores_in
from alignedserve.batches.records import FileId
from alignedserve.batches.remote.remote_stores import RemoteBlobs, RemoteRecords
from alignedserve.batches.remote.state_client import STATE, StateClient
from alignedserve.batches.remote.state_server import StateServer
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.batches.stores.memory_records import MemoryRecords
from alignedserve.core.quotas import QuotaPool
from alignedserve.gateway.request_quotas import RequestQuotas
from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import AddressBook, Publication
from alignedserve.process.links import Identity
from alignedserve.process.tls import CertificateAuthority, Credentials
from benchmarks.support.recording import write_result

GATEWAY = "gateway-1"
SECRET = bytes(32)
FILE = FileId("file-" + "a" * 24)
LIMIT = 60_000_000
CHUNK_BYTES = 64 * 1024  # as a client's upload arrives


class _Entries:
    """A directory with the places of this benchmark."""

    def __init__(self, channel: Connection | None = None, entries: dict[str, str] | None = None) -> None:
        self._channel = channel
        self._entries = entries or {}

    def publish(self, name: str, entry: str) -> None:
        assert self._channel is not None
        self._channel.send(entry)

    def look_up(self, name: str) -> str | None:
        return self._entries.get(name)


def _serve(channel: Connection, folder: Path, credentials: Credentials) -> None:
    async def serve() -> None:
        stores = stores_in(folder / "state", MemoryRecords())
        server = StateServer(
            Identity(Role.STATE_SERVER, STATE, SECRET, credentials=credentials),
            AddressBook(folder, "node-0", "127.0.0.1", _Entries(channel)),
            records=stores.records,
            blobs=stores.blobs,
            logs=stores.logs,
            quotas=QuotaPool(LIMIT, 1, [GATEWAY], time.monotonic()),
        )
        await server.start()
        await asyncio.to_thread(channel.recv)
        await server.close()

    uvloop.run(serve())


async def _milliseconds(work: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    taken: list[float] = []
    for _ in range(count):
        began_s = time.perf_counter()
        await work()
        taken.append(1000.0 * (time.perf_counter() - began_s))
    return taken


async def _rates(store: ContentStore, content: bytes) -> tuple[float, float]:
    """Return the megabytes per second of an upload and of a download."""
    began_s = time.perf_counter()
    writer = await store.begin(FILE)
    for start in range(0, len(content), CHUNK_BYTES):
        await writer.write(content[start : start + CHUNK_BYTES])
    await writer.commit()
    written_s = time.perf_counter()
    size = sum([len(chunk) async for chunk in store.chunks(FILE)])
    read_s = time.perf_counter()
    assert size == len(content)
    await store.remove(FILE)
    return size / 1e6 / (written_s - began_s), size / 1e6 / (read_s - written_s)


async def _measure(client: StateClient, own: ContentStore, num_calls: int, num_bytes: int) -> dict[str, Any]:
    counted = RequestQuotas(LIMIT, 1, gateway=GATEWAY, gateways=(GATEWAY,), client=client)
    counted.start()
    records = RemoteRecords(client)
    await asyncio.sleep(1.5)
    reads = await _milliseconds(lambda: records.read(["file/x"]), num_calls)
    counts = await _milliseconds(lambda: counted.count(0), num_calls)
    began_s = time.perf_counter()
    for _ in range(num_calls // 100):
        await asyncio.gather(*(counted.count(0) for _ in range(100)))
    counts_per_s = num_calls / (time.perf_counter() - began_s)
    content = os.urandom(num_bytes)
    rounds = [(await _rates(RemoteBlobs(client), content), await _rates(own, content)) for _ in range(3)]
    counted.stop()
    return {
        "read_ms": {"median": statistics.median(reads), "p99": sorted(reads)[int(0.99 * num_calls)]},
        "count_ms": {"median": statistics.median(counts), "p99": sorted(counts)[int(0.99 * num_calls)]},
        "counts_per_s_at_100_at_once": counts_per_s,
        "upload_mb_per_s": statistics.median(elsewhere[0] for elsewhere, _ in rounds),
        "download_mb_per_s": statistics.median(elsewhere[1] for elsewhere, _ in rounds),
        "upload_on_the_head_mb_per_s": statistics.median(head[0] for _, head in rounds),
        "download_on_the_head_mb_per_s": statistics.median(head[1] for _, head in rounds),
        "bytes": num_bytes,
    }


async def _with_client(entry: str, folder: Path, credentials: Credentials, options: Any) -> dict[str, Any]:
    assert Publication.decode(entry)
    book = AddressBook(folder / "elsewhere", "node-1", "127.0.0.1", _Entries(entries={STATE: entry}))
    client = StateClient(Identity(Role.GATEWAY, GATEWAY, SECRET, credentials=credentials), book)
    client.start()
    try:
        return await _measure(client, DiskBlobs(folder / "own"), options.calls, options.bytes)
    finally:
        await client.close()


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--bytes", type=int, default=64_000_000)
    options = parser.parse_args()
    authority = CertificateAuthority.new("benchmark")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here, there = context.Pipe()
        server = context.Process(target=_serve, args=(there, folder, authority.issue(STATE)))
        server.start()
        try:
            entry = here.recv()
            figures = uvloop.run(_with_client(entry, folder, authority.issue(GATEWAY), options))
        finally:
            here.send(None)
            server.join()
    for what, figure in figures.items():
        print(f"{what}: {figure}")
    print(write_result("state_server", figures))


if __name__ == "__main__":
    main()
