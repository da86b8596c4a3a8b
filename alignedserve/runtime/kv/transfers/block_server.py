"""The owner's end of block transfers without shared memory: a server of a buffer's blocks for authenticated peers.

One thread per connected peer handles its requests in order. A peer that dies, stops in the middle of a transfer or
violates the protocol is dropped with its connection; the others are not affected. Blocks that a dropped peer had only
partly written carry a generation that was never announced, and so are never read.
"""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter
from pathlib import Path

from alignedserve.core.errors import PeerError, ProtocolError
from alignedserve.messages.blocks import OpenTransfer, TransferOpened, TransferRefused
from alignedserve.runtime.kv.transfers.block_channel import OWNER_RANK
from alignedserve.runtime.kv.transfers.channel_opener import ChannelOpener, open_stream
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket, keep_alive, listen_at
from alignedserve.runtime.kv.transfers.session import ServedBuffer, TransferSession
from alignedserve.runtime.process.links import Identity, Peer, real_address

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 256  # of peers
_MAX_STRANGERS = 64  # beside them: connections that have yet to prove what they are
# Reasons why a connection is not accepted that say nothing about the next one: too many open files, or no memory.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_PAUSE_S = 0.1


class BlockServer:
    """Serves a buffer from construction on. `address` is where it really listens (a TCP port of 0 is any free one).

    The buffer belongs to the caller, which closes the server before the buffer. Raises OSError when the address is
    taken. `transports`: those that a peer may choose from; others than tcp need an `open_channel` that opens them.
    """

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
        self._connections: dict[ControlSocket, str] = {}  # with the peer's name, empty until it is authenticated
        self._strangers: dict[ControlSocket, None] = {}  # those in their handshake, the oldest first
        self._threads: set[threading.Thread] = set()
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
                    self._connections[control] = ""
                    self._strangers[control] = None
                    self._threads.add(thread)
                    thread.start()
            if not is_served:
                control.close()

    def _make_room(self, host: str) -> None:
        """Drop a connection in its handshake when there are too many: the oldest of the host that has most of them.

        So a host that opens connections without end keeps out only itself.
        """
        with self._lock:
            if len(self._strangers) < _MAX_STRANGERS:
                return
            hosts = Counter([host, *(one.peer_host for one in self._strangers)])
            worst = max(hosts, key=lambda name: hosts[name])
            oldest = next((one for one in self._strangers if one.peer_host == worst), next(iter(self._strangers)))
            del self._strangers[oldest]
        logger.warning("too many connections in their handshake: the oldest from %s is dropped", worst or "here")
        oldest.disconnect()

    def _serve(self, control: ControlSocket) -> None:
        name = "unknown peer"
        session = None
        try:
            self._buffer.begin_thread()
            if self._context is not None:
                control.encrypt(self._context, is_listener=True)
            peer = control.authenticate_as_listener(self._identity)
            name = peer.name
            self._replace_older(control, peer)
            session = self._open(control)
            while session is not None:
                control.wait_readable()
                session.handle(control.receive())
        except PeerError as error:
            if not self._is_closed:
                logger.info("block transfer with %s ended: %s", name, error)
        finally:
            control.close()
            if session is not None:
                session.close()
            with self._lock:
                del self._connections[control]
                self._strangers.pop(control, None)
                self._threads.discard(threading.current_thread())

    def _replace_older(self, control: ControlSocket, peer: Peer) -> None:
        """Drop earlier connections of a peer that reconnects: they are lost, even if that has not been noticed."""
        with self._lock:
            older = [one for one, name in self._connections.items() if name == peer.name]
            self._connections[control] = peer.name
            self._strangers.pop(control, None)
        for one in older:
            one.disconnect()

    def _open(self, control: ControlSocket) -> TransferSession | None:
        request = control.receive()
        if not isinstance(request, OpenTransfer):
            raise ProtocolError("a request before the transfer was opened")
        buffer, transport = self._buffer, request.transport
        reason = None
        if transport not in self._transports:
            reason = f"this buffer is served by {', '.join(self._transports)}, not by {transport!r}"
        elif request.layout_digest != buffer.layout.digest().hex():
            reason = "the block layouts of the two ends differ"
        if reason is not None:
            control.send(TransferRefused(reason))
            return None
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
            device=buffer.device,
        )
        return TransferSession(buffer, control, channel)
