"""Announcements of the driver of a cluster of hosts; things that a rehearsal spares. Without Ray."""

import logging
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from alignedserve.batches.location import SharedState
from alignedserve.cluster import serving_cluster
from alignedserve.cluster.actor_factory import PreparedNode
from alignedserve.cluster.deployments.orders import (
    AdminRequest,
    Answer,
    DrainNode,
    NodeOrder,
    OrderDone,
    OrderRefused,
    ScaleWorkers,
    UndoDrain,
)
from alignedserve.cluster.desired import Act, ClusterStep
from alignedserve.cluster.hosts.record import ClusterRecord
from alignedserve.cluster.nodes import joining
from alignedserve.cluster.nodes.admission import Agent
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.cluster.serving_cluster import ServingCluster
from alignedserve.core.errors import NotEnoughMemory, PeerLost, ResourceError
from tests.harnesses.hosts import cluster_demo, namespace_hosts
from tests.unit.cluster.driven_cluster import NODES, started


def test_every_process_with_a_log_is_named_and_every_address_is_one_to_call(cluster: ServingCluster) -> None:
    head, other = cluster.record().nodes
    assert [actor.name for actor in head.actors] == [
        *("driver", "router", "batches-0", "pool-0", "gateway-0", "prefill-0", "decode-0")
    ]
    assert [actor.name for actor in other.actors] == ["pool-1", "gateway-1", "prefill-1", "decode-1"]
    assert (head.urls, other.urls) == (("http://10.0.0.0:8000",), ("http://10.0.0.1:8000",))


@pytest.mark.parametrize(
    ("host", "url"), [("::", "http://[::1]:8000"), ("fd00::1", "http://[fd00::1]:8000"), ("h", "http://h:8000")]
)
def test_the_address_of_a_gateway_is_one_to_call(cluster: ServingCluster, host: str, url: str) -> None:
    gateway = msgspec.structs.replace(cluster.config.gateway, host=host)
    cluster.config = msgspec.structs.replace(cluster.config, gateway=gateway)
    assert cluster.url == url


def test_a_refused_node_that_leaves_is_no_lost_one(
    cluster: ServingCluster, announced: list[ClusterRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = list(NODES)
    monkeypatch.setattr(serving_cluster, "alive_nodes", lambda: alive)
    cluster.refuse(NODES[2], "it has another Python")
    for _ in range(2):
        assert cluster.check()
    (before,) = announced
    assert [node.problem for node in before.nodes] == ["", "", "it has another Python"]
    alive.remove(NODES[2])
    assert cluster.check()
    assert [node.node_id for node in announced[-1].nodes] == ["id-0", "id-1"]


def test_a_node_drains_stays_out_and_is_used_again(
    cluster: ServingCluster,
    announced: list[ClusterRecord],
    answered: Callable[[AdminRequest], Answer | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "release", lambda folder: None)
    monkeypatch.setattr(joining, "kill_actors", lambda actors: None)

    def after(order: NodeOrder) -> tuple[str, list[str]]:
        answer = answered(order)
        assert isinstance(answer, OrderDone | OrderRefused)
        said = answer.text if isinstance(answer, OrderDone) else answer.reason
        return said, [node.drain for node in announced[-1].nodes]

    assert after(DrainNode("node-1", 60.0)) == (
        "node-1 gets nothing new; what it still has in 60 s goes elsewhere.",
        ["", "draining"],
    )
    assert after(UndoDrain("host-1")) == ("node-1 is used again.", ["", ""])
    assert answered(UndoDrain("host-1")) == OrderRefused("node-1 neither drains nor has drained")
    monkeypatch.setattr("alignedserve.cluster.desired.MOVING_S", 0.0)
    assert after(DrainNode("10.0.0.1", 0.0))[1] == ["", "drained"]
    assert announced[-1].nodes[1].actors == ()
    begun: list[RayNode] = []
    waiting = SimpleNamespace(node=NODES[1], advance=lambda: None, close=lambda: None)

    def begin(node: RayNode, members: object) -> Any:
        begun.append(node)
        return waiting

    monkeypatch.setattr(cluster._joining, "begin", begin)
    assert cluster.check()
    assert begun == []
    assert after(UndoDrain("node-1")) == ("node-1 is used again; its processes start now.", [""])
    assert cluster.check()
    assert begun == [NODES[1]]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (DrainNode("node-0", 1.0), "node-0 is the head"),
        (DrainNode("x", 1.0), "there is no node x; there are node-0"),
        (ScaleWorkers({"decode": 1}), "2 nodes keep one decode worker each"),
        (ScaleWorkers({"gateway": 1}), "no number of workers"),
    ],
)
def test_orders_that_cannot_be_are_refused(
    cluster: ServingCluster,
    answered: Callable[[AdminRequest], Answer | None],
    monkeypatch: pytest.MonkeyPatch,
    order: NodeOrder,
    problem: str,
) -> None:
    monkeypatch.setattr(cluster, "actors", lambda: {"router": None})
    answer = answered(order)
    assert isinstance(answer, OrderRefused)
    assert problem in answer.reason


def test_more_workers_have_new_names_and_fewer_are_those_with_the_least_work(
    cluster: ServingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []
    ended: list[str] = []
    router = SimpleNamespace(num_left=SimpleNamespace(remote=lambda names: {"decode-0": 3, "decode-2": 5}))
    routers = {"router": router}
    free = SimpleNamespace(available_bytes=SimpleNamespace(remote=lambda: 1 << 40))
    for member in cluster._members.values():
        member.agent = Agent(free, member.agent.book)
    monkeypatch.setattr(cluster._wishes, "_create", lambda node, name: created.append(name))
    monkeypatch.setattr(cluster, "remove_worker", lambda node, name: ended.append(name))
    monkeypatch.setattr("alignedserve.cluster.ray_node.ray.get", lambda reference, timeout: reference)
    said = cluster._wishes.scale(ScaleWorkers({"decode": 3}), routers)
    assert (said, created) == ("decode-2 starts on node-0.", ["decode-2"])
    assert [actor.name for actor in cluster.record().nodes[0].actors][-2:] == ["decode-0", "decode-2"]
    assert "decode-0 gets nothing new" in cluster._wishes.scale(ScaleWorkers({"decode": 2}), routers)
    assert cluster._wishes.scale(ScaleWorkers({"decode": 2}), routers) == "There are as many already."
    cluster._perform(ClusterStep(Act.END_WORKER, "decode-0"))
    assert ended == ["decode-0"]
    assert "decode-0" not in [actor.name for actor in cluster.record().nodes[0].actors]
    free.available_bytes.remote = lambda: 1 << 20
    with pytest.raises(NotEnoughMemory, match=r"node-0 has no room for 2 more workers: .* enough for 0"):
        cluster._wishes.scale(ScaleWorkers({"decode": 6, "prefill": 2}), routers)


def test_the_log_of_the_driver_is_closed_with_it(cluster: ServingCluster) -> None:
    package = logging.getLogger("alignedserve")
    num_handlers = len(package.handlers)
    cluster._leave_ray()
    cluster._leave_ray()
    assert len(package.handlers) == num_handlers - 1


def test_a_worker_whose_name_is_taken_is_none_of_the_cluster(
    cluster: ServingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_taken(node: PreparedNode, name: str) -> None:
        raise ValueError(f"the name {name} is taken")

    before = [member.prepared.share for member in cluster._members.values()]
    monkeypatch.setattr(cluster, "add_worker", is_taken)
    member = cluster._members["id-0"]
    with pytest.raises(PeerLost, match="decode-2 cannot be started, try again"):
        cluster._wishes._add("decode", member, "")
    assert [member.prepared.share for member in cluster._members.values()] == before


@pytest.mark.parametrize(("served_s", "is_left"), [(60.0, True), (1.0, False)])
def test_a_driver_that_fails_leaves_a_cluster_that_has_served(
    cluster: ServingCluster, monkeypatch: pytest.MonkeyPatch, served_s: float, is_left: bool
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(type(cluster), "_leave_ray", lambda self: ended.append("ray"))
    cluster._ready_s = time.monotonic() - served_s
    cluster.leave()
    assert ended == ([] if is_left else ["ray"])
    monkeypatch.undo()


def test_a_cluster_that_stops_ends_its_own_processes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_cluster, "_RAY_EXIT_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as stranger:
        cluster = started(tmp_path, {})
        with subprocess.Popen(["sleep", "60"]) as own:
            cluster.stop()
            assert own.wait() == -signal.SIGKILL
        assert stranger.poll() is None
        stranger.kill()


def test_a_rehearsal_removes_no_folder_but_that_of_a_former_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="not of a former rehearsal"):
        cluster_demo.clear_former(tmp_path)
    assert (tmp_path / "file").exists()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "alignedserve").touch()
    cluster_demo.clear_former(tmp_path)
    assert not tmp_path.exists()
    cluster_demo.clear_former(tmp_path)


def test_only_one_set_of_hosts_is_made_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_hosts, "obstacle", lambda: None)
    monkeypatch.setattr(namespace_hosts, "_TURN", tmp_path / "lock")
    with namespace_hosts._take_turn(), pytest.raises(ResourceError, match="one set at a time"):
        namespace_hosts.NamespaceHosts(2, tmp_path / "hosts").__enter__()
    assert not (tmp_path / "hosts").exists()
    namespace_hosts._take_turn().close()


def test_limits_keep_the_shares_of_the_start(cluster: ServingCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[SharedState] = []

    def create(node: PreparedNode, state: SharedState, *, drives_batches: bool) -> dict[str, Any]:
        states.append(state)
        return {}

    monkeypatch.setattr(cluster, "_factory_of", lambda part: SimpleNamespace(create=create))
    monkeypatch.setattr(cluster, "_watch", lambda name: None)
    node = next(iter(cluster._members.values())).prepared
    cluster._state = SharedState(gateways=cluster._first_gateways or ())
    cluster.add_node(node)
    assert states == [SharedState(gateways=("gateway-0", "gateway-1"))]
