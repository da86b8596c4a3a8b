"""The state that a driver hands over, and the next driver that takes it. Without Ray.

All that is unpickled here was pickled by the test itself: no process is asked for it, and no file is read.
"""

import dataclasses
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from cryptography import x509
from ray import cloudpickle

from alignedserve.cluster.draining.drains import Draining
from alignedserve.cluster.hosts import succession
from alignedserve.cluster.hosts.admission import Keeper
from alignedserve.cluster.hosts.cluster import ClusterOnHosts
from alignedserve.cluster.hosts.membership import Membership
from alignedserve.cluster.hosts.nodes.keeper import KeptState
from alignedserve.cluster.hosts.nodes.report import own_versions
from alignedserve.cluster.hosts.operations.node_drains import NodeDrains
from alignedserve.cluster.hosts.record import ClusterRecord
from alignedserve.cluster.hosts.succession import ClusterState, Succession, digest_of, left_by_former
from alignedserve.cluster.placement import NodeCapacity
from alignedserve.config.unset_sizes import from_mapping
from alignedserve.process.tls import CertificateAuthority
from tests.unit.cluster.driven_cluster import NODES, KeeperMemory


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
        cluster._joining.drains.finished(float(second), {})
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
    of_second = dataclasses.replace(share, deployment_id="2", decode=("decode-1.2",), gateways=())
    scaled = dataclasses.replace(of_second, decode=("decode-1.2", "decode-2.2"))
    changes: list[Callable[[], object]] = [
        lambda: other.set_part(dataclasses.replace(other.prepared, share=of_second)),
        lambda: other.set_part(dataclasses.replace(other.prepared, share=scaled)),
        lambda: other.remove_model("2"),
        lambda: known.plan.placement.join(NodeCapacity("node-2", "10.0.0.2", 4)),
        lambda: known._vacant.setdefault(("host-7", ""), []).append((share,)),
        lambda: known._vacant["host-7", ""].pop(),
        lambda: known.drains.begin("node-1", Draining(("decode-1",), (), 60.0)),
        lambda: known.drains.finished(1.0, {}),
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
