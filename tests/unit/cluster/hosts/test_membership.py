"""Nodes of a running cluster, and their preparation beside the driver's loop. Without Ray."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from alignedserve.cluster.hosts.membership import (
    Announce,
    CancelPreparation,
    DrainAsked,
    DrainUndone,
    EndNode,
    ForgetNode,
    Membership,
    MembershipCommand,
    NodeDrained,
    NodeJoined,
    NodePostponed,
    NodeRefused,
    NodesSeen,
    PrepareNode,
)
from alignedserve.cluster.nodes.joining import Preparation, Steps
from alignedserve.cluster.nodes.members import Member
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.core.errors import PeerLost, ResourceError
from tests.support.marks import each

NODE = RayNode("id", "10.0.0.1", "spare", is_head=False)


def hosts(*node_ids: str) -> dict[str, tuple[str, str]]:
    """Ids of the same host differ in what follows the dot."""
    return {node_id: (node_id.partition(".")[0], "10.0.0.1") for node_id in node_ids}


def seen(*node_ids: str) -> NodesSeen:
    return NodesSeen(hosts(*node_ids))


def test_a_new_node_is_prepared_once_and_joins() -> None:
    nodes = Membership(hosts("head"))
    assert nodes.on_event(seen("head", "a"), 0.0) == [PrepareNode("a")]
    assert nodes.on_event(seen("head", "a"), 1.0) == []
    assert nodes.on_event(NodeJoined("a"), 2.0) == [Announce()]
    assert nodes.members == ("head", "a")
    assert nodes.on_event(seen("head", "a"), 3.0) == []


def test_a_loss_is_seen_while_another_node_is_prepared() -> None:
    nodes = Membership(hosts("head", "a"))
    assert nodes.on_event(seen("head", "a", "b"), 0.0) == [PrepareNode("b")]
    assert nodes.on_event(seen("head", "b"), 1.0) == [ForgetNode("a"), Announce()]
    assert nodes.on_event(seen("head"), 2.0) == [CancelPreparation("b")]
    assert nodes.members == ("head",)


def test_a_node_that_does_not_answer_is_tried_again_after_longer_and_longer_pauses() -> None:
    nodes = Membership(hosts("head"))
    pauses, now = [], 0.0
    for _ in range(7):
        began = now
        while not nodes.on_event(seen("head", "a"), now):
            now += 0.5
        pauses.append(now - began)
        assert nodes.on_event(NodePostponed("a"), now) == []
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]


def test_a_refused_node_is_left_alone_until_it_comes_anew() -> None:
    nodes = Membership(hosts("head"))
    nodes.on_event(seen("head", "a"), 0.0)
    assert nodes.on_event(NodeRefused("a", "another Python"), 1.0) == [Announce()]
    assert nodes.refused == {"a": "another Python"}
    assert nodes.on_event(seen("head", "a"), 100.0) == []
    assert nodes.on_event(seen("head"), 101.0) == [Announce()]
    assert nodes.refused == {}
    assert nodes.on_event(seen("head", "a"), 102.0) == [PrepareNode("a")]


def test_a_node_that_drains_ends_and_stays_out_until_it_is_undone() -> None:
    nodes = Membership(hosts("head", "a"))
    assert nodes.on_event(DrainAsked("a"), 0.0) == [Announce()]
    assert (nodes.members, nodes.draining) == (("head", "a"), ("a",))
    assert nodes.on_event(NodeDrained("a"), 1.0) == [EndNode("a"), Announce()]
    assert (nodes.members, nodes.draining, nodes.drained) == (("head",), (), ("a",))
    assert nodes.on_event(seen("head", "a"), 2.0) == []
    assert nodes.on_event(DrainUndone("a"), 3.0) == [Announce()]
    assert nodes.on_event(seen("head", "a"), 4.0) == [PrepareNode("a")]


def test_a_drain_that_is_undone_in_time_changes_nothing() -> None:
    nodes = Membership(hosts("head", "a"))
    nodes.on_event(DrainAsked("a"), 0.0)
    assert nodes.on_event(DrainUndone("a"), 1.0) == [Announce()]
    assert (nodes.members, nodes.draining, nodes.drained) == (("head", "a"), (), ())


@pytest.mark.parametrize("is_lost_first", [True, False])
def test_a_host_that_drained_stays_out_when_it_comes_back_under_another_id(is_lost_first: bool) -> None:
    nodes = Membership(hosts("head", "a.1"))
    nodes.on_event(DrainAsked("a.1"), 0.0)
    if is_lost_first:
        assert nodes.on_event(seen("head"), 1.0) == [ForgetNode("a.1"), Announce()]
    else:
        nodes.on_event(NodeDrained("a.1"), 1.0)
        assert nodes.on_event(seen("head"), 2.0) == []
    assert nodes.drained == ("a.1",)
    assert nodes.on_event(seen("head", "a.2", "b.1"), 3.0) == [PrepareNode("b.1")]
    assert nodes.on_event(seen("head", "a.2", "a.3", "b.1"), 4.0) == [PrepareNode("a.3")]  # a second node of that host
    nodes.on_event(DrainUndone("a.1"), 5.0)
    assert nodes.on_event(seen("head", "a.2", "b.1"), 6.0) == [CancelPreparation("a.3"), PrepareNode("a.2")]


def test_a_node_that_is_given_back_stays_out_while_it_lives_and_its_host_may_come_again() -> None:
    nodes = Membership(hosts("head", "a"))
    assert nodes.on_event(DrainAsked("a", is_given_back=True), 0.0) == [Announce()]
    assert (nodes.released, nodes.members) == (("a",), ("head", "a"))
    assert nodes.on_event(NodeDrained("a"), 1.0) == [EndNode("a"), Announce()]
    assert (nodes.released, nodes.members, nodes.drained) == (("a",), ("head",), ())
    assert nodes.on_event(seen("head", "a"), 100.0) == []
    assert nodes.on_event(seen("head"), 101.0) == [Announce()]
    assert nodes.released == ()
    assert nodes.on_event(seen("head", "a.1"), 102.0) == [PrepareNode("a.1")]


def test_a_node_that_was_given_back_is_taken_again_whether_it_has_drained_or_not() -> None:
    nodes = Membership(hosts("head", "a"))
    nodes.on_event(DrainAsked("a", is_given_back=True), 0.0)
    assert nodes.on_event(DrainUndone("a"), 1.0) == [Announce()]
    assert nodes.on_event(seen("head", "a"), 2.0) == []
    nodes.on_event(DrainAsked("a", is_given_back=True), 3.0)
    nodes.on_event(NodeDrained("a"), 4.0)
    assert nodes.on_event(DrainUndone("a"), 5.0) == [Announce()]
    assert nodes.on_event(seen("head", "a"), 6.0) == [PrepareNode("a")]


def test_a_node_that_is_lost_while_it_is_given_back_is_forgotten() -> None:
    nodes = Membership(hosts("head", "a"))
    nodes.on_event(DrainAsked("a", is_given_back=True), 0.0)
    assert nodes.on_event(seen("head"), 1.0) == [ForgetNode("a"), Announce()]
    assert (nodes.released, nodes.drained) == ((), ())
    assert nodes.on_event(seen("head", "a.1"), 2.0) == [PrepareNode("a.1")]


class NodeModel:
    """Performs the commands: checks that each fits what was commanded before."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self.nodes = Membership(hosts("head"))
        self.alive = ["head"]
        self.has_actors = {"head"}
        self.prepared: set[str] = set()
        self.refused: set[str] = set()
        self.draining: set[str] = set()
        self.out: set[str] = set()  # drained, alive or not

    def perform(self, commands: list[MembershipCommand]) -> None:
        for command in commands:
            match command:
                case PrepareNode(node_id):
                    assert node_id in self.alive
                    assert node_id not in self.prepared | self.has_actors | self.refused | self.out
                    self.prepared.add(node_id)
                case CancelPreparation(node_id):
                    assert node_id not in self.alive
                    self.prepared.remove(node_id)
                case ForgetNode(node_id):
                    assert node_id not in self.alive
                    self.has_actors.remove(node_id)
                    if node_id in self.draining:
                        self.draining.remove(node_id)
                        self.out.add(node_id)
                case EndNode(node_id):
                    assert node_id in self.draining
                    self.has_actors.remove(node_id)
                    self.draining.remove(node_id)
                    self.out.add(node_id)

    def drain(self, now: float) -> None:
        """Begin, end or undo a drain."""
        able = sorted(self.has_actors - self.draining - {"head"})
        if self.draining and self._choice.random() < 0.5:
            self.perform(self.nodes.on_event(NodeDrained(min(self.draining)), now))
        elif (self.out or self.draining) and self._choice.random() < 0.4:
            node_id = min(self.out or self.draining)
            self.out.discard(node_id)
            self.draining.discard(node_id)
            self.perform(self.nodes.on_event(DrainUndone(node_id), now))
        elif able:
            self.draining.add(able[0])
            self.perform(self.nodes.on_event(DrainAsked(able[0]), now))

    def look(self, now: float) -> None:
        self.perform(self.nodes.on_event(seen(*self.alive), now))
        self.refused &= set(self.alive)

    def step(self, now: float) -> None:
        if self._choice.random() < 0.2:
            self.drain(now)
        elif self.prepared and self._choice.random() < 0.5:
            node_id = self._choice.choice(sorted(self.prepared))
            self.prepared.remove(node_id)
            match self._choice.randrange(3):
                case 0:
                    self.has_actors.add(node_id)
                    self.perform(self.nodes.on_event(NodeJoined(node_id), now))
                case 1:
                    self.refused.add(node_id)
                    self.perform(self.nodes.on_event(NodeRefused(node_id, "it differs"), now))
                case _:
                    self.perform(self.nodes.on_event(NodePostponed(node_id), now))
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
    assert set(model.nodes.members) == model.has_actors <= set(model.alive)
    assert set(model.nodes.refused) == model.refused
    assert set(model.nodes.drained) == model.out
    assert set(model.nodes.draining) == model.draining <= model.has_actors
    assert model.has_actors | model.prepared | model.refused | (model.out & set(model.alive)) == set(model.alive)


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
