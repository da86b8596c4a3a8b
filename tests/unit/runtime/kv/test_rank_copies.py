"""Copies of a worker whose ranks have blocks of their own devices: each its part, in memory of the host."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as changed

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import TransportUnavailable
from alignedserve.messages.caches import ArenaOffered, BlockCopy
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.runtime.engine.ranks.rank_group import FollowerCopies, FrameCount, GroupCopies
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena, ArenaPart
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsOffer, RankedTransfer
from alignedserve.runtime.kv.transfers.registry import open_transfer
from tests.support.devices.device_stand_in import HOST, PCIE, Machine, StandInStorage
from tests.support.devices.rank_devices import device_of
from tests.support.samples import DECODE, PREFILL, blocks

pytestmark = pytest.mark.slow

SIZE, NUM_BLOCKS, GENERATION = 3, 8, 5
PART = BlockLayout(block_size=8, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32")
SOURCES, PLACES, TARGETS = (5, 2, 3, 0), (6, 1, 2, 7), (1, 4, 6, 3)
SECRET = b"t" * 32


class RankedWorker:
    """A worker's ranks, each with blocks of its own on a device of its own."""

    def __init__(self, name: str, machine: Machine, seed: int, size: int = SIZE) -> None:
        self.identity = Identity(Role.DECODE_WORKER, name, SECRET, 5.0)
        self.contents = list[torch.Tensor]()
        self.storages = list[BlockStorage]()
        generator = torch.Generator().manual_seed(seed)
        for rank in range(size):
            storage = BlockStorage(PART, NUM_BLOCKS, part=ArenaPart(rank, size))
            storage.bytes.copy_(torch.randint(0, 256, storage.bytes.shape, generator=generator, dtype=torch.uint8))
            self.contents.append(storage.bytes)
            self.storages.append(StandInStorage(storage, machine.device(device_of(name, rank))))
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.num_frames = 0
        self.performed = [FrameCount() for _ in range(1, size)]
        self._threads = [
            threading.Thread(target=FollowerCopies(theirs, storage, performed).follow)
            for (_, theirs), storage, performed in zip(pairs, self.storages[1:], self.performed, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self.copies = GroupCopies([ours for ours, _ in pairs], lambda: self.num_frames)
        self._device = machine.device(name)

    def open(self, offered: ArenaOffered, transport: str = "auto", peer: str = PREFILL) -> RankedTransfer:
        self._device.use()
        own = open_transfer(offered, self.storages[0], identity=self.identity, stamps=True, transport=transport)
        transfer = RankedTransfer(own, self.copies, peer)
        try:
            self.copies.open(peer, PartsOffer(offered, self.identity, True, transport))
        except BaseException:
            transfer.close()
            raise
        return transfer

    def close(self) -> None:
        self.copies.end()
        for thread in self._threads:
            thread.join()


class HostBuffer:
    """A candidate buffer in the host's memory, of whole blocks, also served."""

    def __init__(self, folder: Path, name: str) -> None:
        layout = ArenaPart(0, SIZE).whole(PART)
        self.arena = Arena.create(folder / f"{name}.arena", layout, NUM_BLOCKS)
        identity = Identity(Role.PREFILL_WORKER, PREFILL, SECRET, 5.0)
        address = f"unix:{folder}/{name}"
        self._server = BlockServer(ArenaBuffer(self.arena), address, identity=identity, transports=("tcp",))
        self.offered = ArenaOffered(
            str(self.arena.path),
            NUM_BLOCKS,
            layout.block_bytes,
            layout.digest().hex(),
            served_at=self._server.address,
            transports=("shm", "tcp"),
        )

    def close(self) -> None:
        self._server.close()
        self.arena.close(unlink=True)


@pytest.fixture
def machine() -> Machine:
    return Machine(seed=7)


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[HostBuffer]:
    made = HostBuffer(tmp_path, "b")
    yield made
    made.close()


@pytest.fixture
def worker(machine: Machine) -> Iterator[RankedWorker]:
    made = RankedWorker(DECODE, machine, 2)
    yield made
    made.close()


def offload(transfer: RankedTransfer) -> BlockCopy | None:
    (runs,) = transfer.offload([OffloadRequest(blocks(*SOURCES), blocks(*PLACES), GENERATION)])
    return None if runs is None else BlockCopy(GENERATION, PART.block_size * len(PLACES), runs)


def fetch(transfer: RankedTransfer, copy: BlockCopy) -> bool:
    (is_held,) = transfer.fetch([FetchRequest(copy, blocks(*TARGETS))])
    return is_held


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_each_rank_reads_and_writes_its_part(
    transport: str, machine: Machine, buffer: HostBuffer, worker: RankedWorker
) -> None:
    sent = [content[list(SOURCES)].clone() for content in worker.contents]
    there = worker.open(buffer.offered, transport)
    copy = offload(there)
    assert copy is not None
    assert fetch(there, copy)
    for rank, content in enumerate(worker.contents):
        assert torch.equal(sent[rank], content[list(TARGETS)])
        crossed = machine.moved(PCIE, HOST, device_of(DECODE, rank))
        assert sum(one.num_bytes for one in crossed) == len(TARGETS) * PART.block_bytes
    there.close()


def test_a_relay_takes_the_parts_of_all_ranks(tmp_path: Path, buffer: HostBuffer, worker: RankedWorker) -> None:
    sent = [content[list(SOURCES)].clone() for content in worker.contents]
    pool = HostBuffer(tmp_path, "p")
    there, other = worker.open(buffer.offered), worker.open(pool.offered, peer="pool")
    copy = offload(there)
    assert copy is not None
    places = blocks(3, 4, 0, 5)
    runs = there.relay_to(other, copy, places, 9)
    assert runs is not None
    assert fetch(other, BlockCopy(9, copy.context_len, runs))
    assert all(torch.equal(rows, content[list(TARGETS)]) for rows, content in zip(sent, worker.contents, strict=True))
    buffer.arena.blocks[PLACES[2], -1] ^= 1  # of the last rank's part
    assert there.relay_to(other, copy, places, 10) is None
    assert not pool.arena.is_stamped(places, 10)
    there.close()
    other.close()
    pool.close()


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_part_that_has_changed_on_its_way_is_refused_whosever_it_is(
    rank: int, buffer: HostBuffer, worker: RankedWorker
) -> None:
    there = worker.open(buffer.offered)
    copy = offload(there)
    assert copy is not None
    buffer.arena.blocks[PLACES[1], rank * PART.block_bytes + 17] ^= 1
    assert not fetch(there, copy)
    there.close()


def test_a_rank_copies_behind_the_steps_that_the_first_has_told_of(
    machine: Machine, buffer: HostBuffer, worker: RankedWorker
) -> None:
    """Among them are swaps of the same blocks."""
    there = worker.open(buffer.offered)
    worker.num_frames = 2
    for performed in worker.performed:
        performed.add()
    with ThreadPoolExecutor(1, initializer=machine.device(DECODE).use) as thread:
        copying = thread.submit(offload, there)
        while not machine.moved(PCIE, DECODE):
            threading.Event().wait(0.001)
        assert [machine.moved(PCIE, device_of(DECODE, rank)) for rank in range(1, SIZE)] == [[], []]
        for performed in worker.performed:
            performed.add()
        assert copying.result(60.0) is not None
    there.close()


def test_what_one_rank_does_not_hold_is_not_held(buffer: HostBuffer, worker: RankedWorker) -> None:
    there = worker.open(buffer.offered)
    copy = offload(there)
    assert copy is not None
    worker.copies.close(PREFILL)  # the first rank's transfer is still open
    assert not fetch(there, copy)
    assert offload(there) is None
    there.close()


def test_blocks_of_another_layout_are_refused(machine: Machine, buffer: HostBuffer) -> None:
    narrow = RankedWorker("decode-1", machine, 3, size=2)
    with pytest.raises(TransportUnavailable, match="its block layout is not this worker's"):
        narrow.open(changed(buffer.offered, transports=("shm",)))
    narrow.close()


def test_a_rank_that_reaches_no_part_names_itself(buffer: HostBuffer, worker: RankedWorker) -> None:
    worker.storages[2].part = replace_part(worker.storages[2].part)
    with pytest.raises(TransportUnavailable, match=r"^rank 2: "):
        worker.open(buffer.offered, "shm")


def replace_part(part: ArenaPart) -> ArenaPart:
    return part._replace(size=part.size + 1)
