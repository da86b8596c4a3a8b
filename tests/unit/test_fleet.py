"""The router's records of workers and pools, and whom it gives work."""

from typing import Any

import pytest

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.links import FormBatch, JoinedBatch, PoolLoad, PoolRegistered, WorkerLoad
from router.fleet import Fleet
from router.state import AskKind, HandedOver, TrackedRequest
from tests.samples import DECODE, GATEWAY, POOL, PREFILL, R1, R2, life, request, worker

ASKED, OTHER_POOL = WorkerName(DECODE), "pool-1"
RUNNING = JoinedBatch(BatchId(1), 32, 48)
# A worker runs at most four; three are enough to keep it busy.
SATURATED = {"num_running": 3, "num_free_blocks": 8}
Asked = list[tuple[str, FormBatch]]


def empty_fleet(**batching: Any) -> Fleet:
    return Fleet(candidate_requests=2, batching=BatchingConfig(min_requests=3, **batching))


def fleet(batching: dict[str, Any] | None = None, **decoders: dict[str, Any]) -> Fleet:
    """A pool, and decode workers by name with what is special about them."""
    made = empty_fleet(**(batching or {}))
    made.register(POOL, PoolRegistered(100))
    for name, changes in decoders.items():
        made.register(name.replace("_", "-"), worker(**changes))
    return made


def pool_requests(where: Fleet, count: int, prefix: str = "p", pool: str = POOL) -> list[TrackedRequest]:
    tracked = [TrackedRequest(request(f"{prefix}{number}"), GATEWAY, 1.0) for number in range(count)]
    for one in tracked:
        one.move(Stage.PREFILLING, PREFILL)
        where.note_pooled(one, pool)
    return tracked


def decoding(where: Fleet, name: str, count: int) -> list[TrackedRequest]:
    tracked = pool_requests(where, count, name)
    for one in tracked:
        where.note_decoding(one, where.workers[name])
    return tracked


def busy(num_pooled: int, batching: dict[str, Any] | None = None, now: float = 0.0, **load: Any) -> Fleet:
    """decode-0 runs three requests of its first batch, granted at `now`, and so many more wait in the pool."""
    where = fleet(batching, decode_0={})
    decoding(where, DECODE, 3)
    where.workers[DECODE].last_batch_s = now
    pool_requests(where, num_pooled)
    where.note_load(DECODE, WorkerLoad(**{**SATURATED, **load}))
    return where


def refuse(where: Fleet) -> None:
    """The pool has nothing for decode-0."""
    where.note_formed(where.workers[DECODE], is_empty=True, now=0.0)


def form(number: int, max_blocks: int, max_requests: int, min_requests: int, **changes: Any) -> Asked:
    return [(POOL, FormBatch(BatchId(number), ASKED, max_blocks, max_requests, min_requests, **changes))]


# --- prefills


def test_the_least_loaded_worker_prefills_next_and_ties_go_by_name() -> None:
    where = fleet()
    for name in ("prefill-1", "prefill-0"):
        where.register(name, worker(can_prefill=True, can_decode=False))
    chosen = where.least_loaded_prefiller()
    assert chosen is not None
    assert chosen.name == "prefill-0"
    chosen.prefilling[R1] = HandedOver(life(1), 5)
    following = where.least_loaded_prefiller()
    assert following is not None
    assert following.name == "prefill-1"


def test_a_prefill_worker_needs_its_pool() -> None:
    where = empty_fleet()
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    assert where.least_loaded_prefiller() is None


def test_a_decode_worker_does_not_prefill() -> None:
    assert fleet(decode_0={}).least_loaded_prefiller() is None


def test_a_colocated_worker_takes_what_it_can_run_and_needs_no_pool() -> None:
    where = empty_fleet()
    where.register(DECODE, worker(can_prefill=True, max_running=2))
    record = where.workers[DECODE]
    assert where.least_loaded_prefiller() is record
    record.prefilling[R1] = HandedOver(life(1), 4)
    record.decoding.add(R2)
    assert where.least_loaded_prefiller() is None


def test_only_a_completion_of_the_same_life_is_counted_off() -> None:
    record = fleet(decode_0={}).workers[DECODE]
    record.prefilling[R1] = HandedOver(life(2), 5)
    assert not record.count_off(R1, life(1))
    assert not record.count_off(R2, life(2))
    assert record.num_prefill_tokens == 5
    assert record.count_off(R1, life(2))
    assert record.num_prefill_tokens == 0


# --- what fits at all


@pytest.mark.parametrize(("max_context_len", "expected"), [(80, True), (81, False)])
def test_a_request_must_fit_some_decode_worker(max_context_len: int, expected: bool) -> None:
    where = fleet(decode_0={"num_blocks": 20}, decode_1={"num_blocks": 10})
    assert where.can_ever_hold(max_context_len) is expected


def test_with_no_decode_worker_to_tell_everything_may_fit() -> None:
    assert fleet().can_ever_hold(10**9)


# --- questions: when none is asked


def test_one_question_at_a_time() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 3)
    assert len(where.batches_to_form(0.0)) == 1
    pool_requests(where, 1, "q")
    assert where.batches_to_form(0.0) == []


def test_without_news_the_question_is_not_repeated() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form(0.0)
    refuse(where)
    assert where.batches_to_form(0.0) == []
    where.mark_news()
    assert where.batches_to_form(0.0) == form(2, 20, 3, 3)


def test_a_report_of_the_worker_is_news() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form(0.0)
    refuse(where)
    where.note_load(DECODE, WorkerLoad())
    assert len(where.batches_to_form(0.0)) == 1


def test_a_request_that_comes_into_the_pool_is_news() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    refuse(where)
    pool_requests(where, 1, "q")
    assert len(where.batches_to_form(0.0)) == 1


def test_after_a_batch_the_next_question_waits_for_the_workers_report() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 9)
    where.batches_to_form(0.0)
    where.note_formed(where.workers[DECODE], is_empty=False, now=0.0)
    assert where.batches_to_form(0.0) == []
    where.note_load(DECODE, WorkerLoad())
    assert len(where.batches_to_form(0.0)) == 1


def test_nothing_is_asked_of_an_empty_pool_or_of_none() -> None:
    where = fleet(decode_0={}, decode_1={"pool_name": OTHER_POOL})
    assert where.batches_to_form(0.0) == []


def test_a_colocated_worker_gets_no_batches() -> None:
    where = fleet(decode_0={"can_prefill": True})
    pool_requests(where, 3)
    assert where.batches_to_form(0.0) == []


# --- batches


def test_an_empty_worker_may_fill_its_whole_memory_and_gets_candidates_as_well() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 9)
    assert where.batches_to_form(0.0) == form(1, 20, 4 + 2, 3)


def test_no_more_are_demanded_than_there_are() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 2)
    assert where.batches_to_form(0.0) == form(1, 20, 2, 2)


def test_no_more_are_demanded_than_the_worker_runs() -> None:
    where = fleet(decode_0={"max_running": 2})
    pool_requests(where, 9)
    assert where.batches_to_form(0.0) == form(1, 20, 4, 2)


def test_where_lengths_do_not_matter_no_batch_is_too_small() -> None:
    where = fleet({"policy": "fcfs"}, decode_0={})
    pool_requests(where, 9)
    assert where.batches_to_form(0.0) == form(1, 20, 6, 1)


def test_workers_share_the_pool_fairly_and_the_emptiest_is_asked_first() -> None:
    where = fleet(decode_0={}, decode_1={})
    decoding(where, "decode-0", 1)
    pool_requests(where, 3)
    asked = where.batches_to_form(0.0)
    assert [form.worker for _, form in asked] == ["decode-1", "decode-0"]
    assert [form.max_requests for _, form in asked] == [2, 2]


def test_a_worker_that_runs_too_few_gets_what_it_has_places_for() -> None:
    where = busy(9, num_running=2)
    assert where.batches_to_form(0.0) == form(1, 8, 4 + 2 - 3, 3)


def test_a_busy_worker_is_given_a_whole_batch_ahead_of_need() -> None:
    assert busy(9).batches_to_form(0.0) == form(1, 8, 4, 3)


def test_candidates_take_up_to_their_share_of_a_busy_workers_memory() -> None:
    assert busy(9, num_candidate_blocks=3).batches_to_form(0.0) == form(1, 8 - 3, 4, 3)


def test_a_worker_whose_candidates_take_their_share_is_not_asked_for_more() -> None:
    assert busy(9, num_candidate_blocks=8).batches_to_form(0.0) == []


def test_a_busy_worker_is_not_given_what_is_not_worth_a_switch() -> None:
    assert busy(2).batches_to_form(0.0) == []


def test_what_is_not_worth_a_switch_is_given_after_a_while() -> None:
    assert busy(2, now=5.0).batches_to_form(6.9) == []
    assert busy(2, now=5.0).batches_to_form(7.0) == form(1, 8, 2, 2)


def test_a_batch_notes_when_it_came() -> None:
    where = busy(3)
    where.batches_to_form(1.0)
    where.note_formed(where.workers[DECODE], is_empty=False, now=1.5)
    assert where.workers[DECODE].last_batch_s == 1.5


def test_a_worker_with_a_batch_ahead_needs_no_other() -> None:
    assert busy(9, num_batch_candidates=3).batches_to_form(0.0) == []


def test_where_lengths_do_not_matter_a_worker_gets_what_it_has_places_for() -> None:
    assert busy(9, {"policy": "fcfs"}).batches_to_form(0.0) == form(1, 8, 4 + 2 - 3, 1)


def test_a_worker_with_all_the_requests_it_may_have_is_not_asked_for_more() -> None:
    where = fleet({"policy": "fcfs"}, decode_0={})
    decoding(where, DECODE, 6)
    pool_requests(where, 1)
    assert where.batches_to_form(0.0) == []


# --- joins


def test_who_is_of_the_running_lengths_joins_while_another_batch_waits() -> None:
    where = busy(9, num_batch_candidates=3, num_candidate_blocks=2, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8 - 2, 1 + 2, 1, joins=RUNNING)


def test_who_is_of_the_running_lengths_joins_when_there_is_no_batch_to_come() -> None:
    where = busy(9, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8, 4, 3)
    refuse(where)
    assert where.batches_to_form(0.0) == form(2, 8, 3, 1, joins=RUNNING)
    refuse(where)
    assert where.batches_to_form(0.0) == []


def test_too_few_for_a_batch_may_still_join() -> None:
    assert busy(1, running=RUNNING).batches_to_form(0.0) == form(1, 8, 1, 1, joins=RUNNING)


def test_candidates_that_are_to_join_already_are_counted() -> None:
    where = busy(9, num_batch_candidates=3, num_candidate_requests=2, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8, 1, 1, joins=RUNNING)
    full = busy(9, num_batch_candidates=3, num_candidate_requests=3, running=RUNNING)
    assert full.batches_to_form(0.0) == []


def test_nobody_joins_what_is_not_of_one_length() -> None:
    assert busy(1, running=None).batches_to_form(0.0) == []


def test_nobody_joins_while_another_batch_has_waited_too_long() -> None:
    where = busy(9, now=5.0, num_batch_candidates=3, running=RUNNING)
    assert where.batches_to_form(7.0) == []
    assert len(where.batches_to_form(6.9)) == 1


def test_a_join_is_no_batch_of_its_own() -> None:
    where = busy(1, running=RUNNING)
    where.batches_to_form(1.0)
    record = where.workers[DECODE]
    assert record.asked_for is AskKind.JOIN
    where.note_formed(record, is_empty=False, now=1.5)
    assert (record.last_batch_s, record.is_load_old) == (0.0, True)


# --- coming, going, counting


def test_a_lost_pool_ends_its_unanswered_questions() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    where.remove(POOL)
    where.register(POOL, PoolRegistered(100))
    pool_requests(where, 1, "q")
    assert len(where.batches_to_form(0.0)) == 1


def test_a_lost_pool_leaves_the_questions_to_another() -> None:
    where = fleet(decode_0={})
    where.register(OTHER_POOL, PoolRegistered(100))
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    where.remove(OTHER_POOL)
    assert where.workers[DECODE].forming == BatchId(1)


def test_a_pool_that_comes_back_has_another_life() -> None:
    where = fleet(decode_0={})
    before = where.pool_of(DECODE)
    where.remove(POOL)
    assert where.pool_of(DECODE) is None
    where.register(POOL, PoolRegistered(100))
    after = where.pool_of(DECODE)
    assert before is not None
    assert after is not None
    assert before.life != after.life


def test_a_copy_is_where_it_was_noted_for_as_long_as_that_pool_lives() -> None:
    where = fleet()
    (tracked,) = pool_requests(where, 1)
    assert where.copy_of(tracked) == POOL
    where.remove(POOL)
    assert where.copy_of(tracked) is None
    where.register(POOL, PoolRegistered(100))
    assert where.copy_of(tracked) is None


def test_a_worker_that_comes_back_has_nothing() -> None:
    where = fleet(decode_0={})
    decoding(where, DECODE, 2)
    where.register(DECODE, worker())
    assert where.workers[DECODE].decoding == set()
    assert where.workers[DECODE].load is None


def test_forgetting_gives_back_what_was_counted() -> None:
    where = fleet(decode_0={})
    (pooled,) = pool_requests(where, 1)
    (running,) = decoding(where, DECODE, 1)
    assert where.pools[POOL].num_pooled == 1
    where.forget(pooled)
    where.forget(running)
    assert where.pools[POOL].num_pooled == 0
    assert where.workers[DECODE].decoding == set()


def test_what_comes_back_to_the_pool_is_counted_there_and_no_more_with_the_worker() -> None:
    where = fleet(decode_0={})
    (running,) = decoding(where, DECODE, 1)
    where.note_pooled(running, POOL)
    assert where.pools[POOL].num_pooled == 1
    assert where.workers[DECODE].decoding == set()


def test_what_is_pooled_counts_as_a_prefill_until_its_worker_reports_it() -> None:
    where = fleet()
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    tracked = TrackedRequest(request(), GATEWAY, 1.0)
    tracked.move(Stage.PREFILLING, PREFILL)
    where.workers[PREFILL].prefilling[R1] = HandedOver(life(1), 4)
    where.note_pooled(tracked, POOL)
    assert where.workers[PREFILL].num_prefill_tokens == 4


def test_reports_of_the_unknown_are_ignored() -> None:
    where = fleet()
    where.note_load("decode-9", WorkerLoad())
    where.note_load("pool-9", PoolLoad(1, 1, 1))
    assert "decode-9" not in where
    assert "pool-9" not in where
    assert POOL in where


def test_who_may_be_lost_with_whom() -> None:
    where = fleet(decode_0={})
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    tracked = TrackedRequest(request(), GATEWAY, 1.0)
    tracked.move(Stage.PREFILLING, PREFILL)
    assert where.may_have_lost(tracked, PREFILL)
    assert not where.may_have_lost(tracked, POOL)
    tracked.is_computed = True  # its blocks are on their way
    assert where.may_have_lost(tracked, POOL)
    where.note_pooled(tracked, POOL)
    assert where.may_have_lost(tracked, POOL)
    assert not where.may_have_lost(tracked, DECODE)
    tracked.granted_to = DECODE
    assert where.may_have_lost(tracked, DECODE)
