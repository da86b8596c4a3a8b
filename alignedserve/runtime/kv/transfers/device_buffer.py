"""A candidate buffer in device memory, and blocks on a device gathered into pieces that travel.

Used by `bench transfer` and the contract tests; workers keep candidate buffers in host memory so far. Everything here
is plain torch and runs on any device, the CPU included.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, NotEnoughMemory
from alignedserve.messages.blocks import DeviceMemoryHandle
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.kv.block_checksums import (
    check_target,
    runs_with_checksums,
    source_blocks,
    verify_digests,
)
from alignedserve.runtime.kv.block_runs import BlockIds, BlockRuns, Ints, PlacedRuns, as_ids
from alignedserve.runtime.kv.shm_arena import NO_LEASE, Arena
from alignedserve.runtime.kv.transfers.device_checksums import DeviceRunChecksums
from kernels.block_digests import WORD_BYTES
from kernels.block_lists import gather_blocks, scatter_blocks
from kernels.cpu.block_copies import all_rows, copy_blocks

_STAGED_BYTES = 16 * 1024 * 1024


class DeviceBlocks:
    """Blocks uint8 [num_blocks, block_bytes] on a device, gathered into pieces there and scattered out of them."""

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
    """A ServedBuffer with blocks on a device and their generations on the host; outlives its block server.

    Raises NotEnoughMemory saying how many bytes are needed.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device) -> None:
        assert layout.block_bytes % WORD_BYTES == 0, "blocks on a device are made of 8-byte words"
        self.layout = layout
        self.writer_stamps = True
        self.num_blocks = num_blocks
        self.device = device
        try:
            self.blocks = torch.zeros((num_blocks, layout.block_bytes), dtype=torch.uint8, device=device)
        except RuntimeError as error:
            needed = num_blocks * layout.block_bytes
            raise NotEnoughMemory(f"a candidate buffer needs {needed} bytes on {device}") from error
        self.generations: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self._pieces = DeviceBlocks(self.blocks)
        self.gather = self._pieces.gather
        self.scatter = self._pieces.scatter

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        """Mark these blocks as written under this generation (0: no lease)."""
        self.generations[np.asarray(block_ids, np.int64)] = generation

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        """Return whether all of them are marked with this generation."""
        return generation != NO_LEASE and bool((self.generations[np.asarray(block_ids, np.int64)] == generation).all())

    def listed(self, block_ids: BlockIds) -> None:
        """Return None: the blocks are on a device."""

    def exported(self) -> DeviceMemoryHandle | None:
        """See ServedBuffer. Each call is for one other process."""
        if self.device.type != "cuda":
            return None
        storage: Any = self.blocks.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, is_awaited = storage._share_cuda_()
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return DeviceMemoryHandle(uuid, handle, size, offset, counter, counter_offset, event, is_awaited)

    def relay_from(self, source: Arena, copy: BlockCopy, block_ids: BlockIds, generation: int) -> tuple[BlockRun, ...]:
        """Copy from an arena into this buffer as `relay` does; after HandoffRejected no lease holds the blocks."""
        ids = as_ids(block_ids)
        check_target(ids, copy.num_blocks, generation, self.num_blocks)
        try:
            return self._relay_from(source, copy, ids, generation)
        except HandoffRejected:
            self.stamp(ids, NO_LEASE)
            raise

    def _relay_from(self, source: Arena, copy: BlockCopy, block_ids: Ints, generation: int) -> tuple[BlockRun, ...]:
        layout = self.layout
        sources = source_blocks(
            copy, block_size=layout.block_size, num_targets=len(block_ids), num_blocks=source.num_blocks
        )
        if not source.is_stamped(sources, copy.generation):
            raise HandoffRejected("the lease is no longer valid")
        self.stamp(block_ids, generation)
        runs = BlockRuns.of(block_ids)
        digests = np.empty(len(sources), np.uint64)
        new = self._pieces.checksums(runs.placed())
        size = max(1, _STAGED_BYTES // layout.block_bytes)
        staged = torch.empty((min(size, len(sources)), layout.block_bytes), dtype=torch.uint8)
        for first in range(0, len(sources), size):
            part = sources[first : first + size]
            rows = staged[: len(part)]
            listed = all_rows(rows.numpy())
            digests[first : first + size] = copy_blocks(source.listed(part), listed, is_streamed=False)
            self.scatter(block_ids[first : first + size], rows.to(self.device), new)
        verify_digests(copy, digests)
        if not source.is_stamped(sources, copy.generation):
            raise HandoffRejected("the lease is no longer valid")
        return runs_with_checksums(runs, new.values)


def map_device_memory(memory: DeviceMemoryHandle | None, num_blocks: int, block_bytes: int) -> Tensor:
    """Map another process's blocks, uint8 [num_blocks, block_bytes]. Raises HandoffRejected when that is impossible."""
    if memory is None:
        raise HandoffRejected("the blocks are not in a device's memory")
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if memory.device_uuid not in uuids:
        raise HandoffRejected("the device of the blocks is not visible to this process")
    if memory.storage_bytes < num_blocks * block_bytes:
        raise HandoffRejected("the blocks are more than the memory that is offered")
    index = uuids.index(memory.device_uuid)
    try:
        torch.zeros(1, device=torch.device("cuda", index))  # initialises the device in this process first
        storage = torch.UntypedStorage._new_shared_cuda(
            index,
            memory.handle,
            memory.storage_bytes,
            memory.storage_offset,
            memory.counter_handle,
            memory.counter_offset,
            memory.event_handle,
            memory.event_is_awaited,
        )
    except RuntimeError as error:
        raise HandoffRejected(f"the memory of the blocks cannot be mapped: {str(error)[:200]}") from error
    flat = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
    return flat[: num_blocks * block_bytes].view(num_blocks, block_bytes)
