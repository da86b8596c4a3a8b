"""Swap space where blocks are shared by two requests: caches leave and come back slot by slot.

A copy of a whole block would bring back what the other request had in it. What has left of a cache is always the end of
its context, in as many parts as it left in; all of it comes back at once.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import Swap
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import DeviceStreams, Event
from alignedserve.runtime.engine.swap_space import HostCaches
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.pending_copies import IntArray


class _Part(NamedTuple):
    """Consecutive tokens of one cache on the host."""

    first_token: int
    rows: Tensor  # [tokens, keys and values of every layer, elements of a slot]
    copied_out: Event


class _Places(NamedTuple):
    """The slots of some tokens."""

    block_ids: IntArray  # [tokens]
    slots: IntArray  # [tokens]


class SlotSwapSpace(HostCaches):
    """Parts of caches, swapped slot by slot; slots that one request leaves may be reused by another."""

    width = 1.0  # of a copy on the host, by the cache on the device

    def __init__(self, storage: BlockStorage, streams: DeviceStreams) -> None:
        super().__init__(storage, streams)
        layout = storage.layout
        shape = (storage.num_blocks, layout.runs_per_block, layout.block_size, layout.slot_width)
        self._slots = storage.blocks.view(shape)
        self._is_host = storage.device.type == "cpu"
        self._parts: dict[RequestId, list[_Part]] = {}  # in the order of their tokens

    def _forget(self, request_id: RequestId) -> None:
        del self._parts[request_id]

    def _copy_out(self, swap: Swap) -> None:
        parts = self._parts.setdefault(swap.request_id, [])
        assert not parts or parts[0].first_token == swap.first_token + swap.num_tokens, "not the end of what is left"
        places = self._places(swap, swap.first_token // self._storage.layout.block_size)
        rows = self._pinned(swap.num_tokens)
        staging = rows if self._is_host else torch.empty_like(rows, device=self._storage.device, pin_memory=False)
        self._storage.pending_copies.wait(self._offload, places.block_ids)
        self._offload.run(partial(self._gather, places, staging))
        if staging is not rows:
            self._offload.copy_out(staging, rows)
        self._storage.pending_copies.record(self._offload, places.block_ids)
        parts.insert(0, _Part(swap.first_token, rows, self._offload.record()))

    def _copy_in(self, swap: Swap) -> None:
        parts = self._parts.pop(swap.request_id)
        assert parts[0].first_token == swap.first_token, "comes back in other places than it left"
        assert sum(len(part.rows) for part in parts) == swap.num_tokens, "not all of it comes back"
        places = self._places(swap, 0)
        self._storage.pending_copies.wait(self._prefetch, places.block_ids)
        for part in parts:
            self._prefetch.wait(part.copied_out)
            first = part.first_token - swap.first_token
            of_part = _Places(*(array[first : first + len(part.rows)] for array in places))
            staging = part.rows
            if not self._is_host:
                staging = torch.empty_like(part.rows, device=self._storage.device, pin_memory=False)
                self._prefetch.copy_in(part.rows, staging)
            self._prefetch.run(partial(self._scatter, of_part, staging))
        self._storage.pending_copies.record(self._prefetch, places.block_ids)

    def _places(self, swap: Swap, first_column: int) -> _Places:
        """Return the slots of the swap's tokens; its blocks begin with this column of the block table."""
        size = self._storage.layout.block_size
        columns, offsets = np.divmod(np.arange(swap.first_token, swap.first_token + swap.num_tokens), size)
        block_ids = np.array(swap.block_ids, np.int64)[columns - first_column]
        return _Places(block_ids, size - 1 - offsets if swap.is_reversed else offsets)

    def _pinned(self, num_tokens: int) -> Tensor:
        shape = (num_tokens, self._slots.shape[1], self._slots.shape[3])
        return torch.empty(shape, dtype=self._slots.dtype, pin_memory=not self._is_host)

    def _gather(self, places: _Places, rows: Tensor) -> None:
        block_ids, slots = to_device([places.block_ids, places.slots], self._storage.device)
        rows.copy_(self._slots[block_ids, :, slots])

    def _scatter(self, places: _Places, rows: Tensor) -> None:
        block_ids, slots = to_device([places.block_ids, places.slots], self._storage.device)
        self._slots[block_ids, :, slots] = rows
