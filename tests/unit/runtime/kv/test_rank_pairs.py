"""A buffer that the ranks of a worker lend out of their devices, and the equal ranks of another that reach it."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory, TransportUnavailable
from alignedserve.messages.caches import ArenaOffered, BlockCopy
from alignedserve.messages.handshake import Role
from alignedserve.process.addresses import AddressBook
from alignedserve.process.links import Identity
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.tls import Credentials
from alignedserve.runtime.engine.ranks.follower_copies import FollowerCopies, FrameCount
from alignedserve.runtime.engine.ranks.group_copies import GroupCopies
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.buffer_budget import BufferBudget
from alignedserve.runtime.kv.candidate_memory import CandidateMemory
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.kv.transfers.channel_transfer import ChannelTransfer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.own_buffer_transfer import OwnBufferTransfer
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsLoan, PartsOffer, RankedTransfer
from alignedserve.runtime.kv.transfers.registry import open_transfer
from tests.support.cpu_accelerator import cpu_lanes
from tests.support.device_stand_in import LINK, Machine, StandInStorage
from tests.support.rank_devices import device_of
from tests.support.samples import DECODE, PREFILL, blocks

pytestmark = pytest.mark.slow

SIZE, NUM_BLOCKS, GENERATION = 3, 8, 5
PART = BlockLayout(block_size=8, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32")
SOURCES, PLACES, TARGETS = (5, 2, 3, 0), (6, 1, 2, 7), (1, 4, 6, 3)
SECRET = b"t" * 32


class RankedWorker:
    """A worker's ranks, each with blocks of its own on a device of its own."""

    def __init__(
        self, name: str, machine: Machine | None, seed: int, size: int = SIZE, credentials: Credentials | None = None
    ) -> None:
        """`machine`: None: the host stands in for every device."""
        self.identity = Identity(Role.DECODE_WORKER, name, SECRET, 5.0, credentials)
        self.contents = list[torch.Tensor]()
        self.storages = list[BlockStorage]()
        generator = torch.Generator().manual_seed(seed)
        for rank in range(size):
            storage = BlockStorage(PART, NUM_BLOCKS, part=ArenaPart(rank, size))
            storage.bytes.copy_(torch.randint(0, 256, storage.bytes.shape, generator=generator, dtype=torch.uint8))
            self.contents.append(storage.bytes)
            storage.lanes = cpu_lanes()
            self.storages.append(
                storage if machine is None else StandInStorage(storage, machine.device(device_of(name, rank)))
            )
        pairs = [socket.socketpair() for _ in range(1, size)]
        self.connections = [theirs for _, theirs in pairs]
        self.num_frames = 0
        self.performed = [FrameCount() for _ in range(1, size)]
        self._threads = [
            threading.Thread(target=FollowerCopies(theirs, storage, performed).follow)
            for theirs, storage, performed in zip(self.connections, self.storages[1:], self.performed, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        self.copies = GroupCopies([ours for ours, _ in pairs], lambda: self.num_frames)
        self._device = None if machine is None else machine.device(name)

    def open(self, offered: ArenaOffered, transport: str = "auto") -> RankedTransfer:
        if self._device is not None:
            self._device.use()
        own = open_transfer(offered, self.storages[0], identity=self.identity, stamps=True, transport=transport)
        transfer = RankedTransfer(own, self.copies, PREFILL)
        try:
            self.copies.open(PREFILL, PartsOffer(offered, self.identity, True, transport))
        except BaseException:
            transfer.close()
            raise
        return transfer

    def close(self) -> None:
        self.copies.end()
        for thread in self._threads:
            thread.join()


class Lender:
    """The worker that lends, and what its own ranks copy to and from the buffer."""

    def __init__(
        self,
        machine: Machine | None,
        folder: Path,
        *,
        book: AddressBook | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`book`: of a worker that others on another host reach."""
        self.worker = worker = RankedWorker(PREFILL, machine, 1)
        spec = ProcessSpec(
            Role.PREFILL_WORKER,
            PREFILL,
            folder.name,
            SECRET,
            5.0,
            book or AddressBook(folder),
            folder,
            credentials=credentials,
        )
        first = worker.storages[0]
        self.memory = CandidateMemory(
            first.part.whole(PART),
            BufferBudget(2 * NUM_BLOCKS, (), may_grow=True) if book else BufferBudget(NUM_BLOCKS, (DECODE,)),
            spec,
            lanes=first.lanes,
            part=first.part,
        )
        self._identity = spec.identity()

    def lend(self) -> ArenaOffered:
        opened = self.memory.open_for(DECODE)
        assert opened is not None
        assert opened.parts is not None
        offered, parts = opened.offered, opened.parts
        loan = PartsLoan(self._identity, offered.num_blocks, parts.max_blocks, offered.transports, parts.addresses)
        addresses = self.worker.copies.lend(DECODE, loan)
        own = OwnBufferTransfer(self.worker.storages[0], opened.memory)  # type: ignore[arg-type]
        self.transfer = RankedTransfer(own, self.worker.copies, DECODE)
        return replace(offered, rank_addresses=addresses)

    def close(self) -> None:
        self.worker.close()
        self.memory.close()


@pytest.fixture
def machine() -> Machine:
    return Machine(seed=7)


@pytest.fixture
def lender(machine: Machine, tmp_path: Path) -> Iterator[Lender]:
    made = Lender(machine, tmp_path)
    yield made
    made.close()


@pytest.fixture
def reader(machine: Machine) -> Iterator[RankedWorker]:
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
def test_each_rank_reads_and_writes_the_part_of_its_peer(
    transport: str, machine: Machine, lender: Lender, reader: RankedWorker
) -> None:
    there = reader.open(lender.lend(), transport)
    machine.device(PREFILL).use()
    copy = offload(lender.transfer)
    assert copy is not None
    machine.device(DECODE).use()
    assert fetch(there, copy)
    for source, target in zip(lender.worker.contents, reader.contents, strict=True):
        assert torch.equal(source[list(SOURCES)], target[list(TARGETS)])
    num_bytes = len(SOURCES) * PART.block_bytes
    for rank in range(SIZE):
        crossed = machine.moved(LINK, device_of(PREFILL, rank), device_of(DECODE, rank))
        assert sum(one.num_bytes for one in crossed) == (num_bytes if transport == "auto" else 0)
    back = offload(there)
    assert back is not None
    machine.device(PREFILL).use()
    assert fetch(lender.transfer, back)
    for source, target in zip(reader.contents, lender.worker.contents, strict=True):
        assert torch.equal(source[list(SOURCES)], target[list(TARGETS)])
    there.close()


def test_each_pair_of_ranks_has_a_process_group_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nccl's between hosts, here of gloo, with the host in the place of devices."""
    monkeypatch.setattr(CandidateMemory, "_transports", lambda memory, is_far: ("gloo",))
    lender, reader = Lender(None, tmp_path), RankedWorker(DECODE, None, 2)
    there = reader.open(lender.lend(), "gloo")
    assert isinstance(there.own, ChannelTransfer)
    sent = [content[list(SOURCES)] for content in reader.contents]
    copy = offload(there)
    assert copy is not None
    assert fetch(lender.transfer, copy)
    for rank in range(SIZE):
        assert torch.equal(sent[rank], lender.worker.contents[rank][list(TARGETS)])
    assert fetch(there, copy)
    there.close()
    reader.close()
    lender.close()


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_part_that_has_changed_on_its_way_is_refused_whosever_it_is(
    rank: int, machine: Machine, lender: Lender, reader: RankedWorker
) -> None:
    there = reader.open(lender.lend())
    machine.device(PREFILL).use()
    copy = offload(lender.transfer)
    assert copy is not None
    lent = [rows for rows in machine.lent.values() if rows.owner.name == device_of(PREFILL, rank)]
    assert len(lent) == 1
    plain = lent[0].as_subclass(torch.Tensor)
    plain[PLACES[1], 17] ^= 1
    machine.device(DECODE).use()
    assert not fetch(there, copy)
    there.close()


def test_a_rank_copies_behind_the_steps_that_the_first_has_told_of(
    machine: Machine, lender: Lender, reader: RankedWorker
) -> None:
    """Among them are swaps of the same blocks."""
    there = reader.open(lender.lend())
    reader.num_frames = 2
    for performed in reader.performed:
        performed.add()
    with ThreadPoolExecutor(1, initializer=machine.device(DECODE).use) as thread:
        copying = thread.submit(offload, there)
        while not machine.moved(LINK, DECODE):
            threading.Event().wait(0.001)
        assert [machine.moved(LINK, device_of(DECODE, rank)) for rank in range(1, SIZE)] == [[], []]
        for performed in reader.performed:
            performed.add()
        assert copying.result(60.0) is not None
    there.close()


def test_what_one_rank_does_not_hold_is_not_held(machine: Machine, lender: Lender, reader: RankedWorker) -> None:
    there = reader.open(lender.lend())
    copy = offload(there)
    assert copy is not None
    reader.copies.close(PREFILL)  # the first rank's transfer is still open
    assert not fetch(there, copy)
    assert offload(there) is None
    there.close()


def test_workers_of_other_widths_are_refused_by_name(machine: Machine, lender: Lender, reader: RankedWorker) -> None:
    offered = lender.lend()
    narrow = RankedWorker("decode-1", machine, 3, size=2)
    with pytest.raises(TransportUnavailable, match=r"tensor_parallel is 3 at the lender of the blocks and 2 here"):
        narrow.open(offered)
    with pytest.raises(TransportUnavailable, match=r"it has the parts of rank 0 of 3, not of rank 0 of 2"):
        narrow.open(replace(offered, num_ranks=2, rank_addresses=offered.rank_addresses[:1]))
    with pytest.raises(TransportUnavailable, match=r"rank 2: .*it has the parts of rank 1 of 3, not of rank 2 of 3"):
        reader.open(replace(offered, rank_addresses=offered.rank_addresses[:1] * 2))
    narrow.close()


def test_without_room_on_the_device_of_a_rank_nothing_is_lent(tmp_path: Path, machine: Machine) -> None:
    lender = Lender(machine, tmp_path)
    machine.device(device_of(PREFILL, 2)).num_lent_bytes = machine.device_bytes
    with pytest.raises(NotEnoughMemory, match=r"rank 2: 8 blocks of \d+ bytes on prefill-0/2"):
        lender.lend()
    lender.close()


def test_buffers_that_are_lent_again_take_no_more_memory(machine: Machine, lender: Lender) -> None:
    for _ in range(4):
        lender.lend()
    assert machine.device(device_of(PREFILL, 1)).num_lent_bytes <= 2 * NUM_BLOCKS * PART.block_bytes
