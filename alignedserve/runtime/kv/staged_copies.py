"""Blocks of a device to and from host memory, by queues: lists of blocks are gathered there into one run of bytes, so
that the link is crossed in few large copies, and the host's end is page-locked."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import Event, Stream
from alignedserve.runtime.kv.block_codecs import BlockCodec

Rows = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]

_STAGED_BYTES = 32 << 20  # large enough for a link's full speed, small beside a cache
_NUM_STAGES = 2  # one is filled while the other is emptied


class StagedCopies:
    """Copies on one queue."""

    def __init__(
        self,
        form: BlockCodec,
        queue: Stream,
        device: torch.device,
        *,
        staged_bytes: int = _STAGED_BYTES,
        is_staged: bool | None = None,
    ) -> None:
        """`device`: the queue's and the blocks'; memory to gather in (`is_staged`) is taken there now, but on a CPU,
        where blocks go straight to and from the host's rows."""
        self._form = form
        self._queue = queue
        self._device = device
        self._piece = max(1, staged_bytes // form.row_bytes)
        self._is_cuda = device.type == "cuda"
        self._staging: Tensor | None = None
        if is_staged or (is_staged is None and self._is_cuda):
            self._staging = torch.empty((self._piece, form.row_bytes), dtype=torch.uint8, device=device)

    def pinned(self, num_rows: int) -> Tensor:
        """Host memory for so many blocks: uint8 [num_rows, row_bytes]."""
        return torch.empty((num_rows, self._form.row_bytes), dtype=torch.uint8, pin_memory=self._is_cuda)

    def copy_out(self, block_ids: IntArray, rows: Tensor) -> None:
        """Put on the queue: rows[i] = block_ids[i]. `rows` from `pinned`, left alone until an event behind it."""
        for first in range(0, len(block_ids), self._piece):
            part = block_ids[first : first + self._piece]
            there = rows[first : first + len(part)]
            staging = there if self._staging is None else self._staging[: len(part)]
            self._queue.run(partial(self._gather, part, staging))
            if staging is not there:
                self._queue.copy_out(staging, there)

    def copy_in(self, rows: Tensor, block_ids: IntArray) -> None:
        """Put on the queue: block_ids[i] = rows[i], as `copy_out`; no block twice."""
        for first in range(0, len(block_ids), self._piece):
            part = block_ids[first : first + self._piece]
            there = rows[first : first + len(part)]
            staging = there if self._staging is None else self._staging[: len(part)]
            if staging is not there:
                self._queue.copy_in(there, staging)
            self._queue.run(partial(self._scatter, staging, part))

    def rows_to_read(self, block_ids: IntArray) -> Iterator[Rows]:
        """The bytes of the blocks, one after the other, while the next ones are on their way. A row is valid until the
        next one is asked for."""
        pieces = self._pieces(block_ids)
        stages = [self.pinned(len(pieces[0])) for _ in pieces[:_NUM_STAGES]]
        events: list[Event] = []

        def start(index: int) -> None:
            self.copy_out(pieces[index], stages[index % _NUM_STAGES][: len(pieces[index])])
            events.append(self._queue.record())

        for index in range(len(stages)):
            start(index)
        for index, piece in enumerate(pieces):
            events[index].wait_on_host()
            yield from stages[index % _NUM_STAGES][: len(piece)].numpy()
            if index + _NUM_STAGES < len(pieces):
                start(index + _NUM_STAGES)

    def rows_to_write(self, block_ids: IntArray) -> Iterator[Rows]:
        """Rows to fill, one for each of the blocks. A row is taken over when the next one, or the end, is asked for; at
        the end all of them have arrived."""
        pieces = self._pieces(block_ids)
        stages = [self.pinned(len(pieces[0])) for _ in pieces[:_NUM_STAGES]]
        events: list[Event] = []
        for index, piece in enumerate(pieces):
            if index >= _NUM_STAGES:
                events[index - _NUM_STAGES].wait_on_host()
            stage = stages[index % _NUM_STAGES][: len(piece)]
            yield from stage.numpy()
            self.copy_in(stage, piece)
            events.append(self._queue.record())
        for event in events[-_NUM_STAGES:]:
            event.wait_on_host()

    def _pieces(self, block_ids: IntArray) -> list[IntArray]:
        bounds = [*range(0, len(block_ids), self._piece), len(block_ids)]
        return [block_ids[first:last] for first, last in pairwise(bounds)]

    def _gather(self, block_ids: IntArray, staging: Tensor) -> None:
        (on_device,) = to_device([block_ids], self._device)
        self._form.gather(on_device, staging)

    def _scatter(self, staging: Tensor, block_ids: IntArray) -> None:
        (on_device,) = to_device([block_ids], self._device)
        self._form.scatter(staging, on_device)
