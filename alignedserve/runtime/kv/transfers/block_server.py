"""The owner's end of block transfers without shared memory: a buffer's blocks, served to whoever proves itself.

A thread for each connected peer answers its questions one after the other. A peer that dies, is stopped in the middle
of a transfer or says what it should not is dropped with its connection; the others never notice. What a dropped peer
had half written is under a generation that nobody was told of, and so is never read.
"""

import contextlib
import logging
import socket
import threading
from pathlib import Path

import torch

from alignedserve.core.errors import PeerError, ProtocolError
from alignedserve.messages.blocks import OpenTransfer, TransferOpened, TransferRefused
from alignedserve.runtime.kv.transfers.control import Control, keep_alive, listen_at
from alignedserve.runtime.kv.transfers.process_pair import OWNER_RANK, make_pair
from alignedserve.runtime.kv.transfers.session import ServedBuffer, Session
from alignedserve.runtime.process.links import Identity, Peer

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256


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
        self._accepting.join()
        self._listener.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.hang_up()
        for thread in threads:
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
            one.hang_up()

    def _open(self, control: Control) -> Session | None:
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


def _real_address(listener: socket.socket, address: str) -> str:
    if listener.family == socket.AF_UNIX:
        return address
    host, port = listener.getsockname()[:2]
    return f"tcp:{host}:{port}"
