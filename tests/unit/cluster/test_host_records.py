"""What the driver of a cluster of hosts announces, and when; what a rehearsal spares. Without Ray."""

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from ray import cloudpickle

from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, PreparedNode
from alignedserve.cluster.hosts import cluster as running
from alignedserve.cluster.hosts.admission import Keeper
from alignedserve.cluster.hosts.cluster import ClusterOnHosts, Driving
from alignedserve.cluster.hosts.joining import Joining
from alignedserve.cluster.hosts.members import Member
from alignedserve.cluster.hosts.node_report import NodeReport, own_versions
from alignedserve.cluster.hosts.plan import NodeResources, plan_cluster
from alignedserve.cluster.hosts.ray_nodes import RayNode
from alignedserve.cluster.hosts.record import ClusterRecord
from alignedserve.cluster.hosts.succession import ClusterState, Succession, digest_of
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.placement import NodeCapacity
from alignedserve.cluster.start_observer import LoggingObserver
from alignedserve.config.sections import MIB, ModelSectionConfig, from_mapping
from alignedserve.core.errors import ResourceError
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
        self.keep = SimpleNamespace(remote=lambda number, copy, *others: self.copies.append(copy))


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
    joining = Joining(plan, NodeReport(own_versions()), "c", 2)
    factory = ActorFactory(POCKET, ActorClasses(None, None))
    return ClusterOnHosts(joining, members, factory, Driving(LoggingObserver(), Succession("asked")))


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


def test_the_log_of_the_driver_is_closed_with_it(cluster: ClusterOnHosts) -> None:
    package = logging.getLogger("alignedserve")
    num_handlers = len(package.handlers)
    cluster._leave_ray()
    cluster._leave_ray()
    assert len(package.handlers) == num_handlers - 1


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


def test_a_driver_hands_over_once_a_second_at_most(cluster: ClusterOnHosts) -> None:
    cluster._hand_over()
    cluster._hand_over()
    assert [len(member.keeper.actor.copies) for member in cluster._members.values()] == [1, 1]


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
