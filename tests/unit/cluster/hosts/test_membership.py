"""Nodes of a running cluster, and their preparation beside the driver's loop. Without Ray."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from alignedserve.cluster.desired import Act, ClusterStep, ProcessDrain, SeenCluster, SeenNode, WantedCluster, reconcile
from alignedserve.cluster.nodes.joining import Preparation, Steps
from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.core.errors import PeerLost, ResourceError
from tests.support.marks import each

NODE = RayNode("id", "10.0.0.1", "spare", is_head=False)


def prepare(node_id: str) -> ClusterStep:
    return ClusterStep(Act.PREPARE, node_id)


def hosts(*node_ids: str) -> dict[str, tuple[str, str]]:
    """Ids of the same host differ in what follows the dot."""
    return {node_id: (node_id.partition(".")[0], "10.0.0.1") for node_id in node_ids}


class Nodes:
    """The nodes of a cluster, whose steps are performed at once. Each has a worker of its name."""

    def __init__(self, *members: str) -> None:
        self.wanted = WantedCluster()
        self.members = list(members)
        self.preparing: list[str] = []
        self.left: dict[str, int] = {}

    def look(self, now: float, *alive: str) -> list[ClusterStep]:
        members = {node_id: SeenNode(f"node-{node_id}", host) for node_id, host in hosts(*self.members).items()}
        steps = reconcile(self.wanted, SeenCluster(hosts(*alive), members, tuple(self.preparing), self.left), now)
        for act, node_id, _ in steps:
            match act:
                case Act.PREPARE:
                    self.preparing.append(node_id)
                case Act.CANCEL:
                    self.preparing.remove(node_id)
                case Act.FORGET | Act.END_NODE:
                    self.members.remove(node_id)
        return steps

    def join(self, node_id: str) -> None:
        self.preparing.remove(node_id)
        self.members.append(node_id)
        self.wanted.joined(node_id)

    def refuse(self, node_id: str) -> None:
        self.preparing.remove(node_id)
        self.wanted.refuse(node_id, "it differs")

    def postpone(self, node_id: str, now: float) -> None:
        self.preparing.remove(node_id)
        self.wanted.postpone(node_id, now)

    def drain(self, node_id: str, *, is_given_back: bool = False) -> None:
        drain = ProcessDrain((f"decode-{node_id}",), (), float("inf"), is_given_back)
        self.wanted.drains[f"node-{node_id}"] = drain
        self.left.pop(f"decode-{node_id}", None)

    def finish(self, node_id: str) -> None:
        """Let nothing be left on a node."""
        self.left[f"decode-{node_id}"] = 0

    def undo(self, node_id: str) -> None:
        self.wanted.use_again(node_id, f"node-{node_id}")

    @property
    def drained(self) -> list[str]:
        return list(self.wanted.drained)


def test_a_new_node_is_prepared_once_and_joins() -> None:
    nodes = Nodes("head")
    assert nodes.look(0.0, "head", "a") == [prepare("a")]
    assert nodes.look(1.0, "head", "a") == []
    nodes.join("a")
    assert nodes.look(3.0, "head", "a") == []


def test_a_step_that_was_not_taken_is_given_again() -> None:
    nodes = Nodes("head")
    for now in (0.0, 1.0):
        assert nodes.look(now, "head", "a") == [prepare("a")]
        nodes.preparing.clear()


def test_a_loss_is_seen_while_another_node_is_prepared() -> None:
    nodes = Nodes("head", "a")
    assert nodes.look(0.0, "head", "a", "b") == [prepare("b")]
    assert nodes.look(1.0, "head", "b") == [ClusterStep(Act.FORGET, "a")]
    assert nodes.look(2.0, "head") == [ClusterStep(Act.CANCEL, "b")]


def test_a_node_that_does_not_answer_is_tried_again_after_longer_and_longer_pauses() -> None:
    nodes = Nodes("head")
    pauses, now = [], 0.0
    for _ in range(7):
        began = now
        while not nodes.look(now, "head", "a"):
            now += 0.5
        pauses.append(now - began)
        nodes.postpone("a", now)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_a_refused_node_is_left_alone_until_it_comes_anew() -> None:
    nodes = Nodes("head")
    nodes.look(0.0, "head", "a")
    nodes.refuse("a")
    assert nodes.look(100.0, "head", "a") == []
    assert nodes.wanted.refused == {"a": "it differs"}
    assert nodes.look(101.0, "head") == []
    assert nodes.wanted.refused == {}
    assert nodes.look(102.0, "head", "a") == [prepare("a")]


def test_a_node_that_drains_ends_and_stays_out_until_it_is_undone() -> None:
    nodes = Nodes("head", "a")
    nodes.drain("a")
    assert nodes.look(0.0, "head", "a") == []
    nodes.finish("a")
    assert nodes.look(1.0, "head", "a") == [ClusterStep(Act.END_NODE, "a")]
    assert (nodes.wanted.drains, nodes.drained) == ({}, ["a"])
    assert nodes.look(2.0, "head", "a") == []
    nodes.undo("a")
    assert nodes.look(4.0, "head", "a") == [prepare("a")]


def test_a_drain_that_is_undone_in_time_changes_nothing() -> None:
    nodes = Nodes("head", "a")
    nodes.drain("a")
    nodes.undo("a")
    nodes.finish("a")
    assert nodes.look(1.0, "head", "a") == []
    assert (nodes.wanted.drains, nodes.drained) == ({}, [])


def test_a_node_and_its_worker_that_drain_at_once_end_together() -> None:
    nodes = Nodes("head", "a")
    nodes.drain("a")
    nodes.wanted.drains["decode-a"] = ProcessDrain(("decode-a",), (), 0.0)
    nodes.finish("a")
    seen = {node_id: SeenNode(f"node-{node_id}", host, (f"decode-{node_id}",)) for node_id, host in hosts("a").items()}
    assert reconcile(nodes.wanted, SeenCluster(hosts("a"), seen, (), nodes.left), 1.0) == [
        ClusterStep(Act.END_NODE, "a")
    ]
    assert nodes.wanted.drains == {}


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_a_host_that_drained_stays_out_when_it_comes_back_under_another_id(is_lost_first: bool) -> None:
    nodes = Nodes("head", "a.1")
    nodes.drain("a.1")
    if is_lost_first:
        assert nodes.look(1.0, "head") == [ClusterStep(Act.FORGET, "a.1")]
    else:
        nodes.finish("a.1")
        assert nodes.look(1.0, "head", "a.1") == [ClusterStep(Act.END_NODE, "a.1")]
        assert nodes.look(2.0, "head") == []
    assert nodes.drained == ["a.1"]
    assert nodes.look(3.0, "head", "a.2", "b.1") == [prepare("b.1")]
    assert nodes.look(4.0, "head", "a.2", "a.3", "b.1") == [prepare("a.3")]  # a second node of that host
    nodes.undo("a.1")
    assert nodes.look(6.0, "head", "a.2", "b.1") == [ClusterStep(Act.CANCEL, "a.3"), prepare("a.2")]


def test_a_node_that_is_given_back_stays_out_while_it_lives_and_its_host_may_come_again() -> None:
    nodes = Nodes("head", "a")
    nodes.drain("a", is_given_back=True)
    nodes.finish("a")
    assert nodes.look(1.0, "head", "a") == [ClusterStep(Act.END_NODE, "a")]
    assert (list(nodes.wanted.given_back), nodes.drained) == (["a"], [])
    assert nodes.look(100.0, "head", "a") == []
    assert nodes.look(101.0, "head") == []
    assert nodes.wanted.given_back == {}
    assert nodes.look(102.0, "head", "a.1") == [prepare("a.1")]


def test_a_node_that_was_given_back_is_taken_again_whether_it_has_drained_or_not() -> None:
    nodes = Nodes("head", "a")
    nodes.drain("a", is_given_back=True)
    nodes.undo("a")
    assert nodes.look(2.0, "head", "a") == []
    nodes.drain("a", is_given_back=True)
    nodes.finish("a")
    nodes.look(4.0, "head", "a")
    nodes.undo("a")
    assert nodes.look(6.0, "head", "a") == [prepare("a")]


def test_a_node_that_is_lost_while_it_is_given_back_is_forgotten() -> None:
    nodes = Nodes("head", "a")
    nodes.drain("a", is_given_back=True)
    assert nodes.look(1.0, "head") == [ClusterStep(Act.FORGET, "a")]
    assert (nodes.wanted.given_back, nodes.drained) == ({}, [])
    assert nodes.look(2.0, "head", "a.1") == [prepare("a.1")]


class NodeModel:
    """Performs the steps: checks that each fits what was wished before."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self.nodes = Nodes("head")
        self.alive = ["head"]
        self.refused: set[str] = set()
        self.draining: set[str] = set()
        self.out: set[str] = set()  # drained, alive or not

    def look(self, now: float) -> None:
        known = {*self.nodes.members, *self.nodes.preparing, *(self.refused & set(self.alive)), *self.out}
        for act, node_id, _ in self.nodes.look(now, *self.alive):
            match act:
                case Act.PREPARE:
                    assert node_id in self.alive
                    assert node_id not in known
                case Act.CANCEL:
                    assert node_id not in self.alive
                case Act.FORGET:
                    assert node_id not in self.alive
                    self.out |= {node_id} & self.draining
                case Act.END_NODE:
                    assert node_id in self.draining
                    self.out.add(node_id)
        self.draining -= self.out | (self.draining - set(self.nodes.members))
        self.refused &= set(self.alive)

    def drain(self, now: float) -> None:
        """Begin, end or undo a drain."""
        able = sorted(set(self.nodes.members) - self.draining - {"head"})
        if self.draining and self._choice.random() < 0.5:
            self.nodes.finish(min(self.draining))
            self.look(now)
        elif (self.out or self.draining) and self._choice.random() < 0.4:
            node_id = min(self.out or self.draining)
            self.out.discard(node_id)
            self.draining.discard(node_id)
            self.nodes.undo(node_id)
        elif able:
            self.draining.add(able[0])
            self.nodes.drain(able[0])

    def step(self, now: float) -> None:
        if self._choice.random() < 0.2:
            self.drain(now)
        elif self.nodes.preparing and self._choice.random() < 0.5:
            node_id = self._choice.choice(sorted(self.nodes.preparing))
            match self._choice.randrange(3):
                case 0:
                    self.nodes.join(node_id)
                case 1:
                    self.refused.add(node_id)
                    self.nodes.refuse(node_id)
                case _:
                    self.nodes.postpone(node_id, now)
        else:
            node_id = self._choice.choice("abcd")
            (self.alive.remove if node_id in self.alive else self.alive.append)(node_id)
            if self._choice.random() < 0.7:
                self.look(now)


@each("seed", range(30))
def test_in_random_histories_every_node_that_lives_is_used_refused_or_tried(seed: int) -> None:
    model = NodeModel(random.Random(seed))
    for step in range(300):
        model.step(float(step))
    model.look(1000.0)
    has_actors, wanted = set(model.nodes.members), model.nodes.wanted
    assert has_actors <= set(model.alive)
    assert set(wanted.refused) == model.refused
    assert set(wanted.drained) == model.out
    assert set(wanted.drains) == {f"node-{node_id}" for node_id in model.draining}
    assert model.draining <= has_actors
    used = has_actors | set(model.nodes.preparing) | model.refused
    assert used | (model.out & set(model.alive)) == set(model.alive)


# --- the steps of a preparation


class Answers:
    """The answers that have come."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}

    def __call__(self, asked: Sequence[Any]) -> Sequence[Any] | None:
        return [self.found[one] for one in asked] if all(one in self.found for one in asked) else None


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def steps(ended: list[str], result: Any) -> Steps:
    try:
        (report,) = yield ["report"]
        if report == "differs":
            raise ResourceError("it has another Python")
        yield ["failure", "folder"]
        ready: Member = result
        return ready
    finally:
        ended.append("ended")


def test_a_preparation_goes_on_as_answers_come_and_never_waits() -> None:
    answers, ended, member = Answers(), list[str](), object()
    preparation = Preparation(NODE, steps(ended, member), answers, Clock())
    assert preparation.advance() is None
    answers.found["report"] = "fits"
    assert preparation.advance() is None
    assert preparation.advance() is None
    answers.found |= {"failure": None, "folder": "/run"}
    assert not ended
    assert preparation.advance() is member
    assert ended == ["ended"]


def test_a_preparation_ends_what_it_began_when_it_fails_or_is_given_up() -> None:
    answers, ended = Answers(), list[str]()
    given_up = Preparation(NODE, steps(ended, None), answers, Clock())
    given_up.close()
    assert ended == ["ended"]
    answers.found["report"] = "differs"
    with pytest.raises(ResourceError, match="another Python"):
        Preparation(NODE, steps(ended, None), answers, Clock()).advance()
    assert ended == ["ended"] * 2


def test_a_node_that_never_answers_is_lost_for_now() -> None:
    clock, ended = Clock(), list[str]()
    preparation = Preparation(NODE, steps(ended, None), Answers(), clock)
    clock.now_s = 419.0
    assert preparation.advance() is None
    clock.now_s = 421.0
    with pytest.raises(PeerLost, match=r"spare \(10.0.0.1\) does not answer"):
        preparation.advance()
    assert ended == ["ended"]
