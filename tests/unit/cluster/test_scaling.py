"""The number of a cluster's nodes: what is recommended, when it changes, and that it never goes back and forth."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.sections import ScalingConfig
from alignedserve.core.errors import ConfigError
from alignedserve.messages.gateways import ClusterStatus, Demand
from plugins.autoscaler.logic import (
    AskForNodes,
    GiveBack,
    Recommendation,
    ScaledNode,
    ScalingCommand,
    ScalingLogic,
    TakeAgain,
)
from tests.support.marks import each

PLACES = 64
HEAD = ScaledNode("head", is_head=True)
TWO = (HEAD, ScaledNode("a"))


def logic(max_nodes: int = 8, **config: float) -> ScalingLogic:
    return ScalingLogic(ScalingConfig(max_nodes=max_nodes, **config), max_nodes)  # type: ignore[arg-type]


def status(
    num_real_time: int, num_nodes: int, *, best_effort: int = 0, wait_s: float = 0, risk: int = 0
) -> ClusterStatus:
    demand = Demand(num_real_time, num_nodes * PLACES, wait_s, risk)
    return ClusterStatus(num_decoding=num_real_time + best_effort, demand=demand)


def reported(seen: ClusterStatus | None) -> dict[str, ClusterStatus]:
    """Return what the routers of a cluster of one model have reported."""
    return {} if seen is None else {"": seen}


def looks(
    made: ScalingLogic, seen: ClusterStatus | None, nodes: tuple[ScaledNode, ...], *times: int
) -> list[ScalingCommand]:
    return [command for now in times for command in made.decide(reported(seen), nodes, float(now))]


# --- what is recommended


@each(
    ("seen", "expected"),
    [
        (status(0, 2), (1, 1)),
        (status(140, 2), (3, 4)),  # the example of the module
        (status(92, 2), (2, 2)),
        (status(93, 2), (2, 3)),
        (status(10_000, 2), (4, 8)),  # twice the nodes that serve, at most
        (status(0, 2, best_effort=200), (1, 5)),  # adds no node, and keeps those that there are
        (status(10, 2, wait_s=5.0), (1, 1)),
        (status(10, 2, wait_s=7.0), (3, 3)),
        (status(10, 2, wait_s=120.0), (4, 4)),
        (status(10, 2, risk=1), (3, 3)),
    ],
)
def test_the_bounds_follow_from_the_demand(seen: ClusterStatus, expected: tuple[int, int]) -> None:
    assert logic().recommend(seen, 2) == Recommendation(*expected)


def test_what_a_model_needs_beyond_its_nodes_comes_on_top_of_the_others() -> None:
    made = logic(up_after_s=0.0, down_after_s=10.0)
    nodes = (ScaledNode("head", is_head=True, models=("", "2")), ScaledNode("a", models=("",)))
    assert made.decide({"": status(10, 2), "2": status(140, 1)}, nodes, 0.0) == [AskForNodes(3)]


def test_the_only_node_of_a_model_is_not_given_back() -> None:
    made = logic(up_after_s=0.0, down_after_s=1.0)
    nodes = (HEAD, ScaledNode("a"), ScaledNode("b", models=("2",)))
    idle = {"": status(0, 2), "2": status(0, 1)}
    commands = [command for now in range(5) for command in made.decide(idle, nodes, float(now))]
    assert [command for command in commands if isinstance(command, GiveBack)][:1] == [GiveBack("a")]
    assert GiveBack("b") not in commands


def test_a_model_that_has_not_reported_changes_nothing() -> None:
    made = logic(up_after_s=0.0, down_after_s=1.0)
    commands = [
        one
        for now in range(5)
        for one in made.decide({"": status(0, 2)}, (*TWO, ScaledNode("b", models=("2",))), float(now))
    ]
    assert commands == [AskForNodes(3)]


# --- when it changes


def test_nodes_are_asked_for_when_they_were_wanted_for_a_while() -> None:
    made, busy = logic(up_after_s=3.0), status(140, 2)
    assert looks(made, busy, TWO, 0, 1, 2) == [AskForNodes(2)]
    assert looks(made, busy, TWO, 3, 4, 5) == [AskForNodes(3)]
    assert made.num_wanted == 3


def test_a_moment_of_load_asks_for_nothing() -> None:
    made = logic(up_after_s=3.0)
    commands = looks(made, status(10, 2), TWO, 0, 1, 2, 3)
    commands += looks(made, status(500, 2), TWO, 4, 5)
    commands += looks(made, status(10, 2), TWO, 6, 7, 8, 9, 10)
    assert commands == [AskForNodes(2)]


def test_an_idle_node_is_given_back_when_it_was_idle_for_long() -> None:
    made, nodes = logic(down_after_s=300.0), (*TWO, ScaledNode("b"))
    commands = looks(made, status(0, 3), nodes, *range(300))
    assert commands == [AskForNodes(3)]
    assert looks(made, status(0, 3), nodes, 300) == [AskForNodes(1), GiveBack("b"), GiveBack("a")]
    released = (HEAD, ScaledNode("a", is_released=True))
    assert looks(made, status(0, 1), released, 301, 302) == []


def test_the_head_is_never_given_back() -> None:
    made, nodes = logic(down_after_s=10.0), (ScaledNode("a"), HEAD)
    looks(made, status(0, 2), nodes, *range(10))
    assert looks(made, status(0, 2), nodes, 10) == [AskForNodes(1), GiveBack("a")]


def test_any_load_within_the_window_keeps_its_nodes() -> None:
    made = logic(down_after_s=300.0)
    looks(made, status(0, 2), TWO, *range(200))
    looks(made, status(90, 2), TWO, 200)
    assert looks(made, status(0, 2), TWO, *range(201, 501)) == []
    assert looks(made, status(0, 2), TWO, 501) == [AskForNodes(1), GiveBack("a")]


def test_a_released_node_that_is_still_there_is_taken_again_first() -> None:
    made = logic(up_after_s=0.0)
    nodes = (*TWO, ScaledNode("b", is_released=True), ScaledNode("c", is_released=True))
    assert looks(made, status(140, 2), nodes, 0) == [AskForNodes(3), TakeAgain("c")]


def test_nodes_that_came_by_themselves_stay_for_a_while() -> None:
    made = logic(up_after_s=0.0, down_after_s=10.0)
    looks(made, status(0, 1), (HEAD,), *range(20))
    assert looks(made, status(0, 2), TWO, *range(20, 30)) == [AskForNodes(2)]
    assert looks(made, status(0, 2), TWO, 30) == [AskForNodes(1), GiveBack("a")]


def test_more_nodes_than_the_most_are_given_back_in_time_whatever_the_load() -> None:
    made, nodes = logic(2, down_after_s=10.0), (*TWO, ScaledNode("b"))
    assert looks(made, status(500, 3), nodes, *range(10)) == [AskForNodes(3)]
    assert looks(made, status(500, 3), nodes, 10) == [AskForNodes(2), GiveBack("b")]


def test_without_a_report_nothing_changes_and_waiting_begins_anew() -> None:
    made = logic(down_after_s=10.0)
    looks(made, status(0, 2), TWO, *range(10))
    assert looks(made, None, TWO, 10) == []
    assert looks(made, ClusterStatus(), TWO, 11) == []  # no worker is registered
    assert looks(made, status(0, 2), TWO, *range(12, 21)) == []
    assert looks(made, status(0, 2), TWO, 21) == [AskForNodes(1), GiveBack("a")]


@each(
    ("values", "field_name"),
    [
        ({"min_nodes": 0}, "min_nodes"),
        ({"min_nodes": 3, "max_nodes": 2}, "max_nodes"),
        ({"target_load": 0.0}, "target_load"),
        ({"max_wait_s": 0.5}, "max_wait_s"),
        ({"up_after_s": -1.0}, "up_after_s"),
        ({"up_after_s": 9.0, "down_after_s": 8.0}, "down_after_s"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(values: dict[str, float], field_name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scaling\.{field_name} "):
        ScalingConfig(**values)  # type: ignore[arg-type]


# --- random loads on nodes that take their time


@dataclass
class Fleet:
    """Nodes as a cloud has them: they come late, drain, and are removed when they have been idle."""

    made: ScalingLogic
    start_s: float
    idle_s: float = 60.0
    now: float = 0.0
    asked: int = 1
    next_id: int = 0
    coming: list[float] = field(default_factory=list)  # when each will be there
    nodes: dict[str, float | None] = field(default_factory=lambda: {"head": None})  # released since, by id
    changes: list[tuple[float, int]] = field(default_factory=list)  # of what is asked for

    def step(self, real_time: int, seconds: float = 1.0) -> None:
        """Let time pass, and the logic look once."""
        self.now += seconds
        arrived = [at for at in self.coming if at <= self.now]
        self.coming = [at for at in self.coming if at > self.now]
        for _ in arrived:
            self.next_id += 1
            self.nodes[f"n{self.next_id}"] = None
        for node, since in list(self.nodes.items()):
            if since is not None and self.now - since > self.idle_s:
                del self.nodes[node]
        seen = status(real_time, self.num_members)
        views = [ScaledNode(node, node == "head", is_released=since is not None) for node, since in self.nodes.items()]
        for command in self.made.decide(reported(seen), views, self.now):
            self._perform(command)
        missing = self.asked - len(self.coming) - self.num_members
        self.coming += [self.now + self.start_s] * missing if missing > 0 else []
        del self.coming[max(0, self.asked - self.num_members) :]

    @property
    def num_members(self) -> int:
        return sum(since is None for since in self.nodes.values())

    def _perform(self, command: ScalingCommand) -> None:
        match command:
            case AskForNodes(num_nodes):
                assert num_nodes != self.asked or not self.changes, "the same is asked for twice"
                self.asked = num_nodes
                self.changes.append((self.now, num_nodes))
            case GiveBack(node_id):
                assert node_id != "head"
                assert self.nodes[node_id] is None
                self.nodes[node_id] = self.now
            case TakeAgain(node_id):
                assert self.nodes[node_id] is not None
                self.nodes[node_id] = None

    def turns(self) -> Iterator[float]:
        """Yield the seconds from each rise to the next fall."""
        for (_, before), (rose_s, high), (fell_s, low) in zip(
            self.changes, self.changes[1:], self.changes[2:], strict=False
        ):
            if before < high > low:
                yield fell_s - rose_s


def noise(seed: int) -> Callable[[float], int]:
    chance = random.Random(seed)
    return lambda mean: max(0, int(chance.gauss(mean, mean**0.5)))


LOADS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 600)), min_size=1, max_size=8)


@settings(max_examples=25)
@given(LOADS, st.sampled_from([0.0, 5.0, 60.0]), st.integers(1, 3), st.integers(0, 1000))
def test_any_load_stays_in_bounds_and_no_rise_is_undone_soon(
    loads: list[tuple[int, int]], start_s: float, min_nodes: int, seed: int
) -> None:
    fleet = Fleet(logic(6, min_nodes=min_nodes, down_after_s=100.0), start_s)
    vary = noise(seed)
    for seconds, mean in loads:
        for _ in range(seconds):
            fleet.step(vary(mean))
            assert min_nodes <= fleet.asked <= 6
            assert fleet.num_members <= 6
    assert all(seconds >= 100.0 for seconds in fleet.turns())


@settings(max_examples=12)
@given(st.integers(0, 350), st.sampled_from([0.0, 60.0]), st.integers(0, 1000))
def test_a_steady_load_comes_to_rest_with_room_for_it(mean: int, start_s: float, seed: int) -> None:
    fleet, vary = Fleet(logic(8, down_after_s=100.0), start_s), noise(seed)
    for _ in range(500):
        fleet.step(vary(mean))
    num_changes = len(fleet.changes)
    for _ in range(400):
        fleet.step(vary(mean))
    assert len(fleet.changes) <= num_changes + 1  # noise at the very edge of a band may still want one node more
    assert mean <= 0.9 * PLACES * fleet.num_members
    assert fleet.num_members <= 1 + mean // (0.5 * PLACES)
