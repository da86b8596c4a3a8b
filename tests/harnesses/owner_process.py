"""A candidate buffer that belongs to another process, on the host or on a device, for the contract of its transfers."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.runtime.device.accelerator import accelerator_of
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import KVTransfer
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer, DeviceBuffer, IpcTransfer

SECRET = b"t" * 32
OWNER = Identity(Role.PREFILL_WORKER, "prefill-0", SECRET, peer_timeout_s=20.0)  # a device is slow to begin
CLIENT = Identity(Role.DECODE_WORKER, "decode-0", SECRET, peer_timeout_s=20.0)


class Owner:
    """Commands that the other process performs."""

    def make(self, folder: Path, layout: BlockLayout, num_blocks: int, transport: str, device: str) -> None:
        self._arena = Arena.create(folder / "shared.arena", layout, num_blocks) if device == "cpu" else None
        if self._arena is not None:
            self._buffer: Any = ArenaBuffer(self._arena)
            self._blocks: Any = torch.from_numpy(self._arena.blocks)
        else:
            accelerator = accelerator_of(torch.device(device))
            assert accelerator is not None, "a device"
            self._blocks = accelerator.lendable(num_blocks, layout.block_bytes)
            self._buffer = DeviceBuffer(layout, self._blocks, CopyLanes(accelerator))
        address = f"unix:{folder}/b.sock"
        self._server = BlockServer(
            self._buffer, address, identity=OWNER, transports=(transport,), open_channel=open_channel
        )

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        self._buffer.stamp(block_ids, generation)

    def flip(self, block_id: BlockId, offset: int) -> None:
        self._blocks[block_id, offset] ^= 0x10
        if self._blocks.is_cuda:
            torch.cuda.synchronize(self._blocks.device)

    def content(self) -> npt.NDArray[np.uint8]:
        content: npt.NDArray[np.uint8] = self._blocks.cpu().numpy().copy()
        return content

    def close(self) -> None:
        self._server.close()
        del self._buffer, self._blocks
        if self._arena is not None:
            self._arena.close(unlink=True)


def do_as_told(told: Connection) -> None:
    """Do in the other process what this one says."""
    owner = Owner()
    while True:
        try:
            name, arguments = told.recv()
        except EOFError:
            return
        told.send(getattr(owner, name)(*arguments))


@cache
def owner_process() -> Connection:
    """Start the other process, one for all tests as that takes seconds; it ends with this one."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    multiprocessing.get_context("spawn").Process(target=do_as_told, args=(there,), daemon=True).start()
    there.close()
    return here


class ProcessMedium:
    """A Medium whose blocks are another process's."""

    writer_stamps = True
    is_shared = False

    def __init__(
        self, folder: Path, layout: BlockLayout, *, transport: str, devices: tuple[str, str] = ("cpu", "cpu")
    ) -> None:
        self.layout = layout
        self.device, their_device = devices
        self._transport = transport
        self._address = f"unix:{folder}/b.sock"
        self._transfers: list[KVTransfer] = []
        self._tell("make", folder, layout, 24, transport, their_device)

    def transfer(self, storage: BlockStorage) -> KVTransfer:
        identity = replace(CLIENT, name=f"decode-{len(self._transfers)}")
        transfer: KVTransfer
        if self._transport == "cuda_ipc":
            assert storage.lanes is not None, "blocks of a device"
            transfer = IpcTransfer(storage, self._address, identity=identity, lanes=storage.lanes)
        else:
            transfer = ChannelTransfer(storage, self._address, identity=identity, transport=self._transport)
        self._transfers.append(transfer)
        return transfer

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        self._tell("stamp", block_ids, generation)

    def flip(self, block_id: BlockId, offset: int) -> None:
        self._tell("flip", block_id, offset)

    def content(self) -> npt.NDArray[np.uint8]:
        content: npt.NDArray[np.uint8] = self._tell("content")
        return content

    def close(self) -> None:
        for transfer in self._transfers:
            transfer.close()
        self._transfers.clear()
        self._tell("close")

    def _tell(self, name: str, *arguments: Any) -> Any:
        told = owner_process()
        told.send((name, arguments))
        assert told.poll(60), "the other process does not answer"
        return told.recv()
