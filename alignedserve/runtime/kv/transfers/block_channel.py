"""The way in which the bytes of blocks travel between the two ends of a block transfer, piece by piece.

Nothing here, nor in what serves blocks over a connection, loads torch: the KV pool does without it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from alignedserve.runtime.kv.block_runs import BlockRuns
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket
from kernels.cpu.block_copies import BlockList

OWNER_RANK, CLIENT_RANK = 0, 1  # the two ends
NUM_PIECES = 3  # some are filled, or emptied, while others travel

Rows = Any  # uint8 [n, block_bytes]: an array, or a Tensor of a process pair
Fill = Callable[[int, Rows], None]  # (number of the first block, rows to fill)
Take = Callable[[int, Rows], None]


class BlockChannel(Protocol):
    """Streams blocks in either direction. Raises PeerLost when the other end is gone, or silent for too long."""

    def send(self, num_blocks: int, fill: Fill) -> None:
        """Send this many blocks; `fill` gathers the next ones while the ones before travel."""

    def receive(self, num_blocks: int, take: Take) -> None:
        """Receive this many blocks; `take` empties a piece while the next one travels."""

    def close(self) -> None:
        """Release its threads and memory. Not during a transfer; may be repeated."""


def cut(num_blocks: int, piece_blocks: int) -> Iterator[tuple[int, int, int]]:
    for index, first in enumerate(range(0, num_blocks, piece_blocks)):
        yield index % NUM_PIECES, first, min(piece_blocks, num_blocks - first)


Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES = 4 * 1024 * 1024


class BlockStream:
    """A BlockChannel on a control socket: pieces follow the message that names their blocks, without a header.

    A second thread fills or empties a piece while another one travels. `close` ends it.
    """

    def __init__(self, control: ControlSocket, block_bytes: int) -> None:
        self._control = control
        self._piece_blocks = max(1, _PIECE_BYTES // block_bytes)
        self._pieces = np.empty((NUM_PIECES, self._piece_blocks, block_bytes), np.uint8)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="block stream")

    def send(self, num_blocks: int, fill: Fill) -> None:
        filled: deque[tuple[Bytes, Future[None]]] = deque()
        with self._copying():
            for slot, first, count in cut(num_blocks, self._piece_blocks):
                if len(filled) == NUM_PIECES:
                    self._send_next(filled)
                rows = self._pieces[slot, :count]
                filled.append((rows, self._copier.submit(fill, first, rows)))
            while filled:
                self._send_next(filled)

    def receive(self, num_blocks: int, take: Take) -> None:
        taken: deque[Future[None]] = deque()
        with self._copying():
            for slot, first, count in cut(num_blocks, self._piece_blocks):
                if len(taken) == NUM_PIECES:
                    taken.popleft().result()
                rows = self._pieces[slot, :count]
                self._control.receive_bytes(_bytes_of(rows))
                taken.append(self._copier.submit(take, first, rows))
            for future in taken:
                future.result()

    def send_lists(self, lists: Iterable[BlockList]) -> None:
        """Send blocks straight from where they lie, one after the other, neighbours at once."""
        for rows in self._neighbours(lists):
            self._control.send_bytes(_bytes_of(rows))

    def receive_lists(self, lists: Iterable[BlockList]) -> None:
        """Receive blocks straight to where they belong, one after the other, neighbours at once."""
        for rows in self._neighbours(lists):
            self._control.receive_bytes(_bytes_of(rows))

    def _neighbours(self, lists: Iterable[BlockList]) -> Iterator[Bytes]:
        for listed in lists:
            for first, count in BlockRuns.of(listed.block_ids).pairs():
                for start in range(first, first + count, self._piece_blocks):
                    yield listed.blocks[start : min(start + self._piece_blocks, first + count)]

    def close(self) -> None:
        self._copier.shutdown()

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._copier.submit(bool).result()  # it does one thing after the other

    def _send_next(self, filled: "deque[tuple[Bytes, Future[None]]]") -> None:
        rows, is_filled = filled.popleft()
        is_filled.result()
        self._control.send_bytes(_bytes_of(rows))


def _bytes_of(rows: Bytes) -> memoryview:
    content: Any = rows
    return memoryview(content).cast("B")


class ChannelOpener(Protocol):
    """Opens the channel of a transport."""

    def __call__(
        self, control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float
    ) -> BlockChannel:
        """Return the channel to the other end of this connection. Raises PeerLost."""


def open_stream(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float
) -> BlockChannel:
    assert transport == "tcp", "another transport than a stream is served"
    return BlockStream(control, block_bytes)
