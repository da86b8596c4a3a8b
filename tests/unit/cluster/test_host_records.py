"""Announcements of the driver of a cluster of hosts; things that a rehearsal spares. Without Ray."""

import dataclasses
import logging
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cryptography import x509
from ray import cloudpickle

from alignedserve.batches.location import SharedState
from alignedserve.cluster import launch
from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, PreparedNode
from alignedserve.cluster.hosts import cluster as running
from alignedserve.cluster.hosts import joining, succession
from alignedserve.cluster.hosts.admission import Keeper
from alignedserve.cluster.hosts.cluster import ClusterOnHosts, Driving
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.membership import Membership
from alignedserve.cluster.hosts.nodes.keeper import KeptState
from alignedserve.cluster.hosts.nodes.ray_nodes import RayNode
from alignedserve.cluster.hosts.nodes.report import NodeReport, own_versions
from alignedserve.cluster.hosts.operations.drains import Draining
from alignedserve.cluster.hosts.operations.node_drains import NodeDrains
from alignedserve.cluster.hosts.operations.orders import Answer, DrainNode, Order, ScaleWorkers, UndoDrain
from alignedserve.cluster.hosts.operations.worker_scaling import WorkerActors
from alignedserve.cluster.hosts.plan import NodeResources, plan_cluster
from alignedserve.cluster.hosts.record import ClusterRecord
from alignedserve.cluster.hosts.succession import ClusterState, Succession, digest_of, left_by_former
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.placement import NodeCapacity
from alignedserve.cluster.start_observer import LoggingObserver
from alignedserve.config.sections import MIB, ModelSectionConfig
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.core.errors import NotEnoughMemory, PeerLost, ResourceError
from alignedserve.evaluation import cluster_demo, namespace_hosts
from alignedserve.runtime.model.served_model import resolve_model
from alignedserve.runtime.process.addresses import AddressBook
from alignedserve.runtime.process.tls import CertificateAuthority

POCKET = resolve_model(ModelSectionConfig())
NODES = [RayNode(f"id-{index}", f"10.0.0.{index}", f"host-{index}", is_head=index == 0) for index in range(3)]


class KeeperMemory:
    """A keeper in this process."""

    def __init__(self) -> None:
        self.copies: list[bytes] = []
        self.num_heard = 0
        self.keep = SimpleNamespace(remote=lambda number, copy, *others: self.copies.append(copy))
        self.hear = SimpleNamespace(remote=self._hear)

    def _hear(self, number: int) -> tuple[str, bool]:
        """Return a name of this call, and its result."""
        self.num_heard += 1
        return f"{id(self)}-{self.num_heard}", cloudpickle.loads(self.copies[-1]).number == number


def started(folder: Path, settings: dict[str, Any]) -> ClusterOnHosts:
    """Return a cluster of two nodes, none of whose actors exist."""
    found = [
        NodeResources(NodeCapacity(f"node-{index}", node.address, 4), Machine(8192 * MIB, 4096 * MIB, 4, False))
        for index, node in enumerate(NODES[:2])
    ]
    plan = plan_cluster(from_mapping(settings), POCKET, found)
    members = []
    for node, one, share in zip(NODES, found, plan.shares, strict=False):
        book = AddressBook(folder / f"c-{share.node}", node.node_id, node.address)
        book.folder.mkdir(parents=True)
        prepared = PreparedNode(share, one.capacity, plan.config_of(share, node.address), book)
        members.append(Member(node, prepared, Keeper(KeeperMemory(), book)))
    made = Joining(plan, NodeReport(own_versions()), "c", 2)
    factory = ActorFactory(POCKET, ActorClasses(None, None))
    return ClusterOnHosts(made, members, factory, Driving(LoggingObserver(), Succession("asked")))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterOnHosts]:
    made = started(tmp_path, {"gateway": {"host": "0.0.0.0"}})
    yield made
    made._leave_ray()
    logging.getLogger("alignedserve").setLevel(logging.NOTSET)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[ClusterRecord]:
    records: list[ClusterRecord] = []
    monkeypatch.setattr(running, "write_record", records.append)
    monkeypatch.setattr(running, "is_asked_to_stop", lambda cluster_id: False)
    monkeypatch.setattr(running, "take_orders", lambda cluster_id: [])
    return records


def test_every_process_with_a_log_is_named_and_every_address_is_one_to_call(cluster: ClusterOnHosts) -> None:
    head, other = cluster.record().nodes
    assert [actor.name for actor in head.actors] == [
        *("driver", "router", "batches-0", "pool-0", "gateway-0", "prefill-0", "decode-0")
    ]
    assert [actor.name for actor in other.actors] == ["pool-1", "gateway-1", "prefill-1", "decode-1"]
    assert (head.urls, other.urls) == (("http://10.0.0.0:8000",), ("http://10.0.0.1:8000",))


@pytest.mark.parametrize(
    ("host", "url"), [("::", "http://[::1]:8000"), ("fd00::1", "http://[fd00::1]:8000"), ("h", "http://h:8000")]
)
def test_the_address_of_a_gateway_is_one_to_call(cluster: ClusterOnHosts, host: str, url: str) -> None:
    gateway = msgspec.structs.replace(cluster.config.gateway, host=host)
    cluster.config = msgspec.structs.replace(cluster.config, gateway=gateway)
    assert cluster.url == url


def test_a_refused_node_that_leaves_is_no_lost_one(
    cluster: ClusterOnHosts, announced: list[ClusterRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = list(NODES)
    monkeypatch.setattr(running, "alive_nodes", lambda: alive)
    cluster.refuse(NODES[2], "it has another Python")
    assert cluster.check()
    assert announced == []
    alive.remove(NODES[2])
    assert cluster.check()
    assert [node.node_id for node in announced[-1].nodes] == ["id-0", "id-1"]


def test_a_node_drains_stays_out_and_is_used_again(
    cluster: ClusterOnHosts, announced: list[ClusterRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[tuple[str, Order]] = []
    answers: list[Answer] = []
    monkeypatch.setattr(running, "alive_nodes", lambda: list(NODES[:2]))
    monkeypatch.setattr(running, "take_orders", lambda cluster_id: [orders.pop()] if orders else [])
    monkeypatch.setattr(running, "answer_order", lambda cluster_id, name, answer: answers.append(answer))
    monkeypatch.setattr(joining, "release", lambda folder: None)
    monkeypatch.setattr(joining, "end_keepers", lambda actors: None)

    def after(order: Order) -> tuple[str, list[str]]:
        orders.append(("x", order))
        assert cluster.check()
        return answers[-1].text, [node.drain for node in announced[-1].nodes]

    assert after(DrainNode("node-1", 60.0)) == (
        "node-1 gets nothing new; what it still has in 60 s goes elsewhere.",
        ["", "draining"],
    )
    assert after(UndoDrain("host-1")) == ("node-1 is used again.", ["", ""])
    assert answers[-1].is_refused is False
    text, _ = after(UndoDrain("host-1"))
    assert (text, answers[-1].is_refused) == ("node-1 neither drains nor has drained", True)
    monkeypatch.setattr("alignedserve.cluster.hosts.operations.drains.MOVING_S", 0.0)
    assert after(DrainNode("10.0.0.1", 0.0))[1] == ["", "drained"]
    assert announced[-1].nodes[1].actors == ()
    begun: list[RayNode] = []
    waiting = SimpleNamespace(node=NODES[1], advance=lambda: None, close=lambda: None)

    def begin(node: RayNode) -> Any:
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
    cluster: ClusterOnHosts, monkeypatch: pytest.MonkeyPatch, order: Order, problem: str
) -> None:
    monkeypatch.setattr(cluster, "actors", lambda: {"router": None})
    answer = cluster._obey(order)
    assert answer.is_refused
    assert problem in answer.text


def test_more_workers_have_new_names_and_fewer_are_those_with_the_least_work(
    cluster: ClusterOnHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []
    ended: list[str] = []
    router = SimpleNamespace(num_left=SimpleNamespace(remote=lambda names: {"decode-0": 3, "decode-2": 5}))
    free = SimpleNamespace(available_bytes=SimpleNamespace(remote=lambda: 1 << 40))
    for member in cluster._members.values():
        member.keeper = Keeper(free, member.keeper.book)
    actors = WorkerActors(lambda node, name: created.append(name), lambda node, name: ended.append(name))
    monkeypatch.setattr(cluster._workers, "_workers", actors)
    monkeypatch.setattr("alignedserve.cluster.hosts.ray_calls.ray.get", lambda reference, timeout: reference)
    said = cluster._workers.scale(ScaleWorkers({"decode": 3}), router)
    assert (said, created) == ("decode-2 starts on node-0.", ["decode-2"])
    assert [actor.name for actor in cluster.record().nodes[0].actors][-2:] == ["decode-0", "decode-2"]
    assert "decode-0 gets nothing new" in cluster._workers.scale(ScaleWorkers({"decode": 2}), router)
    assert cluster._workers.scale(ScaleWorkers({"decode": 2}), router) == "There are as many already."
    cluster._workers.end("decode-0")
    assert ended == ["decode-0"]
    assert "decode-0" not in [actor.name for actor in cluster.record().nodes[0].actors]
    free.available_bytes.remote = lambda: 1 << 20
    with pytest.raises(NotEnoughMemory, match=r"node-0 has no room for 2 workers more: .* enough for 0"):
        cluster._workers.scale(ScaleWorkers({"decode": 6, "prefill": 2}), router)


def test_the_log_of_the_driver_is_closed_with_it(cluster: ClusterOnHosts) -> None:
    package = logging.getLogger("alignedserve")
    num_handlers = len(package.handlers)
    cluster._leave_ray()
    cluster._leave_ray()
    assert len(package.handlers) == num_handlers - 1


def test_a_worker_whose_name_is_taken_is_none_of_the_cluster(
    cluster: ClusterOnHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_taken(node: PreparedNode, name: str) -> None:
        raise ValueError(f"the name {name} is taken")

    before = [member.prepared.share for member in cluster._members.values()]
    monkeypatch.setattr(cluster, "add_worker", is_taken)
    member = cluster._members["id-0"]
    with pytest.raises(PeerLost, match="decode-2 cannot be started, try again"):
        cluster._workers._add("decode", member)
    assert [member.prepared.share for member in cluster._members.values()] == before


@pytest.mark.parametrize(("served_s", "is_left"), [(60.0, True), (1.0, False)])
def test_a_driver_that_fails_leaves_a_cluster_that_has_served(
    cluster: ClusterOnHosts, monkeypatch: pytest.MonkeyPatch, served_s: float, is_left: bool
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(type(cluster), "_leave_ray", lambda self: ended.append("ray"))
    cluster._ready_s = time.monotonic() - served_s
    cluster.leave()
    assert ended == ([] if is_left else ["ray"])
    monkeypatch.undo()


def test_a_cluster_that_stops_ends_its_own_processes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_RAY_EXIT_S", 0.1)
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


def test_the_next_driver_gets_what_the_last_one_knew(cluster: ClusterOnHosts, announced: list[ClusterRecord]) -> None:
    keepers = [member.keeper.actor for member in cluster._members.values()]
    cluster._hand_over()
    (copy,) = keepers[0].copies
    assert keepers[1].copies == [copy]
    state: ClusterState = cloudpickle.loads(copy)
    assert (state.number, state.asked) == (1, "asked")
    assert [member.name for member in state.members] == ["node-0", "node-1"]
    assert [member.prepared.share for member in state.members] == [
        member.prepared.share for member in cluster._members.values()
    ]
    assert state.secrets == cluster._factory.secrets
    assert Succession("asked", state).started == cluster._succession.started


def test_the_next_driver_gives_back_what_the_last_one_began_to(cluster: ClusterOnHosts) -> None:
    cluster._drains.give_back("id-1")
    membership = Membership({node.node_id: node.host for node in NODES[:2]})
    NodeDrains(cluster._members, membership, cluster._joining, lambda event: None)
    assert membership.released == ("id-1",)


@pytest.fixture
def keepers(cluster: ClusterOnHosts, monkeypatch: pytest.MonkeyPatch) -> list[KeeperMemory]:
    monkeypatch.setattr(succession, "_PERIOD_S", 0.0)
    monkeypatch.setattr(succession, "answers_so_far", lambda calls: {call: call[1] for call in calls})
    return [member.keeper.actor for member in cluster._members.values()]


def test_a_driver_looks_once_a_second_at_most(cluster: ClusterOnHosts) -> None:
    cluster._hand_over()
    cluster._hand_over()
    keepers = [member.keeper.actor for member in cluster._members.values()]
    assert [(len(keeper.copies), keeper.num_heard) for keeper in keepers] == [(1, 0), (1, 0)]


def test_what_has_not_changed_is_handed_over_once(cluster: ClusterOnHosts, keepers: list[KeeperMemory]) -> None:
    for second in range(4):
        cluster._joining.drains.ended(float(second), {})
        cluster._hand_over()
    assert [(len(keeper.copies), keeper.num_heard) for keeper in keepers] == [(1, 3), (1, 3)]


def test_a_keeper_that_lacks_the_state_gets_it_again(cluster: ClusterOnHosts, keepers: list[KeeperMemory]) -> None:
    cluster._hand_over()
    keepers[1].copies = [pickle.dumps(SimpleNamespace(number=0))]
    cluster._hand_over()
    cluster._hand_over()
    assert len(keepers[0].copies) == 1
    assert keepers[1].copies[1:] == keepers[0].copies


def test_a_node_with_other_actors_or_another_keeper_gets_the_state(
    cluster: ClusterOnHosts, keepers: list[KeeperMemory]
) -> None:
    cluster._hand_over()
    cluster._actors["node-0"] = {"decode-0": object()}
    cluster._hand_over()
    assert [len(keeper.copies) for keeper in keepers] == [2, 1]
    member, new = cluster._members["id-1"], KeeperMemory()
    member.keeper = Keeper(new, member.keeper.book)
    cluster._hand_over()
    assert [len(keeper.copies) for keeper in (*keepers, new)] == [2, 1, 1]


def test_a_keeper_that_does_not_answer_is_not_asked_again(
    cluster: ClusterOnHosts, keepers: list[KeeperMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "answers_so_far", lambda calls: {})
    for _ in range(5):
        cluster._hand_over()
    assert [keeper.num_heard for keeper in keepers] == [1, 1]


def test_every_change_is_handed_over(cluster: ClusterOnHosts, keepers: list[KeeperMemory]) -> None:
    known, (head, other) = cluster._joining, cluster._members.values()
    share = dataclasses.replace(other.prepared.share, decode=("decode-1", "decode-9"))
    changes: list[Callable[[], object]] = [
        lambda: known.plan.placement.join(NodeCapacity("node-2", "10.0.0.2", 4)),
        lambda: known._vacant.setdefault(("host-7", ""), []).append(share),
        lambda: known._vacant["host-7", ""].pop(),
        lambda: known.drains.begin("node-1", Draining(("decode-1",), (), 60.0)),
        lambda: known.drains.ended(1.0, {}),
        lambda: known.drained.update({"id-7": other.without_keeper()}),
        lambda: setattr(known, "_num_nodes", 9),
        lambda: setattr(known, "_num_folders", 9),
        lambda: setattr(other, "prepared", dataclasses.replace(other.prepared, share=share)),
        lambda: setattr(head, "ray_node", head.ray_node._replace(node_id="id-9")),
        lambda: cluster._members.pop("id-1"),
    ]
    for number, change in enumerate(changes, start=1):
        cluster._hand_over()
        cluster._hand_over()
        assert len(keepers[0].copies) == number
        change()
    cluster._hand_over()
    state: ClusterState = cloudpickle.loads(keepers[0].copies[-1])
    assert state.number == len(keepers[0].copies) == len(changes) + 1
    assert [member.ray_node.node_id for member in state.members] == ["id-9"]


def test_what_a_driver_of_another_build_left_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [KeptState(1, b"calignedserve.core.errors\nNoSuchClass\n.", 60.0)]
    monkeypatch.setattr(succession, "kept_by", lambda keepers: left)
    record = ClusterRecord("c", own_versions(), "pocket", "colocated", started=0.0, is_ready=True, nodes=())
    assert left_by_former(record) is None


def test_what_has_changed_is_handed_over_at_once(cluster: ClusterOnHosts, announced: list[ClusterRecord]) -> None:
    cluster._hand_over()
    cluster._drains.give_back("id-1")
    cluster._announce()
    assert [len(member.keeper.actor.copies) for member in cluster._members.values()] == [2, 2]
    assert len(announced) == 1


def test_an_authority_that_was_handed_over_issues_what_the_others_believe() -> None:
    authority = CertificateAuthority("c")
    before = authority.issue("router")
    after = pickle.loads(pickle.dumps(authority)).issue("decode-0")
    assert after.authority == before.authority
    x509.load_pem_x509_certificate(after.certificate).verify_directly_issued_by(
        x509.load_pem_x509_certificate(before.authority)
    )


def test_a_driver_with_another_configuration_or_other_keys_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_mapping({})
    assert digest_of(config) == digest_of(from_mapping({}))
    assert digest_of(config) != digest_of(from_mapping({"decode": {"count": 2}}))
    assert digest_of(config) != digest_of(from_mapping({"decode": {"count": config.decode.count}}))
    before = digest_of(config)
    monkeypatch.setenv("ALIGNEDSERVE_API_KEYS", "one")
    assert digest_of(config) != before


def test_limits_keep_the_shares_of_the_start(cluster: ClusterOnHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[SharedState] = []

    def create(node: PreparedNode, state: SharedState) -> dict[str, Any]:
        states.append(state)
        return {}

    monkeypatch.setattr(cluster, "_factory", SimpleNamespace(create=create))
    monkeypatch.setattr(cluster, "_watch", lambda name: None)
    node = next(iter(cluster._members.values())).prepared
    cluster._state = SharedState(gateways=cluster._first_gateways or ())
    cluster.add_node(node)
    assert states == [SharedState(gateways=("gateway-0", "gateway-1"), have_run=True)]
