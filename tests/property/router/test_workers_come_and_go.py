"""Random histories of workers that join later, on any node, and are lost for good.

The right pairs are linked, and every request gets its answer, though no decode worker may be left beside its pool.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.worker_core.block_peers import LINK_IDLE_S
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import LogicCluster
from tests.property.test_every_request_ends_once import check_answers, check_nothing_is_held, make_requests, some_steps
from tests.support.marks import many

# Three nodes with a pool each; at first one worker of each kind, on the first.
SHAPES = (
    Shape(num_nodes=3, pool_blocks=60, worker_blocks=24, min_requests=2),
    Shape(num_nodes=3, pool_blocks=60, worker_blocks=24, max_running_requests=3, direct_handoff=True),
)


def check_links(cluster: LogicCluster) -> None:
    """Check that after a minute without work every decode worker dials its node's prefill workers, and nothing else."""
    cluster.now += LINK_IDLE_S
    cluster.tick()
    peers = {name for name in cluster.logics if name.startswith("prefill")}
    for decoder in [name for name in cluster.logics if name.startswith("decode")]:
        dialled = {peer for dialler, peer in cluster.dialled if dialler == decoder}
        near = {peer for peer in peers if cluster.pool_of(peer) == cluster.pool_of(decoder)}
        assert dialled == near
        assert {peer for peer, other in cluster.links if other == decoder} == {
            *near,
            cluster.pool_of(decoder),
            "router",
        }


def move(cluster: LogicCluster, rng: random.Random, number: int) -> None:
    """Let a worker join some node, or lose one for good: never the last of its kind."""
    if rng.random() < 0.6:
        cluster.start(f"{rng.choice(('prefill', 'decode'))}-{number}")
        return
    kind = rng.choice(("prefill", "decode"))
    able = [name for name in cluster.logics if name.startswith(kind)]
    if len(able) > 1:
        cluster.kill(rng.choice(able))


def lose_and_bring_back(cluster: LogicCluster, rng: random.Random) -> None:
    """Kill a pool or a worker and start it again, or cut the link of a pool to a decode worker anywhere."""
    links = [key for key in cluster.links if key[0].startswith("pool") and key[1].startswith("decode")]
    if links and rng.random() < 0.6:
        cluster.cut(*rng.choice(links))
        return
    name = rng.choice([name for name in cluster.logics if name != "router"])
    cluster.kill(name)
    some_steps(cluster, rng, 30)
    cluster.start(name)


def replay(seed: int, shape: Shape) -> None:
    rng = random.Random(seed)
    cluster = LogicCluster(shape, seed)
    for number, request in enumerate(make_requests(rng, 20)):
        cluster.submit(request)
        some_steps(cluster, rng, 60)
        if rng.random() < 0.5:
            move(cluster, rng, number + 1)
        if rng.random() < 0.3:
            lose_and_bring_back(cluster, rng)
        if rng.random() < 0.05:
            cluster.kill("router")
            cluster.start("router")
    cluster.run()
    check_links(cluster)
    check_answers(cluster)
    check_nothing_is_held(cluster)


@settings(max_examples=8)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(SHAPES))
def test_with_workers_that_come_and_go(seed: int, shape: Shape) -> None:
    replay(seed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(many(300)))
def test_many_histories(seed: int) -> None:
    replay(seed, SHAPES[seed % len(SHAPES)])
