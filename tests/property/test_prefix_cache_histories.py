"""Random histories of workers whose requests share blocks: right answers, no block lost, and no policy that stalls.

The stand-in engine checks every cache before it reads it, and that none but full blocks of equal contexts are shared.
"""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.sections import SchedulingConfig, Topology
from alignedserve.core.ids import RequestId, WorkerName
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.prefix_cache import block_hashes, contexts
from alignedserve.prefix_cache.block_hashes import HASH_BYTES, block_hash, prefix_root
from alignedserve.scheduling.policies import all_policies
from alignedserve.scheduling.policy import Mechanism
from alignedserve.worker_core.logic import ColocatedLogic
from kvpool.logic import PoolLogic
from prefill_worker.logic import PrefillLogic
from router.prefix_index import PrefixIndex
from router.state import TrackedRequest, WorkerRecord
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_cluster import LogicCluster
from tests.property.test_every_request_ends_once import check_answers, check_nothing_is_held, some_steps
from tests.support.marks import slow
from tests.support.token_engine import right_answer

pytestmark = pytest.mark.slow

COLOCATED = [
    name
    for name, entry in all_policies().items()
    if Topology.COLOCATED in entry.topologies and Mechanism.KNOWN_LENGTHS not in entry.needs
]
ROOTS = (*(prefix_root(b"key", tenant=tenant, salt="", form=b"") for tenant in ("one", "another")), b"")
TIGHT = Shape(is_colocated=True, worker_blocks=17, has_prefix_cache=True)  # the longest context takes them all


def conversations(rng: random.Random, count: int, *, max_len: int = 60) -> list[Request]:
    """Draw requests that begin alike: with one of a few instructions, or with a whole request before and its answer."""
    stems = [tuple(rng.randrange(1, 50) for _ in range(rng.choice((4, 8, 13, 24)))) for _ in range(3)]
    drawn: list[Request] = []
    for number in range(count):
        begins = rng.choice(stems)
        if drawn and rng.random() < 0.5:
            before = rng.choice(drawn)
            begins = before.prompt_token_ids + tuple(right_answer(before)) * (rng.random() < 0.7)
        own = tuple(rng.randrange(1, 50) for _ in range(rng.randrange(0, 9)))
        prompt = (begins + own)[: max_len - 8]
        root = rng.choices(ROOTS, (6, 2, 1))[0]
        drawn.append(
            Request(
                request_id=RequestId(f"r{number:03d}"),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=rng.randrange(1, max_len - len(prompt) + 1), temperature=0.0),
                reply_to="gateway",
                arrival_s=number * 0.001,
                request_class=rng.choice(list(RequestClass)),
                slo=Slo(ttft_s=0.5, tpot_s=0.05) if rng.random() < 0.3 else Slo(),
                prefix_root=root,
            )
        )
    return drawn


def shape_of(name: str, **sizes: object) -> Shape:
    return replace(TIGHT, scheduling=name, host_tokens=60, **sizes)  # type: ignore[arg-type]


def check_caches(cluster: LogicCluster) -> None:
    """Check that blocks at rest are free or cached, and that no cached one has users."""
    for logic in cluster.logics.values():
        if isinstance(logic, PoolLogic):
            kept = logic._prefixes.cached
            assert kept.num_unused == len(kept) == logic._prefixes.num_blocks
            assert logic._lease_table.num_used == len(kept)
        if isinstance(logic, ColocatedLogic) and logic._prefixes is not None:
            cached = logic._prefixes.blocks
            assert cached.num_unused == len(cached) + cluster.shape.state_blocks * len(cached.states)
            assert all(block.num_users == 0 for block in cached)
            assert logic._requests.allocator.num_free == logic._state.num_free == cluster.shape.worker_blocks
        if isinstance(logic, PrefillLogic):
            cached = logic._blocks._prefixes.blocks  # type: ignore[union-attr]
            assert all(block.num_users == 0 for block in cached)
            assert cached.num_unused == len(cached) + cluster.shape.state_blocks * len(cached.states)
            assert logic._blocks.num_free == cluster.shape.worker_blocks


def play(seed: int, shape: Shape, *, aborts: float = 0.1, losses: float = 0.0, count: int = 12) -> LogicCluster:
    rng = random.Random(seed)
    cluster = LogicCluster(shape, seed)
    for request in conversations(rng, count):
        cluster.submit(request)
        some_steps(cluster, rng, 40)
        if rng.random() < aborts:
            cluster.abort(rng.choice(list(cluster.client.requests)))
        if rng.random() < losses:
            name = rng.choice([name for name in cluster.logics if name != "router"])
            cluster.kill(name)
            some_steps(cluster, rng, 30)
            cluster.start(name)
    cluster.run()
    check_answers(cluster)
    check_nothing_is_held(cluster)
    check_caches(cluster)
    return cluster


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
@pytest.mark.parametrize("name", COLOCATED)
def test_every_policy_in_a_tiny_memory(name: str, seed: int) -> None:
    play(seed, shape_of(name), count=25 if seed else 12)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9), name=st.sampled_from(COLOCATED))
def test_workers_that_are_lost(seed: int, name: str) -> None:
    play(seed, shape_of(name, num_decode=2), losses=0.2)


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 6))])
@pytest.mark.parametrize("name", COLOCATED)
def test_states_in_blocks_of_their_own(name: str, seed: int) -> None:
    play(seed, shape_of(name, state_blocks=2, worker_blocks=23), count=25 if seed else 12)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9))
def test_states_that_move(seed: int) -> None:
    play(seed, shape_of("aligned_slo", num_decode=3, is_elastic=True, state_blocks=2, worker_blocks=30), losses=0.1)


def test_requests_go_on_behind_states() -> None:
    cluster = play(1, shape_of("fcfs", state_blocks=2, worker_blocks=60), aborts=0.0, count=25)
    (worker,) = [logic for logic in cluster.logics.values() if isinstance(logic, ColocatedLogic)]
    assert worker._prefixes is not None
    assert worker._prefixes.num_hit_tokens > 40


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9))
def test_requests_that_move(seed: int) -> None:
    play(seed, shape_of("aligned_slo", num_decode=3, is_elastic=True, worker_blocks=24), losses=0.1)


def play_with_pool(seed: int, name: str, *, losses: float = 0.15, **sizes: object) -> tuple[int, int]:
    """Return how many blocks went to the pool, and how many tokens came from it."""
    shape = {"num_decode": 2, "prefix_pool_blocks": 30, "worker_blocks": 24, **sizes}
    cluster = play(seed, shape_of(name, **shape), losses=losses, count=25)
    pooled = [one._pooled for one in cluster.logics.values() if isinstance(one, ColocatedLogic)]
    stored = sum(one._offers.num_stored for one in pooled if one is not None)
    return stored, sum(one.num_loaded_tokens for one in pooled if one is not None)


def test_blocks_go_to_a_pool_and_come_back() -> None:
    stored, loaded = zip(*(play_with_pool(seed, "fcfs", losses=0.0) for seed in range(8)), strict=True)
    assert sum(stored) > 100
    assert sum(loaded) > 100


def test_states_go_to_a_pool_and_come_back() -> None:
    sizes = {"state_blocks": 2, "losses": 0.0}
    stored, loaded = zip(*(play_with_pool(seed, "fcfs", **sizes) for seed in range(8)), strict=True)
    assert sum(stored) > 100
    assert sum(loaded) > 40


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9), name=st.sampled_from(COLOCATED), refuse=st.sampled_from((0.0, 0.3)))
def test_a_pool_of_states_and_workers_that_are_lost(seed: int, name: str, refuse: float) -> None:
    play_with_pool(seed, name, refuse=refuse, state_blocks=2)


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9), name=st.sampled_from(COLOCATED), refuse=st.sampled_from((0.0, 0.3)))
def test_a_pool_and_workers_that_are_lost(seed: int, name: str, refuse: float) -> None:
    play_with_pool(seed, name, refuse=refuse)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9))
def test_requests_that_move_beside_a_pool(seed: int) -> None:
    play_with_pool(seed, "aligned_slo", is_elastic=True)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9), name=st.sampled_from(COLOCATED))
def test_hashes_that_collide(seed: int, name: str) -> None:
    """With hashes of two bits nearly every block has another's: no hit is wrong, as its tokens are compared."""

    def two_bits(parent: bytes, packed: bytes) -> bytes:
        return bytes([block_hash(parent, packed)[0] & 3]) * HASH_BYTES

    with patch.object(block_hashes, "block_hash", two_bits), patch.object(contexts, "block_hash", two_bits):
        play(seed, shape_of(name))


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9), losses=st.sampled_from((0.0, 0.1)))
def test_separate_prefill_workers(seed: int, losses: float) -> None:
    shape = Shape(num_prefill=2, num_decode=2, pool_blocks=60, worker_blocks=20, has_prefix_cache=True)
    play(seed, shape, losses=losses)


@settings(max_examples=5)
@given(
    seed=st.integers(0, 10**9),
    losses=st.sampled_from((0.0, 0.1)),
    name=st.sampled_from(("aligned", "aligned_slo", "alise")),
)
def test_states_of_separate_workers(seed: int, losses: float, name: str) -> None:
    shape = Shape(num_prefill=2, num_decode=2, pool_blocks=80, worker_blocks=30, buffer_blocks=24, state_blocks=2)
    scheduling = SchedulingConfig(policy=name)
    play(seed, replace(shape, has_prefix_cache=True, disaggregated_scheduling=scheduling), losses=losses)


def test_separate_workers_go_on_behind_states() -> None:
    shape = Shape(pool_blocks=90, worker_blocks=60, state_blocks=2, has_prefix_cache=True)
    cluster = play(1, shape, aborts=0.0, count=25)
    (worker,) = [logic for logic in cluster.logics.values() if isinstance(logic, PrefillLogic)]
    assert worker._blocks.num_hit_tokens > 40


def other_pool(index: PrefixIndex, tracked: TrackedRequest, worker: WorkerRecord) -> WorkerName | None:
    """Name the other node's pool for every request, whatever it has: what is asked of it need not be there."""
    return next((WorkerName(pool) for pool in index._pools if pool != worker.registered.pool_name), None)


def play_on_two_nodes(seed: int, **sizes: object) -> int:
    """Return how often a worker loaded from the other node's pool."""
    shape = shape_of("fcfs", num_decode=4, num_nodes=2, prefix_pool_blocks=40, worker_blocks=24, **sizes)
    with patch.object(PrefixIndex, "far_pool", other_pool):
        cluster = play(seed, shape, losses=0.15 if sizes else 0.0, count=25)
    return sum(len(loads) for loads in cluster.far_loads.values())


def test_blocks_come_from_the_pool_of_another_node() -> None:
    assert sum(play_on_two_nodes(seed) for seed in range(8)) > 10


@settings(max_examples=5)
@given(seed=st.integers(0, 10**9), refuse=st.sampled_from((0.0, 0.3)))
def test_pools_of_several_nodes_that_are_lost(seed: int, refuse: float) -> None:
    play_on_two_nodes(seed, refuse=refuse)
