"""Everything that listens on the hosts of a cluster, and what it answers to those without credentials.

`purpose_of` is the table of ports in docs/hosts.md; a listener without a purpose has no business there.
"""

import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

_ANSWER_S = 1.5
_REPLY_BYTES = 1 << 12
_ALL_ADDRESSES = ("*", "0.0.0.0", "[::]")
_LINE = re.compile(r'^LISTEN\s+\d+\s+\d+\s+(\S+):(\d+)\s.*?(?:users:\(\("([^"]*)"|$)')
# Ray's services, by a method of each.
_RAY_METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.LogService/ListLogs",
    "/ray.rpc.RayletDriver/ClusterInfo",
)
RAY_PORTS: Mapping[int, str] = {
    6379: "Ray's head (GCS)",
    6381: "Ray's raylet",
    6382: "Ray's object manager",
    6383: "Ray's agent",
    6384: "Ray's agent (HTTP)",
    6385: "Ray's runtime environments (HTTP)",
    10001: "Ray's client server",
}
RAY_WORKER_PORTS = range(10100, 11000)
LINKS = "links and KV"
GATEWAY = "gateway"
RAY_WORKERS = "Ray's workers"
LOGIN = "SSH"
LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class Listener:
    """One TCP socket in the state LISTEN."""

    address: str
    port: int
    program: str

    @property
    def is_loopback(self) -> bool:
        """Return whether only its own host reaches it."""
        return self.address.startswith(("127.", "[::1]", "[::ffff:127."))


@dataclass(frozen=True, slots=True)
class Probe:
    """One attempt without credentials, and what came of it."""

    kind: str
    answer: str  # empty: nothing
    is_refused: bool


def listeners_of(listing: str) -> list[Listener]:
    """Return the listeners that `ss -ltnpH` printed."""
    found = (_LINE.match(line.strip()) for line in listing.splitlines())
    return [Listener(one[1], int(one[2]), one[3] or "") for one in found if one is not None]


def purpose_of(listener: Listener, node_address: str, gateway_port: int) -> str | None:
    """Return the purpose of a listener on a host at this address; None: it should not be there."""
    if listener.is_loopback:
        return LOOPBACK
    if listener.port == 22:
        return LOGIN
    if listener.port in RAY_PORTS:
        return RAY_PORTS[listener.port]
    if listener.port in RAY_WORKER_PORTS:
        return RAY_WORKERS
    if listener.address in _ALL_ADDRESSES:
        return None
    if listener.port == gateway_port:
        return GATEWAY
    is_ours = listener.program.startswith("ray::") and listener.address == node_address
    return LINKS if is_ours else None


def probe(address: str, port: int) -> list[Probe]:
    """Try a port in every way that needs no credentials."""
    tries: Sequence[Callable[[str, int], Probe]] = (_garbage, _http_get, _ray_call, _tls_without_certificate)
    with ThreadPoolExecutor(len(tries)) as pool:
        return list(pool.map(lambda one: one(address, port), tries))


def _garbage(address: str, port: int) -> Probe:
    reply = _exchange(address, port, bytes(range(256)) * 16)
    return Probe("garbage", repr(reply[:60]) if reply else "", not _is_content(reply))


def _http_get(address: str, port: int) -> Probe:
    reply = _exchange(address, port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return Probe("HTTP GET", repr(reply[:60]) if reply else "", not _is_content(reply))


def _is_content(reply: bytes) -> bool:
    """Return whether this is more than an error of HTTP, a TLS alert, or the settings with which HTTP/2 begins."""
    if not reply or reply[0] == 0x15:
        return False
    if reply.startswith(b"HTTP/1."):
        return reply[9:10] != b"4"
    return not _is_http2_preamble(reply)


def _is_http2_preamble(reply: bytes) -> bool:
    """Return whether all frames are settings, pings, window updates, resets or a farewell: none carries an answer."""
    while reply:
        if len(reply) < 9 or reply[3] not in (0x3, 0x4, 0x6, 0x7, 0x8):
            return False
        reply = reply[9 + int.from_bytes(reply[:3], "big") :]
    return True


def _exchange(address: str, port: int, sent: bytes) -> bytes:
    try:
        with socket.create_connection((address, port), _ANSWER_S) as connection:
            connection.sendall(sent)
            return connection.recv(_REPLY_BYTES)
    except OSError:  # silence, or a closed connection
        return b""


def _ray_call(address: str, port: int) -> Probe:
    """Call every service of Ray's without a token: one that is not there is unimplemented, one that is must refuse."""
    codes = []
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        for method in _RAY_METHODS:
            try:
                channel.unary_unary(method)(b"", timeout=_ANSWER_S)
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
    refusals = {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}
    return Probe("Ray without a token", ", ".join(sorted(set(codes))), set(codes) <= refusals)


def _tls_without_certificate(address: str, port: int) -> Probe:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((address, port), _ANSWER_S) as connection,
            context.wrap_socket(connection) as secured,
        ):
            secured.sendall(bytes(64))
            reply = secured.recv(_REPLY_BYTES)
    except (OSError, ssl.SSLError) as error:
        return Probe("TLS without a certificate", getattr(error, "reason", "") or type(error).__name__, True)
    return Probe("TLS without a certificate", repr(reply[:60]) if reply else "", not reply)
