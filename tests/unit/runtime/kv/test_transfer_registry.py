"""The choice of a transport: the fastest that both ends have, or the requested one, or the reasons against each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alignedserve.core.errors import PeerLost, TransportUnavailable
from alignedserve.messages.caches import ArenaOffered
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import KVTransfer
from alignedserve.runtime.kv.transfers.local_transfer import ShmTransfer
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.registry import open_transfer
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer
from tests.harnesses.transfer import CLIENT, OWNER, filled, layout_of

LAYOUT = layout_of("float32")


@dataclass
class Offer:
    """A candidate buffer that is both a file and served."""

    offered: ArenaOffered

    def open(self, transport: str = "auto", **changes: Any) -> KVTransfer:
        offered = msgspec.structs.replace(self.offered, **changes)
        storage = filled(LAYOUT, 1)
        return open_transfer(offered, storage, identity=CLIENT, stamps=True, transport=transport)


@pytest.fixture
def offer(tmp_path: Path) -> Iterator[Offer]:
    arena = Arena.create(tmp_path / "b.arena", LAYOUT, 8)
    server = BlockServer(
        ArenaBuffer(arena),
        f"unix:{tmp_path}/b.sock",
        identity=OWNER,
        transports=("tcp", "gloo"),
        open_channel=open_channel,
    )
    digest = LAYOUT.digest().hex()
    path = str(arena.path)
    yield Offer(
        ArenaOffered(path, 8, LAYOUT.block_bytes, digest, server.address, ("shm", "tcp", "gloo"), arena.file_id)
    )
    server.close()
    arena.close(unlink=True)


@pytest.mark.parametrize(
    ("transport", "expected"),
    [("auto", ShmTransfer), ("shm", ShmTransfer), ("tcp", ChannelTransfer), ("gloo", ChannelTransfer)],
)
def test_the_fastest_or_the_one_that_was_asked_for(offer: Offer, transport: str, expected: type) -> None:
    transfer = offer.open(transport)
    assert type(transfer) is expected
    transfer.close()


@pytest.mark.parametrize(
    "changes",
    [{"path": "/nowhere/b.arena"}, {"path": ""}, {"file_id": "another-host/1/2"}, {"transports": ("gloo",)}],
    ids=str,
)
def test_what_is_not_to_be_had_is_passed_over(offer: Offer, changes: dict[str, Any]) -> None:
    transfer = offer.open(**changes)
    assert isinstance(transfer, ChannelTransfer)
    transfer.close()
    with pytest.raises(TransportUnavailable, match="shm: "):
        offer.open("shm", **changes)


@pytest.mark.parametrize(
    ("transport", "changes", "reason"),
    [
        ("carrier pigeon", {}, "unknown transport 'carrier pigeon'; there are auto, cuda_ipc, shm, tcp, gloo"),
        ("tcp", {"transports": ("gloo",)}, "tcp: the other end does not offer it"),
        ("cuda_ipc", {"transports": ("cuda_ipc",)}, "cuda_ipc: this end does not have it"),
        ("gloo", {"served_at": ""}, "gloo: the blocks are served nowhere"),
        ("auto", {"transports": ()}, "shm: the other end does not offer it; .*gloo: the other end does not offer it"),
    ],
)
def test_an_error_says_why_not(offer: Offer, transport: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TransportUnavailable, match=reason):
        offer.open(transport, **changes)


def test_an_address_without_a_listener_is_a_lost_peer(offer: Offer) -> None:
    with pytest.raises(PeerLost):
        offer.open("gloo", served_at="unix:/nowhere.sock")
