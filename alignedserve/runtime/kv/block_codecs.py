"""Codecs of blocks: the contiguous rows of bytes in which they leave their device."""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId
from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.memory_maps import huge_pages
from alignedserve.runtime.device.registered_memory import CHUNK_BYTES, RegisteredMemory
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.kv.block_runs import BlockRuns
from alignedserve.runtime.kv.direct_copies import IntArray, PendingCopies
from kernels.cache_blocks import dequantise_blocks, gather_blocks, quantise_blocks, scatter_blocks


class BlockCodec(NamedTuple):
    """Encodes each block as a row, uint8 [row_bytes], and decodes rows. Lists of blocks are int64 [count], rows uint8
    [count, row_bytes], contiguous, both on the blocks' device; a list to scatter to has no block twice."""

    row_bytes: int
    gather: Callable[[Tensor, Tensor], None]  # (blocks, rows): write the rows
    scatter: Callable[[Tensor, Tensor], None]  # (rows, blocks): overwrite the blocks
    exact_of: Tensor | None = None  # uint8 [num_blocks, row_bytes]: these very bytes


def exact_codec(block_bytes: Tensor) -> BlockCodec:
    """Build a codec that copies byte for byte. `block_bytes`: uint8 [num_blocks, any multiple of 8]."""
    return BlockCodec(
        block_bytes.shape[1],
        partial(gather_blocks, block_bytes),
        lambda rows, block_ids: scatter_blocks(rows, block_bytes, block_ids),
        block_bytes,
    )


def int8_codec(block_bytes: Tensor, layout: BlockLayout) -> BlockCodec:
    """Build a codec that rounds to 8 bits per channel (ALISE, section 3.2). `block_bytes`: blocks of this layout."""
    numbers, parts, first, first_byte = block_bytes.view(torch_dtype(layout.dtype)), [], 0, 0
    for kind in layout.kinds:
        shape, end = (kind.runs_per_block, kind.block_size, kind.kv_width), first_byte + kind.int8_block_bytes
        runs = numbers[:, first : first + kind.block_elements].view(-1, *shape)
        parts.append((runs, slice(first_byte, end)))
        first, first_byte = first + kind.block_elements, end

    def gather(block_ids: Tensor, rows: Tensor) -> None:
        for runs, columns in parts:
            quantise_blocks(runs, block_ids, rows[:, columns])

    def scatter(rows: Tensor, block_ids: Tensor) -> None:
        for runs, columns in parts:
            dequantise_blocks(rows[:, columns], runs, block_ids)

    return BlockCodec(layout.int8_block_bytes, gather, scatter)


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
