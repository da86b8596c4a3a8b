"""Two nodes in one process: a router, a pool and a prefill worker on one, a decode worker alone on the other.

Every request's blocks go from the pool to the other node's decode worker over TCP, encrypted or in clear.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from alignedserve.config.sections import ClusterConfig
from alignedserve.process.addresses import AddressBook
from alignedserve.process.tls import CertificateAuthority
from tests.harnesses.clusters.in_process import RoomCluster
from tests.support.devices.device_stand_in import Machine

FAR = "decode-9"
_MAPPED_S = 0.3


@dataclass
class Entries:
    """A directory that never fails."""

    known: dict[str, str] = field(default_factory=dict)

    def publish(self, name: str, entry: str) -> None:
        self.known[name] = entry

    def look_up(self, name: str) -> str | None:
        return self.known.get(name)


def two_nodes(config: ClusterConfig, folder: Path, *, has_tls: bool, machine: Machine | None = None) -> RoomCluster:
    """Make a cluster in which FAR is to run on the other node, whose pool is never there."""
    (folder / "far").mkdir(parents=True)
    cluster = RoomCluster(config, folder, machine)
    cluster.authority = CertificateAuthority.new("two nodes") if has_tls else None
    directory = Entries()
    cluster.addresses = AddressBook(folder, "node-0", "127.0.0.1", directory, has_tls=has_tls)
    cluster.books[FAR] = AddressBook(folder / "far", "node-1", "127.0.0.1", directory, has_tls=has_tls)
    cluster.pools[FAR] = "pool-9"  # never there: a node with decode workers alone
    return cluster


async def start_two_nodes(
    config: ClusterConfig, folder: Path, *, has_tls: bool, machine: Machine | None = None
) -> RoomCluster:
    """Start them; the pool's file is hidden from the decode worker, as it would be on another host."""
    cluster = two_nodes(config, folder, has_tls=has_tls, machine=machine)
    await cluster.start_router()
    await cluster.start_pool()
    await cluster.start_prefill("prefill-0")
    await cluster.gateway.start()
    await asyncio.sleep(_MAPPED_S)  # until the prefill worker has mapped the arena
    cluster.arena_path.unlink()
    await cluster.start_decode(FAR)
    return cluster
