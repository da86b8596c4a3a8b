"""The way in which the bytes of blocks travel between the two ends of a block transfer, piece by piece.

Nothing here, nor in what serves blocks over a connection, loads torch: the KV pool does without it.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from alignedserve.core.errors import PeerLost, ProtocolError
from alignedserve.messages.blocks import RendezvousValue
from alignedserve.runtime.device.collectives import gloo_group
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
            for one in taken:
                one.result()

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


_DISTRIBUTED: Any = dist  # untyped: its content depends on how torch was built
_Store: Any = _DISTRIBUTED.Store


class ProcessPair:
    """A BlockChannel through a process group of two."""

    def __init__(self, group: Any, rank: int, block_bytes: int, timeout_s: float) -> None:
        self._group = group
        self._other = CLIENT_RANK if rank == OWNER_RANK else OWNER_RANK
        self._timeout_s = timeout_s
        self._piece_blocks = max(1, _PIECE_BYTES // block_bytes)
        shape = (NUM_PIECES, self._piece_blocks, block_bytes)
        self._pieces = torch.empty(shape, dtype=torch.uint8)

    def send(self, num_blocks: int, fill: Fill) -> None:
        works: deque[Any] = deque()
        with _exchange("blocks could not be sent"):
            for slot, first, count in cut(num_blocks, self._piece_blocks):
                if len(works) == NUM_PIECES:
                    self._wait(works.popleft())
                rows = self._pieces[slot, :count]
                fill(first, rows)
                works.append(self._group.send([rows], self._other, 0))
            for work in works:
                self._wait(work)

    def receive(self, num_blocks: int, take: Take) -> None:
        works: deque[tuple[int, torch.Tensor, Any]] = deque()
        with _exchange("blocks did not arrive"):
            for slot, first, count in cut(num_blocks, self._piece_blocks):
                if len(works) == NUM_PIECES:
                    self._take_next(works, take)
                rows = self._pieces[slot, :count]
                works.append((first, rows, self._group.recv([rows], self._other, 0)))
            while works:
                self._take_next(works, take)

    def close(self) -> None:
        """See BlockChannel: the group goes with its last reference."""

    def _take_next(self, works: "deque[tuple[int, torch.Tensor, Any]]", take: Take) -> None:
        first, rows, work = works.popleft()
        self._wait(work)
        take(first, rows)

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self._timeout_s))


@contextlib.contextmanager
def _exchange(problem: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"{problem}: {_first_line(error)}") from error


class ControlStore(_Store):  # type: ignore[misc]
    """The store of a process group while it is set up: entries travel over the control socket."""

    def __init__(self, control: ControlSocket) -> None:
        super().__init__()
        self._control = control
        self._entries: dict[str, bytes] = {}
        self._is_open = True

    def seal(self) -> None:
        self._is_open = False

    def set(self, key: str, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = content
        if self._is_open:
            self._control.send(RendezvousValue(key, content))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for the other end to set all of them; the control socket has its own timeout."""
        while not all(key in self._entries for key in keys):
            if not self._is_open:
                raise PeerLost("a process group asks for an entry that was never set")
            message = self._control.receive()
            if not isinstance(message, RendezvousValue):
                raise ProtocolError("the peer sent another message than an entry of the process group")
            self._entries[message.key] = message.value

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def clone(self) -> "ControlStore":
        return self


def make_pair(control: ControlSocket, rank: int, *, block_bytes: int, timeout_s: float) -> ProcessPair:
    """Set up a process group with the other end of this connection. Raises PeerLost."""
    store = ControlStore(control)
    try:
        group = gloo_group(store, rank, 2, timedelta(seconds=timeout_s), host=control.local_host)
        pair = ProcessPair(group, rank, block_bytes, timeout_s)
        _exchange_one(pair, rank)
    except (RuntimeError, MemoryError) as error:  # the latter from an invalid address
        raise PeerLost(f"no process group could be made: {_first_line(error)}") from error
    store.seal()
    return pair


def _exchange_one(pair: ProcessPair, rank: int) -> None:
    for sender in (OWNER_RANK, CLIENT_RANK):
        if rank == sender:
            pair.send(1, lambda _first, rows: None)
        else:
            pair.receive(1, lambda _first, rows: None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def open_channel(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float
) -> BlockChannel:
    if transport == "tcp":
        return open_stream(control, rank, transport=transport, block_bytes=block_bytes, timeout_s=timeout_s)
    return make_pair(control, rank, block_bytes=block_bytes, timeout_s=timeout_s)
