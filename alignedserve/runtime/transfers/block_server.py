"""The owner's end of block transfers without shared memory: a buffer's blocks, served to whoever proves itself.

A thread for each connected peer answers its questions one after the other. A peer that dies, is stopped in the middle
of a transfer or says what it should not is dropped with its connection; the others never notice. What a dropped peer
had half written is under a generation that nobody was told of, and so is never read.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected, PeerError, ProtocolError
from alignedserve.core.ids import BlockId
from alignedserve.messages.blocks import (
    BlocksAnswered,
    BlocksCopied,
    DeviceMemory,
    NamedBlocks,
    OpenTransfer,
    ReadBlocks,
    TransferOpened,
    TransferRefused,
    WriteBlocks,
)
from alignedserve.runtime.block_sums import check_target, spelt_out
from alignedserve.runtime.links import Identity, Peer
from alignedserve.runtime.transfers.control import Control, keep_alive, listen_at
from alignedserve.runtime.transfers.pair import OWNER_RANK, Pair, make_pair

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256
_MAX_TIMES_BUFFER = 16  # blocks in one question, in multiples of the buffer


class ServedBuffer(Protocol):
    """The blocks of an owner and the generations on them: an ArenaBuffer, or a DeviceBuffer."""

    layout: BlockLayout
    num_blocks: int
    device: torch.device

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        """Mark these blocks as written under this generation."""

    def is_stamped(self, block_ids: Sequence[BlockId], generation: int) -> bool:
        """Whether they all are."""

    def gather(self, block_ids: Sequence[BlockId], rows: Tensor) -> None:
        """Copy blocks into rows: uint8 [len(block_ids), block_bytes]."""

    def scatter(self, block_ids: Sequence[BlockId], rows: Tensor) -> None:
        """Copy rows into blocks."""

    def exported(self) -> DeviceMemory | None:
        """How another process of this machine maps the blocks, where they lie on a device."""


class BlockServer:
    """Serves from when it is made. `address` is where it really listens (a TCP port of 0 is any free one).

    The buffer stays its owner's, who closes the server before it closes the buffer. Raises OSError when the address is
    taken. `transports` are what a peer may choose from.
    """

    def __init__(self, buffer: ServedBuffer, address: str, *, identity: Identity, transports: tuple[str, ...]) -> None:
        self._buffer = buffer
        self._identity = identity
        self._transports = transports
        self._lock = threading.Lock()
        self._connections: dict[Control, str] = {}  # with the peer's name, empty until it is proven
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self._listener = listen_at(address)
        self.address = _real_address(self._listener, address)
        self._accepting = threading.Thread(target=self._accept, name="block server", daemon=True)
        self._accepting.start()

    @property
    def num_peers(self) -> int:
        """Connected peers, those that are still to prove themselves included."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Drop all peers and wait for their threads; those in the middle of a transfer end within its timeout."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.close()
        for thread in (self._accepting, *threads):
            thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    logger.error("block server at %s: %s", self.address, error)
                return
            keep_alive(connection, self._identity.peer_timeout_s)
            control = Control(connection, self._identity.peer_timeout_s)
            thread = threading.Thread(target=self._serve, args=(control,), name="block peer", daemon=True)
            with self._lock:
                is_full = len(self._connections) >= _MAX_CONNECTIONS
                if not is_full and not self._is_closed:
                    self._connections[control] = ""
                    self._threads.add(thread)
                    thread.start()
            if is_full:
                control.close()

    def _serve(self, control: Control) -> None:
        name = "unknown peer"
        try:
            peer = control.prove_as_listener(self._identity)
            name = peer.name
            self._replace_older(control, peer)
            session = self._open(control)
            while session is not None:
                control.wait()
                session.answer(control.receive())
        except PeerError as error:
            if not self._is_closed:
                logger.info("block transfer with %s ended: %s", name, error)
        finally:
            control.close()
            with self._lock:
                del self._connections[control]
                self._threads.discard(threading.current_thread())

    def _replace_older(self, control: Control, peer: Peer) -> None:
        """A peer that comes again has lost its former connection, whether or not we have noticed."""
        with self._lock:
            older = [one for one, name in self._connections.items() if name == peer.name]
            self._connections[control] = peer.name
        for one in older:
            one.close()

    def _open(self, control: Control) -> "Session | None":
        asked = control.receive()
        if not isinstance(asked, OpenTransfer):
            raise ProtocolError("a question before the transfer was opened")
        buffer, transport = self._buffer, asked.transport
        reason = None
        if transport not in self._transports:
            reason = f"this buffer is served by {', '.join(self._transports)}, not by {transport!r}"
        elif asked.layout_digest != buffer.layout.digest().hex():
            reason = "its block layout is not the other end's"
        if reason is not None:
            control.send(TransferRefused(reason))
            return None
        if transport == "cuda_ipc":
            control.send(TransferOpened(buffer.num_blocks, buffer.exported()))
            return Session(buffer, control, None)
        control.send(TransferOpened(buffer.num_blocks))
        pair = make_pair(
            control,
            OWNER_RANK,
            transport=transport,
            block_bytes=buffer.layout.block_bytes,
            timeout_s=self._identity.peer_timeout_s,
            device=buffer.device if transport == "nccl" else torch.device("cpu"),
        )
        return Session(buffer, control, pair)


class Session:
    """Questions of one peer, answered in order. Without a pair the peer moves the bytes by itself (cuda_ipc)."""

    def __init__(self, buffer: ServedBuffer, control: Control, pair: Pair | None) -> None:
        self._buffer = buffer
        self._control = control
        self._pair = pair
        self._in_hand: list[tuple[int, list[BlockId] | None]] = []  # generation and blocks of the last question

    def answer(self, question: object) -> None:
        """Perform one question. Raises PeerLost or ProtocolError, after which the session is over."""
        match question:
            case WriteBlocks(requests=requests):
                self._bound(requests)
                self._in_hand = [(one.generation, self._writable(one)) for one in requests]
                if self._pair is not None:
                    self._receive(self._pair, requests)
                self._tell()
            case ReadBlocks(requests=requests):
                self._bound(requests)
                self._in_hand = [(one.generation, self._readable(one)) for one in requests]
                self._tell()
                if self._pair is not None:
                    self._send(self._pair)
                    self._tell_again()
            case BlocksCopied() if self._pair is None:
                self._tell_again()
            case _:
                raise ProtocolError("a question out of turn")

    def _receive(self, pair: Pair, requests: Sequence[NamedBlocks]) -> None:
        """Take all bytes in, and write those whose request holds."""
        targets: list[BlockId | None] = []
        for named, (_, blocks) in zip(requests, self._in_hand, strict=True):
            targets += blocks if blocks is not None else [None] * sum(count for _, count in named.runs)

        def take(first: int, rows: Tensor) -> None:
            wanted = [
                (row, target) for row, target in enumerate(targets[first : first + len(rows)]) if target is not None
            ]
            if len(wanted) == len(rows):
                self._buffer.scatter([target for _, target in wanted], rows)
                return
            for row, target in wanted:
                self._buffer.scatter([target], rows[row : row + 1])

        pair.receive(len(targets), take)

    def _send(self, pair: Pair) -> None:
        sources = [block_id for _, blocks in self._in_hand for block_id in blocks or ()]

        def fill(first: int, rows: Tensor) -> None:
            self._buffer.gather(sources[first : first + len(rows)], rows)

        pair.send(len(sources), fill)

    def _tell(self) -> None:
        self._control.send(BlocksAnswered(tuple(blocks is not None for _, blocks in self._in_hand)))

    def _tell_again(self) -> None:
        """A generation may have been replaced while its blocks were read."""
        self._in_hand = [
            (generation, blocks if blocks is not None and self._buffer.is_stamped(blocks, generation) else None)
            for generation, blocks in self._in_hand
        ]
        self._tell()

    def _bound(self, requests: Sequence[NamedBlocks]) -> None:
        """Refused as a whole: no peer of ours asks for this, and it would keep us busy for ever."""
        counts = [sum(count for _, count in named.runs) for named in requests]
        if any(count > self._buffer.num_blocks for count in counts):
            raise ProtocolError("a request of more blocks than the buffer has")
        if sum(counts) > _MAX_TIMES_BUFFER * self._buffer.num_blocks:
            raise ProtocolError("a question about too many blocks")

    def _writable(self, named: NamedBlocks) -> list[BlockId] | None:
        try:
            blocks = spelt_out(named.runs, self._buffer.num_blocks)
            check_target(blocks, len(blocks), named.generation, self._buffer.num_blocks)
        except HandoffRejected as error:
            logger.warning("write under generation %d refused: %s", named.generation, error)
            return None
        self._buffer.stamp(blocks, named.generation)
        return blocks

    def _readable(self, named: NamedBlocks) -> list[BlockId] | None:
        try:
            blocks = spelt_out(named.runs, self._buffer.num_blocks)
        except HandoffRejected as error:
            logger.warning("read of generation %d refused: %s", named.generation, error)
            return None
        return blocks if self._buffer.is_stamped(blocks, named.generation) else None


def _real_address(listener: socket.socket, address: str) -> str:
    if listener.family == socket.AF_UNIX:
        return address
    host, port = listener.getsockname()[:2]
    return f"tcp:{host}:{port}"
