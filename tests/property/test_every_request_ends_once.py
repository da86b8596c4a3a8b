"""Random histories of the whole system: in any order of events, aborts and losses, nothing is lost or repeated."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.sections import SchedulingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, RequestClass, SamplingParams, Slo
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import LogicCluster
from tests.support.marks import many
from tests.support.token_engine import right_answer

pytestmark = pytest.mark.slow

DIRECT: dict[str, Any] = {"max_running_requests": 3, "direct_handoff": True}
POOLED: dict[str, Any] = {
    "scheduling": "aligned_slo",
    "worker_blocks": 20,
    "decode_pool_blocks": 16,
    "prefix_pool_blocks": 20,
    "has_prefix_cache": True,
}
SHAPES = (
    Shape(),
    Shape(num_prefill=2, num_decode=3),
    Shape(pool_blocks=16, worker_blocks=18),
    Shape(is_colocated=True, num_decode=2, worker_blocks=20),
    Shape(is_colocated=True, worker_blocks=20, host_tokens=60, settings=(("preemption", "swap"),)),
    Shape(is_colocated=True, worker_blocks=24, host_tokens=60, scheduling="aligned_slo"),
    Shape(num_decode=2, worker_blocks=24, disaggregated_scheduling=SchedulingConfig(policy="aligned_slo")),
    Shape(num_prefill=2, worker_blocks=24, disaggregated_scheduling=SchedulingConfig(policy="round_robin")),
    Shape(
        worker_blocks=20,
        host_tokens=60,
        disaggregated_scheduling=SchedulingConfig(policy="aligned_slo"),
        min_requests=2,
    ),
    Shape(num_decode=2, worker_blocks=20, host_tokens=40, disaggregated_scheduling=SchedulingConfig(policy="alise")),
    Shape(worker_blocks=20, host_tokens=60, disaggregated_scheduling=SchedulingConfig(policy="fastserve")),
    Shape(worker_blocks=20, hidden_ratio=0.5, disaggregated_scheduling=SchedulingConfig(policy="apt_serve")),
    Shape(worker_blocks=20, hidden_ratio=0.5, disaggregated_scheduling=SchedulingConfig(policy="apt_serve_chunked")),
    Shape(worker_blocks=20, host_tokens=60, disaggregated_scheduling=SchedulingConfig(policy="bros")),
    Shape(num_decode=2, worker_blocks=20, disaggregated_scheduling=SchedulingConfig(policy="accelgen")),
    Shape(worker_blocks=20, host_tokens=60, disaggregated_scheduling=SchedulingConfig(policy="fcfs_classed")),
    Shape(worker_blocks=20, disaggregated_scheduling=SchedulingConfig(policy="edf")),
    Shape(num_decode=2, worker_blocks=20, disaggregated_scheduling=SchedulingConfig(policy="srpt")),
    Shape(worker_blocks=20, num_prefill=2, disaggregated_scheduling=SchedulingConfig(policy="qoserve")),
    Shape(num_decode=2, refuse=0.3),
    Shape(is_colocated=True, is_elastic=True, num_decode=3, worker_blocks=24, scheduling="aligned_slo"),
    Shape(is_colocated=True, is_elastic=True, num_decode=3, worker_blocks=30, host_tokens=60, num_nodes=2),
    Shape(is_colocated=True, is_elastic=True, num_decode=2, worker_blocks=24, refuse=0.3),
    # Decodes that wait in the pool of their node, beside prefix blocks and without.
    Shape(is_colocated=True, worker_blocks=20, scheduling="aligned_slo", decode_pool_blocks=60),
    Shape(is_colocated=True, is_elastic=True, num_decode=3, host_tokens=60, **POOLED),
    # Many small requests against few places: batches replace each other, requests are evicted and come back.
    Shape(pool_blocks=120, worker_blocks=24, buffer_blocks=40, max_running_requests=5, min_requests=2),
    Shape(num_prefill=2, num_decode=2, pool_blocks=100, worker_blocks=20, buffer_blocks=12, min_requests=2),
    Shape(policy="fcfs", buffer_blocks=0, worker_blocks=20),
    Shape(num_decode=2, worker_blocks=24, buffer_blocks=12, min_requests=2, pack_share=0.9),
    # Two nodes: requests that cannot wait go from one to the other.
    Shape(num_nodes=2, num_prefill=2, num_decode=2, pool_blocks=60, worker_blocks=24, min_requests=2, **DIRECT),
    Shape(num_nodes=2, num_prefill=2, num_decode=3, worker_blocks=20, buffer_blocks=12, max_running_requests=3),
)
# Where nothing is refused at random, so that every request must get its answer whatever dies.
RELIABLE = [shape for shape in SHAPES if not shape.refuse]
FEW = 15  # `test_many_histories` has 40 of each, or 400


def any_slo(rng: random.Random) -> Slo:
    return Slo(tpot_s=0.001) if rng.random() < 0.3 else Slo(deadline_s=5.0 if rng.random() < 0.2 else None)


def make_requests(
    rng: random.Random,
    count: int,
    *,
    least_prompt: int = 1,
    least_answer: int = 0,
    classes: Sequence[RequestClass] = tuple(RequestClass),
    draw_slo: Callable[[random.Random], Slo] = any_slo,
) -> list[Request]:
    return [
        Request(
            request_id=RequestId(f"r{number:03d}"),
            prompt_token_ids=tuple(rng.randrange(1, 50) for _ in range(rng.randrange(least_prompt, 30))),
            sampling=SamplingParams(max_tokens=rng.randrange(least_answer, 30), temperature=0.0),
            reply_to="gateway",
            arrival_s=number * 0.001,
            request_class=rng.choice(classes),
            slo=draw_slo(rng),
        )
        for number in range(count)
    ]


def check_answers(cluster: LogicCluster) -> None:
    client = cluster.client
    for request_id, request in client.requests.items():
        answer, right = client.answers[request_id], right_answer(request)
        assert answer == right[: len(answer)], "a wrong, repeated or missing token"
        if request_id not in client.aborted:
            assert isinstance(client.ends[request_id], FinishReason), f"{request_id} ended with {client.ends}"
            assert answer == right


def check_nothing_is_held(cluster: LogicCluster) -> None:
    status = cluster.status()
    assert (status.num_queued, status.num_prefilling, status.num_pooled, status.num_decoding) == (0, 0, 0, 0)
    assert status.num_pool_blocks_used == 0
    assert status.num_worker_blocks_used == 0


def some_steps(cluster: LogicCluster, rng: random.Random, most: int) -> None:
    for _ in range(rng.randrange(most)):
        cluster.step()


Disturbance = Callable[[LogicCluster, random.Random], None]


def abort(cluster: LogicCluster, rng: random.Random) -> None:
    cluster.abort(rng.choice(list(cluster.client.requests)))


def lose_processes(cluster: LogicCluster, rng: random.Random) -> None:
    """Kill a worker or pool, of several nodes now and then a whole one, and start it again."""
    name = rng.choice([name for name in cluster.logics if name != "router"])
    lost = cluster.node_of(name) if cluster.shape.num_nodes > 1 and rng.random() < 0.4 else [name]
    for one in lost:
        cluster.kill(one)
    some_steps(cluster, rng, 30)
    for one in lost:
        cluster.start(one)


def cut_a_link(cluster: LogicCluster, rng: random.Random) -> None:
    """Cut a link between workers, pools and router, which comes back while both ends live."""
    links = [key for key in cluster.links if "gateway-0" not in key]
    if links:
        cluster.cut(*rng.choice(links))


def cut_a_pool_from_its_router(cluster: LogicCluster, rng: random.Random) -> None:
    """Cut the link of a pool to the router: what it had to say of requests is lost, and workers see nothing of it."""
    links = [key for key in cluster.links if key[0].startswith("pool") and key[1] == "router"]
    if links:
        cluster.cut(*rng.choice(links))


def lose_the_router(cluster: LogicCluster, rng: random.Random) -> None:
    """Restart the router with nothing; gateways bring their open requests back, workers what they decode."""
    cluster.kill("router")
    some_steps(cluster, rng, 30)
    cluster.start("router")


def move_the_router(cluster: LogicCluster, rng: random.Random) -> None:
    """Restart the router on another clock, far behind: the head reboots, or another host has it."""
    cluster.kill("router")
    cluster.router_ahead_s /= 10
    cluster.start_router_slowly()


# Each with how likely it is after a request.
DISTURBANCES: dict[str, tuple[Disturbance, float]] = {
    "aborts": (abort, 0.2),
    "lost processes": (lose_processes, 0.25),
    "cut links": (cut_a_link, 0.3),
    "pools cut from their router": (cut_a_pool_from_its_router, 0.6),
    "lost routers": (lose_the_router, 0.08),
    "routers whose clocks are behind": (move_the_router, 0.15),
}


def replay(seed: int, kind: str, shape: Shape) -> None:
    """Disturb a cluster while requests come; every one still gets exactly its answer, and nothing is left."""
    rng, (disturb, chance) = random.Random(seed), DISTURBANCES[kind]
    cluster = LogicCluster(shape, seed)
    cluster.router_ahead_s = 1e6 if disturb is move_the_router else 0.0
    for request in make_requests(rng, 20):
        cluster.submit(request)
        some_steps(cluster, rng, 60)
        if rng.random() < chance:
            disturb(cluster, rng)
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)


# In each a decode came back from the pool twice, or all of a worker waited for one that was away in it.
@pytest.mark.parametrize(
    ("seed", "is_elastic"),
    [(24, True), (52, True), (99, True), (126, True), (56, False), (83, False), (97, False), (273, False)],
)
def test_caches_and_pool_of_one_long_request_hold_thirty(seed: int, is_elastic: bool) -> None:
    (shape,) = (shape for shape in SHAPES if shape.decode_pool_blocks and shape.is_elastic is is_elastic)
    cluster, rng = LogicCluster(replace(shape, worker_blocks=16, decode_pool_blocks=16), seed), random.Random(seed)
    for request in make_crowd(rng):
        cluster.submit(request)
        some_steps(cluster, rng, 12)
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)


def make_crowd(rng: random.Random) -> list[Request]:
    """Return thirty long requests, two of three with a person who waits, and objectives tight and loose."""
    slos = [Slo(ttft_s=0.5, tpot_s=0.01), Slo(ttft_s=0.05, tpot_s=0.2), Slo(tpot_s=0.001), Slo(), Slo(deadline_s=5.0)]
    classes = (RequestClass.REAL_TIME, RequestClass.REAL_TIME, RequestClass.BEST_EFFORT)
    return make_requests(
        rng, 30, least_prompt=10, least_answer=10, classes=classes, draw_slo=lambda rng: rng.choice(slos)
    )


@pytest.mark.parametrize("kind", DISTURBANCES)
@settings(max_examples=FEW)
@given(seed=st.integers(0, 10**9), data=st.data())
def test_every_request_ends_once(kind: str, seed: int, data: st.DataObject) -> None:
    replay(seed, kind, data.draw(st.sampled_from(SHAPES if kind == "aborts" else RELIABLE)))


@pytest.mark.parametrize("seed", range(many(400)))
def test_many_histories(seed: int) -> None:
    for kind in DISTURBANCES:
        shapes = SHAPES if kind == "aborts" else RELIABLE
        replay(seed, kind, shapes[seed % len(shapes)])
