"""Random histories of nodes and workers that join later and are lost for good: the right pairs of workers are linked,
and every request gets its answer."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.test_every_request_ends_once import check_answers, check_nothing_is_held, make_requests
from tests.support.logic_cluster import LogicCluster, Shape

# Three nodes with a pool each; at first one worker of each kind, on the first.
SHAPES = (
    Shape(num_nodes=3, pool_blocks=60, worker_blocks=24, min_requests=2),
    Shape(num_nodes=3, pool_blocks=60, worker_blocks=24, max_running_requests=3, direct_handoff=True),
)


def check_links(cluster: LogicCluster) -> None:
    """Every decode worker is linked to every prefill worker, and dials nothing else."""
    prefill = {name for name in cluster.logics if name.startswith("prefill")}
    for decoder in [name for name in cluster.logics if name.startswith("decode")]:
        assert {peer for dialler, peer in cluster.dialled if dialler == decoder} == prefill
        assert {peer for peer, other in cluster.links if other == decoder and peer.startswith("prefill")} == prefill


def move(cluster: LogicCluster, rng: random.Random, number: int) -> None:
    """A worker joins some node, or one is lost for good: never the last of its kind."""
    if rng.random() < 0.6:
        cluster.start(f"{rng.choice(('prefill', 'decode'))}-{number}")
        return
    kind = rng.choice(("prefill", "decode"))
    able = [name for name in cluster.logics if name.startswith(kind)]
    if len(able) > 1:
        cluster.kill(rng.choice(able))


def replay(seed: int, shape: Shape) -> None:
    rng = random.Random(seed)
    cluster = LogicCluster(shape, seed)
    for number, request in enumerate(make_requests(rng, 20)):
        cluster.submit(request)
        for _ in range(rng.randrange(60)):
            cluster.step()
        if rng.random() < 0.5:
            move(cluster, rng, number + 1)
        if rng.random() < 0.05:
            cluster.kill("router")
            cluster.start("router")
    # A batch of a pool whose last decode worker was lost for good needs another one beside it.
    for node in range(shape.num_nodes):
        cluster.start(f"decode-{shape.num_nodes * 100 + node}")
    cluster.run()
    check_links(cluster)
    check_answers(cluster)
    check_nothing_is_held(cluster)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(SHAPES))
def test_with_workers_that_come_and_go(seed: int, shape: Shape) -> None:
    replay(seed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_many_histories(seed: int) -> None:
    replay(seed, SHAPES[seed % len(SHAPES)])
