"""A connection between the first stage of a worker and another: frames of commands and of hidden rows.

A frame is a byte that tells its kind, its length in 8 bytes, and the content. One thread receives; any may send.
"""

import contextlib
import enum
import socket
import struct
import threading
from typing import NamedTuple

from alignedserve.core.errors import ProtocolError

_HEADER = struct.Struct("<BQ")
_MOST_BYTES = 1 << 31  # of a frame: rows of the longest chunk
_JOINED_BYTES = 1 << 16  # shorter contents are sent with their header in one piece


class FrameKind(enum.IntEnum):
    """What a frame holds."""

    COMMANDS = 1
    ROWS = 2  # hidden vectors [rows, hidden_size], as they lie in memory
    SPECIFICATION = 3  # the first frame to a stage
    STARTED = 4  # its answer


class StageFrame(NamedTuple):
    """A frame that has come."""

    kind: FrameKind
    content: bytearray


class StageWire:
    """One end of a connection, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()

    def send(self, kind: FrameKind, content: "bytes | bytearray | memoryview") -> None:
        """Send a frame. Raises OSError when the other end is gone."""
        num_bytes = len(content) if not isinstance(content, memoryview) else content.nbytes
        header = _HEADER.pack(kind, num_bytes)
        with self._sending:
            if num_bytes <= _JOINED_BYTES:
                self._connection.sendall(header + bytes(content))
            else:
                self._connection.sendall(header)
                self._connection.sendall(content)

    def receive(self) -> StageFrame | None:
        """Wait for a frame; None: the other end has closed. Raises ProtocolError for one that is none, OSError."""
        header = self._read(_HEADER.size)
        if header is None:
            return None
        kind, length = _HEADER.unpack(header)
        if length > _MOST_BYTES or kind not in FrameKind.__members__.values():
            raise ProtocolError("a frame between stages that is none")
        content = self._read(length)
        return None if content is None else StageFrame(FrameKind(kind), content)

    def close(self) -> None:
        """Close the connection; waits of the other end and of other threads end."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own, which drops TLS first: another thread would go on in clear on the same socket.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, length: int) -> bytearray | None:
        content = bytearray(length)
        left = memoryview(content)
        while left:
            got = self._connection.recv_into(left)
            if not got:
                return None
            left = left[got:]
        return content
