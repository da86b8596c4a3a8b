"""The router's records of workers and pools, and who prefills next."""

from alignedserve.core.ids import BatchId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.pools import PoolLoad, PoolRegistered
from alignedserve.messages.workers import WorkerLoad
from router.state import DispatchedPrefill, TrackedRequest
from tests.harnesses.placement import OTHER_POOL, decoding, empty_fleet, placement, pool_requests
from tests.support.marks import each
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, R2, epoch, request, worker

# --- prefills


def test_the_least_loaded_worker_prefills_next_and_ties_go_by_name() -> None:
    where = placement()
    for name in ("prefill-1", "prefill-0"):
        where.register(name, worker(can_prefill=True, can_decode=False))
    chosen = where.least_loaded_prefiller()
    assert chosen is not None
    assert chosen.name == "prefill-0"
    where.start_prefill(chosen, R1, DispatchedPrefill(epoch(1), 5))
    following = where.least_loaded_prefiller()
    assert following is not None
    assert following.name == "prefill-1"


def test_a_prefill_worker_needs_its_pool() -> None:
    where = empty_fleet()
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    assert where.least_loaded_prefiller() is None


def test_a_decode_worker_does_not_prefill() -> None:
    assert placement(decode_0={}).least_loaded_prefiller() is None


def test_a_colocated_worker_takes_what_it_can_run_and_needs_no_pool() -> None:
    where = empty_fleet()
    where.register(DECODE, worker(can_prefill=True, max_running_requests=2))
    record = where.workers[DECODE]
    assert where.least_loaded_prefiller() is record
    where.start_prefill(record, R1, DispatchedPrefill(epoch(1), 4))
    where.start_prefill(record, R2, DispatchedPrefill(epoch(2), 4))
    assert where.least_loaded_prefiller() is None


def test_only_a_completion_of_the_same_epoch_completes_a_prefill() -> None:
    where = placement(decode_0={})
    record = where.workers[DECODE]
    where.start_prefill(record, R1, DispatchedPrefill(epoch(2), 5))
    assert not where.complete_prefill(record, R1, epoch(1))
    assert not where.complete_prefill(record, R2, epoch(2))
    assert record.num_prefill_tokens == 5
    assert where.complete_prefill(record, R1, epoch(2))
    assert record.num_prefill_tokens == 0


# --- what fits at all


@each(("max_context_len", "expected"), [(80, True), (81, False)])
def test_a_request_must_fit_some_decode_worker(max_context_len: int, expected: bool) -> None:
    where = placement(decode_0={"num_blocks": 20}, decode_1={"num_blocks": 10})
    assert where.can_ever_hold(max_context_len) is expected


def test_with_no_decode_worker_to_tell_everything_may_fit() -> None:
    assert placement().can_ever_hold(10**9)


# --- coming, going, counting


def test_a_lost_pool_ends_its_unanswered_questions() -> None:
    where = placement(decode_0={})
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    where.remove(POOL)
    where.register(POOL, PoolRegistered(100))
    pool_requests(where, 1, "q")
    assert len(where.batches_to_form(0.0)) == 1


def test_a_lost_pool_leaves_the_questions_to_another() -> None:
    where = placement(decode_0={})
    where.register(OTHER_POOL, PoolRegistered(100))
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    where.remove(OTHER_POOL)
    assert where.workers[DECODE].pending_batch == BatchId(1)


def test_a_pool_that_comes_back_has_another_epoch() -> None:
    where = placement(decode_0={})
    before = where.pool_of(DECODE)
    where.remove(POOL)
    assert where.pool_of(DECODE) is None
    where.register(POOL, PoolRegistered(100))
    after = where.pool_of(DECODE)
    assert before is not None
    assert after is not None
    assert before.epoch != after.epoch


def test_a_copy_is_where_it_was_recorded_for_as_long_as_that_pool_lives() -> None:
    where = placement()
    (tracked,) = pool_requests(where, 1)
    assert where.copy_of(tracked) == POOL
    where.remove(POOL)
    assert where.copy_of(tracked) is None
    where.register(POOL, PoolRegistered(100))
    assert where.copy_of(tracked) is None


def test_a_worker_that_comes_back_has_nothing() -> None:
    where = placement(decode_0={})
    decoding(where, DECODE, 2)
    where.register(DECODE, worker())
    assert where.workers[DECODE].decoding == set()
    assert where.workers[DECODE].load is None


def test_forgetting_gives_back_what_was_counted() -> None:
    where = placement(decode_0={})
    (pooled,) = pool_requests(where, 1)
    (running,) = decoding(where, DECODE, 1)
    assert where.pools[POOL].num_pooled == 1
    where.unassign(pooled)
    where.unassign(running)
    assert where.pools[POOL].num_pooled == 0
    assert where.workers[DECODE].decoding == set()


def test_what_comes_back_to_the_pool_is_counted_there_and_no_more_with_the_worker() -> None:
    where = placement(decode_0={})
    (running,) = decoding(where, DECODE, 1)
    where.set_pooled(running, POOL, 1)
    assert where.pools[POOL].num_pooled == 1
    assert where.workers[DECODE].decoding == set()


def test_what_is_pooled_counts_as_a_prefill_until_its_worker_reports_it() -> None:
    where = placement()
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    tracked = TrackedRequest(request(), GATEWAY, 1.0)
    tracked.move(Stage.PREFILLING, PREFILL)
    where.start_prefill(where.workers[PREFILL], R1, DispatchedPrefill(epoch(1), 4))
    where.set_pooled(tracked, POOL, 1)
    assert where.workers[PREFILL].num_prefill_tokens == 4


def test_reports_of_the_unknown_are_ignored() -> None:
    where = placement()
    where.update_load("decode-9", WorkerLoad())
    where.update_load("pool-9", PoolLoad(1, 1, 1))
    assert "decode-9" not in where
    assert "pool-9" not in where
    assert POOL in where


def test_who_may_be_lost_with_whom() -> None:
    where = placement(decode_0={})
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    tracked = TrackedRequest(request(), GATEWAY, 1.0)
    tracked.move(Stage.PREFILLING, PREFILL)
    assert where.depends_on(tracked, PREFILL)
    assert not where.depends_on(tracked, POOL)
    tracked.is_prefilled = True  # its blocks are on their way
    assert where.depends_on(tracked, POOL)
    where.set_pooled(tracked, POOL, 1)
    assert where.depends_on(tracked, POOL)
    assert not where.depends_on(tracked, DECODE)
    tracked.destination = DECODE
    assert where.depends_on(tracked, DECODE)


def test_who_has_other_blocks_than_the_others_is_refused() -> None:
    where = empty_fleet()
    assert where.register(POOL, PoolRegistered(100, "digest")) is None
    assert where.register(DECODE, worker(layout_digest="digest")) is None
    reason = where.register(PREFILL, worker(can_prefill=True, can_decode=False, layout_digest="another"))
    assert reason is not None
    assert "blocks" in reason
    assert PREFILL not in where


def test_who_comes_back_with_other_blocks_is_refused_as_well_and_the_first_may_have_any() -> None:
    where = empty_fleet()
    assert where.register(DECODE, worker(layout_digest="digest")) is None
    assert where.register(DECODE, worker(layout_digest="another")) is None
    assert where.register(POOL, PoolRegistered(100, "digest")) is not None
    assert POOL not in where
