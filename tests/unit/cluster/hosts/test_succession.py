"""The state that a driver hands over, and the next driver that takes it. Without Ray."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509

from alignedserve.cluster.actor_factory import ClusterSecrets
from alignedserve.cluster.deployments.logic import Deployment, DeploymentsLogic, DeploymentStage
from alignedserve.cluster.desired import DrainedNode, ProcessDrain, RollingRestart, SeenCluster, reconcile
from alignedserve.cluster.hosts import succession
from alignedserve.cluster.hosts.record import ClusterRecord, own_versions
from alignedserve.cluster.hosts.succession import ClusterState, Succession, decode, digest_of, encode, left_by_former
from alignedserve.cluster.memory_planner import Machine
from alignedserve.cluster.nodes.admission import Agent
from alignedserve.cluster.nodes.agent import KeptState
from alignedserve.cluster.nodes.members import HostedModel
from alignedserve.cluster.nodes.ray_nodes import WorkerShare
from alignedserve.cluster.placement import NodeCapacity
from alignedserve.config.sections import ModelSectionConfig
from alignedserve.config.unset_sizes import DefaultSize, from_mapping
from alignedserve.core.errors import ProtocolError
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.models import tiny_mobile
from tests.support.models.tiny_encoders import make_tiny_encoder
from tests.unit.cluster.driven_cluster import NODES, AgentMemory, joined

PRODUCT = ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels")


class Driver:
    """The part of a driver that hands over."""

    def __init__(self, folder: Path) -> None:
        self.joining, self.members = joined(folder, {"topology": "disaggregated"})
        self.agents: list[AgentMemory] = [member.agent.actor for member in self.members]
        self.secrets = ClusterSecrets()
        self.actors: dict[str, dict[str, Any]] = {}
        self._succession = Succession("asked")

    def hand_over(self, *, has_changed: bool = False) -> None:
        """Do it."""
        self._succession.hand_over(self.joining, self.members, self.secrets, self.actors, has_changed=has_changed)

    @property
    def state(self) -> ClusterState:
        """Return all of it."""
        return ClusterState("asked", 1.5, self.secrets, self.joining, tuple(self.members))


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


@pytest.fixture
def eager(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver that looks whenever it is asked to, and whose agents answer at once."""
    monkeypatch.setattr(succession, "_PERIOD_S", 0.0)
    monkeypatch.setattr(succession, "answers_so_far", lambda calls: {call: call[1] for call in calls})
    return driver


def test_the_next_driver_gets_what_the_last_one_knew(driver: Driver) -> None:
    joining, (head, other) = driver.joining, driver.members
    share = replace(other.prepared.share, deployment_id="2", decode=("decode-1.2",), gateways=())
    other.set_part(replace(other.prepared, share=share, num_far_decode=3, joins_others=True))
    other.placed = {"decode-1": WorkerShare(0, 2.0, 0.5)}
    joining.logic = DeploymentsLogic([Deployment("2", "b", DeploymentStage.DRAINING, "order", 5.0)], 2)
    joining.models["2"] = HostedModel(joining.models[""].plan, {"model": {"path": "/m"}}, "digest")
    joining.wholes["node-0"] = Machine(1, 2, 3, True)
    joining.vacant["host-7", "10.0.0.7"] = [(share,)]
    wanted = joining.wanted
    wanted.drains["node-1"] = ProcessDrain(("decode-1",), (), 60.0)
    wanted.drained["id-7"] = DrainedNode("node-7", NODES[2].host, "id-7")
    wanted.restart = RollingRestart("order", ["decode-1"], {"decode-0": 9.0, "decode-1": 9.0}, "decode-0", since_s=4.0)
    driver.secrets = ClusterSecrets(b"secret", CertificateAuthority.new("c"))
    found = decode(encode(driver.state))
    assert (found.asked, found.started, found.secrets.secret) == ("asked", 1.5, b"secret")
    assert [one.parts for one in found.members] == [
        tuple(replace(part, options_of=known.options_of) for part in member.parts)
        for member, known in ((head, found.members[0].prepared), (other, found.members[1].prepared))
    ]
    assert [(one.ray_node, one.agent, one.placed) for one in found.members] == [
        (one.ray_node, Agent(None, one.agent.book), one.placed) for one in driver.members
    ]
    then = found.joining
    assert then.plan.placement.join(NodeCapacity("node-2", "10.0.0.2", 4)) == joining.plan.placement.join(
        NodeCapacity("node-2", "10.0.0.2", 4)
    )
    assert then.models[""].plan is then.plan
    assert replace(then.plan, placement=joining.plan.placement) == joining.plan
    assert (then.models["2"].own, then.models["2"].digest) == ({"model": {"path": "/m"}}, "digest")
    assert (then.logic.left, then.logic.num_named) == (joining.logic.left, 2)
    assert (then.wholes, then.vacant, then.device) == (joining.wholes, joining.vacant, joining.device)
    kept = ("drains", "drained", "restart", "seen_s")
    assert [getattr(then.wanted, name) for name in kept] == [getattr(wanted, name) for name in kept]
    assert (then.num_nodes, then.num_folders, then.cluster_id) == (2, 2, "c")


def test_a_size_that_is_unset_stays_so(driver: Driver) -> None:
    config = decode(encode(driver.state)).joining.plan.config
    assert isinstance(config.decode.count, DefaultSize)


def test_a_model_of_either_kind_is_handed_over(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "encoder").mkdir()
    make_tiny_encoder(tmp_path / "encoder", "bert")
    served = resolve_model(ModelSectionConfig(path=str(tmp_path / "encoder")))
    driver.joining.plan = replace(driver.joining.plan, served=served, choices={})
    assert decode(encode(driver.state)).joining.plan.served == served


def test_a_model_that_sees_is_handed_over(driver: Driver) -> None:
    served = replace(driver.joining.plan.served, vision=tiny_mobile.CONFIG)
    driver.joining.plan = replace(driver.joining.plan, served=served, choices={})
    assert decode(encode(driver.state)).joining.plan.served == served


def test_a_driver_looks_once_a_second_at_most(driver: Driver) -> None:
    driver.hand_over()
    driver.hand_over()
    assert [(len(agent.copies), agent.num_heard) for agent in driver.agents] == [(1, 0), (1, 0)]
    assert driver.agents[0].copies == driver.agents[1].copies


def test_what_has_changed_is_handed_over_at_once(driver: Driver) -> None:
    driver.hand_over()
    driver.joining.num_nodes = 9
    driver.hand_over(has_changed=True)
    assert [len(agent.copies) for agent in driver.agents] == [2, 2]


def test_what_has_not_changed_is_handed_over_once(eager: Driver) -> None:
    for second in range(4):
        reconcile(eager.joining.wanted, SeenCluster({}, {}), float(second))
        eager.hand_over()
    assert [(len(agent.copies), agent.num_heard) for agent in eager.agents] == [(1, 3), (1, 3)]


def test_a_agent_that_lacks_the_state_gets_it_again(eager: Driver) -> None:
    eager.hand_over()
    eager.agents[1].number = 0
    eager.hand_over()
    eager.hand_over()
    assert [len(agent.copies) for agent in eager.agents] == [1, 2]


def test_a_node_with_other_actors_or_another_agent_gets_the_state(eager: Driver) -> None:
    eager.hand_over()
    eager.actors["node-0"] = {"decode-0": object()}
    eager.hand_over()
    assert [len(agent.copies) for agent in eager.agents] == [2, 1]
    new = AgentMemory()
    eager.members[1].agent = Agent(new, eager.members[1].agent.book)
    eager.hand_over()
    assert [len(agent.copies) for agent in (*eager.agents, new)] == [2, 1, 1]


def test_a_agent_that_does_not_answer_is_not_asked_again(eager: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "answers_so_far", lambda calls: {})
    for _ in range(5):
        eager.hand_over()
    assert [agent.num_heard for agent in eager.agents] == [1, 1]


def test_every_change_is_handed_over(eager: Driver) -> None:
    known, (head, other) = eager.joining, eager.members
    share = replace(other.prepared.share, decode=("decode-1", "decode-9"))
    of_second = replace(share, deployment_id="2", decode=("decode-1.2",), gateways=())
    changes: list[Callable[[], object]] = [
        lambda: other.set_part(replace(other.prepared, share=of_second)),
        lambda: other.set_part(replace(other.prepared, share=replace(of_second, decode=("decode-2.2",)))),
        lambda: other.remove_model("2"),
        lambda: known.plan.placement.join(NodeCapacity("node-2", "10.0.0.2", 4)),
        lambda: known.vacant.setdefault(("host-7", ""), []).append((share,)),
        lambda: known.vacant["host-7", ""].pop(),
        lambda: known.wanted.drains.update({"node-1": ProcessDrain(("decode-1",), (), 60.0)}),
        lambda: reconcile(known.wanted, SeenCluster({}, {}), 1.0),
        lambda: known.wanted.drained.update({"id-7": DrainedNode("node-7", NODES[2].host, "id-7")}),
        lambda: setattr(known, "num_nodes", 9),
        lambda: setattr(known, "num_folders", 9),
        lambda: setattr(other, "prepared", replace(other.prepared, share=share)),
        lambda: setattr(head, "ray_node", head.ray_node._replace(node_id="id-9")),
        lambda: eager.members.pop(),
    ]
    for number, change in enumerate(changes, start=1):
        eager.hand_over()
        eager.hand_over()
        assert len(eager.agents[0].copies) == number
        change()
    eager.hand_over()
    assert eager.agents[0].number == len(eager.agents[0].copies) == len(changes) + 1
    assert [member.ray_node.node_id for member in decode(eager.agents[0].copies[-1]).members] == ["id-9"]


@pytest.mark.parametrize("place", [(), ("device",), ("members", 0), ("first", "served", "config"), ("sections", 1)])
def test_a_record_with_an_unknown_field_is_refused(driver: Driver, place: Sequence[str | int]) -> None:
    record = inner = msgspec.msgpack.decode(encode(driver.state))
    for one in place:
        inner = inner[one]
    inner["new"] = 1
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(record))


@pytest.mark.parametrize("left", [b"calignedserve.core.errors\nNoSuchClass\n.", b"", b"\x80"])
def test_what_a_driver_of_another_build_left_is_not_taken_over(left: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "kept_by", lambda agents: [KeptState(1, left, 60.0)])
    record = ClusterRecord("c", own_versions(), "pocket", "colocated", started=0.0, is_ready=True, nodes=())
    assert left_by_former(record) is None


def test_the_latest_record_is_taken_over(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [KeptState(number, encode(replace(driver.state, asked=f"asked {number}")), 60.0) for number in (2, 3)]
    monkeypatch.setattr(succession, "kept_by", lambda agents: kept)
    record = ClusterRecord("c", own_versions(), "pocket", "colocated", started=0.0, is_ready=True, nodes=())
    left = left_by_former(record)
    assert left is not None
    assert (left.number, left.asked) == (3, "asked 3")


def test_an_authority_that_was_handed_over_issues_what_the_others_believe() -> None:
    authority = CertificateAuthority.new("c")
    before = authority.issue("router")
    after = CertificateAuthority.from_pem(*authority.pem).issue("decode-0")
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


def test_the_product_unpickles_nothing() -> None:
    root = Path(__file__).parents[4]
    files = [file for folder in PRODUCT for file in (root / folder).rglob("*.py")]
    assert len(files) > 500
    found = [
        str(file.relative_to(root)) for file in files if "pickle" in file.read_text("utf-8") and _uses_pickle(file)
    ]
    assert found == []


def _uses_pickle(file: Path) -> bool:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        if any(part.lower().endswith("pickle") for name in names for part in name.split(".")):
            return True
    return False
