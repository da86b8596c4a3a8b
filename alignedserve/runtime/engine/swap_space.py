"""Swap space: caches of preempted requests in host memory.

Driven by the computing thread. On a GPU the copies are only enqueued on streams, one per direction, and run in parallel
with computing; later work on the same blocks waits for them (`PendingCopies`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.device.streams import DeviceStreams, Event, Stream
from alignedserve.runtime.kv.block_codecs import HostRows, exact_codec, int8_codec
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import IntArray
from alignedserve.runtime.kv.staged_copies import StagedCopies

OFFLOAD, PREFETCH = "offload", "prefetch"


class HostCaches(ABC):
    """Caches of preempted requests in host memory, by request. The worker's logic limits their size."""

    width: float  # of a copy on the host, by the cache on the device; below 1: int8

    def __init__(self, storage: BlockStorage, streams: DeviceStreams, row_bytes: int, host_bytes: int) -> None:
        """`row_bytes`: of a row on the host; `host_bytes`: memory for rows that is registered with a device now."""
        self._storage = storage
        self._offload, self._prefetch = streams.stream(OFFLOAD), streams.stream(PREFETCH)
        self._row_bytes = row_bytes
        self._accelerator = storage.accelerator
        self._host_rows: HostRows | None = None
        if self._accelerator is not None and host_bytes >= row_bytes:
            self._host_rows = HostRows(self._accelerator, row_bytes, host_bytes // row_bytes)

    def perform(self, swaps: Swaps) -> None:
        """Forget, copy out, then copy in; what one request leaves may be reused by another."""
        for request_id in swaps.forgotten:
            self._forget(request_id)
        for swap in swaps.outs:
            self._copy_out(swap)
        for swap in swaps.ins:
            self._copy_in(swap)

    def time_copies(self, block_ids: Sequence[BlockId], clock: Callable[[], float]) -> float:
        """Copy blocks that no request uses out and back, and return how long it took."""
        name = RequestId("calibration")
        swap = Swap(name, len(block_ids) * self._storage.layout.block_size, tuple(block_ids))
        started_s = clock()
        self.perform(Swaps((), (swap,), (swap,)))
        self._prefetch.record().synchronize()
        return clock() - started_s

    def _rows_for(self, count: int) -> tuple[list[Tensor], IntArray | None]:
        taken = None if self._host_rows is None else self._host_rows.take(count, self._offload)
        if self._host_rows is not None and taken is not None:
            return self._host_rows.pieces(taken), taken
        if self._accelerator is not None:
            return [self._accelerator.pinned(count, self._row_bytes)], None
        return [torch.empty((count, self._row_bytes), dtype=torch.uint8)], None

    def _give_back(self, taken: IntArray | None, stream: Stream) -> None:
        if self._host_rows is not None and taken is not None:
            self._host_rows.give_back(taken, stream)

    @abstractmethod
    def _forget(self, request_id: RequestId) -> None:
        """Free the copy of a request that has one."""

    @abstractmethod
    def _copy_out(self, swap: Swap) -> None:
        """Copy a cache, or the end of one, to the host."""

    @abstractmethod
    def _copy_in(self, swap: Swap) -> None:
        """Copy back all of a cache that is on the host."""


class _Copy(NamedTuple):
    pieces: list[Tensor]  # rows, of its blocks in order
    taken: IntArray | None  # of the HostRows; None: memory of its own
    copied_out: Event

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.pieces))


class SwapSpace(HostCaches):
    """Caches swapped as a whole, block by block."""

    def __init__(
        self, storage: BlockStorage, streams: DeviceStreams, *, is_int8: bool = False, host_bytes: int = 0
    ) -> None:
        """`is_int8`: copies on the host are rounded to 8 bits per channel (ALISE, section 3.2).
        `host_bytes`: memory for them that is registered with a device now; copies beyond it allocate their own."""
        assert not (is_int8 and storage.layout.has_scales), "blocks of 8 bits are not rounded again"
        codec = int8_codec(storage.bytes, storage.layout) if is_int8 else exact_codec(storage.bytes)
        super().__init__(storage, streams, codec.row_bytes, host_bytes)
        self._is_int8 = is_int8
        self.width = codec.row_bytes / storage.layout.block_bytes  # of a copy on the host; below 1: int8
        self._copies_out = StagedCopies(codec, self._offload, self._accelerator)
        self._copies_in = StagedCopies(codec, self._prefetch, self._accelerator)
        self._copies: dict[RequestId, _Copy] = {}

    @override
    def _forget(self, request_id: RequestId) -> None:
        self._give_back(self._copies.pop(request_id).taken, self._offload)

    @override
    def _copy_out(self, swap: Swap) -> None:
        assert swap.request_id not in self._copies, "a cache swapped out twice"
        assert not swap.first_token, "part of a cache"
        block_ids = np.array(swap.block_ids, np.int64)
        pieces, taken = self._rows_for(len(block_ids))
        self._storage.pending_copies.wait(self._offload, block_ids)
        num_last = swap.num_tokens % self._storage.layout.block_size
        if self._is_int8 and num_last:
            # Stale values in the slots behind the last token must not widen its channels' ranges.
            self._offload.run(partial(self._storage.fill_tail, swap.block_ids[-1], num_last))
        for part, rows in _parts(block_ids, pieces):
            self._copies_out.copy_out(part, rows)
        self._storage.pending_copies.record(self._offload, block_ids)
        self._copies[swap.request_id] = _Copy(pieces, taken, self._offload.record())

    @override
    def _copy_in(self, swap: Swap) -> None:
        copy = self._copies.pop(swap.request_id)
        block_ids = np.array(swap.block_ids[: copy.num_blocks], np.int64)
        self._prefetch.wait(copy.copied_out)
        self._storage.pending_copies.wait(self._prefetch, block_ids)
        for part, rows in _parts(block_ids, copy.pieces):
            self._copies_in.copy_in(rows, part)
        self._storage.pending_copies.record(self._prefetch, block_ids)
        self._give_back(copy.taken, self._prefetch)


def _parts(block_ids: IntArray, pieces: list[Tensor]) -> Iterator[tuple[IntArray, Tensor]]:
    first = 0
    for rows in pieces:
        yield block_ids[first : first + len(rows)], rows
        first += len(rows)
