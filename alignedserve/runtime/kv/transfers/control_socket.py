"""The control socket of a block transfer: framing, mutual authentication by the cluster's secret, deadlines.

Blocking, for the thread that moves the blocks. Frames are those of process.links (a 4-byte little-endian
length, a MessagePack message) with a smaller bound. Proofs are constructed alike but name the two sides differently, so
that a proof made for one kind of connection is invalid on the other."""

import contextlib
import select
import socket
import ssl
import struct
import time
from pathlib import Path
from secrets import token_bytes

from alignedserve.core.errors import PeerLost, ProtocolError
from alignedserve.messages.blocks import BlockClientInbound, BlockServerInbound
from alignedserve.messages.handshake import Challenge, HandshakeMessage, Hello, Welcome
from alignedserve.messages.wire import PROTOCOL_VERSION, Codec, Message
from alignedserve.process.links import Identity, Peer, check_proof, check_version, proof_of
from alignedserve.process.tls import check_certificate

_HEADER = struct.Struct("<I")
_MAX_HANDSHAKE_BYTES = 4096
_MAX_REQUEST_BYTES = 8 * 1024 * 1024
_TLS = "tls:"
_DIALLER, _LISTENER = "block dialler", "block listener"
_HANDSHAKE = Codec(HandshakeMessage)
_SERVER_INBOUND, _CLIENT_INBOUND = Codec(BlockServerInbound), Codec(BlockClientInbound)


class ControlSocket:
    """A connected socket, owned. Methods raise PeerLost when the other end is gone or too slow, and ProtocolError when
    it violates the protocol."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._codec = _HANDSHAKE
        self._max_bytes = _MAX_HANDSHAKE_BYTES
        self._is_dropped = False
        self.peer_host = _host_of(connection)

    @property
    def local_host(self) -> str:
        """The local address of the connection; the loopback address for a Unix socket."""
        name = self._socket.getsockname()
        return str(name[0]) if self._socket.family in (socket.AF_INET, socket.AF_INET6) else "127.0.0.1"

    def send(self, message: Message) -> None:
        """Send one message."""
        payload = self._codec.encode(message)
        self.send_bytes(_HEADER.pack(len(payload)) + payload)

    def send_bytes(self, content: bytes | memoryview) -> None:
        """Send the plain bytes of the blocks that a message has named."""
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(content)
        except OSError as error:
            raise PeerLost(f"the other end of a block transfer does not read: {error}") from error

    def receive(self) -> Message:
        """Return the next message, which must be complete within the timeout."""
        deadline_s = time.monotonic() + self._timeout_s
        (length,) = _HEADER.unpack(self._read(_HEADER.size, deadline_s))
        if length > self._max_bytes:
            raise ProtocolError(f"a frame of {length} bytes, more than {self._max_bytes}")
        return self._codec.decode(self._read(length, deadline_s))

    def receive_bytes(self, content: memoryview) -> None:
        """Fill memory with the bytes that follow; all must arrive within the timeout."""
        self._fill(content, time.monotonic() + self._timeout_s)

    def wait_readable(self) -> None:
        """Wait without limit until there is something to receive."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.poll()
        except (OSError, ValueError) as error:
            raise PeerLost("the connection was closed") from error

    def disconnect(self) -> None:
        """Shut the connection down from another thread. May be repeated. The thread that uses the socket gets PeerLost
        and closes it. If it were closed here, its descriptor could belong to a newer connection by the time that thread
        waits on it."""
        self._is_dropped = True
        with contextlib.suppress(OSError):  # it may not be connected any more
            # Not SSLSocket's own, which drops TLS first: the other thread would go on in clear on the same socket.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def release(self) -> socket.socket:
        """Return the connection, once both ends have proved what they are; the caller owns it from now on."""
        return self._socket

    def close(self) -> None:
        """Close the connection, on the thread that uses it. May be repeated."""
        self.disconnect()
        self._socket.close()

    def encrypt(self, context: ssl.SSLContext, *, is_listener: bool) -> None:
        """Go over to TLS before anything else is said. Raises PeerLost: the other end does not, or is not trusted."""
        try:
            self._socket.settimeout(self._timeout_s)
            encrypted = context.wrap_socket(self._socket, server_side=is_listener, do_handshake_on_connect=False)
            self._socket = encrypted
            if self._is_dropped:  # perhaps while neither socket had the descriptor, so that nothing was shut down
                raise PeerLost("the connection was dropped before TLS")
            encrypted.do_handshake()
        except OSError as error:
            raise PeerLost(f"no TLS with the other end of a block transfer: {error}") from error

    def authenticate_as_listener(self, identity: Identity) -> Peer:
        """Challenge the dialler and answer its challenge; from then on it may send requests."""
        nonce = token_bytes(32)
        self.send(Challenge(PROTOCOL_VERSION, nonce))
        match self.receive():
            case Hello(version=version, role=role, name=name, proof=proof, nonce=its_nonce):
                check_version(version)
                check_proof(identity.secret, proof, _DIALLER, nonce, name)
                self._check_certificate(name)
            case _:
                raise ProtocolError("a handshake message out of turn")
        own_proof = proof_of(identity.secret, _LISTENER, its_nonce, identity.name)
        self.send(Welcome(identity.role, identity.name, own_proof))
        self._use_codec(_SERVER_INBOUND)
        return Peer(role, name)

    def authenticate_as_dialler(self, identity: Identity) -> Peer:
        """Answer the listener's challenge and check its own proof."""
        nonce = token_bytes(32)
        match self.receive():
            case Challenge(version=version, nonce=its_nonce):
                check_version(version)
            case _:
                raise ProtocolError("a handshake message out of turn")
        own_proof = proof_of(identity.secret, _DIALLER, its_nonce, identity.name)
        self.send(Hello(PROTOCOL_VERSION, identity.role, identity.name, own_proof, nonce))
        match self.receive():
            case Welcome(role=role, name=name, proof=proof):
                check_proof(identity.secret, proof, _LISTENER, nonce, name)
                self._check_certificate(name)
            case _:
                raise ProtocolError("a handshake message out of turn")
        self._use_codec(_CLIENT_INBOUND)
        return Peer(role, name)

    def _check_certificate(self, name: str) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            check_certificate(self._socket.getpeercert(), name)

    def _use_codec(self, codec: Codec) -> None:
        self._codec = codec
        self._max_bytes = _MAX_REQUEST_BYTES

    def _read(self, count: int, deadline_s: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            part = bytearray(min(count - len(content), 1 << 20))
            self._fill(memoryview(part), deadline_s)
            content += part
        return bytes(content)

    def _fill(self, content: memoryview, deadline_s: float) -> None:
        received = 0
        try:
            while received < len(content):
                self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
                count = self._socket.recv_into(content[received:])
                if not count:
                    raise PeerLost("the other end of a block transfer closed the connection")
                received += count
        except OSError as error:
            raise PeerLost(f"nothing came from the other end of a block transfer: {error}") from error


def _host_of(connection: socket.socket) -> str:
    try:
        name = connection.getpeername()
    except OSError:
        return ""
    return str(name[0]) if connection.family in (socket.AF_INET, socket.AF_INET6) else ""


def dial(address: str, identity: Identity) -> ControlSocket:
    """Connect to `unix:/path`, `tls:host:port` or `tcp:host:port` and authenticate both ends. Raises PeerLost or
    ProtocolError."""
    try:
        connection = _connected(address, identity.peer_timeout_s)
    except (OSError, ValueError) as error:
        raise PeerLost(f"no connection to {address}") from error
    control = ControlSocket(connection, identity.peer_timeout_s)
    try:
        if address.startswith(_TLS):
            control.encrypt(identity.trusted().dialler_context(), is_listener=False)
        control.authenticate_as_dialler(identity)
    except (PeerLost, ProtocolError):
        control.close()
        raise
    return control


def _connected(address: str, timeout_s: float) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind != "unix":
        host, _, port = rest.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout_s)
        keep_alive(connection, timeout_s)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(rest)
    except OSError:
        connection.close()
        raise
    return connection


def listen_at(address: str) -> socket.socket:
    """Return a listening socket at `unix:/path`, `tls:host:port` or `tcp:host:port` (0: any free port). Raises OSError
    when the address is taken."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if Path(rest).is_socket():
            Path(rest).unlink()  # a killed process left it; the folder is the cluster's own
        try:
            listener.bind(rest)
            listener.listen(64)
        except OSError:
            listener.close()
            raise
        return listener
    host, _, port = rest.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=64)


def keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Have the kernel detect a peer that is cut off while the connection is idle; a Unix socket needs none of it."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(timeout_s / 2)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(timeout_s / 6)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
