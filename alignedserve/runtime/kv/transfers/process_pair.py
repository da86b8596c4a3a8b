"""Process groups of two: never init_process_group, no WORLD, no store that other processes can reach.

torch sets a process group up through a key-value store. Here the authenticated control socket is the store: entries of
an end are sent to the peer. A pair that failed in any way is discarded; a new connection makes a new pair."""

import contextlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from alignedserve.core.errors import PeerLost, ProtocolError
from alignedserve.messages.blocks import RendezvousValue
from alignedserve.runtime.device.collectives import gloo_group
from alignedserve.runtime.kv.transfers.block_server import (
    _PIECE_BYTES,
    CLIENT_RANK,
    NUM_PIECES,
    OWNER_RANK,
    BlockChannel,
    Fill,
    Take,
    cut,
    open_stream,
)
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket

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
        for sender in (OWNER_RANK, CLIENT_RANK):
            if rank == sender:
                pair.send(1, lambda _first, rows: None)
            else:
                pair.receive(1, lambda _first, rows: None)
    except (RuntimeError, MemoryError) as error:  # the latter from an invalid address
        raise PeerLost(f"no process group could be made: {_first_line(error)}") from error
    store.seal()
    return pair


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def open_channel(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float
) -> BlockChannel:
    if transport == "tcp":
        return open_stream(control, rank, transport=transport, block_bytes=block_bytes, timeout_s=timeout_s)
    return make_pair(control, rank, block_bytes=block_bytes, timeout_s=timeout_s)
