"""The router's records of workers and pools, and FormBatch on behalf of decode workers."""

from alignedserve.core.lifecycle import Stage
from alignedserve.messages.pools import PoolLoad, PoolRegistered
from alignedserve.messages.workers import WorkerLoad
from router.state import BatchKind, DispatchedPrefill, TrackedRequest
from tests.harnesses.placement import RUNNING, busy, decoding, empty_fleet, form, placement, pool_requests, refuse
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, epoch, request, worker

# --- coming, going, counting


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


def test_who_has_other_blocks_than_the_others_is_refused() -> None:
    where = empty_fleet()
    assert where.register(POOL, PoolRegistered(100, "digest")) is None
    assert where.register(DECODE, worker(layout_digest="digest")) is None
    reason = where.register(PREFILL, worker(can_prefill=True, can_decode=False, layout_digest="another"))
    assert reason is not None
    assert "blocks" in reason
    assert PREFILL not in where


# --- questions: when none is asked


def test_without_news_the_question_is_not_repeated() -> None:
    where = placement(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form(0.0)
    refuse(where)
    assert where.batches_to_form(0.0) == []
    where.clear_refusals()
    assert where.batches_to_form(0.0) == form(2, 20, 3, 2)


def test_a_request_that_comes_into_the_pool_is_news() -> None:
    where = placement(decode_0={})
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    refuse(where)
    pool_requests(where, 1, "q")
    assert len(where.batches_to_form(0.0)) == 1


# --- batches


def test_no_more_are_demanded_than_there_are() -> None:
    where = placement(decode_0={})
    pool_requests(where, 2)
    assert where.batches_to_form(0.0) == form(1, 20, 2, 2)


def test_workers_share_the_pool_fairly_and_the_emptiest_is_asked_first() -> None:
    where = placement(decode_0={}, decode_1={})
    decoding(where, "decode-0", 1)
    pool_requests(where, 3)
    asked = where.batches_to_form(0.0)
    assert [form.worker for _, form in asked] == ["decode-1", "decode-0"]
    assert [form.max_requests for _, form in asked] == [2, 2]


def test_a_worker_that_runs_too_few_gets_what_it_has_places_for() -> None:
    where = busy(9, num_running=1)
    assert where.batches_to_form(0.0) == form(1, 8, 4 + 2 - 3, 2)


def test_a_busy_worker_is_given_a_whole_batch_ahead_of_need() -> None:
    assert busy(9).batches_to_form(0.0) == form(1, 8, 4, 2)


def test_a_worker_whose_candidates_take_their_share_is_not_asked_for_more() -> None:
    assert busy(9, num_candidate_blocks=8).batches_to_form(0.0) == []


def test_a_busy_worker_is_not_given_what_is_not_worth_a_switch() -> None:
    assert busy(1).batches_to_form(0.0) == []


def test_what_is_not_worth_a_switch_is_given_after_a_while() -> None:
    assert busy(1, now=5.0).batches_to_form(6.9) == []
    assert busy(1, now=5.0).batches_to_form(7.0) == form(1, 8, 1, 1)


def test_a_request_larger_than_any_batch_for_a_busy_worker_gets_one_when_it_has_waited_too_long() -> None:
    where = busy(2, now=1.0)
    pool_requests(where, 1, "large", num_blocks=9)  # a batch for a busy worker has eight
    assert where.batches_to_form(1.9) == form(1, 8, 3, 2)
    refuse(where)
    where.clear_refusals()
    assert where.batches_to_form(2.0) == form(2, 9, 3, 2)


def test_a_worker_with_all_the_requests_it_may_have_is_not_asked_for_more() -> None:
    where = placement({"policy": "fcfs"}, decode_0={})
    decoding(where, DECODE, 6)
    pool_requests(where, 1)
    assert where.batches_to_form(0.0) == []


# --- joins


def test_who_is_of_the_running_lengths_joins_while_another_batch_waits() -> None:
    where = busy(9, num_batch_candidates=3, num_candidate_blocks=2, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8 - 2, 1 + 2, 1, joins=RUNNING)


def test_who_is_of_the_running_lengths_joins_when_there_is_no_batch_to_come() -> None:
    where = busy(9, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8, 4, 2)
    refuse(where)
    assert where.batches_to_form(0.0) == form(2, 8, 3, 1, joins=RUNNING)
    refuse(where)
    assert where.batches_to_form(0.0) == []


def test_no_request_joins_while_another_batch_has_waited_too_long() -> None:
    for now, expected in ((6.9, 1), (7.0, 0)):
        where = busy(9, now=5.0, num_batch_candidates=3, running=RUNNING)
        assert len(where.batches_to_form(now)) == expected


def test_a_join_is_no_batch_of_its_own() -> None:
    where = busy(1, running=RUNNING)
    where.batches_to_form(1.0)
    record = where.workers[DECODE]
    assert record.requested_kind is BatchKind.JOIN
    where.close_batch_request(record, is_empty=False, now=1.5)
    assert (record.last_batch_s, record.is_load_stale) == (0.0, True)


def test_chat_goes_where_least_chat_decodes_whatever_documents_do() -> None:
    where = placement(**{f"elastic_{number}": {"can_prefill": True, "can_move": True} for number in range(2)})
    for name, count, is_real_time in (("elastic-0", 1, True), ("elastic-1", 3, False)):
        for one in decoding(where, name, count):
            if not is_real_time:
                where.workers[name].decoding_real_time.discard(one.request.request_id)
        where.clear_refusals()
        where.update_load(name, WorkerLoad())
    least = where.least_loaded_prefiller(is_real_time=True)
    assert least is not None
    assert least.name == "elastic-1"
    other = where.least_loaded_prefiller()
    assert other is not None
    assert other.name == "elastic-0"
