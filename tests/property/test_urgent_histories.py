"""Random histories of workers whose passes stop between layers: right answers, and nothing lost or held."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.sections import SchedulingConfig
from alignedserve.core.request import RequestClass
from alignedserve.worker_core.logic import ColocatedLogic
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import LogicCluster
from tests.property.test_every_request_ends_once import check_answers, check_nothing_is_held, some_steps
from tests.property.test_prefix_cache_histories import check_caches, conversations

pytestmark = pytest.mark.slow

ELASTIC: dict[str, Any] = {"is_colocated": True, "yields": True, "scheduling": "aligned_slo", "host_tokens": 60}
POOLED: dict[str, Any] = {**ELASTIC, "worker_blocks": 20, "decode_pool_blocks": 40}
SEPARATE: dict[str, Any] = {
    "yields": True,
    "disaggregated_scheduling": SchedulingConfig(policy="aligned_slo", yield_between_layers=True),
}
SHAPES = (
    Shape(worker_blocks=24, **ELASTIC),
    Shape(worker_blocks=24, has_prefix_cache=True, **ELASTIC),
    Shape(worker_blocks=24, num_decode=2, has_prefix_cache=True, prefix_pool_blocks=30, **ELASTIC),
    Shape(worker_blocks=24, num_decode=3, is_elastic=True, has_prefix_cache=True, **ELASTIC),
    Shape(**POOLED),
    Shape(num_decode=2, is_elastic=True, has_prefix_cache=True, prefix_pool_blocks=20, **POOLED),
    Shape(worker_blocks=20, pool_blocks=60, num_prefill=2, has_prefix_cache=True, **SEPARATE),
)


def play(seed: int, shape: Shape) -> tuple[int, int]:
    """Return how many urgent iterations there were, and how many decodes left to a pool, of workers that lived."""
    rng, cluster = random.Random(seed), LogicCluster(shape, seed)
    for request in conversations(rng, 20):
        is_chat = rng.random() < 0.4
        cluster.submit(replace(request, request_class=RequestClass.REAL_TIME if is_chat else RequestClass.BEST_EFFORT))
        some_steps(cluster, rng, 12)
        if rng.random() < 0.1:
            cluster.abort(rng.choice(list(cluster.client.requests)))
        if rng.random() < 0.05:
            name = rng.choice([name for name in cluster.logics if name != "router"])
            cluster.kill(name)
            some_steps(cluster, rng, 30)
            cluster.start(name)
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)
    if shape.has_prefix_cache:
        check_caches(cluster)
    workers = [one for one in cluster.logics.values() if isinstance(one, ColocatedLogic)]
    num_left = sum(one._decodes.num_left for one in workers if one._decodes is not None)
    return cluster.num_urgent, num_left


@pytest.mark.parametrize("shape", SHAPES)
def test_passes_that_stop_lose_nothing(shape: Shape) -> None:
    played = [play(seed, shape) for seed in range(8)]
    assert sum(num_urgent for num_urgent, _ in played) > 1
    assert (sum(num_left for _, num_left in played) > 1) is (shape.decode_pool_blocks > 0)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(SHAPES))
def test_more_of_them(seed: int, shape: Shape) -> None:
    play(seed, shape)
