"""Random histories of drains: drained workers get nothing new and end empty; no token is repeated, wrong or missing."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.messages.pools import FormBatch
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest
from router.logic import RouterLogic
from router.state import DrainRequested
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import LogicCluster
from tests.property.test_every_request_ends_once import check_answers, check_nothing_is_held, make_requests, some_steps
from tests.support.marks import each, many

ROUTER = "router"
SHAPES = (
    Shape(num_nodes=2, num_prefill=2, num_decode=3, pool_blocks=60, worker_blocks=24, min_requests=2),
    Shape(num_nodes=2, num_prefill=2, num_decode=2, worker_blocks=24, max_running_requests=3, direct_handoff=True),
    Shape(num_prefill=2, num_decode=3, worker_blocks=20, buffer_blocks=12, min_requests=2),
    Shape(is_colocated=True, num_decode=3, worker_blocks=20),
)
FEW = 15  # `test_many_histories_of_drains` has 75, or 300


class DrainedCluster(LogicCluster):
    """A cluster whose router is told what drains, and whose messages to drained workers are looked at."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.draining: dict[str, None] = {}
        super().__init__(shape, seed)

    def drain(self, *moved: str) -> None:
        """Tell the router, as its driver does about once a second; it may be gone."""
        if ROUTER in self.logics:
            self._deliver(ROUTER, DrainRequested(tuple(self.draining), moved))  # type: ignore[arg-type]

    def num_left(self, name: str) -> int:
        router = self.logics[ROUTER]
        assert isinstance(router, RouterLogic)
        return router.num_left([name])[name]

    def units(self) -> list[list[str]]:
        """Return what may drain as one: a worker beside another of its kind and node, or a node of several."""
        workers = [name for name in self.logics if name.startswith(("prefill", "decode"))]
        single = [[one] for one in workers if sum(self._is_like(one, other) for other in workers) > 1]
        whole = [self.node_of(f"decode-{index}") for index in range(self.shape.num_nodes)]
        return single + (whole if self.shape.num_nodes > 1 else [])

    def _is_like(self, one: str, other: str) -> bool:
        return one.split("-")[0] == other.split("-")[0] and self.pool_of(one) == self.pool_of(other)

    @override
    def _send(self, source: str, target: str, message: Message) -> None:
        if source == ROUTER:
            match message:
                case PrefillRequest(bypass_to=bypass_to):
                    assert target not in self.draining
                    assert bypass_to not in self.draining
                case FormBatch(worker=worker):
                    assert worker not in self.draining
        super()._send(source, target, message)


def replay_with_drains(seed: int, shape: Shape) -> None:
    """Drain units, undo it, move and end them, while processes, the router too, are lost and come back."""
    rng = random.Random(seed)
    cluster = DrainedCluster(shape, seed)
    for request in make_requests(rng, 20):
        cluster.submit(request)
        some_steps(cluster, rng, 50)
        chance = rng.random()
        if not cluster.draining and chance < 0.4:
            cluster.draining = dict.fromkeys(rng.choice(cluster.units()))
            cluster.drain()
        elif cluster.draining and chance < 0.3:
            end_drained(cluster, rng)
        elif cluster.draining and chance < 0.4:
            cluster.draining = {}
            cluster.drain()
        elif chance > 0.9:
            lose_one(cluster, rng)
    cluster.draining = {}
    cluster.drain()
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)


def end_drained(cluster: DrainedCluster, rng: random.Random) -> None:
    """Move what is left, see that nothing is, end the processes, and start others later."""
    names = list(cluster.draining)
    cluster.drain()
    cluster.drain(*names)
    some_steps(cluster, rng, 200)
    for name in names:
        cluster.kill(name)
    some_steps(cluster, rng, 50)
    for name in names:
        cluster.start(name)
    cluster.draining = {}
    cluster.drain()


def lose_one(cluster: DrainedCluster, rng: random.Random) -> None:
    name = rng.choice(list(cluster.logics))
    cluster.kill(name)
    some_steps(cluster, rng, 20)
    if name == ROUTER:
        cluster.draining = {}  # it knows nothing of them until it is told
    cluster.start(name)


@settings(max_examples=FEW)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(SHAPES))
def test_with_drains(seed: int, shape: Shape) -> None:
    replay_with_drains(seed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(300)))
def test_many_histories_of_drains(seed: int) -> None:
    replay_with_drains(seed, SHAPES[seed % len(SHAPES)])


@each("seed", range(8))
def test_a_drained_node_empties_by_itself_or_when_it_is_told_to(seed: int) -> None:
    """While the others serve: by itself when there is time; at once when its requests are moved."""
    shape, rng = SHAPES[seed % 2], random.Random(seed)
    cluster = DrainedCluster(shape, seed)
    for request in make_requests(rng, 20):
        cluster.submit(request)
        some_steps(cluster, rng, 40)
    names = cluster.node_of("decode-1")
    cluster.draining = dict.fromkeys(names)
    moved = names if seed % 4 < 2 else []
    for _ in range(20):
        cluster.drain(*moved)
        cluster.run()
    assert [cluster.num_left(name) for name in names] == [0] * len(names)
    for name in names:
        cluster.kill(name)
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)
