"""Copies of blocks between a device and host memory that is registered with its driver, without a copy on the host.

Blocks are gathered on the device, summed there, and copied in runs of neighbours, as they lie on the host. Digests are
of the bytes in the device's own memory: of what leaves it, or of what has arrived there.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import DeviceStreams, streams_of
from alignedserve.runtime.kv.block_runs import BlockRuns, Ints
from kernels.block_digests import row_digests
from kernels.block_lists import gather_blocks, scatter_blocks
from kernels.cpu.block_copies import BlockList, Digests

_STAGED_BYTES = 32 << 20  # on the device: large enough for a link's full speed, small beside a cache


class DirectCopies:
    """Copies of one storage's blocks on a stream and through staging memory of their own; for one thread."""

    def __init__(
        self, blocks: Tensor, *, streams: DeviceStreams | None = None, staged_bytes: int = _STAGED_BYTES
    ) -> None:
        """`blocks`: uint8 [num_blocks, block_bytes], on their device."""
        self._blocks = blocks
        self._stream = (streams or streams_of(blocks.device)).stream("direct")
        self._size = max(1, staged_bytes // blocks.shape[1])
        self._staging: Tensor | None = None  # allocated by the first copy

    def copy_out(self, block_ids: Ints, target: BlockList) -> Digests:
        """Copy blocks to the host, wait until they are there and return their digests."""
        host, digests = torch.from_numpy(target.blocks), list[Tensor]()
        try:
            for first in range(0, len(block_ids), self._size):
                part = block_ids[first : first + self._size]
                staged = self._staged(len(part))
                self._stream.run(partial(self._gather, part, staged))
                self._stream.run(partial(_add_digests, staged, digests))
                for rows, run in _runs(target.block_ids[first : first + self._size]):
                    self._stream.copy_out(staged[rows], host[run])
        finally:
            self._stream.record().synchronize()
        return _on_host(digests)

    def copy_in(self, source: BlockList, block_ids: Ints) -> Digests:
        """Copy blocks from the host, wait until they are there and return their digests; no block twice."""
        host, digests = torch.from_numpy(source.blocks), list[Tensor]()
        try:
            for first in range(0, len(block_ids), self._size):
                part = block_ids[first : first + self._size]
                staged = self._staged(len(part))
                for rows, run in _runs(source.block_ids[first : first + self._size]):
                    self._stream.copy_in(host[run], staged[rows])
                self._stream.run(partial(_add_digests, staged, digests))
                self._stream.run(partial(self._scatter, staged, part))
        finally:
            self._stream.record().synchronize()
        return _on_host(digests)

    def _staged(self, count: int) -> Tensor:
        if self._staging is None:
            shape = (self._size, self._blocks.shape[1])
            self._staging = torch.empty(shape, dtype=torch.uint8, device=self._blocks.device)
        return self._staging[:count]

    def _gather(self, block_ids: Ints, staged: Tensor) -> None:
        (on_device,) = to_device([block_ids], self._blocks.device)
        gather_blocks(self._blocks, on_device, staged)

    def _scatter(self, staged: Tensor, block_ids: Ints) -> None:
        (on_device,) = to_device([block_ids], self._blocks.device)
        scatter_blocks(staged, self._blocks, on_device)


def _runs(block_ids: Ints) -> list[tuple[slice, slice]]:
    """Return the runs of neighbours: their rows in the staging memory, and their blocks on the host."""
    runs = BlockRuns.of(block_ids)
    rows = runs.placed().num_before.tolist()
    return [
        (slice(row, row + count), slice(first, first + count))
        for row, (first, count) in zip(rows, runs.pairs(), strict=True)
    ]


def _add_digests(staged: Tensor, digests: list[Tensor]) -> None:
    digests.append(row_digests(staged))


def _on_host(digests: list[Tensor]) -> Digests:
    return np.concatenate([np.empty(0, np.uint64), *(one.cpu().numpy().view(np.uint64) for one in digests)])
