"""A sender, a receiver and whatever lies between them, for each implementation of KVTransfer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, KVTransfer, OffloadRequest
from alignedserve.runtime.kv.transfers.local_transfer import ShmTransfer
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer, DeviceBuffer, IpcTransfer
from tests.harnesses.owner_process import ProcessMedium
from tests.support.devices.cpu_accelerator import cpu_lanes
from tests.support.samples import blocks
from tests.support.stored_blocks import read_blocks, write_blocks

NUM_POOL_BLOCKS, NUM_STORAGE_BLOCKS, BLOCK_SIZE = 24, 16, 8
SECRET = b"t" * 32
AUTHORITY = CertificateAuthority.new("tests")
OWNER = Identity(Role.PREFILL_WORKER, "prefill-0", SECRET, 3.0, AUTHORITY.issue("prefill-0"))
CLIENT = Identity(Role.DECODE_WORKER, "decode-0", SECRET, 3.0, AUTHORITY.issue("decode-0"))
Bytes = npt.NDArray[np.uint8]


class Medium(Protocol):
    """Place of the blocks in between. One for each implementation of the port."""

    writer_stamps: bool  # as in a candidate buffer; in the pool's arena its owner does
    is_shared: bool  # blocks are read in place, until the last byte has arrived
    device: str  # where the storages of both ends are

    def transfer(self, storage: BlockStorage) -> KVTransfer: ...
    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None: ...
    def flip(self, block_id: BlockId, offset: int) -> None: ...
    def content(self) -> Bytes: ...
    def close(self) -> None: ...


class ShmMedium:
    """An arena, mapped once by its owner and once by each worker."""

    is_shared = True
    device = "cpu"

    def __init__(self, folder: Path, layout: BlockLayout, *, writer_stamps: bool = False) -> None:
        self.writer_stamps = writer_stamps
        self.layout = layout
        self._arena = Arena.create(folder / "shared.arena", layout, NUM_POOL_BLOCKS)

    def transfer(self, storage: BlockStorage) -> KVTransfer:
        return ShmTransfer(storage, Arena.attach(self._arena.path, self.layout), stamps=self.writer_stamps)

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        self._arena.stamp(block_ids, generation)

    def flip(self, block_id: BlockId, offset: int) -> None:
        self._arena.blocks[block_id, offset] ^= 0x10

    def content(self) -> Bytes:
        return self._arena.blocks.copy()

    def close(self) -> None:
        self._arena.close(unlink=True)


class RegisteredMedium(ShmMedium):
    """An arena that is registered with a device's driver, whose copies go straight to and from it."""

    @override
    def transfer(self, storage: BlockStorage) -> KVTransfer:
        arena = Arena.attach(self._arena.path, self.layout)
        return ShmTransfer(storage, arena, stamps=self.writer_stamps, lanes=cpu_lanes())


class ServedMedium(ShmMedium):
    """An arena behind a block server, reached over a connection or through a process group."""

    is_shared = False

    def __init__(
        self, folder: Path, layout: BlockLayout, *, transport: str, address: str, writer_stamps: bool = True
    ) -> None:
        super().__init__(folder, layout, writer_stamps=writer_stamps)
        self._transport = transport
        buffer = ArenaBuffer(self._arena, writer_stamps=writer_stamps)
        self.server = BlockServer(buffer, address, identity=OWNER, transports=(transport,), open_channel=open_channel)
        self._transfers: list[ChannelTransfer] = []

    @override
    def transfer(self, storage: BlockStorage) -> KVTransfer:
        name = f"decode-{len(self._transfers)}"
        identity = replace(CLIENT, name=name, credentials=AUTHORITY.issue(name))
        transfer = ChannelTransfer(storage, self.server.address, identity=identity, transport=self._transport)
        self._transfers.append(transfer)
        return transfer

    @override
    def close(self) -> None:
        for transfer in self._transfers:
            transfer.close()
        self.server.close()
        super().close()


class DeviceMedium:
    """A candidate buffer as it lies on a device, here on the CPU, behind a block server."""

    writer_stamps = True
    is_shared = False
    device = "cpu"

    def __init__(self, folder: Path, layout: BlockLayout, *, transport: str) -> None:
        self._transport = transport
        self._lanes = cpu_lanes()
        rows = self._lanes.accelerator.lendable(NUM_POOL_BLOCKS, layout.block_bytes)
        self._buffer = DeviceBuffer(layout, rows, self._lanes)
        self.server = BlockServer(
            self._buffer, f"unix:{folder}/b.sock", identity=OWNER, transports=(transport,), open_channel=open_channel
        )
        self._transfers: list[KVTransfer] = []

    def transfer(self, storage: BlockStorage) -> KVTransfer:
        identity = replace(CLIENT, name=f"decode-{len(self._transfers)}")
        transfer: KVTransfer
        if self._transport == "cuda_ipc":
            transfer = IpcTransfer(storage, self.server.address, identity=identity, lanes=self._lanes)
        else:
            transfer = ChannelTransfer(storage, self.server.address, identity=identity, transport=self._transport)
        self._transfers.append(transfer)
        return transfer

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        self._buffer.stamp(block_ids, generation)

    def flip(self, block_id: BlockId, offset: int) -> None:
        self._buffer.blocks[block_id, offset] ^= 0x10

    def content(self) -> Bytes:
        return self._buffer.blocks.numpy().copy()

    def close(self) -> None:
        for transfer in self._transfers:
            transfer.close()
        self.server.close()


MEDIA: dict[str, Callable[[Path, BlockLayout], Medium]] = {
    "shm pool": ShmMedium,
    "shm buffer": lambda folder, layout: ShmMedium(folder, layout, writer_stamps=True),
    "shm registered": RegisteredMedium,
    "gloo unix": lambda folder, layout: ServedMedium(folder, layout, transport="gloo", address=f"unix:{folder}/b.sock"),
    "tcp": lambda folder, layout: ServedMedium(folder, layout, transport="tcp", address="tcp:127.0.0.1:0"),
    "tcp pool, tls": lambda folder, layout: ServedMedium(
        folder, layout, transport="tcp", address="tls:127.0.0.1:0", writer_stamps=False
    ),
    "gloo tcp": lambda folder, layout: ServedMedium(folder, layout, transport="gloo", address="tcp:127.0.0.1:0"),
    # What cuda_ipc does, on the CPU: everything but mapping the memory.
    "device mapped": lambda folder, layout: DeviceMedium(folder, layout, transport="cuda_ipc"),
    "device tcp": lambda folder, layout: DeviceMedium(folder, layout, transport="tcp"),
}


# The other gloo has most of it in common; a pair for every test takes its time.
IN_SLOW_TESTS = ("gloo unix",)


def elsewhere(transport: str, *devices: str) -> Callable[[Path, BlockLayout], Medium]:
    """Another process owns the blocks; the devices of the storages and of the blocks."""
    here, there = devices or ("cpu", "cpu")
    return lambda folder, layout: ProcessMedium(folder, layout, transport=transport, devices=(here, there))


ELSEWHERE: dict[str, Callable[[Path, BlockLayout], Medium]] = {
    "gloo process": elsewhere("gloo"),
    "cuda_ipc": elsewhere("cuda_ipc", "cuda:0", "cuda:0"),
    "cuda_ipc two devices": elsewhere("cuda_ipc", "cuda:0", "cuda:1"),
}
NUM_DEVICES = {"cuda_ipc": 1, "cuda_ipc two devices": 2}


def layout_of(dtype: str) -> BlockLayout:
    return BlockLayout(block_size=BLOCK_SIZE, num_layers=2, num_kv_heads=2, head_dim=4, dtype=dtype)


@dataclass
class Setup:
    """A sender, a receiver and what lies between them. Leases are given out as the pool does."""

    medium: Medium
    layout: BlockLayout
    sender: BlockStorage
    receiver: BlockStorage

    def __post_init__(self) -> None:
        self.rng = random.Random(5)
        self.sending = self.medium.transfer(self.sender)
        self.receiving = self.medium.transfer(self.receiver)
        self._free = list(range(NUM_POOL_BLOCKS))
        self.rng.shuffle(self._free)
        self._num_leases = 0

    def lease(self, num_blocks: int) -> tuple[int, tuple[BlockId, ...]]:
        self._num_leases += 1
        taken = tuple(BlockId(self._free.pop()) for _ in range(num_blocks))
        self.medium.stamp(taken, self._num_leases)
        return self._num_leases, taken

    def send(self, context_len: int, source: Sequence[int]) -> BlockCopy:
        generation, taken = self.lease(len(source))
        return self.send_to(taken, generation, context_len, source)

    def send_to(self, taken: Sequence[BlockId], generation: int, context_len: int, source: Sequence[int]) -> BlockCopy:
        (runs,) = self.sending.offload([OffloadRequest(blocks(*source), taken, generation)])
        assert runs is not None, "a valid offload was refused"
        return BlockCopy(generation, context_len, runs)

    def fetch(self, copy: BlockCopy, *target: int) -> Bytes | None:
        """Return the fetched blocks, or None when the copy was refused."""
        (is_held,) = self.receiving.fetch([FetchRequest(copy, blocks(*target))])
        return content(self.receiver, target) if is_held else None

    def expect(self, copy: BlockCopy, target: Sequence[int], source: Sequence[int]) -> None:
        """Check that the copy holds, and brings the blocks that were sent."""
        rows = self.fetch(copy, *target)
        assert rows is not None, "a valid copy was refused"
        assert (rows == content(self.sender, source)).all()


def content(storage: BlockStorage, block_ids: Sequence[int]) -> Bytes:
    return read_blocks(storage, blocks(*block_ids))


def filled(layout: BlockLayout, seed: int, device: str = "cpu") -> BlockStorage:
    storage = BlockStorage(layout, NUM_STORAGE_BLOCKS, device)
    rows = np.random.default_rng(seed).integers(0, 256, (NUM_STORAGE_BLOCKS, layout.block_bytes), np.uint8)
    write_blocks(storage, blocks(*range(NUM_STORAGE_BLOCKS)), rows)
    return storage


def everything(storage: BlockStorage) -> Bytes:
    return content(storage, range(NUM_STORAGE_BLOCKS))


def changed(copy: BlockCopy, **changes: Any) -> BlockCopy:
    return msgspec.structs.replace(copy, **changes)


def run_of(run: BlockRun, **changes: Any) -> BlockRun:
    return msgspec.structs.replace(run, **changes)
