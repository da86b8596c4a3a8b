"""Random histories of whole clusters: the placement that looks only at what has changed decides as the plain one."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.messages.events import Send
from alignedserve.messages.handshake import Role
from router.leans import Leans
from router.logic import RouterEvent, RouterLogic
from router.placement import Placement
from router.policies.bypass import DirectHandoff, UrgentBypass
from router.policies.prefill_order import LeastSlackOrder
from tests.harnesses.plain_placement import PlainPlacement
from tests.property.test_every_request_ends_once import lose_processes, make_requests, some_steps
from tests.support.cluster_shape import Shape
from tests.support.logic_cluster import Logic, LogicCluster
from tests.support.marks import many

SHAPES = (
    Shape(num_nodes=2, num_prefill=4, num_decode=4, pool_blocks=60, worker_blocks=24, min_requests=2),
    Shape(num_nodes=3, num_prefill=3, num_decode=5, worker_blocks=18, max_running_requests=2, min_requests=1),
    Shape(num_nodes=2, num_prefill=2, num_decode=4, max_running_requests=2, direct_handoff=True),
    Shape(num_prefill=2, num_decode=3, worker_blocks=20, buffer_blocks=40, min_requests=2, policy="fcfs"),
    Shape(is_colocated=True, num_decode=4, worker_blocks=20),
    Shape(is_colocated=True, num_nodes=3, num_decode=5, worker_blocks=20, gateway_beside="pool-2"),
    Shape(num_nodes=2, num_prefill=4, num_decode=4, pool_blocks=60, worker_blocks=24, gateway_beside="pool-1"),
    Shape(is_colocated=True, is_elastic=True, num_nodes=2, num_decode=4, worker_blocks=20, scheduling="aligned_slo"),
    # Pools without a decode worker beside them, whose requests go before those of the others in time.
    Shape(num_nodes=3, num_prefill=3, num_decode=1, worker_blocks=18, max_running_requests=2, min_requests=1),
    Shape(num_nodes=4, num_prefill=4, num_decode=2, worker_blocks=18, max_running_requests=2, policy="fcfs"),
)


class TwinRouter:
    """A router whose every decision is compared with that of another, which places plainly."""

    def __init__(self, shape: Shape) -> None:
        self.routers = [self._make(shape, kind) for kind in (Placement, PlainPlacement)]

    def on_event(self, event: RouterEvent, now: float) -> Sequence[Send]:
        indexed, plain = (router.on_event(event, now) for router in self.routers)
        assert indexed == plain, event
        return indexed

    @staticmethod
    def _make(shape: Shape, kind: type[Placement]) -> RouterLogic:
        config = shape.router
        return RouterLogic(
            config=config,
            placement=kind(max_candidate_requests=config.max_candidate_requests, batching=shape.batching),
            order=LeastSlackOrder(),
            bypass=DirectHandoff() if config.direct_handoff else UrgentBypass(),
            leans=Leans(),
        )


class TwinCluster(LogicCluster):
    """A cluster with such a router."""

    @override
    def _make(self, name: str) -> tuple[Logic, Role]:
        if name == "router":
            return TwinRouter(self.shape), Role.ROUTER  # type: ignore[return-value]
        return super()._make(name)


def compare_decisions(seed: int, shape: Shape) -> None:
    """Let requests, aborts, losses and ticks happen; TwinRouter compares."""
    rng = random.Random(seed)
    cluster = TwinCluster(shape, seed)
    for request in make_requests(rng, 30):
        cluster.submit(request)
        some_steps(cluster, rng, 40)
        if rng.random() < 0.1:
            cluster.abort(rng.choice(list(cluster.client.requests)))
        if rng.random() < 0.15:
            lose_processes(cluster, rng)
        if rng.random() < 0.1:
            cluster.tick()
    cluster.run()


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(SHAPES))
def test_decisions_are_those_of_the_plain_placement(seed: int, shape: Shape) -> None:
    compare_decisions(seed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(200)))
def test_many_histories(seed: int) -> None:
    compare_decisions(seed, SHAPES[seed % len(SHAPES)])
