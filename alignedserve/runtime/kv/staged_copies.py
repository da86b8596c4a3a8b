"""Stream-ordered copies of blocks between a device and host memory.

Lists of blocks are gathered on the device into contiguous bytes, so that few large copies cross the link; the host's
memory is page-locked. Blocks that stay as they are can go straight to and from the host's rows as well, where the
driver copies a list by one call.

Codecs of blocks: the contiguous rows of bytes in which they leave their device.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId
from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.cuda_driver import RowRuns
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.device.memory_maps import huge_pages
from alignedserve.runtime.device.registered_memory import CHUNK_BYTES, RegisteredMemory
from alignedserve.runtime.device.streams import Event, Stream
from alignedserve.runtime.kv.block_runs import BlockRuns
from alignedserve.runtime.kv.direct_copies import DirectCopies, IntArray, PendingCopies
from kernels.cache_blocks import dequantise_blocks, gather_blocks, quantise_blocks, scatter_blocks
from kernels.cpu.block_copies import BlockList, all_rows


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


_STAGED_BYTES = 32 << 20  # large enough for a link's full speed, small beside a cache
_NUM_STAGES = 2  # one is filled while the other is emptied


class StagedCopies:
    """Copies on one stream."""

    def __init__(
        self,
        codec: BlockCodec,
        stream: Stream,
        accelerator: Accelerator | None,
        *,
        staged_bytes: int = _STAGED_BYTES,
        least_listed_bytes: int | None = None,
    ) -> None:
        """`accelerator`: of the stream and the blocks; None: a CPU, where blocks are copied straight to and from the
        host's rows. Others may gather in staging memory, allocated there now. `least_listed_bytes`: of a block that
        is copied by lists instead; None: none is, as long as it is not known whether the driver's call returns at
        once."""
        self._codec = codec
        self._stream = stream
        self._accelerator = accelerator
        self._piece = max(1, staged_bytes // codec.row_bytes)
        self._stages: list[Tensor] = []  # on the host, of walks through pieces
        is_listed = least_listed_bytes is not None and codec.row_bytes >= least_listed_bytes
        is_listed = is_listed and stream.copies_runs_at_once
        self._listed = codec.exact_of if is_listed else None
        needs_staging = self._listed is None
        self._staging = accelerator.empty(self._piece, codec.row_bytes) if accelerator and needs_staging else None

    def pinned(self, num_rows: int) -> Tensor:
        """Allocate host memory for `num_rows` blocks: uint8 [num_rows, row_bytes]."""
        if self._accelerator is None:
            return torch.empty((num_rows, self._codec.row_bytes), dtype=torch.uint8)
        return self._accelerator.pinned(num_rows, self._codec.row_bytes)

    def copy_out(self, block_ids: IntArray, rows: Tensor) -> None:
        """Enqueue rows[i] = block_ids[i]; `rows`, from `pinned`, are not touched before a later event is done."""
        if self._listed is not None:
            self._stream.copy_out_runs(self._listed, rows, RowRuns.of(block_ids, np.arange(len(block_ids))))
            return
        for first in range(0, len(block_ids), self._piece):
            part = block_ids[first : first + self._piece]
            target = rows[first : first + len(part)]
            staging = target if self._staging is None else self._staging[: len(part)]
            self._stream.run(partial(self._gather, part, staging))
            if staging is not target:
                self._stream.copy_out(staging, target)

    def copy_in(self, rows: Tensor, block_ids: IntArray) -> None:
        """Enqueue block_ids[i] = rows[i], under the terms of `copy_out`; no block twice."""
        if self._listed is not None:
            self._stream.copy_in_runs(rows, self._listed, RowRuns.of(block_ids, np.arange(len(block_ids))))
            return
        for first in range(0, len(block_ids), self._piece):
            part = block_ids[first : first + self._piece]
            target = rows[first : first + len(part)]
            staging = target if self._staging is None else self._staging[: len(part)]
            if staging is not target:
                self._stream.copy_in(target, staging)
            self._stream.run(partial(self._scatter, staging, part))

    def pieces_to_read(self, block_ids: IntArray) -> Iterator[BlockList]:
        """Iterate over copies of the blocks, copying ahead; one is valid until the iterator is advanced."""
        pieces = self._pieces(block_ids)
        stages = self._stages_for(pieces)
        events: list[Event] = []

        def start(index: int) -> None:
            self.copy_out(pieces[index], stages[index % _NUM_STAGES][: len(pieces[index])])
            events.append(self._stream.record())

        for index in range(len(stages)):
            start(index)
        for index, piece in enumerate(pieces):
            events[index].synchronize()
            yield all_rows(stages[index % _NUM_STAGES][: len(piece)].numpy())
            if index + _NUM_STAGES < len(pieces):
                start(index + _NUM_STAGES)

    def pieces_to_write(self, block_ids: IntArray) -> Iterator[BlockList]:
        """Iterate over lists of rows to fill, a row for each block. A list is copied when the iterator is advanced;
        once it is advanced past its end, all copies are done."""
        pieces = self._pieces(block_ids)
        stages = self._stages_for(pieces)
        events: list[Event] = []
        for index, piece in enumerate(pieces):
            if index >= _NUM_STAGES:
                events[index - _NUM_STAGES].synchronize()
            stage = stages[index % _NUM_STAGES][: len(piece)]
            yield all_rows(stage.numpy())
            self.copy_in(stage, piece)
            events.append(self._stream.record())
        for event in events[-_NUM_STAGES:]:
            event.synchronize()

    def finish(self) -> None:
        """Wait until all copies are done, also those of a walk that was left."""
        self._stream.record().synchronize()

    def _stages_for(self, pieces: list[IntArray]) -> list[Tensor]:
        if not pieces:
            return []
        if not self._stages or len(self._stages[0]) < len(pieces[0]):
            self._stages = [self.pinned(len(pieces[0])) for _ in range(_NUM_STAGES)]
        return self._stages[: len(pieces)]

    def _pieces(self, block_ids: IntArray) -> list[IntArray]:
        bounds = [*range(0, len(block_ids), self._piece), len(block_ids)]
        return [block_ids[first:last] for first, last in pairwise(bounds)]

    def _gather(self, block_ids: IntArray, staging: Tensor) -> None:
        (on_device,) = to_device([block_ids], staging.device)
        self._codec.gather(on_device, staging)

    def _scatter(self, staging: Tensor, block_ids: IntArray) -> None:
        (on_device,) = to_device([block_ids], staging.device)
        self._codec.scatter(staging, on_device)


T = TypeVar("T")


class Lanes(Generic[T]):
    """Lanes of one kind, made by need and used again. From any thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._free: deque[T] = deque()

    @contextlib.contextmanager
    def taken(self) -> Iterator[T]:
        """Yield a lane that nothing else uses meanwhile; its work must be done at the end."""
        try:
            lane = self._free.pop()
        except IndexError:
            lane = self._make()
        try:
            yield lane
        finally:
            self._free.append(lane)


class CopyLanes:
    """The lanes of one device for direct copies."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._direct = Lanes(lambda: DirectCopies(accelerator))

    def direct(self) -> contextlib.AbstractContextManager[DirectCopies]:
        """Take a lane for the body. The calling thread has the device as its current one from then on."""
        self.accelerator.use()
        return self._direct.taken()
