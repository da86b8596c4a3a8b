"""Random histories of whole clusters: a placement that looks at what has changed decides as one that looks at all.

The orders of workers, the pools to look at and the prompts that are late are brought up to date where something
changes. A change that is not noted makes a decision later, or another one; looking at everything before each decision
then shows it.
"""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from alignedserve.messages.events import Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import FormBatch
from router.leans import Leans
from router.logic import RouterEvent, RouterLogic
from router.placement import Placement
from router.policies import DirectHandoff, LeastSlackOrder, UrgentBypass
from router.state import WorkerRecord
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import Logic, LogicCluster
from tests.property.test_every_request_ends_once import lose_processes, make_requests, some_steps
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


class EagerPlacement(Placement):
    """Looks at all workers and pools before each decision."""

    @override
    def least_loaded_prefiller(self, *, is_real_time: bool = False, at_full_pool: bool = False) -> WorkerRecord | None:
        self._look_at_all()
        return super().least_loaded_prefiller(is_real_time=is_real_time, at_full_pool=at_full_pool)

    @override
    def note_late_prompts(self, now: float) -> None:
        super().note_late_prompts(now)
        for worker in self.workers.values():
            for request_id, prefill in worker.prefilling.items():
                if worker.registered.can_move and prefill.is_real_time and prefill.due_s <= now:
                    worker.note_late(request_id, prefill.attempt)

    @override
    def batches_to_form(
        self, now: float, is_shared: Callable[[float], bool] = lambda _: False
    ) -> list[tuple[str, FormBatch]]:
        self._look_at_all()
        return super().batches_to_form(now, is_shared)

    def _look_at_all(self) -> None:
        for worker in self.workers.values():
            self._rank(worker)
        for pool in self.pools:
            self.batch_requests.note_change(pool)


class TwinRouter:
    """A router whose every decision is compared with that of another, which looks at all."""

    def __init__(self, shape: Shape) -> None:
        self.routers = [self._make(shape, kind) for kind in (Placement, EagerPlacement)]

    def on_event(self, event: RouterEvent, now: float) -> Sequence[Send]:
        careful, eager = (router.on_event(event, now) for router in self.routers)
        assert careful == eager, event
        return careful

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
def test_decisions_are_those_of_a_look_at_all(seed: int, shape: Shape) -> None:
    compare_decisions(seed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(200)))
def test_many_histories(seed: int) -> None:
    compare_decisions(seed, SHAPES[seed % len(SHAPES)])
