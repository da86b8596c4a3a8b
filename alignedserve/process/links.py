"""One end of a link: framing, mutual proof of the cluster's secret, liveness.

A frame is a 4-byte little-endian length and a MessagePack message. The listener challenges, the dialler answers and
challenges back; until both proofs hold, nothing but handshake messages is decoded. A peer that is silent for
`peer_timeout_s` is lost, whether it died, was stopped or was cut off. Times in messages from another host are converted
to this one's clock.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import struct
import time
from asyncio.trsock import TransportSocket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from typing_extensions import override

from alignedserve.core.errors import PeerLost, ProtocolError
from alignedserve.messages.clocks import ClockOffset, on_this_clock
from alignedserve.messages.handshake import Challenge, HandshakeMessage, Hello, Ping, Role, Welcome
from alignedserve.messages.wire import MAX_FRAME_BYTES, PROTOCOL_VERSION, Codec, Message
from alignedserve.process.tls import Credentials, check_certificate

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<I")
_HANDSHAKE_CODEC = Codec(HandshakeMessage)
_MAX_HANDSHAKE_BYTES = 4096
# A peer that does not read is disconnected before its backlog fills the memory.
_MAX_BACKLOG_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of this process on every link."""

    role: Role
    name: str
    secret: bytes = field(repr=False)  # never in a log
    peer_timeout_s: float = 5.0
    credentials: Credentials | None = None  # for addresses that begin with tls:

    def trusted(self) -> Credentials:
        assert self.credentials is not None, "TLS without credentials"
        return self.credentials


@dataclass(frozen=True, slots=True)
class Peer:
    """The identity of the other end."""

    role: Role
    name: str


class Link(asyncio.Protocol):
    """One connection. All callbacks run on the loop that owns it; `send` never blocks."""

    def __init__(
        self,
        identity: Identity,
        codec: Codec,
        *,
        is_dialler: bool,
        on_made: Callable[["Link"], None],
        on_linked: Callable[["Link"], None],
        on_message: Callable[["Link", Message], None],
        on_lost: Callable[["Link"], None],
        dialled: str = "",
    ) -> None:
        """`dialled`: the name of the process that a dialler means to reach; empty: any of the cluster."""
        self.peer: Peer | None = None
        self.problem = ""  # that ended the handshake
        self._identity = identity
        self._codec = codec
        self._is_dialler = is_dialler
        self._dialled = dialled
        self._on_made = on_made
        self._on_linked = on_linked
        self._on_message = on_message
        self._on_lost = on_lost
        self._nonce = secrets.token_bytes(32)
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []  # frames sent in this turn of the loop
        self._num_outgoing_bytes = 0
        self._is_write_due = False
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()  # done when the connection is gone
        self._made_s = self._last_heard_s = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._peer_clock: ClockOffset | None = None  # of another host

    # --- asyncio.Protocol

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of a stream; uvloop's are of no asyncio class
        self._on_made(self)
        if self._transport.get_extra_info("socket").family != socket.AF_UNIX:
            self._peer_clock = ClockOffset()
        self._watch_silence()
        if not self._is_dialler:
            self._write(_HANDSHAKE_CODEC.encode(Challenge(PROTOCOL_VERSION, self._nonce)))

    @override
    def data_received(self, data: bytes) -> None:
        self._last_heard_s = self._loop.time()
        self._buffer += data
        try:
            while (payload := self._next_frame()) is not None:
                if self.peer is None:
                    self._handshake(_HANDSHAKE_CODEC.decode(payload))
                else:
                    self._receive(payload)
        except ProtocolError as error:
            if self.peer is None:
                self.problem = str(error)
            else:
                logger.warning("link to %s closed: %s", self.peer, error)
            self.close()

    @override
    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._watch is not None:
            self._watch.cancel()
        if not self.lost.done():
            self.lost.set_result(None)
        self._on_lost(self)

    # --- for the owner

    def send(self, message: Message) -> None:
        """Enqueue one message, written with the others of this turn of the loop. On a lost link it is dropped;
        `on_lost` reports the loss."""
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() + self._num_outgoing_bytes > _MAX_BACKLOG_BYTES:
            logger.warning("link to %s closed: it does not read its messages", self.peer)
            self.close()
            return
        payload = self._codec.encode(message)
        self._outgoing += (_HEADER.pack(len(payload)), payload)
        self._num_outgoing_bytes += len(payload)
        if not self._is_write_due:
            self._is_write_due = True
            self._loop.call_soon(self._write_outgoing)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- inside

    def _write_outgoing(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        self._is_write_due, self._num_outgoing_bytes = False, 0
        if self._transport is not None:
            self._transport.write(b"".join(outgoing))

    def _write(self, payload: bytes) -> None:
        assert self._transport is not None, "a write before the connection was made"
        self._transport.write(_HEADER.pack(len(payload)) + payload)

    def _next_frame(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        limit = MAX_FRAME_BYTES if self.peer is not None else _MAX_HANDSHAKE_BYTES
        if length > limit:
            raise ProtocolError(f"a frame of {length} bytes, more than {limit}")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return payload

    def _receive(self, payload: bytes) -> None:
        message = self._codec.decode(payload)
        if isinstance(message, Ping):
            if self._peer_clock is not None:
                self._peer_clock.observe(message.clock_s, time.monotonic())
            return
        if self._peer_clock is not None:
            message = on_this_clock(message, self._peer_clock.seconds)
        self._on_message(self, message)

    def _handshake(self, message: Message) -> None:
        match message:
            case Challenge() if self._is_dialler:
                check_version(message.version)
                proof = self._proof("dialler", message.nonce, self._identity.name)
                identity = self._identity
                hello = Hello(PROTOCOL_VERSION, identity.role, identity.name, proof, self._nonce, self._dialled)
                self._write(_HANDSHAKE_CODEC.encode(hello))
            case Hello() if not self._is_dialler:
                check_version(message.version)
                self._check_proof(message.proof, "dialler", message.name)
                # Before the peer counts as linked: this link must not replace a true link.
                _check_dialled(message.dialled, self._identity.name)
                proof = self._proof("listener", message.nonce, self._identity.name)
                self._write(_HANDSHAKE_CODEC.encode(Welcome(self._identity.role, self._identity.name, proof)))
                self._linked(Peer(message.role, message.name))
            case Welcome() if self._is_dialler:
                self._check_proof(message.proof, "listener", message.name)
                _check_dialled(self._dialled, message.name)
                self._linked(Peer(message.role, message.name))
            case _:
                raise ProtocolError("a handshake message out of turn")

    def _linked(self, peer: Peer) -> None:
        assert self._transport is not None, "linked without a connection"
        if self._transport.get_extra_info("ssl_object") is not None:
            check_certificate(self._transport.get_extra_info("peercert"), peer.name)
        self.peer = peer
        self.send(Ping(time.monotonic()))
        self._on_linked(self)

    def _proof(self, side: str, nonce: bytes, name: str) -> bytes:
        return proof_of(self._identity.secret, side, nonce, name)

    def _check_proof(self, proof: bytes, side: str, name: str) -> None:
        check_proof(self._identity.secret, proof, side, self._nonce, name)

    def _watch_silence(self) -> None:
        timeout_s = self._identity.peer_timeout_s
        if self._loop.time() - self._last_heard_s > timeout_s:
            if self.peer is not None:
                logger.warning("link to %s closed: silent for more than %.1f s", self.peer, timeout_s)
            self.problem = "the peer is silent"
            self.close()
            return
        if self.peer is None and self._loop.time() - self._made_s > timeout_s:
            self.problem = f"it is not complete after {timeout_s:.1f} s"
            self.close()
            return
        if self.peer is not None:
            self.send(Ping(time.monotonic()))
        self._watch = self._loop.call_later(timeout_s / 5, self._watch_silence)


def _check_dialled(dialled: str, name: str) -> None:
    if dialled not in ("", name):
        raise ProtocolError(f"{dialled} was dialled and {name} answered")


def proof_of(secret: bytes, side: str, nonce: bytes, name: str) -> bytes:
    return hmac.digest(secret, side.encode() + nonce + name.encode(), "sha256")


def check_proof(secret: bytes, proof: bytes, side: str, nonce: bytes, name: str) -> None:
    """Check a proof. Raises ProtocolError when it was made with another secret."""
    if not hmac.compare_digest(proof, proof_of(secret, side, nonce, name)):
        raise ProtocolError("the peer does not know this cluster's secret")


def check_version(version: int) -> None:
    """Check the protocol version. Raises ProtocolError when it differs."""
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, this process {PROTOCOL_VERSION}")


async def connect(address: str, make_link: Callable[[], Link], identity: Identity) -> Link:
    """Dial `unix:/path`, `tls:host:port` or, in clear, `tcp:host:port`. Raises PeerLost when that fails."""
    loop = asyncio.get_running_loop()
    kind, _, rest = address.partition(":")
    try:
        if kind == "unix":
            return (await loop.create_unix_connection(make_link, rest))[1]
        host, _, port = rest.rpartition(":")
        async with asyncio.timeout(identity.peer_timeout_s):
            if kind == "tcp":
                return (await loop.create_connection(make_link, host, int(port)))[1]
            context = identity.trusted().dialler_context()
            return (await loop.create_connection(make_link, host, int(port), ssl=context, server_hostname=""))[1]
    except (OSError, ValueError) as error:
        raise PeerLost(f"no connection to {address} ({str(error) or 'no answer'})") from error


async def listen(address: str, make_link: Callable[[], Link], identity: Identity) -> asyncio.Server:
    """Listen at an address that `connect` dials. Raises OSError when it is taken."""
    loop = asyncio.get_running_loop()
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return await loop.create_unix_server(make_link, rest)
    host, _, port = rest.rpartition(":")
    if kind == "tcp":
        return await loop.create_server(make_link, host, int(port))
    context, timeout_s = identity.trusted().listener_context(), identity.peer_timeout_s
    return await loop.create_server(make_link, host, int(port), ssl=context, ssl_handshake_timeout=timeout_s)


def real_address(listener: "socket.socket | TransportSocket", address: str) -> str:
    """Return where a listener at this address is reached: a port of 0 stands for any free one."""
    if listener.family == socket.AF_UNIX:
        return address
    host, port = listener.getsockname()[:2]
    return f"{address.partition(':')[0]}:{host}:{port}"
