"""Orders to a cluster on this host, through its door."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from alignedserve.cli.commands import top as command
from alignedserve.cluster.deployments import admin_api as client
from alignedserve.cluster.deployments.admin_api import MAX_LINE_BYTES, AdminApi, ask, find_cluster, show
from alignedserve.cluster.deployments.orders import (
    AddModel,
    AdminRequest,
    Answer,
    DeploymentReport,
    Models,
    OrderDone,
    OrderRefused,
    Remark,
    RemoveModel,
    ReplaceModel,
    ShowModels,
    problem_of,
)
from alignedserve.core.errors import PeerLost, ResourceError

pytestmark = pytest.mark.slow

MODELS = Models("http://127.0.0.1:1", (DeploymentReport("", "a", "/a", "serving", 2, ("decode-0",)),))


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminApi]:
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", str(tmp_path))
    (tmp_path / "cluster").mkdir()
    door = AdminApi(tmp_path / "cluster")
    yield door
    door.close()


def asked(door: AdminApi, request: AdminRequest, *answers: Answer) -> tuple[list[object], list[str]]:
    """Ask on a thread, answer as the driver would; return the last answer or the error, and the remarks."""
    ends: list[object] = []
    remarks: list[str] = []

    def run() -> None:
        try:
            ends.append(ask(door.path, request, remarks.append))
        except (ResourceError, PeerLost) as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    taken = next(found for found in iter(door.take, None) if found)
    assert [one for _, one in taken] == [request]
    for answer in answers:
        door.answer(taken[0][0], answer)
    if not answers:
        door.close()
    thread.join()
    return ends, remarks


def test_an_order_is_answered_step_by_step(door: AdminApi) -> None:
    order = AddModel("/b", "b", ("decode.count=2",))
    assert asked(door, order, Remark("preparing"), OrderDone("served")) == ([OrderDone("served")], ["preparing"])


def test_one_that_comes_while_the_door_closes_is_disconnected(door: AdminApi) -> None:
    """A connection may be accepted before, and its order come after those that wait were told."""
    client, connection = socket.socketpair()
    with client, connection:
        client.sendall(msgspec.json.encode(ShowModels()) + b"\n")
        door.close()
        thread = threading.Thread(target=door.serve, args=(connection,), daemon=True)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive()
    assert door.take() == []


def test_the_last_answer_comes_after_any_number_of_remarks(door: AdminApi) -> None:
    answers: list[Answer] = [Remark("step " + "." * 1000)] * 5000
    answers.append(OrderDone("served"))
    ends, remarks = asked(door, RemoveModel("b"), *answers)
    assert ends == [OrderDone("served")]
    assert remarks


def test_a_refusal_is_an_error_with_its_reason(door: AdminApi) -> None:
    (error,), _ = asked(door, RemoveModel("b"), OrderRefused("no model is served as b"))
    assert isinstance(error, ResourceError)
    assert str(error) == "no model is served as b"


def test_a_cluster_that_ends_meanwhile_is_said(door: AdminApi) -> None:
    (error,), _ = asked(door, ReplaceModel("a", "/b"))
    assert isinstance(error, PeerLost)


def test_models_are_shown(door: AdminApi) -> None:
    assert asked(door, ShowModels(), MODELS)[0] == [MODELS]


def test_the_cluster_of_this_host_is_found_by_its_door(
    door: AdminApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cluster(None) == find_cluster("cluster") == door.path
    for name in ("ended", "second"):
        (tmp_path / name).mkdir()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "ended" / "admin.sock"))
    assert find_cluster(None) == door.path
    with contextlib.closing(AdminApi(tmp_path / "second")), monkeypatch.context() as patched:
        patched.setattr(client, "_url_of", "http://{}".format)
        with pytest.raises(ResourceError, match=r"several clusters serve on this host; choose with --cluster: cluster"):
            find_cluster(None)
        with pytest.raises(ResourceError, match=r"choose with --url: "):  # of `top`, which has no --cluster
            command.top(None, is_once=True, every_s=1.0)
    door.close()
    with pytest.raises(ResourceError, match="no cluster serves on this host"):
        find_cluster(None)
    with pytest.raises(PeerLost):
        show(partial(ask, door.path))


def test_the_door_is_for_its_user_alone(door: AdminApi) -> None:
    assert door.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b'{"type":"Reboot"}\n',
        b"\xff\xfe\n",
        b'{"type":"AddModel","path":""}\n',
        b'{"type":"AddModel","path":"a\\u0000b"}\n',
        b'{"type":"RemoveModel","name":"' + b"x" * 300 + b'"}\n',
        b"x" * (MAX_LINE_BYTES + 1),
    ],
)
def test_what_is_no_order_is_refused_and_not_echoed(door: AdminApi, line: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(door.path))
        connection.sendall(line)
        with connection.makefile("rb") as reading:
            answer = msgspec.json.decode(reading.readline(), type=Answer)
    assert isinstance(answer, OrderRefused)
    assert "xxx" not in answer.reason
    assert door.take() == []


def test_times_and_numbers_of_settings_are_bounded() -> None:
    assert problem_of(RemoveModel("a", float("inf"))) is not None
    assert problem_of(RemoveModel("a", -1.0)) is not None
    assert problem_of(AddModel("/a", settings=("x=1",) * 65)) is not None
    assert problem_of(AddModel("/a", settings=("x=1",))) is None
