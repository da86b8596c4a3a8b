"""A candidate buffer in device memory."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected
from alignedserve.messages.blocks import DeviceMemoryHandle
from alignedserve.runtime.kv.block_runs import BlockIds
from alignedserve.runtime.kv.device_pieces import DevicePieces
from alignedserve.runtime.kv.shm_arena import NO_LEASE, WHOLE, ArenaPart
from alignedserve.runtime.kv.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.host_blocks import HostBlocks
from kernels.cpu.block_copies import BlockList
from kernels.cpu.row_digest import WORD_BYTES


class DeviceBuffer:
    """A ServedBuffer with blocks on a device and their generations on the host; outlives its block server."""

    def __init__(self, layout: BlockLayout, blocks: Tensor, lanes: CopyLanes) -> None:
        """`blocks`: lendable rows uint8 [num_blocks, block_bytes], of any content, on the device of the lanes."""
        assert layout.block_bytes % WORD_BYTES == 0, "blocks on a device are made of 8-byte words"
        self.layout = layout
        self.writer_stamps = True
        self.num_blocks = len(blocks)
        self.lanes = lanes
        self.blocks = blocks
        self.generations: npt.NDArray[np.uint64] = np.zeros(len(blocks), np.uint64)
        self._pieces = DevicePieces(self.blocks, lanes)
        on_host = HostBlocks(self._pieces)
        self.gather, self.scatter = on_host.gather, on_host.scatter

    def part_of(self, part: ArenaPart) -> "DeviceBuffer":
        """Its blocks are copied as a whole."""
        if part != WHOLE:
            raise HandoffRejected("its blocks are in a GPU's memory, which several ranks do not share")
        return self

    def begin_thread(self) -> None:
        self.lanes.accelerator.use()

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        """Mark blocks as written under a generation (0: no lease)."""
        self.generations[np.asarray(block_ids, np.int64)] = generation

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        """Return whether all of them are marked with this generation."""
        return generation != NO_LEASE and bool((self.generations[np.asarray(block_ids, np.int64)] == generation).all())

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        return self._pieces.pieces_to_read(block_ids)

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        return self._pieces.pieces_to_write(block_ids)

    def listed(self, block_ids: BlockIds) -> None:
        """Return None: the blocks are on a device."""

    def exported(self) -> DeviceMemoryHandle:
        """Each call is for one other process."""
        return DeviceMemoryHandle(*self.lanes.accelerator.exported(self.blocks))
