"""A candidate buffer in device memory, and blocks on a device gathered into pieces that travel."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected
from alignedserve.messages.blocks import DeviceMemoryHandle
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.kv.block_checksums import run_checksums
from alignedserve.runtime.kv.block_runs import BlockIds, PlacedRuns
from alignedserve.runtime.kv.copy_lanes import CopyLanes
from alignedserve.runtime.kv.device_pieces import DevicePieces
from alignedserve.runtime.kv.shm_arena import NO_LEASE, WHOLE, ArenaPart
from alignedserve.runtime.kv.transfers.block_channel import Rows
from alignedserve.runtime.kv.transfers.host_blocks import HostBlocks
from kernels.block_digests import WORD_BYTES, row_digests
from kernels.block_lists import gather_blocks, scatter_blocks
from kernels.cpu.block_copies import BlockList


class DeviceRunChecksums:
    """RunChecksums of rows on a device. The host waits for the device only when `values` is read."""

    def __init__(self, runs: PlacedRuns) -> None:
        self._runs = runs
        self._digests: list[Tensor] = []

    def update(self, rows: Tensor) -> None:
        """Add the next blocks: uint8 [n, block_bytes], contiguous, on one device."""
        self._digests.append(row_digests(rows))

    @property
    def values(self) -> list[int]:
        """One unsigned checksum per run, once all blocks were added."""
        digests = [one.cpu().numpy().view(np.uint64) for one in self._digests]
        return run_checksums(np.concatenate([np.empty(0, np.uint64), *digests]), self._runs)


class DeviceBlocks:
    """Blocks uint8 [num_blocks, block_bytes] on a device, gathered into pieces there and scattered out of them.

    On the current stream, as a process group's pieces are.
    """

    def __init__(self, blocks: Tensor) -> None:
        self.device = blocks.device
        self._blocks = blocks

    def checksums(self, runs: PlacedRuns) -> DeviceRunChecksums:
        """Return checksums to be updated by gather or scatter, over all the blocks in order."""
        return DeviceRunChecksums(runs)

    def gather(self, block_ids: BlockIds, rows: Tensor, *checksums: DeviceRunChecksums) -> None:
        """Copy blocks into rows: uint8 [len(block_ids), block_bytes], on this device."""
        gather_blocks(self._blocks, self._ids(block_ids), rows)
        for one in checksums:
            one.update(rows)

    def scatter(self, block_ids: BlockIds, rows: Tensor, *checksums: DeviceRunChecksums) -> None:
        """Copy rows into blocks."""
        scatter_blocks(rows, self._blocks, self._ids(block_ids))
        for one in checksums:
            one.update(rows)

    def _ids(self, block_ids: BlockIds) -> Tensor:
        return to_device([np.asarray(block_ids, np.int64)], self.device)[0]


class DeviceBuffer:
    """A ServedBuffer with blocks on a device and their generations on the host; outlives its block server."""

    def __init__(self, layout: BlockLayout, blocks: Tensor, lanes: CopyLanes, part: ArenaPart = WHOLE) -> None:
        """`blocks`: lendable rows uint8 [num_blocks, block_bytes], of any content, on the device of the lanes.

        `part`: of its worker's blocks, the one that this layout is of.
        """
        assert layout.block_bytes % WORD_BYTES == 0, "blocks on a device are made of 8-byte words"
        self.layout = layout
        self._part = part
        self.writer_stamps = True
        self.num_blocks = len(blocks)
        self.lanes = lanes
        self.device = lanes.accelerator.device
        self.blocks = blocks
        self.generations: npt.NDArray[np.uint64] = np.zeros(len(blocks), np.uint64)
        self._on_device = DeviceBlocks(self.blocks)
        self._pieces = DevicePieces(self.blocks, lanes)
        self._on_host = HostBlocks(self._pieces)

    def part_of(self, part: ArenaPart) -> "DeviceBuffer":
        """See ServedBuffer. It has one part alone."""
        if part != self._part:
            (own, size), (rank, num_ranks) = self._part, part
            raise HandoffRejected(f"it has the parts of rank {own} of {size}, not of rank {rank} of {num_ranks}")
        return self

    def begin_thread(self) -> None:
        """See ServedBuffer."""
        self.lanes.accelerator.use()

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        """Mark these blocks as written under this generation (0: no lease)."""
        self.generations[np.asarray(block_ids, np.int64)] = generation

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        """Return whether all of them are marked with this generation."""
        return generation != NO_LEASE and bool((self.generations[np.asarray(block_ids, np.int64)] == generation).all())

    def gather(self, block_ids: BlockIds, rows: Rows) -> None:
        """Copy blocks into rows uint8 [len(block_ids), block_bytes], on this device or on the host."""
        self._blocks_for(rows).gather(block_ids, rows)

    def scatter(self, block_ids: BlockIds, rows: Rows) -> None:
        """Copy rows, on this device or on the host, into blocks."""
        self._blocks_for(rows).scatter(block_ids, rows)

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """See BlockSource."""
        return self._pieces.pieces_to_read(block_ids)

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """See BlockSource."""
        return self._pieces.pieces_to_write(block_ids)

    def listed(self, block_ids: BlockIds) -> None:
        """Return None: the blocks are on a device."""

    def exported(self) -> DeviceMemoryHandle:
        """See ServedBuffer. Each call is for one other process."""
        return DeviceMemoryHandle(*self.lanes.accelerator.exported(self.blocks))

    def _blocks_for(self, rows: Rows) -> DeviceBlocks | HostBlocks:
        is_here = isinstance(rows, Tensor) and rows.device == self.blocks.device
        return self._on_device if is_here else self._on_host
