"""Decode workers that are given batches of another node's pool, and the choice of that pool."""

from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.costmodel.hardware import LearnedLinks
from alignedserve.messages.pools import FormBatch, PoolRegistered
from alignedserve.messages.workers import WorkerLoad
from router.placement import Placement
from tests.harnesses.placement import empty_fleet, pool_requests
from tests.support.samples import POOL, worker

FAR, OTHER = "decode-9", "decode-8"
FAR_POOL, OTHER_POOL = "pool-9", "pool-8"


def fleet(**batching: int) -> Placement:
    """Build pool-0 without a decode worker beside it, and a decode worker with a pool of its own elsewhere."""
    made = empty_fleet(**batching)
    for pool in (POOL, FAR_POOL):
        made.register(pool, PoolRegistered(100))
    made.register(FAR, worker(pool_name=FAR_POOL))
    return made


def asked(where: Placement, now: float = 0.0) -> list[tuple[str, str, int]]:
    return [(pool, form.worker, form.max_requests) for pool, form in where.batches_to_form(now)]


def test_what_no_worker_of_its_node_can_take_goes_to_a_spare_one_elsewhere() -> None:
    where = fleet()
    pool_requests(where, 3)
    assert where.batches_to_form(0.0) == [(POOL, FormBatch(BatchId(1), WorkerName(FAR), 20, 3, 2))]
    assert asked(where) == []


def test_a_worker_takes_from_its_own_pool_first() -> None:
    where = fleet()
    pool_requests(where, 3)
    pool_requests(where, 1, prefix="own", pool=FAR_POOL)
    assert asked(where) == [(FAR_POOL, FAR, 1)]


def test_no_more_than_its_free_slots() -> None:
    where = fleet()
    pool_requests(where, 9)
    assert asked(where) == [(POOL, FAR, 4)]


def test_nothing_travels_while_a_worker_beside_the_pool_may_take_it() -> None:
    where = fleet()
    where.register("decode-0", worker())
    pool_requests(where, 1)
    assert asked(where) == [(POOL, "decode-0", 1)]
    pool_requests(where, 3, prefix="more")
    assert asked(where) == []  # decode-0 has not answered


def test_a_full_worker_leaves_the_rest_to_others() -> None:
    where = fleet()
    where.register("decode-0", worker(max_running_requests=1))
    (first,) = pool_requests(where, 1)
    where.set_decoding(first, where.workers["decode-0"])
    where.workers["decode-0"].last_batch_s = 0.0
    where.update_load("decode-0", WorkerLoad(num_running=1, num_batch_candidates=1))
    pool_requests(where, 2, prefix="more")
    assert asked(where) == [(POOL, FAR, 2)]


def test_spare_workers_share_what_is_left() -> None:
    where = fleet()
    where.register(OTHER, worker(pool_name=OTHER_POOL))
    pool_requests(where, 3)
    assert asked(where) == [(POOL, OTHER, 2), (POOL, FAR, 1)]


def test_a_pool_that_had_nothing_is_asked_again_when_something_has_changed() -> None:
    where = fleet()
    pool_requests(where, 1)
    assert asked(where) == [(POOL, FAR, 1)]
    where.close_batch_request(where.workers[FAR], is_empty=True, now=0.0)
    assert asked(where) == []
    where.clear_refusals()
    assert asked(where) == [(POOL, FAR, 1)]


def test_a_lost_pool_is_not_waited_for() -> None:
    where = fleet()
    pool_requests(where, 1)
    assert asked(where) == [(POOL, FAR, 1)]
    where.remove(POOL)
    pool_requests(where, 1, prefix="own", pool=FAR_POOL)
    assert asked(where) == [(FAR_POOL, FAR, 1)]


def test_the_loss_of_its_own_pool_leaves_what_another_was_asked_for() -> None:
    where = fleet()
    pool_requests(where, 1)
    asked(where)
    where.remove(FAR_POOL)
    assert where.workers[FAR].pending_batch is not None


def test_of_several_pools_the_one_over_the_fastest_link_is_asked() -> None:
    where = fleet()
    where.register(OTHER_POOL, PoolRegistered(100))
    where.links.observe(FAR, POOL, 10, 0.010)
    where.links.observe(FAR, OTHER_POOL, 10, 0.001)
    pool_requests(where, 3)
    pool_requests(where, 1, prefix="other", pool=OTHER_POOL)
    assert asked(where) == [(OTHER_POOL, FAR, 1)]


def test_links_learn_and_forget() -> None:
    links = LearnedLinks()
    assert links.seconds_per_block(FAR, POOL) == 0.0
    links.observe(FAR, POOL, 10, 0.1)
    assert links.seconds_per_block(FAR, POOL) == 0.01
    assert links.seconds_per_block(OTHER, POOL) == 0.01  # unknown: as the others
    links.observe(FAR, POOL, 10, 0.9)
    assert 0.01 < links.seconds_per_block(FAR, POOL) < 0.09
    links.observe(FAR, OTHER_POOL, 0, 1.0)
    links.forget(POOL)
    links.forget(FAR)
    assert links.seconds_per_block(FAR, POOL) == links.seconds_per_block(OTHER, OTHER_POOL)
