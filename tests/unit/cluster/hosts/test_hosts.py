"""A cluster of several hosts, without Ray: its plan, what nodes are refused for, the sweeper and the supervisor."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from alignedserve.cluster.hosts import supervisor
from alignedserve.cluster.hosts.record import own_versions
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import NodeReport, differences, model_digest
from alignedserve.cluster.nodes.plan import NODE_ADDRESS, NodeResources, plan_cluster, plan_joining
from alignedserve.cluster.nodes.ray_nodes import RayNode, require_head, wait_for_nodes
from alignedserve.cluster.placement import NodeCapacity
from alignedserve.cluster.run_folder import make_run_folder
from alignedserve.cluster.sweeper import sweep
from alignedserve.config.sections import MIB, ClusterConfig, ModelSectionConfig, Topology
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import ConfigError, NotEnoughMemory, ResourceError
from alignedserve.process.loading_progress import LoadedShare, LoadingProgress, read_progress
from alignedserve.runtime.kv.arena_files import arena_path
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.scheduling.factory import resolve_policy
from tests.support.child_processes import has_ended

pytestmark = pytest.mark.slow

GIB = 1024 * MIB
POCKET = resolve_model(ModelSectionConfig())
SEPARATE = from_mapping({"topology": "disaggregated"})


def resources(index: int, available: int = 8 * GIB, shared: int = 4 * GIB) -> NodeResources:
    capacity = NodeCapacity(f"node-{index}", f"10.0.0.{index}", 4)
    return NodeResources(capacity, Machine(available, shared, num_cores=4, has_bfloat16=False))


# --- the plan


def test_every_node_has_sizes_of_its_own() -> None:
    plan = plan_cluster(SEPARATE, POCKET, [resources(0), resources(1, 3 * GIB)])
    sizes = [plan.choices[share.node].config.decode.kv_cache_bytes for share in plan.shares]
    assert sizes[0] >= sizes[1] > 0
    assert [(share.prefill, share.decode) for share in plan.shares] == [
        (("prefill-0",), ("decode-0",)),
        (("prefill-1",), ("decode-1",)),
    ]
    assert plan.served.max_context_len == POCKET.max_context_len


def test_elastic_workers_need_no_memory_for_a_pool_on_any_node() -> None:
    nodes = [resources(0), resources(1, shared=MIB)]
    plan = plan_cluster(resolve_policy(from_mapping({})), POCKET, nodes)
    assert {choice.config.topology for choice in plan.choices.values()} == {Topology.ELASTIC}
    assert [(share.prefill, share.decode) for share in plan.shares] == [((), ("worker-0",)), ((), ("worker-1",))]
    with pytest.raises(NotEnoughMemory, match=r"^node-1: .* set topology=elastic$"):
        plan_cluster(SEPARATE, POCKET, nodes)


def test_the_shortest_context_is_that_of_all() -> None:
    long = replace(POCKET, max_context_len=1 << 22)
    config = from_mapping({"topology": "colocated"})
    alone = plan_cluster(config, long, [resources(0, 2 * GIB)]).served.max_context_len
    assert 0 < alone < long.max_context_len
    plan = plan_cluster(config, long, [resources(0, 16 * GIB), resources(1, 2 * GIB)])
    assert plan.served.max_context_len == alone
    assert {choice.served.max_context_len for choice in plan.choices.values()} == {alone}
    joined = plan.placement.join(resources(2).capacity)
    assert plan_joining(plan, joined, resources(2).machine).decode.kv_cache_bytes > 0
    with pytest.raises(NotEnoughMemory, match=f"node-2 has room for contexts of .*serves {alone}"):
        plan_joining(plan, joined, resources(2, 1500 * MIB).machine)


def test_a_node_without_room_is_named() -> None:
    with pytest.raises(NotEnoughMemory, match=r"^node-1: pocket needs"):
        plan_cluster(from_mapping({}), POCKET, [resources(0), resources(1, 100 * MIB, MIB)])


def test_gateways_listen_at_their_own_nodes_addresses() -> None:
    config = from_mapping({"gateway": {"host": NODE_ADDRESS, "port": 9000}})
    plan = plan_cluster(config, POCKET, [resources(0), resources(1)])
    assert plan.gateways == ("gateway-0", "gateway-1")
    gateways = [plan.config_of(share, f"10.0.0.{index}").gateway for index, share in enumerate(plan.shares)]
    assert [(gateway.host, gateway.port) for gateway in gateways] == [("10.0.0.0", 9000), ("10.0.0.1", 9000)]


def test_configured_counts_leave_nodes_without_workers(config: ClusterConfig) -> None:
    plan = plan_cluster(config, POCKET, [resources(0), resources(1)])
    assert [share.num_workers for share in plan.shares] == [2, 0]
    assert plan.config_of(plan.shares[1], "10.0.0.1").decode.kv_cache_bytes > 0
    assert set(plan.choices) == {"node-0"}


@pytest.fixture
def config() -> ClusterConfig:
    return resolve_policy(from_mapping({"prefill": {"count": 1}, "decode": {"count": 1}}))


# --- admission

HEAD = NodeReport("v1", resources(0).machine, digests=("m",))
NODE = RayNode("id", "10.0.0.1", "spare", is_head=False)


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (HEAD, None),
        (replace(HEAD, versions="v2"), "it has v2, the head v1"),
        (replace(HEAD, digests=(None,)), "no copy of the model"),
        (replace(HEAD, digests=("n",)), "another one"),
        (replace(HEAD, machine=None, problem=ResourceError("no GPU here")), "no GPU here"),
    ],
)
def test_a_node_that_differs_is_refused_with_the_reason(report: NodeReport, problem: str | None) -> None:
    found = differences({NODE: report}, HEAD)
    assert list(found) == ([NODE] if problem else [])
    assert problem is None or problem in found[NODE]


def test_the_digest_of_a_model_sees_what_matters(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100))
    first = model_digest(tmp_path / "a")
    assert first == model_digest(tmp_path / "b") is not None
    (tmp_path / "b" / "model.safetensors").write_bytes(bytes(101))
    assert model_digest(tmp_path / "b") != first
    (tmp_path / "a" / "config.json").write_text("{}")
    assert model_digest(tmp_path / "a") != first
    assert model_digest(tmp_path / "absent") is None
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert model_digest(tmp_path / "m.gguf") is not None


def test_versions_name_what_must_agree() -> None:
    assert "AlignedServe 0." in own_versions()
    assert "protocol" in own_versions()
    assert "Python 3." in own_versions()


def test_waiting_for_nodes_ends_with_those_that_there_are() -> None:
    assert wait_for_nodes(1, 60.0, lambda: [NODE]) == [NODE]
    assert wait_for_nodes(2, 0.0, lambda: [NODE]) == [NODE]


def test_a_cluster_is_started_on_the_head_alone() -> None:
    head, beside = RayNode("h", "10.0.0.0", "first", is_head=True), RayNode("b", "10.0.0.0", "first", is_head=False)
    require_head([head, beside, NODE], "h")
    require_head([head, beside, NODE], "b")
    with pytest.raises(ConfigError, match=r"on the head of Ray, first \(10.0.0.0\); this is spare"):
        require_head([head, beside, NODE], "id")


# --- what outlives


def test_a_sweep_removes_what_has_no_owner_and_keeps_what_is_in_use(tmp_path: Path) -> None:
    folder = tmp_path / f"test-{os.getpid()}"
    folder.mkdir()
    left, progress = folder / "left.sock", folder / "decode-0.progress"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(left))
    progress.touch()
    arena = arena_path(folder.name, "pool-0")
    arena.touch(mode=0o600)
    other = arena_path(f"{folder.name}x", "pool-0")
    other.touch(mode=0o600)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "used.sock"))
            listener.listen()
            assert not sweep(folder)
            assert (folder / "used.sock").exists()
        assert (left.exists(), progress.exists(), arena.exists(), other.exists()) == (False, False, False, True)
        assert sweep(folder)
    finally:
        other.unlink()


def test_a_sweep_spares_what_a_worker_that_loads_reports(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.progress"
    progress = LoadingProgress(path, 100, 2)
    assert not sweep(tmp_path)
    progress.layer_packed()
    assert read_progress(path) == LoadedShare(0, 100, 0, 2)  # written at most ten times a second
    progress.finish()
    assert read_progress(path) == LoadedShare(100, 100, 2, 2)
    assert sweep(tmp_path)
    assert not path.exists()


def test_a_process_too_busy_to_accept_keeps_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))  # its backlog is full
        assert not sweep(tmp_path)
        assert path.exists()


def test_a_restarted_agent_finds_its_folder_with_the_sockets_of_others(run_folder: Path) -> None:
    (run_folder / "c-0").mkdir(mode=0o700)
    (run_folder / "ended").mkdir(mode=0o700)
    sockets = [run_folder / name / "router.sock" for name in ("c-0", "ended")]
    for path in sockets:
        path.touch()
    run_folder.chmod(0o700)
    assert make_run_folder("c-0") == run_folder / "c-0"
    assert [path.exists() for path in sockets] == [True, False]


def test_the_sweeper_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    folder = tmp_path / f"test-{os.getpid()}"
    folder.mkdir()
    (folder / "decode-0.progress").touch()
    source = (
        "import os, sys, time; from pathlib import Path\n"
        "from alignedserve.cluster.sweeper import start_sweeper\n"
        "start_sweeper(Path(sys.argv[1]), os.getpid()); print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", source, str(folder)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        assert (folder / "decode-0.progress").exists()
        owner.kill()
    wait_until(lambda: not (folder / "decode-0.progress").exists())


def test_the_sweeper_kills_what_outlives_its_raylet_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "cluster-0"
    folder.mkdir()
    source = (
        "import os, subprocess, sys, time; from pathlib import Path\n"
        "from alignedserve.cluster.sweeper import start_sweeper\n"
        "agent = subprocess.Popen(['sleep', '60'])\n"
        "if os.fork() == 0: start_sweeper(Path(sys.argv[1]), os.getppid()); os._exit(0)\n"
        "os.wait(); print(agent.pid, flush=True); time.sleep(60)"
    )
    with (
        subprocess.Popen(["sleep", "60"]) as stranger,
        subprocess.Popen([sys.executable, "-c", source, str(folder)], stdout=subprocess.PIPE) as raylet,
    ):
        assert raylet.stdout is not None
        agent = psutil.Process(int(raylet.stdout.readline()))
        wait_until(lambda: (tmp_path / f"raylet-{raylet.pid}.lock").exists())
        assert agent.is_running()
        raylet.kill()
        raylet.wait()
        assert agent.status() != psutil.STATUS_ZOMBIE
        wait_until(lambda: has_ended(agent))
        assert stranger.poll() is None
        stranger.kill()
    wait_until(lambda: not (tmp_path / f"raylet-{raylet.pid}.lock").exists())


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ALIGNEDSERVE_RUN_DIR", str(tmp_path))
    yield tmp_path
    supervisor.end_supervisor()


def test_a_supervisor_is_alone_and_ends_with_its_driver(run_folder: Path) -> None:
    started = run_folder / "started"
    driver = [sys.executable, "-c", f"open({str(started)!r}, 'a').write('x'); import time; time.sleep(60)"]
    assert supervisor.running_supervisor() is None
    first = supervisor.start_supervisor(driver, "auto")
    wait_until(lambda: started.exists() and supervisor.running_supervisor() == first.pid)
    second = supervisor.start_supervisor(driver, "auto")  # in place of the first
    assert first.wait() != 0
    wait_until(lambda: supervisor.running_supervisor() == second.pid)
    wait_until(lambda: started.read_text() == "xx")
    supervisor.end_supervisor()
    assert supervisor.running_supervisor() is None
    second.wait()


@pytest.mark.parametrize(("code", "num_starts"), [(0, 1), (2, 1), (1, 3)])
def test_a_driver_is_restarted_unless_it_ended_well_or_never_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, num_starts: int
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "_MAX_FAILED_STARTS", 3)
    monkeypatch.setattr(supervisor, "has_raylet", lambda: True)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    started = tmp_path / "started"
    try:
        driver = [sys.executable, "-S", "-c", f"open({str(started)!r}, 'a').write('x'); raise SystemExit({code})"]
        assert supervisor.Supervisor(driver).run() == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert started.read_text() == "x" * num_starts


def test_a_driver_that_goes_on_without_ray_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((True, False))
    monkeypatch.setattr(supervisor, "has_raylet", lambda: next(found, False))
    monkeypatch.setattr(supervisor, "_RAY_LOOK_S", 0.0)
    monkeypatch.setattr(supervisor, "_ABANDONED_S", 0.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    try:
        assert supervisor.Supervisor([sys.executable, "-S", "-c", deaf]).run() < 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_without_ray_a_driver_is_not_restarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor, "has_raylet", lambda: False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert supervisor.Supervisor([sys.executable, "-S", "-c", "raise SystemExit(1)"]).run() == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_ray_of_another_cluster_is_not_the_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.write_text("#!/bin/sh\nread nothing\n")
    raylet.chmod(0o755)
    with subprocess.Popen([raylet, "--gcs-address=10.0.0.1:9631"], stdin=subprocess.PIPE) as process:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9631")
        wait_until(supervisor.has_raylet)
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:631")
        assert not supervisor.has_raylet()
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        assert supervisor.has_raylet()
        process.kill()


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_s, "it never came to hold"
        time.sleep(0.01)
