"""Swap space where blocks are shared by two requests: caches leave and come back slot by slot.

A copy of a whole block would bring back what the other request had in it. What has left of a cache is always the end of
its context, in as many parts as it left in; all of it comes back at once.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import Swap
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import DeviceStreams, Event
from alignedserve.runtime.engine.swap_space import HostCaches, SwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import IntArray


def make_swap_space(
    storage: BlockStorage, streams: DeviceStreams, *, shares_blocks: bool, is_int8: bool, host_bytes: int
) -> HostCaches:
    """Return the swap space of a storage; `shares_blocks`: of two requests at a time, whose copies are exact ones."""
    if shares_blocks:
        return SlotSwapSpace(storage, streams, host_bytes=host_bytes)
    return SwapSpace(storage, streams, is_int8=is_int8, host_bytes=host_bytes)


class _Part(NamedTuple):
    first_token: int
    pieces: list[Tensor]  # of rows, one for a token, in order
    taken: IntArray | None  # of the HostRows; None: memory of its own
    copied_out: Event

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pieces))


class _Places(NamedTuple):
    block_ids: IntArray  # [tokens]
    slots: IntArray  # [tokens]


class SlotSwapSpace(HostCaches):
    """Parts of caches, swapped slot by slot; slots that one request leaves may be reused by another."""

    width = 1.0  # of a copy on the host, by the cache on the device

    def __init__(self, storage: BlockStorage, streams: DeviceStreams, *, host_bytes: int = 0) -> None:
        """`host_bytes`: memory for copies that is registered with a device now; those beyond it allocate their own."""
        # [blocks, keys and values of every layer, slots, elements], of each kind of layers
        self._slots = [kind.slots for kind in storage.kinds]
        row_bytes = sum(own.shape[1] * own.shape[3] * own.element_size() for own in self._slots)  # of a token
        super().__init__(storage, streams, row_bytes, host_bytes)
        self._parts: dict[RequestId, list[_Part]] = {}  # in the order of their tokens

    @override
    def _forget(self, request_id: RequestId) -> None:
        for part in self._parts.pop(request_id):
            self._give_back(part.taken, self._offload)

    @override
    def _copy_out(self, swap: Swap) -> None:
        parts = self._parts.setdefault(swap.request_id, [])
        assert not parts or parts[0].first_token == swap.first_token + swap.num_tokens, "not the end of what is left"
        places = self._places(swap, swap.first_token // self._storage.layout.block_size)
        pieces, taken = self._rows_for(swap.num_tokens)
        staging = self._staging(pieces)
        self._storage.pending_copies.wait(self._offload, places.block_ids)
        self._offload.run(partial(self._gather, places, staging))
        for on_device, rows in self._copied(staging, pieces):
            self._offload.copy_out(on_device, rows)
        self._storage.pending_copies.record(self._offload, places.block_ids)
        parts.insert(0, _Part(swap.first_token, pieces, taken, self._offload.record()))

    @override
    def _copy_in(self, swap: Swap) -> None:
        parts = self._parts.pop(swap.request_id)
        assert parts[0].first_token == swap.first_token, "comes back in other places than it left"
        assert sum(part.num_tokens for part in parts) == swap.num_tokens, "not all of it comes back"
        places = self._places(swap, 0)
        self._storage.pending_copies.wait(self._prefetch, places.block_ids)
        for part in parts:
            self._prefetch.wait(part.copied_out)
            first = part.first_token - swap.first_token
            of_part = _Places(*(array[first : first + part.num_tokens] for array in places))
            staging = self._staging(part.pieces)
            for on_device, rows in self._copied(staging, part.pieces):
                self._prefetch.copy_in(rows, on_device)
            self._prefetch.run(partial(self._scatter, of_part, staging))
            self._give_back(part.taken, self._prefetch)
        self._storage.pending_copies.record(self._prefetch, places.block_ids)

    def _places(self, swap: Swap, first_column: int) -> _Places:
        size = self._storage.layout.block_size
        columns, offsets = np.divmod(np.arange(swap.first_token, swap.first_token + swap.num_tokens), size)
        block_ids = np.array(swap.block_ids, np.int64)[columns - first_column]
        return _Places(block_ids, size - 1 - offsets if swap.is_reversed else offsets)

    def _staging(self, pieces: list[Tensor]) -> Tensor:
        if self._accelerator is None:
            return pieces[0]
        return self._accelerator.empty(sum(map(len, pieces)), self._row_bytes)

    def _copied(self, staging: Tensor, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        if self._accelerator is None:
            return
        first = 0
        for rows in pieces:
            yield staging[first : first + len(rows)], rows
            first += len(rows)

    def _elements(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        numbers, first = rows.view(self._slots[0].dtype), 0
        for slots in self._slots:
            _, num_runs, _, width = slots.shape
            yield slots, numbers[:, first : first + num_runs * width].view(-1, num_runs, width)
            first += num_runs * width

    def _gather(self, places: _Places, rows: Tensor) -> None:
        block_ids, offsets = to_device([places.block_ids, places.slots], self._storage.device)
        for slots, own in self._elements(rows):
            own.copy_(slots[block_ids, :, offsets])

    def _scatter(self, places: _Places, rows: Tensor) -> None:
        block_ids, offsets = to_device([places.block_ids, places.slots], self._storage.device)
        for slots, own in self._elements(rows):
            slots[block_ids, :, offsets] = own
