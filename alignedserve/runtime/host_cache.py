"""Caches of preempted requests in host memory: what an iteration swaps out and in, on the thread that computes."""

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.block_storage import BlockStorage


class HostCache:
    """Whole caches by request. How much there may be is the worker's logic's to decide."""

    def __init__(self, storage: BlockStorage) -> None:
        self._storage = storage
        self._copies: dict[RequestId, npt.NDArray[np.uint8]] = {}

    def perform(self, swaps: Swaps) -> None:
        """Forget, copy out, copy in; blocks that one request leaves may be entered by another."""
        for request_id in swaps.forgotten:
            del self._copies[request_id]
        for swap in swaps.outs:
            self._copy_out(swap)
        for swap in swaps.ins:
            rows = self._copies.pop(swap.request_id)
            self._storage.write_blocks(swap.block_ids[: len(rows)], rows)

    def _copy_out(self, swap: Swap) -> None:
        assert swap.request_id not in self._copies, "a cache swapped out twice"
        rows = np.empty((len(swap.block_ids), self._storage.layout.block_bytes), np.uint8)
        self._storage.read_blocks(swap.block_ids, rows)
        self._copies[swap.request_id] = rows
