"""FormBatch on behalf of decode workers: batches that are worth a switch, and requests to join."""

from alignedserve.messages.workers import WorkerLoad
from router.state import BatchKind
from tests.harnesses.placement import OTHER_POOL, RUNNING, busy, decoding, form, placement, pool_requests, refuse
from tests.support.samples import DECODE, worker

# --- questions: when none is asked


def test_one_question_at_a_time() -> None:
    where = placement(decode_0={})
    pool_requests(where, 3)
    assert len(where.batches_to_form(0.0)) == 1
    pool_requests(where, 1, "q")
    assert where.batches_to_form(0.0) == []


def test_without_news_the_question_is_not_repeated() -> None:
    where = placement(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form(0.0)
    refuse(where)
    assert where.batches_to_form(0.0) == []
    where.clear_refusals()
    assert where.batches_to_form(0.0) == form(2, 20, 3, 2)


def test_a_report_of_the_worker_is_news() -> None:
    where = placement(decode_0={})
    pool_requests(where, 3)
    where.batches_to_form(0.0)
    refuse(where)
    where.update_load(DECODE, WorkerLoad())
    assert len(where.batches_to_form(0.0)) == 1


def test_a_request_that_comes_into_the_pool_is_news() -> None:
    where = placement(decode_0={})
    pool_requests(where, 1)
    where.batches_to_form(0.0)
    refuse(where)
    pool_requests(where, 1, "q")
    assert len(where.batches_to_form(0.0)) == 1


def test_after_a_batch_the_next_question_waits_for_the_workers_report() -> None:
    where = placement(decode_0={})
    pool_requests(where, 9)
    where.batches_to_form(0.0)
    where.close_batch_request(where.workers[DECODE], is_empty=False, now=0.0)
    assert where.batches_to_form(0.0) == []
    where.update_load(DECODE, WorkerLoad())
    assert len(where.batches_to_form(0.0)) == 1


def test_what_a_question_without_an_answer_may_take_is_asked_of_the_pool_once() -> None:
    where = placement(decode_0={})
    pool_requests(where, 2)
    assert where.batches_to_form(0.0) == form(1, 20, 2, 2)
    where.register("decode-1", worker())
    assert where.batches_to_form(0.0) == []
    pool_requests(where, 1, "q")
    assert [asked.worker for _, asked in where.batches_to_form(0.0)] == ["decode-1"]


def test_nothing_is_asked_of_an_empty_pool_or_of_none() -> None:
    where = placement(decode_0={}, decode_1={"pool_name": OTHER_POOL})
    assert where.batches_to_form(0.0) == []


def test_a_colocated_worker_gets_no_batches() -> None:
    where = placement(decode_0={"can_prefill": True})
    pool_requests(where, 3)
    assert where.batches_to_form(0.0) == []


# --- batches


def test_an_empty_worker_may_fill_its_whole_memory_and_gets_candidates_as_well() -> None:
    where = placement(decode_0={})
    pool_requests(where, 9)
    assert where.batches_to_form(0.0) == form(1, 20, 4 + 2, 2)


def test_no_more_are_demanded_than_there_are() -> None:
    where = placement(decode_0={})
    pool_requests(where, 2)
    assert where.batches_to_form(0.0) == form(1, 20, 2, 2)


def test_no_more_are_demanded_than_half_of_what_the_worker_runs() -> None:
    where = placement(decode_0={"max_running_requests": 2})
    pool_requests(where, 9)
    assert where.batches_to_form(0.0) == form(1, 20, 4, 1)


def test_where_lengths_do_not_matter_no_batch_is_too_small() -> None:
    where = placement({"policy": "fcfs"}, decode_0={})
    pool_requests(where, 9)
    assert where.batches_to_form(0.0) == form(1, 20, 6, 1)


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


def test_candidates_take_up_to_their_share_of_a_busy_workers_memory() -> None:
    assert busy(9, num_candidate_blocks=3).batches_to_form(0.0) == form(1, 8 - 3, 4, 2)


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


def test_no_space_is_made_for_one_that_no_longer_waits() -> None:
    where = busy(2, now=1.0)
    [large] = pool_requests(where, 1, "large", num_blocks=9)
    where.set_decoding(large, where.workers[DECODE])
    assert where.batches_to_form(9.0) == form(1, 8, 2, 2)


def test_no_space_is_made_for_one_that_fits_no_worker() -> None:
    where = busy(2, now=1.0)
    pool_requests(where, 1, "large", num_blocks=21)
    assert where.batches_to_form(9.0) == form(1, 8, 3, 2)


def test_a_batch_notes_when_it_came() -> None:
    where = busy(3)
    where.batches_to_form(1.0)
    where.close_batch_request(where.workers[DECODE], is_empty=False, now=1.5)
    assert where.workers[DECODE].last_batch_s == 1.5


def test_a_worker_with_a_batch_ahead_needs_no_other() -> None:
    assert busy(9, num_batch_candidates=3).batches_to_form(0.0) == []


def test_where_lengths_do_not_matter_a_worker_gets_what_it_has_places_for() -> None:
    assert busy(9, {"policy": "fcfs"}).batches_to_form(0.0) == form(1, 8, 4 + 2 - 3, 1)


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


def test_too_few_for_a_batch_may_still_join() -> None:
    assert busy(1, running=RUNNING).batches_to_form(0.0) == form(1, 8, 1, 1, joins=RUNNING)


def test_candidates_that_are_to_join_already_are_counted() -> None:
    where = busy(9, num_batch_candidates=3, num_candidate_requests=2, running=RUNNING)
    assert where.batches_to_form(0.0) == form(1, 8, 1, 1, joins=RUNNING)
    full = busy(9, num_batch_candidates=3, num_candidate_requests=3, running=RUNNING)
    assert full.batches_to_form(0.0) == []


def test_no_request_joins_an_unaligned_batch() -> None:
    assert busy(1, running=None).batches_to_form(0.0) == []


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
