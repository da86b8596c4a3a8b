"""Many nodes: decode workers link with prefill workers and pools of other nodes only while they exchange blocks."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.worker_core import block_peers
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import LogicCluster
from tests.property.test_every_request_ends_once import check_answers, check_nothing_is_held, make_requests, some_steps

# Pools without a decode worker beside them, workers with too few places: blocks go from node to node.
BUSY = (
    Shape(num_nodes=4, num_prefill=4, num_decode=2, worker_blocks=20, max_running_requests=2, min_requests=1),
    Shape(num_nodes=3, num_prefill=3, num_decode=3, buffer_blocks=24, max_running_requests=2, direct_handoff=True),
)
QUIET = Shape(num_nodes=12, num_prefill=12, num_decode=12, worker_blocks=24, max_running_requests=3)


def far_links(cluster: LogicCluster) -> int:
    """Return the number of links between decode workers and processes of other nodes."""
    pairs = [
        pair for pair in cluster.links if pair[0].startswith("decode") and "-" in pair[1] and "gateway" not in pair[1]
    ]
    return sum(cluster.pool_of(one) != cluster.pool_of(other) for one, other in pairs)


@pytest.fixture(scope="module")
def _short_idle_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_peers, "LINK_IDLE_S", 0.05)
        yield


@pytest.mark.usefixtures("_short_idle_time")
@settings(max_examples=6)
@given(seed=st.integers(0, 10**9), shape=st.sampled_from(BUSY))
def test_links_that_come_and_go_lose_nothing(seed: int, shape: Shape) -> None:
    rng = random.Random(seed)
    cluster = LogicCluster(shape, seed)
    for request in make_requests(rng, 20):
        cluster.submit(request)
        some_steps(cluster, rng, 60)
        if rng.random() < 0.4:
            cluster.tick()
        if rng.random() < 0.1:
            name = rng.choice([name for name in cluster.logics if name != "router"])
            cluster.kill(name)
            cluster.start(name)
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)


def test_of_many_peers_few_are_linked_and_none_when_nothing_is_exchanged() -> None:
    cluster = LogicCluster(QUIET, 7)
    rng, most = random.Random(7), 0
    assert far_links(cluster) == 0
    for request in make_requests(rng, 60):
        cluster.submit(request)
        some_steps(cluster, rng, 30)
        most = max(most, far_links(cluster))
    cluster.run()
    check_answers(cluster)
    assert 0 < most < 12 * 11 * 2 / 4
    cluster.now += block_peers.LINK_IDLE_S
    cluster.tick()
    assert far_links(cluster) == 0
