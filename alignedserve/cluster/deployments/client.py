"""Gives orders to a cluster that runs on this host, found by the door in its private folder."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from alignedserve.cluster.deployments.admin_api import MAX_LINE_BYTES, SOCKET_NAME
from alignedserve.cluster.deployments.orders import (
    AdminRequest,
    Answer,
    Done,
    Models,
    Refused,
    Remark,
    ShowModels,
    ShowStatus,
    StatusReport,
)
from alignedserve.config.environment import run_root
from alignedserve.core.errors import PeerLost, ResourceError

OnRemark = Callable[[str], None]
Ask = Callable[[AdminRequest, OnRemark], Answer]  # raises ResourceError with the reason of a refusal, or PeerLost

_LOOK_S = 10.0  # for a driver to answer a question


def find_cluster(cluster_id: str | None, *, option: str = "--cluster") -> Path:
    """Return the door of the cluster that runs on this host.

    `cluster_id`: the name of its run folder; None: there is one. `option`: by which the user chooses one. Raises
    ResourceError listing the clusters.
    """
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

    Raises ResourceError with the reason for which it is refused, or PeerLost when the cluster ends or is silent.
    """
    with contextlib.closing(_connect(door)) as connection:
        connection.settimeout(_LOOK_S if isinstance(request, ShowModels | ShowStatus) else None)
        for answer in _answers(connection, request):
            match answer:
                case Remark(text):
                    on_remark(text)
                case Refused(reason):
                    raise ResourceError(reason)
                case Done() | Models() | StatusReport():
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
    """Return whether a cluster that takes orders runs on this host, for this user."""
    return any(_is_open(path) for path in run_root().glob(f"*/{SOCKET_NAME}"))


def urls_here() -> list[str]:
    """Return the addresses of this user's clusters on this host."""
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
