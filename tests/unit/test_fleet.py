"""The router's records of workers and pools, and whom it gives work."""

from typing import Any

import pytest

from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.links import FormBatch, PoolLoad, PoolRegistered, WorkerLoad
from router.fleet import Fleet
from router.state import TrackedRequest
from tests.samples import DECODE, GATEWAY, POOL, PREFILL, R1, request, worker

ASKED = WorkerName(DECODE)


def fleet(**decoders: dict[str, Any]) -> Fleet:
    """A pool, and decode workers by name with what is special about them."""
    made = Fleet(candidate_requests=2)
    made.register(POOL, PoolRegistered(100))
    for name, changes in decoders.items():
        made.register(name.replace("_", "-"), worker(**changes))
    return made


def pool_requests(where: Fleet, count: int, prefix: str = "p") -> list[TrackedRequest]:
    tracked = [TrackedRequest(request(f"{prefix}{number}"), GATEWAY, 1.0) for number in range(count)]
    for one in tracked:
        one.move(Stage.PREFILLING, PREFILL)
        where.note_pooled(one, POOL)
    return tracked


def decoding(where: Fleet, name: str, count: int) -> list[TrackedRequest]:
    tracked = pool_requests(where, count, name)
    for one in tracked:
        where.note_decoding(one, where.workers[name])
    return tracked


def load(num_candidate_blocks: int) -> WorkerLoad:
    return WorkerLoad(0, 0, 0, num_candidate_blocks, 0, 0)


# --- prefills


def test_the_least_loaded_worker_prefills_next_and_ties_go_by_name() -> None:
    where = fleet()
    for name in ("prefill-1", "prefill-0"):
        where.register(name, worker(can_prefill=True, can_decode=False))
    chosen = where.least_loaded_prefiller()
    assert chosen is not None
    assert chosen.name == "prefill-0"
    chosen.prefilling[R1] = 5
    following = where.least_loaded_prefiller()
    assert following is not None
    assert following.name == "prefill-1"


def test_a_prefill_worker_needs_its_pool() -> None:
    where = Fleet(candidate_requests=2)
    where.register(PREFILL, worker(can_prefill=True, can_decode=False))
    assert where.least_loaded_prefiller() is None


def test_a_decode_worker_does_not_prefill() -> None:
    assert fleet(decode_0={}).least_loaded_prefiller() is None


def test_a_colocated_worker_takes_what_it_can_run_and_needs_no_pool() -> None:
    where = Fleet(candidate_requests=2)
    where.register(DECODE, worker(can_prefill=True, max_running=2))
    record = where.workers[DECODE]
    assert where.least_loaded_prefiller() is record
    record.prefilling[R1] = 4
    record.decoding.add(R1)
    assert where.least_loaded_prefiller() is None


# --- what fits at all


@pytest.mark.parametrize(("max_context_len", "expected"), [(80, True), (81, False)])
def test_a_request_must_fit_some_decode_worker(max_context_len: int, expected: bool) -> None:
    where = fleet(decode_0={"num_blocks": 20}, decode_1={"num_blocks": 10})
    assert where.can_ever_hold(max_context_len) is expected


def test_with_no_decode_worker_to_tell_everything_may_fit() -> None:
    assert fleet().can_ever_hold(10**9)


# --- batches


def test_an_empty_worker_may_fill_its_whole_memory() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 3)
    assert where.batches_to_form() == [(POOL, FormBatch(BatchId(1), ASKED, max_blocks=20, max_requests=3))]


def test_one_question_at_a_time() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form()
    pool_requests(where, 1, "q")
    assert where.batches_to_form() == []


def test_without_news_the_question_is_not_repeated() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form()
    where.workers[DECODE].forming = None
    assert where.batches_to_form() == []
    where.mark_news()
    assert where.batches_to_form() == [(POOL, FormBatch(BatchId(2), ASKED, 20, 3))]


def test_a_report_of_the_worker_is_news() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form()
    where.workers[DECODE].forming = None
    where.note_load(DECODE, load(0))
    assert len(where.batches_to_form()) == 1


def test_nothing_is_asked_of_an_empty_pool_or_of_none() -> None:
    where = fleet(decode_0={}, decode_1={"pool_name": "pool-1"})
    assert where.batches_to_form() == []


def test_a_colocated_worker_gets_no_batches() -> None:
    where = fleet(decode_0={"can_prefill": True})
    pool_requests(where, 3)
    assert where.batches_to_form() == []


def test_workers_share_the_pool_fairly_and_the_emptiest_is_asked_first() -> None:
    where = fleet(decode_0={}, decode_1={})
    decoding(where, "decode-0", 1)
    pool_requests(where, 3)
    asked = where.batches_to_form()
    assert [form.worker for _, form in asked] == ["decode-1", "decode-0"]
    assert [form.max_requests for _, form in asked] == [2, 2]


def test_a_busy_worker_gets_candidates_up_to_two_fifths_of_its_memory() -> None:
    where = fleet(decode_0={})
    decoding(where, DECODE, 1)
    pool_requests(where, 9)
    where.note_load(DECODE, load(3))
    assert where.batches_to_form() == [(POOL, FormBatch(BatchId(1), ASKED, max_blocks=8 - 3, max_requests=4 + 2 - 1))]


def test_a_worker_whose_candidates_take_their_share_is_not_asked_for_more() -> None:
    where = fleet(decode_0={})
    decoding(where, DECODE, 1)
    pool_requests(where, 9)
    where.note_load(DECODE, load(8))
    assert where.batches_to_form() == []


def test_a_worker_with_all_the_requests_it_may_have_is_not_asked_for_more() -> None:
    where = fleet(decode_0={})
    decoding(where, DECODE, 6)
    pool_requests(where, 1)
    assert where.batches_to_form() == []


# --- coming, going, counting


def test_a_lost_pool_ends_its_unanswered_questions() -> None:
    where = fleet(decode_0={})
    pool_requests(where, 1)
    where.batches_to_form()
    where.remove(POOL)
    where.register(POOL, PoolRegistered(100))
    pool_requests(where, 1, "q")
    assert len(where.batches_to_form()) == 1


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


def test_reports_of_the_unknown_are_ignored() -> None:
    where = fleet()
    where.note_load("decode-9", load(1))
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
