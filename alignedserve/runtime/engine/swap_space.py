"""Swap space: caches of preempted requests in host memory.

Driven by the computing thread. On a GPU the copies are only enqueued on streams, one per direction, and run in parallel
with computing; later work on the same blocks waits for them (`PendingCopies`)."""

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
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import DeviceStreams, Event, Stream
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import IntArray
from alignedserve.runtime.kv.staged_copies import HostRows, StagedCopies, exact_codec, int8_codec

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
    """Parts of caches, swapped slot by slot, where two requests share blocks. A copy of a whole block would bring back
    the other request's slots. What has left of a cache is always the end of its context, in as many parts as it left
    in; all of it comes back at once."""

    width = 1.0  # of a copy on the host, by the cache on the device

    def __init__(self, storage: BlockStorage, streams: DeviceStreams, *, host_bytes: int = 0) -> None:
        """`host_bytes`: memory for copies that is registered with a device now; those beyond it allocate their own."""
        # [blocks, keys and values of every layer, slots, elements], of each kind of layers
        self._slots = [kind.slots for kind in storage.kinds]
        row_bytes = sum(slots.shape[1] * slots.shape[3] * slots.element_size() for slots in self._slots)  # of a token
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
        for slots, part in self._elements(rows):
            part.copy_(slots[block_ids, :, offsets])

    def _scatter(self, places: _Places, rows: Tensor) -> None:
        block_ids, offsets = to_device([places.block_ids, places.slots], self._storage.device)
        for slots, part in self._elements(rows):
            slots[block_ids, :, offsets] = part
