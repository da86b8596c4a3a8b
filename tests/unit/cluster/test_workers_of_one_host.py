"""One host grows and shrinks while it serves. Without Ray."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignedserve.cluster.actor_factory import ActorClasses, ActorFactory, PreparedNode
from alignedserve.cluster.deployments.orders import Answer, DrainNode, NodeOrder, OrderDone, ScaleWorkers, UndoDrain
from alignedserve.cluster.desired import RollingRestart, reconcile
from alignedserve.cluster.nodes.admission import Agent, NodeAdmission
from alignedserve.cluster.serving_cluster import DriverSetup, ServingCluster
from alignedserve.cluster.starting import LoggingObserver
from alignedserve.config.model_settings import ModelSettings
from tests.unit.cluster.driven_cluster import POCKET, joined


class Host:
    """A cluster of one host, none of whose actors exist, and what became of its workers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        joining, (member, _) = joined(folder, settings)
        member.agent = Agent(None, member.agent.book)
        factory, setup = (
            ActorFactory(POCKET, ActorClasses(None, None)),
            DriverSetup(ModelSettings({}, ({},)), NodeAdmission, LoggingObserver()),
        )
        self.cluster = ServingCluster(joining, [member], factory, setup)
        self.changes: list[str] = []
        self.cluster._wishes._create = self._create
        self.cluster.remove_worker = self._remove  # type: ignore[method-assign]
        router = SimpleNamespace(num_left=SimpleNamespace(remote=lambda names: dict.fromkeys(names, 1)))
        self.cluster.actors = lambda: {"router": router}  # type: ignore[method-assign]

    def _create(self, node: PreparedNode, name: str) -> None:
        self.changes.append(f"+{name}")

    def _remove(self, node: str, name: str) -> None:
        self.changes.append(f"-{name}")

    def said(self, order: NodeOrder) -> str:
        answers: list[Answer] = []
        self.cluster._answer = lambda order_id, answer: answers.append(answer)  # type: ignore[method-assign]
        self.cluster._obey("order", order)
        (answer,) = answers
        return answer.text if isinstance(answer, OrderDone) else f"refused: {answer.reason}"  # type: ignore[union-attr]

    def end_drained(self, name: str) -> None:
        """Let a worker that may drain have nothing left."""
        seen = replace(self.cluster._observed(), left={name: 0})
        for step in reconcile(self.cluster._wanted, seen, 0.0):
            self.cluster._perform(step)

    @property
    def workers(self) -> tuple[str, ...]:
        return next(iter(self.cluster._members.values())).workers


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr("alignedserve.cluster.ray_node.ray.get", lambda reference, timeout: reference)
    return Host(tmp_path)


def test_workers_come_and_go(host: Host) -> None:
    assert host.said(ScaleWorkers({"decode": 3})) == "worker-2 starts on node-0; worker-3 starts on node-0."
    assert [*host.workers] == ["worker-0", "worker-2", "worker-3"]
    assert (
        host.said(DrainNode("worker-2", 9.0)) == "worker-2 gets nothing new; what it still has in 9 s goes elsewhere."
    )
    assert host.said(DrainNode("worker-2", 9.0)).endswith("there are worker-0, worker-3")
    assert host.said(UndoDrain("worker-2")) == "worker-2 is used again."
    assert host.said(DrainNode("worker-2", 9.0)).startswith("worker-2 gets nothing new")
    host.end_drained("worker-2")
    assert [*host.workers] == ["worker-0", "worker-3"]
    assert "gets nothing new" in host.said(ScaleWorkers({"decode": 1}))
    assert host.changes == ["+worker-2", "+worker-3", "-worker-2"]


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (ScaleWorkers({"decode": 0}), "one decode worker stays, so decode=0 is not possible"),
        (ScaleWorkers({"decode": 9_000}), "node-0 has no room for 8999 more workers"),
        (ScaleWorkers({"prefill": 2}), "are scaled by decode=N alone"),
        (DrainNode("worker-0", 1.0), "worker-0 is the last worker of its kind"),
        (DrainNode("node-0", 1.0), "there is no worker node-0, or it drains already; there are worker-0"),
        (UndoDrain("worker-0"), "worker-0 does not drain"),
    ],
)
def test_what_one_host_cannot_do_is_said(host: Host, order: NodeOrder, problem: str) -> None:
    assert problem in host.said(order)
    assert host.changes == []


def test_workers_that_others_stand_by_for_keep_their_number(tmp_path: Path) -> None:
    host = Host(tmp_path, decode={"standby": 1})
    for order in (ScaleWorkers({"decode": 2}), DrainNode("worker-0", 1.0)):
        assert "keep their number" in host.said(order)


def test_the_drains_of_a_restart_are_left_to_it(host: Host) -> None:
    host.said(ScaleWorkers({"decode": 2}))
    host.cluster._wanted.restart = RollingRestart("x", ["worker-2"], {"worker-2": 9.0})
    host.end_drained("")
    assert host.cluster._wanted.workers == ("worker-2",)
    for order in (ScaleWorkers({"decode": 1}), DrainNode("worker-2", 1.0), UndoDrain("worker-2")):
        assert host.said(order).startswith("refused: workers are being restarted")
    host.end_drained("worker-2")
    assert host.cluster._wanted.restart.has_drained
    assert "worker-2" in host.workers
