"""Pools that have waited too long go before the own pool of a decode worker elsewhere."""

from msgspec.structs import replace

from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.messages.pools import FormBatch, PoolRegistered
from alignedserve.messages.workers import WorkerLoad
from router.placement import Placement
from tests.harnesses.placement import decoding, empty_fleet, pool_requests
from tests.support.samples import DECODE, POOL, worker

STRANDED, OTHER_STRANDED, OTHER_POOL, OTHER = "pool-8", "pool-9", "pool-1", "decode-1"
SATURATED = WorkerLoad(num_running=3, num_free_blocks=8)


def fleet() -> Placement:
    """decode-0 runs three requests beside pool-0; two pools without a decode worker beside them. At most 2 s ahead."""
    made = empty_fleet(starvation_s=2.0)
    for pool in (POOL, STRANDED, OTHER_STRANDED):
        made.register(pool, PoolRegistered(100))
    made.register(DECODE, worker())
    decoding(made, DECODE, 3)
    made.workers[DECODE].last_batch_s = 0.0
    made.update_load(DECODE, SATURATED)
    return made


def add_neighbour(where: Placement) -> None:
    """Add decode-1, as busy as decode-0, beside a pool of its own."""
    where.register(OTHER_POOL, PoolRegistered(100))
    where.register(OTHER, worker(pool_name=OTHER_POOL))
    for one in pool_requests(where, 3, "n", OTHER_POOL):
        where.set_decoding(one, where.workers[OTHER])
    where.workers[OTHER].last_batch_s = 0.0
    where.update_load(OTHER, SATURATED)


def pool_at(where: Placement, pool: str, now: float, count: int = 1, num_blocks: int = 1) -> None:
    for one in pool_requests(where, count, f"{pool}-{now}-", pool, num_blocks, now):
        assert one.pooled_s == now


def asked(where: Placement, now: float) -> list[tuple[str, str]]:
    return [(pool, form.worker) for pool, form in where.batches_to_form(now)]


def test_what_came_long_before_all_of_the_own_pool_goes_first() -> None:
    where = fleet()
    pool_at(where, STRANDED, 1.0)
    pool_at(where, POOL, 3.0, count=9)
    assert where.batches_to_form(3.0) == [(STRANDED, FormBatch(BatchId(1), WorkerName(DECODE), 8, 1, 1))]


def test_the_own_pool_goes_first_for_as_long_as_it_has_older_ones() -> None:
    where = fleet()
    pool_at(where, STRANDED, 1.0)
    pool_at(where, POOL, 2.9, count=9)
    assert asked(where, 9.0) == [(POOL, DECODE)]


def test_a_pool_with_nothing_is_no_reason_to_wait_longer_than_the_limit() -> None:
    where = fleet()
    (fourth,) = pool_requests(where, 1)
    where.set_decoding(fourth, where.workers[DECODE])  # no free slot
    pool_at(where, STRANDED, 1.0)
    assert asked(where, 2.9) == []
    assert asked(where, 3.0) == [(STRANDED, DECODE)]


def test_there_is_room_for_the_oldest_however_large() -> None:
    where = fleet()
    pool_at(where, STRANDED, 1.0, num_blocks=17)
    pool_at(where, POOL, 3.0)
    ((pool, form),) = where.batches_to_form(3.0)
    assert (pool, form.max_blocks) == (STRANDED, 17)


def test_what_no_worker_holds_keeps_nothing_else_waiting() -> None:
    where = fleet()
    pool_at(where, STRANDED, 1.0, num_blocks=21)  # decode-0 has twenty
    pool_at(where, OTHER_STRANDED, 1.5)
    pool_at(where, POOL, 3.5)
    assert asked(where, 3.5) == [(OTHER_STRANDED, DECODE)]


def test_a_worker_with_a_batch_ahead_is_not_asked_for() -> None:
    where = fleet()
    pool_at(where, STRANDED, 1.0)
    pool_at(where, POOL, 3.0)
    where.update_load(DECODE, WorkerLoad(num_running=3, num_batch_candidates=1))
    assert asked(where, 4.0) == []
    where.update_load(DECODE, SATURATED)
    assert asked(where, 4.0) == [(STRANDED, DECODE)]


def test_the_pool_that_has_waited_longest_first_by_the_worker_whose_own_has_waited_least() -> None:
    where = fleet()
    add_neighbour(where)
    pool_at(where, OTHER_STRANDED, 0.5)
    pool_at(where, STRANDED, 1.0)
    pool_at(where, POOL, 3.0, count=2)
    pool_at(where, OTHER_POOL, 3.5, count=2)
    assert asked(where, 4.0) == [(OTHER_STRANDED, OTHER), (STRANDED, DECODE)]


def test_one_batch_of_a_pool_at_a_time() -> None:
    where = fleet()
    add_neighbour(where)
    pool_at(where, STRANDED, 1.0, count=9)
    pool_at(where, OTHER_POOL, 3.5)
    where.workers[OTHER].last_batch_s = 3.0  # it needs none of its own
    assert asked(where, 3.5) == [(STRANDED, DECODE)]
    assert asked(where, 3.5) == []
    where.close_batch_request(where.workers[DECODE], is_empty=True, now=3.5)
    assert asked(where, 3.5) == [(STRANDED, OTHER)]


def test_a_worker_beside_it_that_has_nothing_to_do_goes_first() -> None:
    where = fleet()
    where.register(OTHER_POOL, PoolRegistered(100))
    where.register(OTHER, worker(pool_name=OTHER_POOL))
    pool_at(where, OTHER_POOL, 1.0, num_blocks=20)
    assert asked(where, 9.0) == [(OTHER_POOL, OTHER)]
    where.close_batch_request(where.workers[OTHER], is_empty=True, now=9.0)
    assert asked(where, 9.0) == [(OTHER_POOL, DECODE)]


def test_a_worker_beside_it_that_is_too_small_keeps_none_waiting() -> None:
    where = fleet()
    where.register(OTHER_POOL, PoolRegistered(100))
    where.register(OTHER, replace(worker(pool_name=OTHER_POOL), num_blocks=5))
    pool_at(where, OTHER_POOL, 1.0, num_blocks=6)
    assert (OTHER_POOL, DECODE) in asked(where, 9.0)


def test_a_lost_worker_serves_no_pool() -> None:
    where = fleet()
    pool_at(where, STRANDED, 1.0)
    assert asked(where, 1.0) == [(STRANDED, DECODE)]  # its own pool is empty, and it has a free slot
    where.remove(DECODE)
    assert asked(where, 9.0) == []
