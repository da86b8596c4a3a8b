"""Process groups of two: never init_process_group, no WORLD, no store that other processes can reach.

torch sets a process group up through a key-value store. Here that is the authenticated control socket: entries that one
end sets are sent to the other. A pair that failed in any way is discarded; a new connection makes a new one.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alignedserve.core.errors import PeerLost, ProtocolError
from alignedserve.messages.blocks import RendezvousValue
from alignedserve.runtime.kv.transfers.block_channel import CLIENT_RANK, NUM_PIECES, OWNER_RANK, Fill, Take, cut
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket

_DISTRIBUTED: Any = dist  # untyped: its content depends on how torch was built
_CUDA: Any = torch.cuda
_Store: Any = _DISTRIBUTED.Store

_PIECE_BYTES = 4 * 1024 * 1024
_POLL_S = 20e-6
# By default NCCL's watchdog ends the process when a peer is lost; read when a group is made.
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_NCCL_NEVER = timedelta(days=365)
_settings_lock = threading.Lock()


class ProcessPair:
    """A BlockChannel through a process group of two."""

    def __init__(self, group: Any, rank: int, block_bytes: int, timeout_s: float, device: torch.device) -> None:
        self._group = group
        self._other = CLIENT_RANK if rank == OWNER_RANK else OWNER_RANK
        self._timeout_s = timeout_s
        self._piece_blocks = max(1, _PIECE_BYTES // block_bytes)
        shape = (NUM_PIECES, self._piece_blocks, block_bytes)
        self._pieces = torch.empty(shape, dtype=torch.uint8, device=device)
        self._stream: Any = _CUDA.Stream(device) if device.type == "cuda" else None

    def send(self, num_blocks: int, fill: Fill) -> None:
        """See BlockChannel."""
        works: deque[Any] = deque()
        with self._exchange("blocks could not be sent"):
            for slot, first, count in cut(num_blocks, self._piece_blocks):
                if len(works) == NUM_PIECES:
                    self._wait(works.popleft())
                rows = self._pieces[slot, :count]
                fill(first, rows)
                works.append(self._group.send([rows], self._other, 0))
            for work in works:
                self._wait(work)

    def receive(self, num_blocks: int, take: Take) -> None:
        """See BlockChannel."""
        works: deque[tuple[int, Tensor, Any]] = deque()
        with self._exchange("blocks did not arrive"):
            for slot, first, count in cut(num_blocks, self._piece_blocks):
                if len(works) == NUM_PIECES:
                    self._take_next(works, take)
                rows = self._pieces[slot, :count]
                works.append((first, rows, self._group.recv([rows], self._other, 0)))
            while works:
                self._take_next(works, take)

    def close(self) -> None:
        """See BlockChannel: the group goes with its last reference."""

    def _take_next(self, works: "deque[tuple[int, Tensor, Any]]", take: Take) -> None:
        first, rows, work = works.popleft()
        self._wait(work)
        take(first, rows)

    def _wait(self, work: Any) -> None:
        """Wait until this piece has been transferred."""
        if self._stream is None:
            work.wait(timedelta(seconds=self._timeout_s))
            return
        # NCCL's own wait only orders streams, and its own timeout ends the process: poll with a deadline instead.
        deadline_s = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                self._group.abort()
                raise PeerLost("the other end of a block transfer is silent")
            time.sleep(_POLL_S)
        work.wait()

    @contextlib.contextmanager
    def _exchange(self, problem: str) -> Iterator[None]:
        """Run the body, on a device on the pair's own stream and synchronized at its end.

        The engine's work needs no wait: results are announced only once computed.
        """
        try:
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                yield
            self._stream.synchronize()
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
        """End the setup: from now on the socket carries requests and answers."""
        self._is_open = False

    def set(self, key: str, value: Any) -> None:
        """Set the entry here and at the other end."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = content
        if self._is_open:
            self._control.send(RendezvousValue(key, content))

    def get(self, key: str) -> bytes:
        """Wait for the other end to set it."""
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
        """Return whether all of them are known here already."""
        return all(key in self._entries for key in keys)

    def clone(self) -> "ControlStore":
        """Return the same store."""
        return self


def make_pair(
    control: ControlSocket, rank: int, *, transport: str, block_bytes: int, timeout_s: float, device: torch.device
) -> ProcessPair:
    """Set up a process group with the other end of this connection. Raises PeerLost."""
    store = ControlStore(control)
    try:
        make_group = _gloo_group if transport == "gloo" else _nccl_group
        group = make_group(store, rank, timeout_s, control.local_host)
        pair = ProcessPair(group, rank, block_bytes, timeout_s, device)
        _exchange_one(pair, rank)
    except (RuntimeError, MemoryError) as error:  # the latter from an invalid address
        raise PeerLost(f"no process group could be made: {_first_line(error)}") from error
    store.seal()
    return pair


def _gloo_group(store: ControlStore, rank: int, timeout_s: float, host: str) -> Any:
    gloo = _DISTRIBUTED.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1  # for collectives, of which there are none
    # Bound to the address of this connection and to no other.
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    return gloo(store, rank, 2, options)


def _nccl_group(store: ControlStore, rank: int, timeout_s: float, host: str) -> Any:
    nccl = _DISTRIBUTED.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NCCL_NEVER  # ProcessPair has its own timeout
    with _settings_lock:
        before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
        os.environ.update(_NCCL_SETTINGS)
        try:
            return nccl(store, rank, 2, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _exchange_one(pair: ProcessPair, rank: int) -> None:
    """Exchange one block: NCCL connects with the first bytes, through the store, which must still be open."""
    for sender in (OWNER_RANK, CLIENT_RANK):
        if rank == sender:
            pair.send(1, lambda _first, rows: None)
        else:
            pair.receive(1, lambda _first, rows: None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
