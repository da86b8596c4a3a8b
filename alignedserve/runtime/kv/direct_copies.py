"""Copies of blocks between a device's memory and memory that its copies reach: the host's, or another device's.

The other memory is host memory that is registered with the driver, such as the pool's arena, or a peer's blocks,
mapped here. Every byte crosses the link once, straight to or from its place on the other side. From device to device
one kernel copies a whole list. With host memory blocks go straight between their places, neighbours at once and the
whole list by one call where the driver has it; small ones are gathered on the device, as a copy of each would cost more
than its bytes. Digests cover the bytes in the memory of this device: before they leave, or after they arrive."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.cuda_driver import Ints, RowRuns
from alignedserve.runtime.device.streams import Event, Stream
from kernels.block_digests import listed_digests, row_digests
from kernels.cache_blocks import copy_listed, gather_blocks, scatter_blocks
from kernels.cpu.block_copies import BlockList, Digests
from kernels.cpu.row_digest import WORD_BYTES

STAGED_BYTES = 32 << 20  # on the device: large enough for a link's full speed, small beside a cache
# A block that is copied straight: five microseconds of a link, and more than a launch.
LEAST_STRAIGHT_BYTES = 256 << 10
_LEAST_LISTED_BYTES = 32 << 10  # the same where a list is one launch: smaller ones are no faster so, seen on an H100
_ALL = slice(None)


class HostSide:
    """Blocks in registered host memory, in the order of their copies."""

    def __init__(self, listed: BlockList, cut_every: int | None = None) -> None:
        """`cut_every`: as many rows are in one registration, over whose end no copy may reach."""
        self.ids = listed.block_ids
        self._cut_every = cut_every
        self._memory = torch.from_numpy(listed.blocks)

    def write(self, stream: Stream, rows: Tensor, row_ids: Ints, part: slice = _ALL) -> None:
        """Enqueue the copy of rows to these blocks, or to a part of them."""
        stream.copy_out_runs(rows, self._memory, self._runs(row_ids, part))

    def read(self, stream: Stream, rows: Tensor, row_ids: Ints, part: slice = _ALL) -> None:
        """Enqueue the copy of these blocks, or of a part of them, to rows."""
        stream.copy_in_runs(self._memory, rows, self._runs(row_ids, part))

    def _runs(self, row_ids: Ints, part: slice) -> RowRuns:
        return RowRuns.of(row_ids, self.ids[part], cut_every=self._cut_every)


class PeerSide(NamedTuple):
    """Blocks of another device, mapped for this one, or others of the device's own, in the order of their copies."""

    memory: Tensor  # uint8 [num_blocks, block_bytes]
    ids: Ints


OtherBlocks = HostSide | PeerSide


class DirectCopies:
    """One stream of a device, and staging memory of its own; for one thread at a time."""

    def __init__(
        self, accelerator: Accelerator, *, staged_bytes: int = STAGED_BYTES, least_straight_bytes: int | None = None
    ) -> None:
        """`least_straight_bytes`: of a block that is not gathered in staging memory; None: as it is best here."""
        self._accelerator = accelerator
        self._stream = accelerator.streams().stream("direct")
        self._staged_bytes = staged_bytes
        listed = _LEAST_LISTED_BYTES if self._stream.copies_runs_at_once else LEAST_STRAIGHT_BYTES
        self._least_straight_bytes = listed if least_straight_bytes is None else least_straight_bytes
        self._staging: Tensor | None = None  # allocated by the first copy that needs it

    def copy_out(self, blocks: Tensor, block_ids: Ints, target: OtherBlocks) -> Digests:
        """Copy this device's blocks, uint8 [num_blocks, block_bytes], wait until they are there; return digests."""
        assert len(block_ids) == len(target.ids), "as many blocks on either side"

        def enqueue(digests: Tensor) -> None:
            if isinstance(target, PeerSide):
                self._to_peer(blocks, block_ids, target, digests)
            elif self._is_straight(blocks):
                self._straight_out(blocks, block_ids, target, digests)
            else:
                self._staged_out(blocks, block_ids, target, digests)

        return self._copy(len(block_ids), enqueue)

    def copy_in(self, source: OtherBlocks, blocks: Tensor, block_ids: Ints) -> Digests:
        """Copy to this device's blocks, wait until they are there and return their digests; no block twice."""
        assert len(block_ids) == len(source.ids), "as many blocks on either side"

        def enqueue(digests: Tensor) -> None:
            if isinstance(source, PeerSide):
                self._from_peer(source, blocks, block_ids, digests)
            elif self._is_straight(blocks):
                self._straight_in(source, blocks, block_ids, digests)
            else:
                self._staged_in(source, blocks, block_ids, digests)

        return self._copy(len(block_ids), enqueue)

    def _is_straight(self, blocks: Tensor) -> bool:
        return blocks.shape[1] >= self._least_straight_bytes

    def _copy(self, count: int, enqueue: Callable[[Tensor], None]) -> Digests:
        """Enqueue copies that fill digests, uint8 [count, 8] on the device, and wait for both. None are no copies: of
        blocks that were all refused, say."""
        if not count:
            return np.empty(0, np.uint64)
        on_device = self._accelerator.empty(count, WORD_BYTES)
        on_host = self._accelerator.pinned(count, WORD_BYTES)
        try:
            self._stream.run(_nothing)  # behind what used this memory before
            enqueue(on_device)
            self._stream.copy_out(on_device, on_host)
        finally:
            self._stream.record().synchronize()
        return on_host.numpy().view(np.uint64).reshape(-1).copy()

    def _to_peer(self, blocks: Tensor, block_ids: Ints, target: PeerSide, digests: Tensor) -> None:
        copy = partial(_copy_listed, blocks, block_ids, *target)
        self._stream.run_peer(copy, blocks, target.memory, num_rows=len(block_ids))
        self._stream.run(partial(_digest_listed, blocks, block_ids, digests))

    def _from_peer(self, source: PeerSide, blocks: Tensor, block_ids: Ints, digests: Tensor) -> None:
        copy = partial(_copy_listed, *source, blocks, block_ids)
        self._stream.run_peer(copy, source.memory, blocks, num_rows=len(block_ids))
        self._stream.run(partial(_digest_listed, blocks, block_ids, digests))

    def _straight_out(self, blocks: Tensor, block_ids: Ints, target: HostSide, digests: Tensor) -> None:
        target.write(self._stream, blocks, block_ids)
        self._stream.run(partial(_digest_listed, blocks, block_ids, digests))

    def _straight_in(self, source: HostSide, blocks: Tensor, block_ids: Ints, digests: Tensor) -> None:
        source.read(self._stream, blocks, block_ids)
        self._stream.run(partial(_digest_listed, blocks, block_ids, digests))

    def _staged_out(self, blocks: Tensor, block_ids: Ints, target: HostSide, digests: Tensor) -> None:
        for part, staged in self._pieces(blocks, len(block_ids)):
            self._stream.run(partial(_gather, blocks, block_ids[part], staged))
            self._stream.run(partial(_digest, staged, digests[part]))
            target.write(self._stream, staged, np.arange(len(staged)), part)

    def _staged_in(self, source: HostSide, blocks: Tensor, block_ids: Ints, digests: Tensor) -> None:
        for part, staged in self._pieces(blocks, len(block_ids)):
            source.read(self._stream, staged, np.arange(len(staged)), part)
            self._stream.run(partial(_digest, staged, digests[part]))
            self._stream.run(partial(_scatter, staged, blocks, block_ids[part]))

    def _pieces(self, blocks: Tensor, count: int) -> Iterator[tuple[slice, Tensor]]:
        row_bytes = blocks.shape[1]
        size = max(1, self._staged_bytes // row_bytes)
        if self._staging is None or self._staging.shape[1] != row_bytes:
            self._staging = self._accelerator.empty(size, row_bytes)
            self._stream.run(_nothing)
        for first in range(0, count, size):
            last = min(first + size, count)
            yield slice(first, last), self._staging[: last - first]


def _copy_listed(source: Tensor, source_ids: Ints, target: Tensor, target_ids: Ints) -> None:
    listed = to_device([source_ids, target_ids], source.device)
    copy_listed(source, listed[0], target, listed[1])


def _gather(blocks: Tensor, block_ids: Ints, rows: Tensor) -> None:
    (on_device,) = to_device([block_ids], rows.device)
    gather_blocks(blocks, on_device, rows)


def _scatter(rows: Tensor, blocks: Tensor, block_ids: Ints) -> None:
    (on_device,) = to_device([block_ids], rows.device)
    scatter_blocks(rows, blocks, on_device)


def _digest(rows: Tensor, digests: Tensor) -> None:
    digests.copy_(row_digests(rows).view(torch.uint8).view(-1, WORD_BYTES))


def _digest_listed(blocks: Tensor, block_ids: Ints, digests: Tensor) -> None:
    (on_device,) = to_device([block_ids], blocks.device)
    digests.copy_(listed_digests(blocks, on_device).view(torch.uint8).view(-1, WORD_BYTES))


def _nothing() -> None:
    """Do nothing, in its turn."""


IntArray = npt.NDArray[np.int64]


class _Copy(NamedTuple):
    stream: Stream
    event: Event


class PendingCopies:
    """The copies of one storage that may not be done. One thread drives the streams; others may `synchronize`. An
    engine's steps need not be recorded: the end of a step is announced only when the device has done it."""

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        # The number of each block's latest copy, which has itself waited for earlier ones.
        self._last = np.zeros(num_blocks, np.int64)
        self._pending: dict[int, _Copy] = {}
        self._num_begun = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no copy is pending."""
        return not self._pending

    def wait(self, stream: Stream, block_ids: IntArray | Callable[[], IntArray]) -> None:
        """Make later work on the stream wait for what other streams do with these blocks.

        `block_ids`: or what returns them, asked only where other streams do something."""
        if not self._has_other(stream):
            return
        for copy in self._on(block_ids() if callable(block_ids) else block_ids):
            if copy.stream is not stream:
                stream.wait(copy.event)

    def record(self, stream: Stream, block_ids: IntArray) -> None:
        """Record that the latest work on the stream is a copy of these blocks."""
        event = stream.record()
        with self._lock:
            self._forget_first()
            self._num_begun += 1
            self._pending[self._num_begun] = _Copy(stream, event)
            self._last[block_ids] = self._num_begun

    def synchronize(self, block_ids: IntArray) -> None:
        """Block the host until all copies to and from these blocks are done."""
        for copy in self._on(block_ids):
            copy.event.synchronize()

    def _forget_first(self) -> None:
        while self._pending:
            number, copy = next(iter(self._pending.items()))
            if not copy.event.is_done():
                return
            del self._pending[number]

    def _has_other(self, stream: Stream) -> bool:
        with self._lock:
            return any(copy.stream is not stream for copy in self._pending.values())

    def _on(self, block_ids: IntArray) -> list[_Copy]:
        if not self._pending:
            return []
        with self._lock:
            self._pending = {number: copy for number, copy in self._pending.items() if not copy.event.is_done()}
            last = self._last[block_ids]
            return [copy for number, copy in self._pending.items() if (last == number).any()]
