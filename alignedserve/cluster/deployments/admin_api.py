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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
from typing_extensions import override

from alignedserve.cluster.deployments.orders import (
    AdminRequest,
    Answer,
    Models,
    OrderDone,
    OrderRefused,
    Remark,
    ShowModels,
    ShowStatus,
    StatusReport,
    problem_of,
)
from alignedserve.config.environment import run_root
from alignedserve.core.errors import PeerLost, ResourceError

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
            if isinstance(request, OrderRefused):
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
                connection.sendall(_line(OrderRefused("too many orders wait; give it again later")))
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


def _decoded(line: bytes) -> AdminRequest | OrderRefused:
    if len(line) > MAX_LINE_BYTES:
        return OrderRefused("the order is too long")
    try:
        request: AdminRequest = msgspec.json.decode(line, type=AdminRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return OrderRefused("not an order that this version knows")
    problem = problem_of(request)
    return request if problem is None else OrderRefused(problem)


def _line(answer: Answer) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


OnRemark = Callable[[str], None]
Ask = Callable[[AdminRequest, OnRemark], Answer]  # raises ResourceError with the reason of a refusal, or PeerLost

_LOOK_S = 10.0  # for a driver to answer a question


def find_cluster(cluster_id: str | None, *, option: str = "--cluster") -> Path:
    """Return the door of the cluster that runs on this host. `cluster_id`: the name of its run folder; None: only one
    runs. `option`: the command line option for that name. Raises ResourceError listing the clusters."""
    doors = {path.parent.name: path for path in sorted(run_root().glob(f"*/{SOCKET_NAME}")) if _is_open(path)}
    if cluster_id is not None and cluster_id in doors:
        return doors[cluster_id]
    if not doors:
        raise ResourceError("no cluster serves on this host; start one with `alignedserve serve`")
    if cluster_id is None and len(doors) == 1:
        return next(iter(doors.values()))
    known = ", ".join(f"{name} ({_url_of(door) or 'it does not answer'})" for name, door in doors.items())
    problem = "several clusters serve on this host" if cluster_id is None else f"no cluster {cluster_id} serves here"
    raise ResourceError(f"{problem}; choose with {option}: {known}")


def ask(door: Path, request: AdminRequest, on_remark: OnRemark) -> Answer:
    """Give an order and return its last answer, however long it takes; a question is answered soon or not at all.
    Raises ResourceError with the reason for which it is refused, or PeerLost when the cluster ends or is silent."""
    with contextlib.closing(_connect(door)) as connection:
        connection.settimeout(_LOOK_S if isinstance(request, ShowModels | ShowStatus) else None)
        for answer in _answers(connection, request):
            match answer:
                case Remark(text):
                    on_remark(text)
                case OrderRefused(reason):
                    raise ResourceError(reason)
                case OrderDone() | Models() | StatusReport():
                    return answer
    raise PeerLost("the cluster has ended before the order was carried out")


def show(ask: Ask) -> Models:
    """Return the models of a cluster. Raises PeerLost."""
    answer = ask(ShowModels(), lambda text: None)
    if not isinstance(answer, Models):
        raise PeerLost("the cluster is of another version")
    return answer


def show_status(door: Path) -> StatusReport:
    """Return what a cluster does now. Raises PeerLost."""
    answer = ask(door, ShowStatus(), lambda text: None)
    if not isinstance(answer, StatusReport):
        raise PeerLost("the cluster is of another version")
    return answer


def has_cluster() -> bool:
    return any(_is_open(path) for path in run_root().glob(f"*/{SOCKET_NAME}"))


def urls_here() -> list[str]:
    doors = [path for path in sorted(run_root().glob(f"*/{SOCKET_NAME}")) if _is_open(path)]
    return [url for url in map(_url_of, doors) if url is not None]


def _answers(connection: socket.socket, request: AdminRequest) -> Iterator[Answer]:
    try:
        connection.sendall(msgspec.json.encode(request) + b"\n")
        with connection.makefile("rb") as reading:
            while line := reading.readline(MAX_LINE_BYTES):
                yield msgspec.json.decode(line, type=Answer)
    except OSError as error:
        raise PeerLost("the cluster does not answer") from error
    except msgspec.MsgspecError as error:
        raise PeerLost("the cluster is of another version") from error


def _connect(door: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(door))
    except OSError as error:
        connection.close()
        raise PeerLost(f"nothing answers at {door}") from error
    return connection


def _is_open(door: Path) -> bool:
    try:
        _connect(door).close()
    except PeerLost:
        return False
    return True


def _url_of(door: Path) -> str | None:
    try:
        return show(partial(ask, door)).url
    except PeerLost:
        return None
