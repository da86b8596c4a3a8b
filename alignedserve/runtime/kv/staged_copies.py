"""Stream-ordered copies of blocks between a device and host memory.

Lists of blocks are gathered on the device into contiguous bytes, so that few large copies cross the link; the host's
memory is page-locked. Blocks that stay as they are can go straight to and from the host's rows as well, where the
driver copies a list by one call."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.cuda_driver import RowRuns
from alignedserve.runtime.device.streams import Event, Stream
from alignedserve.runtime.kv.block_codecs import BlockCodec
from alignedserve.runtime.kv.direct_copies import DirectCopies
from kernels.cpu.block_copies import BlockList, all_rows

IntArray = npt.NDArray[np.int64]

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
