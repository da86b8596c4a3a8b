"""`alignedserve status` of a cluster on this host: what its driver answers, as a table and as JSON."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.markup import escape

from alignedserve.cli.commands.cluster import one_host
from alignedserve.cli.main import main
from alignedserve.cli.models import serving
from alignedserve.cluster.deployments.admin_api import AdminApi, has_cluster
from alignedserve.cluster.deployments.orders import (
    AdminRequest,
    DeploymentReport,
    DrainNode,
    NodeOrder,
    OrderDone,
    ProcessReport,
    ScaleWorkers,
    ShowStatus,
    StatusReport,
    UndoDrain,
)
from alignedserve.core.errors import ResourceError
from alignedserve.messages.gateways import ClusterStatus
from tests.support.marks import each

MIB = 1024 * 1024
REPORT = StatusReport(
    "http://127.0.0.1:1",
    (DeploymentReport("", "chat", "/a", "serving", 2, ("decode-0",), ("router", "decode-0"), "elastic"),),
    {"": ClusterStatus(num_queued=3, num_decoding=5, num_decode_workers=1, num_worker_blocks=8)},
    (ProcessReport("router", "up", "", 70 * MIB), ProcessReport("decode-0", "up", "", 500 * MIB)),
    4096 * MIB,
    1024 * MIB,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", str(tmp_path))
    (tmp_path / "cluster").mkdir()
    return tmp_path / "cluster"


@pytest.fixture
def door(folder: Path) -> Iterator[AdminApi]:
    door = AdminApi(folder)
    yield door
    door.close()


def shown(door: AdminApi, report: StatusReport, *, json_output: bool) -> bool:
    """Return what `status` returns, while a driver answers with this report."""

    def answer() -> None:
        while not (taken := door.take()):
            time.sleep(0.001)
        ((request_id, request),) = taken
        assert request == ShowStatus()
        door.answer(request_id, report)

    driver = threading.Thread(target=answer)
    driver.start()
    is_whole = one_host.status(None, json_output=json_output)
    driver.join()
    return is_whole


def test_models_load_and_memory(door: AdminApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(door, REPORT, json_output=False)
    said = capsys.readouterr().out
    assert "chat (/a), serving. Load: 3 queued, 0 in prefill, 5 decoding; 1 elastic worker," in said
    assert "500 MiB" in said
    assert "Memory: 570 MiB for these processes; 3072 of the host's 4096 MiB are taken" in said


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "serving"),
        ({"phase": "draining", "failing": {"worker-0": "no room"}}, "draining"),
        ({"phase": "asleep", "problem": "no room"}, "asleep: no room"),
        ({"workers": (), "processes": ("router",)}, "not serving: it has no workers"),
        ({"failing": {"worker-1": "[no] room"}}, "degraded: 1 of 2 workers serve; worker-1: [no] room"),
        (
            {"failing": {"worker-0": "no room", "worker-1": "no room"}},
            "not serving: 0 of 2 workers serve; worker-0: no room",
        ),
        ({"failing": {"router": "it ended"}}, "not serving: 2 of 2 workers serve; router: it ended"),
        (
            {"workers": ("prefill-0", "decode-0"), "failing": {"prefill-0": "no room"}},
            "not serving: 1 of 2 workers serve; prefill-0: no room",
        ),
    ],
)
def test_a_model_that_does_not_serve_does_not_seem_to(
    door: AdminApi, capsys: pytest.CaptureFixture[str], changes: dict[str, object], state: str
) -> None:
    workers = ("worker-0", "worker-1")
    model = DeploymentReport("", "chat", "/a", "serving", 2, workers, ("router", *workers))
    changed = msgspec.structs.replace(model, **changes)
    shown(door, msgspec.structs.replace(REPORT, deployments=(changed,)), json_output=False)
    assert f"chat (/a), {state}. Load: " in capsys.readouterr().out
    assert serving._state(changed) == escape(state)


def test_as_json(door: AdminApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(door, REPORT, json_output=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["is_whole"], document["loads"][""]["num_queued"]) == (True, 3)


@pytest.mark.parametrize(
    "changes", [{"loads": {}}, {"processes": (ProcessReport("decode-0", "fails", "no [bold]memory", None),)}]
)
def test_what_is_not_whole(door: AdminApi, capsys: pytest.CaptureFixture[str], changes: dict[str, object]) -> None:
    assert not shown(door, msgspec.structs.replace(REPORT, **changes), json_output=False)
    said = capsys.readouterr().out
    assert ("Load: unknown" in said) is ("loads" in changes)
    assert ("fails: no [bold]memory" in said) is ("processes" in changes)


def test_a_cluster_is_there_while_its_door_is_open(folder: Path) -> None:
    assert not has_cluster()
    door = AdminApi(folder)
    assert has_cluster()
    door.close()
    assert not has_cluster()


def test_the_log_of_a_process_here_is_shown_without_ray(
    folder: Path, door: AdminApi, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "decode-0.log").write_text("first\nlast\n")
    one_host.logs(None, "decode-0", follow=False)
    assert capsys.readouterr().out == "first\nlast\n"
    one_host.logs(None, None, follow=False)
    assert capsys.readouterr().out == "decode-0\n"
    for name in ("nobody", "../admin"):
        with pytest.raises(ResourceError, match="there are decode-0"):
            one_host.logs(None, name, follow=False)


@pytest.mark.slow
@pytest.mark.usefixtures("door")
def test_the_end_of_a_cluster_of_hosts_says_what_to_do_beside_a_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", frozenset)
    monkeypatch.setattr("sys.argv", ["alignedserve", "stop"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    told = "error: this is for a cluster of `up`, and `alignedserve serve` runs here: "
    assert capsys.readouterr().err == f"{told}Ctrl-C there, or a SIGTERM, ends it\n"


@pytest.mark.slow
@each(
    ("arguments", "order"),
    [
        (("scale", "decode=2"), ScaleWorkers({"decode": 2})),
        (("drain", "worker-1", "--within", "3", "--no-wait"), DrainNode("worker-1", 3.0)),
        (("drain", "worker-1", "--undo"), UndoDrain("worker-1")),
    ],
)
def test_one_host_is_given_the_orders_of_several(
    door: AdminApi,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    order: NodeOrder,
) -> None:
    given: list[AdminRequest] = []

    def answer() -> None:
        while not (taken := door.take()):
            time.sleep(0.001)
        ((request_id, request),) = taken
        given.append(request)
        door.answer(request_id, OrderDone("It is done."))

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("sys.argv", ["alignedserve", *arguments])
    driver = threading.Thread(target=answer)
    driver.start()
    with pytest.raises(SystemExit) as ended:
        main()
    driver.join()
    assert (ended.value.code, given, capsys.readouterr().out) == (0, [order], "It is done.\n")


def test_a_drain_is_awaited_to_its_bound(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_host, "_FOLLOW_S", 0.0)
    answers = iter((False, True))
    one_host.wait_until_drained("decode-0", 1.0, lambda: next(answers))
    assert capsys.readouterr().out == "decode-0 has drained.\n"
    with pytest.raises(ResourceError, match="decode-0 has not drained in time; see `alignedserve logs`"):
        one_host.wait_until_drained("decode-0", -60.0, lambda: False)
