"""The door for orders to a cluster on this host: a Unix socket in its private folder, for its user alone.

A connection carries one request, a line of JSON, and its answers, a line each; the last one closes it. Nothing is
decided here: the driver takes the requests when it looks, on a thread of its own.
"""

import contextlib
import logging
import os
import queue
import secrets
import socket
import socketserver
import struct
import threading
from pathlib import Path

import msgspec
from typing_extensions import override

from alignedserve.cluster.deployments.orders import AdminRequest, Answer, Refused, Remark, problem_of

logger = logging.getLogger(__name__)

SOCKET_NAME = "admin.sock"  # in the run folder
MAX_LINE_BYTES = 1024 * 1024
_MAX_CONNECTIONS = 16
_MAX_ANSWERS = 1024  # that a client may leave unread
_REQUEST_S = 10.0
_CLOSING_S = 0.1  # that a door takes at most to see that it is closed
_PEER = struct.Struct("3i")  # process, user, group
_MACOS_LEVEL, _MACOS_PEER_OPTION = 0, 1  # SOL_LOCAL, LOCAL_PEERCRED
_MACOS_PEER = struct.Struct("2Ih16I")  # version, user, number of groups, groups


class AdminApi:
    """Takes orders to a cluster from the processes of its user, until it is closed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SOCKET_NAME
        self.path.unlink(missing_ok=True)
        self._taken: queue.SimpleQueue[tuple[str, AdminRequest]] = queue.SimpleQueue()
        self._answers: dict[str, queue.Queue[Answer | None]] = {}
        self._is_closed = False  # no more requests are taken
        self._lock = threading.Lock()  # of both
        self._server = _Server(str(self.path), self)
        self.path.chmod(0o600)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSING_S,), name="admin API", daemon=True
        )
        self._thread.start()

    def take(self) -> list[tuple[str, AdminRequest]]:
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._taken.get_nowait())
        return taken

    def answer(self, request_id: str, answer: Answer) -> None:
        """Answer a request, if its client is still there; any but a Remark is the last one."""
        with self._lock:
            answers = self._answers.get(request_id)
        if answers is not None:
            if isinstance(answer, Remark):
                with contextlib.suppress(queue.Full):
                    answers.put_nowait(answer)
            else:
                _put_last(answers, answer)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting = list(self._answers.values())
        for answers in waiting:
            _put_last(answers, None)
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self.path.unlink(missing_ok=True)

    # --- on the threads of connections

    def serve(self, connection: socket.socket) -> None:
        connection.settimeout(_REQUEST_S)
        with connection.makefile("rb") as reading, contextlib.suppress(OSError):
            if _user_of(connection) != os.getuid():
                return
            request = _decoded(reading.readline(MAX_LINE_BYTES + 1))
            if isinstance(request, Refused):
                connection.sendall(_line(request))
                return
            request_id, answers = secrets.token_hex(8), queue.Queue[Answer | None](_MAX_ANSWERS)
            with self._lock:
                is_busy = len(self._answers) >= _MAX_CONNECTIONS
                is_closed = self._is_closed  # nobody would answer, or end the waiting
                if not is_busy and not is_closed:
                    self._answers[request_id] = answers
            if is_closed:
                return
            if is_busy:
                connection.sendall(_line(Refused("too many orders wait; give it again later")))
                return
            self._taken.put((request_id, request))
            try:
                while (answer := answers.get()) is not None:
                    connection.sendall(_line(answer))
                    if not isinstance(answer, Remark):
                        return
            finally:
                with self._lock:
                    del self._answers[request_id]


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str, door: AdminApi) -> None:
        self._door = door
        super().__init__(path, socketserver.BaseRequestHandler)

    @override
    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket), "a stream server without a stream"
        self._door.serve(request)

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        logger.warning("a connection to the admin API has failed", exc_info=True)


def _put_last(answers: "queue.Queue[Answer | None]", answer: Answer | None) -> None:
    while True:
        try:
            answers.put_nowait(answer)
        except queue.Full:
            with contextlib.suppress(queue.Empty):
                answers.get_nowait()
        else:
            return


def _user_of(connection: socket.socket) -> int:
    if hasattr(socket, "SO_PEERCRED"):
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        return int(_PEER.unpack(packed)[1])
    packed = connection.getsockopt(_MACOS_LEVEL, _MACOS_PEER_OPTION, _MACOS_PEER.size)
    return int(_MACOS_PEER.unpack(packed)[1])


def _decoded(line: bytes) -> AdminRequest | Refused:
    if len(line) > MAX_LINE_BYTES:
        return Refused("the order is too long")
    try:
        request: AdminRequest = msgspec.json.decode(line, type=AdminRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Refused("not an order that this version knows")
    problem = problem_of(request)
    return request if problem is None else Refused(problem)


def _line(answer: Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"
