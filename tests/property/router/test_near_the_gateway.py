"""Random histories: a request goes to a worker near its gateway only while that one is about as free as any other."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.messages.handshake import Role
from router.leans import Leans
from router.logic import RouterLogic
from router.placement import Placement
from router.policies.bypass import UrgentBypass
from router.policies.prefill_order import LeastSlackOrder
from router.state import DispatchedPrefill, WorkerRecord
from tests.harnesses.plain_placement import PlainPlacement
from tests.property.test_every_request_ends_once import make_requests
from tests.support.cluster_shape import Shape
from tests.support.logic_cluster import Logic, LogicCluster
from tests.support.marks import many

NEAR = "pool-1"
SHAPES = (
    Shape(is_colocated=True, num_nodes=3, num_decode=6, worker_blocks=60, gateway_beside=NEAR),
    Shape(num_nodes=3, num_prefill=4, num_decode=5, pool_blocks=60, worker_blocks=24, gateway_beside=NEAR),
)


class BoundedPlacement(Placement):
    """Checks what every chosen worker has against what the least loaded one has."""

    num_near = num_far = 0

    @override
    def start_prefill(self, worker: WorkerRecord, request_id: RequestId, prefill: DispatchedPrefill) -> None:
        """See Placement."""
        least = self.least_loaded_prefiller()
        assert least is not None, "a choice of none"
        if worker is not least:
            assert worker.registered.node == NEAR
            assert worker.num_prefill_tokens <= least.num_prefill_tokens + 256
            assert self._load_of(worker) <= 1.125 * self._load_of(least) + 1
        self.num_near += worker.registered.node == NEAR
        self.num_far += worker.registered.node != NEAR
        super().start_prefill(worker, request_id, prefill)

    def _load_of(self, worker: WorkerRecord) -> float:
        plain = PlainPlacement.__new__(PlainPlacement)
        plain.workers, plain.pools = self.workers, self.pools
        return plain.load_of(worker)


class BoundedCluster(LogicCluster):
    """A cluster whose router places so."""

    placement: BoundedPlacement

    @override
    def _make(self, name: str) -> tuple[Logic, Role]:
        if name != "router":
            return super()._make(name)
        config = self.shape.router
        self.placement = BoundedPlacement(
            max_candidate_requests=config.max_candidate_requests, batching=self.shape.batching
        )
        router = RouterLogic(
            config=config,
            placement=self.placement,
            order=LeastSlackOrder(),
            bypass=UrgentBypass(),
            leans=Leans(),
        )
        return router, Role.ROUTER


def run(seed: int, shape: Shape) -> BoundedPlacement:
    """Let requests come at random, with a lost worker now and then."""
    rng = random.Random(seed)
    cluster = BoundedCluster(shape, seed)
    for request in make_requests(rng, 40):
        cluster.submit(request)
        for _ in range(rng.randrange(60)):
            cluster.step()
        if rng.random() < 0.05:
            name = rng.choice([name for name in cluster.logics if name != "router"])
            cluster.kill(name)
            cluster.start(name)
    cluster.run()
    return cluster.placement


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(SHAPES))
def test_a_near_worker_has_little_more_than_the_least_loaded(seed: int, shape: Shape) -> None:
    run(seed, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_near_workers_get_more_than_their_share(shape: Shape) -> None:
    placements = [run(seed, shape) for seed in range(3)]
    num_near, num_far = sum(one.num_near for one in placements), sum(one.num_far for one in placements)
    assert num_near > 0.4 * (num_near + num_far)  # a third or less without a preference


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(100)))
def test_many_histories(seed: int) -> None:
    run(seed, SHAPES[seed % len(SHAPES)])
