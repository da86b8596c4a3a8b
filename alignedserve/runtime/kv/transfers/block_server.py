"""The owner's end of block transfers without shared memory: a server of a buffer's blocks for authenticated peers.

One thread per connected peer handles its requests in order. A peer that dies, stops in the middle of a transfer or
violates the protocol is dropped with its connection; the others are not affected. Blocks that a dropped peer had only
partly written carry a generation that was never announced, and so are never read.

The way in which the bytes of blocks travel between the two ends of a block transfer, piece by piece.

Nothing here, nor in what serves blocks over a connection, loads torch: the KV pool does without it."""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, PeerError, ProtocolError
from alignedserve.messages.blocks import (
    BlocksAnswered,
    BlocksCopied,
    DeviceMemoryHandle,
    NamedBlocks,
    OpenTransfer,
    ReadBlocks,
    TransferOpened,
    TransferRefused,
    WriteBlocks,
)
from alignedserve.process.links import Identity, real_address
from alignedserve.runtime.kv.block_checksums import check_target, expand_runs
from alignedserve.runtime.kv.block_runs import BlockIds, BlockRuns, Ints
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket, keep_alive, listen_at
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
    """A BlockChannel on a control socket: pieces follow the message that names their blocks, without a header. A second
    thread fills or empties a piece while another one travels. `close` ends it."""

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


_MAX_TIMES_BUFFER = 16  # blocks in one message, in multiples of the buffer
_NOWHERE = -1  # the target of blocks that arrive for a refused request


class ServedBuffer(Protocol):
    """Blocks and the generations on them, as their owner serves them: an ArenaBuffer or a DeviceBuffer."""

    layout: BlockLayout
    num_blocks: int
    writer_stamps: bool  # the writer stamps the blocks (a candidate buffer); in the pool's arena their owner has

    def part_of(self, part: ArenaPart) -> "ServedBuffer":
        """Return what is served to a rank that copies this part of each block. Raises HandoffRejected."""

    def begin_thread(self) -> None:
        """Prepare the calling thread for copies of these blocks: a device becomes its current one."""

    def stamp(self, block_ids: BlockIds, generation: int) -> None:
        """Mark these blocks as written under this generation."""

    def is_stamped(self, block_ids: BlockIds, generation: int) -> bool:
        """Return whether all of them are marked with this generation."""

    def gather(self, block_ids: BlockIds, rows: Rows) -> None:
        """Copy blocks into rows: uint8 [len(block_ids), block_bytes]."""

    def scatter(self, block_ids: BlockIds, rows: Rows) -> None:
        """Copy rows into blocks."""

    def listed(self, block_ids: BlockIds) -> BlockList | None:
        """Return blocks in place; None: they are not in this process's memory."""

    def exported(self) -> DeviceMemoryHandle | None:
        """Return a handle by which another process of this machine maps the blocks; None: they are not on a device."""


class TransferSession:
    """Handles the requests of one peer in order. Without a channel the peer moves the bytes itself (cuda_ipc)."""

    def __init__(self, buffer: ServedBuffer, control: ControlSocket, channel: BlockChannel | None) -> None:
        self._buffer = buffer
        self._control = control
        self._channel = channel
        self._current: list[tuple[int, Ints | None]] = []  # generation and blocks of the latest requests

    def handle(self, message: object) -> None:
        """Perform one message. Raises PeerLost or ProtocolError, after which the session is unusable."""
        match message:
            case WriteBlocks(requests=requests):
                self._check_sizes(requests)
                self._current = [(request.generation, self._writable(request)) for request in requests]
                if self._channel is not None:
                    self._receive(self._channel, requests)
                self._answer_again()
            case ReadBlocks(requests=requests):
                self._check_sizes(requests)
                self._current = [(request.generation, self._readable(request)) for request in requests]
                self._answer()
                if self._channel is not None:
                    self._send(self._channel)
                    self._answer_again()
            case BlocksCopied() if self._channel is None:
                self._answer_again()
            case _:
                raise ProtocolError("the peer sent a message out of turn")

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _receive(self, channel: BlockChannel, requests: Sequence[NamedBlocks]) -> None:
        targets = _joined(
            blocks if blocks is not None else np.full(sum(count for _, count in named.runs), _NOWHERE, np.int64)
            for named, (_, blocks) in zip(requests, self._current, strict=True)
        )
        if isinstance(channel, BlockStream) and self._buffer.listed(targets[:0]) is not None:
            channel.receive_lists(self._lists_to_fill(targets))
            return

        def take(first: int, rows: Rows) -> None:
            part = targets[first : first + len(rows)]
            wanted = np.flatnonzero(part != _NOWHERE)
            if len(wanted) == len(part):
                self._buffer.scatter(part, rows)
                return
            for row in wanted.tolist():
                self._buffer.scatter(part[row : row + 1], rows[row : row + 1])

        channel.receive(len(targets), take)

    def _lists_to_fill(self, targets: Ints) -> Iterator[BlockList]:
        unwanted = np.empty((1, self._buffer.layout.block_bytes), np.uint8)
        changes = np.flatnonzero(np.diff(targets == _NOWHERE)) + 1
        for part in np.split(targets, changes):
            is_wanted = bool(len(part)) and part[0] != _NOWHERE
            listed = self._buffer.listed(part) if is_wanted else BlockList(unwanted, np.zeros_like(part))
            assert listed is not None, "a buffer in this process's memory"
            yield listed

    def _send(self, channel: BlockChannel) -> None:
        sources = _joined(blocks for _, blocks in self._current if blocks is not None)
        listed = self._buffer.listed(sources)
        if listed is not None and isinstance(channel, BlockStream):
            channel.send_lists([listed])
            return

        def fill(first: int, rows: Rows) -> None:
            self._buffer.gather(sources[first : first + len(rows)], rows)

        channel.send(len(sources), fill)

    def _answer(self) -> None:
        self._control.send(BlocksAnswered(tuple(blocks is not None for _, blocks in self._current)))

    def _answer_again(self) -> None:
        self._current = [
            (generation, blocks if blocks is not None and self._buffer.is_stamped(blocks, generation) else None)
            for generation, blocks in self._current
        ]
        self._answer()

    def _check_sizes(self, requests: Sequence[NamedBlocks]) -> None:
        counts = [sum(count for _, count in named.runs) for named in requests]
        if any(count > self._buffer.num_blocks for count in counts):
            raise ProtocolError("the peer asks for more blocks than the buffer has")
        if sum(counts) > _MAX_TIMES_BUFFER * self._buffer.num_blocks:
            raise ProtocolError("requests for too many blocks")

    def _writable(self, named: NamedBlocks) -> Ints | None:
        try:
            blocks = expand_runs(named.runs, self._buffer.num_blocks)
            check_target(blocks, len(blocks), named.generation, self._buffer.num_blocks)
            if self._buffer.writer_stamps:
                self._buffer.stamp(blocks, named.generation)
            elif not self._buffer.is_stamped(blocks, named.generation):
                raise HandoffRejected("the lease is no longer valid")
        except HandoffRejected as error:
            logger.warning("write under generation %d refused: %s", named.generation, error)
            return None
        return blocks

    def _readable(self, named: NamedBlocks) -> Ints | None:
        try:
            blocks = expand_runs(named.runs, self._buffer.num_blocks)
        except HandoffRejected as error:
            logger.warning("read of generation %d refused: %s", named.generation, error)
            return None
        return blocks if self._buffer.is_stamped(blocks, named.generation) else None


def _joined(lists: Iterable[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *lists])


logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256  # of peers
_MAX_STRANGERS = 64  # beside them: connections that have yet to prove what they are
# Reasons why a connection is not accepted that say nothing about the next one: too many open files, or no memory.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_PAUSE_S = 0.1
_UNKNOWN = ("", 0)
_SAY_REFUSED_S = 60.0  # between two lines about strangers, whom nobody lets in


class BlockServer:
    """Serves a buffer from construction on. `address` is where it really listens (a TCP port of 0 is any free one). The
    buffer belongs to the caller, which closes the server before the buffer. Raises OSError when the address is taken.
    `transports`: those that a peer may choose from; others than tcp need an `open_channel` that opens them."""

    def __init__(
        self,
        buffer: ServedBuffer,
        address: str,
        *,
        identity: Identity,
        transports: tuple[str, ...],
        open_channel: ChannelOpener = open_stream,
    ) -> None:
        self._buffer = buffer
        self._open_channel = open_channel
        self._identity = identity
        self._transports = transports
        self._lock = threading.Lock()
        self._connections: dict[ControlSocket, tuple[str, int]] = {}  # with the peer's name and rank, once it has said
        self._strangers: dict[ControlSocket, None] = {}  # those in their handshake, the oldest first
        self._threads: set[threading.Thread] = set()
        self._num_refused = 0  # strangers, since the last line about them
        self._say_refused_s = 0.0  # when the next may be written
        self._is_closed = False
        self._context = identity.trusted().listener_context() if address.startswith("tls:") else None
        self._listener = listen_at(address)
        self.address = real_address(self._listener, address)
        self._accepting = threading.Thread(target=self._accept, name="block server", daemon=True)
        self._accepting.start()

    @property
    def num_peers(self) -> int:
        """Connected peers, authenticated or not yet."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Drop all peers and wait for their threads; transfers in progress end within their timeout."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join()
        self._listener.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.disconnect()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.error("block server at %s: %s", self.address, error)
                if error.errno not in _PASSING:
                    return
                time.sleep(_PAUSE_S)
                continue
            keep_alive(connection, self._identity.peer_timeout_s)
            control = ControlSocket(connection, self._identity.peer_timeout_s)
            self._make_room(control.peer_host)
            thread = threading.Thread(target=self._serve, args=(control,), name="block peer", daemon=True)
            with self._lock:
                is_served = len(self._connections) < _MAX_CONNECTIONS + _MAX_STRANGERS and not self._is_closed
                if is_served:
                    self._connections[control] = _UNKNOWN
                    self._strangers[control] = None
                    self._threads.add(thread)
                    thread.start()
            if not is_served:
                control.close()

    def _make_room(self, host: str) -> None:
        """Drop a connection in its handshake when there are too many: the oldest of the host that has most of them. So
        a host that opens connections without end keeps out only itself."""
        with self._lock:
            if len(self._strangers) < _MAX_STRANGERS:
                return
            hosts = Counter([host, *(stranger.peer_host for stranger in self._strangers)])
            worst = max(hosts, key=lambda name: hosts[name])
            oldest = next(
                (stranger for stranger in self._strangers if stranger.peer_host == worst), next(iter(self._strangers))
            )
            del self._strangers[oldest]
        self._say_refused(f"too many at a time: the oldest from {worst or 'here'} is dropped")
        oldest.disconnect()

    def _say_refused(self, problem: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._num_refused += 1
            if now < self._say_refused_s:
                return
            num_refused, self._num_refused, self._say_refused_s = self._num_refused, 0, now + _SAY_REFUSED_S
        count = f", {num_refused} since the last such line" if num_refused > 1 else ""
        logger.warning("block server at %s: a handshake failed%s: %s", self.address, count, problem)

    def _serve(self, control: ControlSocket) -> None:
        name = session = None
        try:
            self._buffer.begin_thread()
            if self._context is not None:
                control.encrypt(self._context, is_listener=True)
            name = control.authenticate_as_listener(self._identity).name
            with self._lock:
                self._strangers.pop(control, None)
            session = self._open(control, name)
            while session is not None:
                control.wait_readable()
                session.handle(control.receive())
        except PeerError as error:
            if not self._is_closed and name is None:
                self._say_refused(str(error))
            elif not self._is_closed:
                logger.info("block transfer with %s ended: %s", name, error)
        finally:
            control.close()
            if session is not None:
                session.close()
            with self._lock:
                del self._connections[control]
                self._strangers.pop(control, None)
                self._threads.discard(threading.current_thread())

    def _open(self, control: ControlSocket, name: str) -> TransferSession | None:
        request = control.receive()
        if not isinstance(request, OpenTransfer):
            raise ProtocolError("a request before the transfer was opened")
        transport = request.transport
        try:
            buffer = self._served(request)
        except HandoffRejected as error:
            control.send(TransferRefused(str(error)))
            return None
        with self._lock:
            older = [connection for connection, known in self._connections.items() if known == (name, request.rank)]
            self._connections[control] = name, request.rank
        for connection in older:
            connection.disconnect()
        if transport == "cuda_ipc":
            control.send(TransferOpened(buffer.num_blocks, buffer.exported()))
            return TransferSession(buffer, control, None)
        control.send(TransferOpened(buffer.num_blocks))
        channel = self._open_channel(
            control,
            OWNER_RANK,
            transport=transport,
            block_bytes=buffer.layout.block_bytes,
            timeout_s=self._identity.peer_timeout_s,
        )
        return TransferSession(buffer, control, channel)

    def _served(self, request: OpenTransfer) -> ServedBuffer:
        if request.transport not in self._transports:
            raise HandoffRejected(
                f"this buffer is served by {', '.join(self._transports)}, not by {request.transport!r}"
            )
        part = ArenaPart(request.rank, request.num_ranks)
        buffer = self._buffer.part_of(part)
        if request.layout_digest != part.whole(buffer.layout).digest().hex():
            raise HandoffRejected("the block layouts of the two ends differ")
        return buffer
