"""Swap space: caches of preempted requests in host memory.

Driven by the computing thread. On a GPU the copies are only enqueued on streams, one per direction, and run in parallel
with computing; later work on the same blocks waits for them (`PendingCopies`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.device.streams import DeviceStreams, Event
from alignedserve.runtime.kv.block_codecs import exact_codec, int8_codec
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.staged_copies import StagedCopies

OFFLOAD, PREFETCH = "offload", "prefetch"


class HostCaches(ABC):
    """Caches of preempted requests in host memory, by request. The worker's logic limits their size."""

    width: float  # of a copy on the host, by the cache on the device; below 1: int8

    def __init__(self, storage: BlockStorage, streams: DeviceStreams) -> None:
        self._storage = storage
        self._offload, self._prefetch = streams.stream(OFFLOAD), streams.stream(PREFETCH)

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

    @abstractmethod
    def _forget(self, request_id: RequestId) -> None:
        """Free the copy of a request that has one."""

    @abstractmethod
    def _copy_out(self, swap: Swap) -> None:
        """Copy a cache, or the end of one, to the host."""

    @abstractmethod
    def _copy_in(self, swap: Swap) -> None:
        """Copy back all of a cache that is on the host."""


class SwapSpace(HostCaches):
    """Caches swapped as a whole, block by block."""

    def __init__(self, storage: BlockStorage, streams: DeviceStreams, *, is_int8: bool = False) -> None:
        """`is_int8`: copies on the host are rounded to 8 bits per channel (ALISE, section 3.2)."""
        assert not (is_int8 and storage.layout.is_int8), "blocks of int8 are not rounded again"
        super().__init__(storage, streams)
        self._is_int8 = is_int8
        codec = int8_codec(storage.bytes, storage.layout) if is_int8 else exact_codec(storage.bytes)
        self.width = codec.row_bytes / storage.layout.block_bytes  # of a copy on the host; below 1: int8
        self._copies_out = StagedCopies(codec, self._offload, storage.device)
        self._copies_in = StagedCopies(codec, self._prefetch, storage.device)
        self._copies: dict[RequestId, tuple[Tensor, Event]] = {}

    def _forget(self, request_id: RequestId) -> None:
        del self._copies[request_id]

    def _copy_out(self, swap: Swap) -> None:
        assert swap.request_id not in self._copies, "a cache swapped out twice"
        assert not swap.first_token, "part of a cache"
        block_ids = np.array(swap.block_ids, np.int64)
        rows = self._copies_out.pinned(len(block_ids))
        self._storage.pending_copies.wait(self._offload, block_ids)
        num_last = swap.num_tokens % self._storage.layout.block_size
        if self._is_int8 and num_last:
            # Stale values in the slots behind the last token must not widen its channels' ranges.
            self._offload.run(partial(self._storage.fill_tail, swap.block_ids[-1], num_last))
        self._copies_out.copy_out(block_ids, rows)
        self._storage.pending_copies.record(self._offload, block_ids)
        self._copies[swap.request_id] = rows, self._offload.record()

    def _copy_in(self, swap: Swap) -> None:
        rows, copied_out = self._copies.pop(swap.request_id)
        block_ids = np.array(swap.block_ids[: len(rows)], np.int64)
        self._prefetch.wait(copied_out)
        self._storage.pending_copies.wait(self._prefetch, block_ids)
        self._copies_in.copy_in(rows, block_ids)
        self._storage.pending_copies.record(self._prefetch, block_ids)
