"""Host memory for caches that leave a device, registered with its driver once.

To lock pages takes a tenth of a second for each GiB, and whoever asks for it waits: for a thread that computes, each
swap would be such a wait. So all of it is taken when a worker starts, and rows of it are handed out, one for a block.
"""

import logging

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId
from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.device.memory_maps import huge_pages
from alignedserve.runtime.device.registered_memory import CHUNK_BYTES, RegisteredMemory
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.kv.block_runs import BlockRuns
from alignedserve.runtime.kv.copies.pending_copies import IntArray, PendingCopies

logger = logging.getLogger(__name__)


class HostRows:
    """Rows of one registered piece of host memory."""

    def __init__(
        self, accelerator: Accelerator, row_bytes: int, num_rows: int, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Of none where the driver refuses, which is logged."""
        num_bytes = max(num_rows * row_bytes, 1)
        memory = huge_pages(num_bytes, populated_bytes=num_bytes)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._registered = RegisteredMemory(
            accelerator.driver, whole.data_ptr(), row_bytes, num_rows, chunk_bytes=chunk_bytes
        )
        if self._registered.obstacle is not None:
            logger.warning("swapped caches are in memory of their own: %s", self._registered.obstacle)
            num_rows = 0
        self._rows = whole[: num_rows * row_bytes].view(num_rows, row_bytes)
        self._allocator = BlockAllocator(num_rows)
        self._uses = PendingCopies(num_rows)

    def take(self, count: int, stream: Stream) -> IntArray | None:
        """Take rows, which later work on the stream may write; None: there are too few."""
        taken = self._allocator.allocate(count)
        if taken is None:
            return None
        numbers = np.array(taken, np.int64)
        self._uses.wait(stream, numbers)
        return numbers

    def give_back(self, numbers: IntArray, stream: Stream) -> None:
        """Give rows back, which earlier work on the stream used last."""
        self._uses.record(stream, numbers)
        self._allocator.free(map(BlockId, numbers.tolist()))

    def pieces(self, numbers: IntArray) -> list[Tensor]:
        """Return the memory of rows as pieces of neighbours, each in one registration, in their order."""
        runs = BlockRuns.of(numbers, cut_every=self._registered.rows_per_chunk)
        return [self._rows[first : first + count] for first, count in runs.pairs()]
