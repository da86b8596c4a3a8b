"""Batches of real-time requests, which are ordered beside and before those of best-effort ones."""

from typing import Any

from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.workers import WorkerLoad
from router.placement import Placement
from router.state import TrackedRequest
from tests.harnesses.placement import RUNNING, SATURATED, Asked, busy, decoding, form, placement, pool_requests, refuse
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, request


def pool_documents(where: Placement, count: int) -> list[TrackedRequest]:
    documents = [
        TrackedRequest(request(f"d{number}", request_class=RequestClass.BEST_EFFORT), GATEWAY, 1.0)
        for number in range(count)
    ]
    for one in documents:
        one.move(Stage.PREFILLING, PREFILL)
        where.set_pooled(one, POOL, 1)
    return documents


def full_of_documents(**load: int) -> Placement:
    """Let decode-0 run three documents, with a batch of documents behind them that holds its share of blocks."""
    where = placement({"best_effort_floor": 0.05}, decode_0={})
    for one in pool_documents(where, 4):
        where.set_decoding(one, where.workers[DECODE])
    where.workers[DECODE].last_batch_s = 0.0
    loaded: dict[str, Any] = {**SATURATED, "num_batch_candidates": 2, "num_candidate_blocks": 8, **load}
    where.update_load(DECODE, WorkerLoad(**loaded))
    return where


def real_time(number: int, max_blocks: int, max_requests: int, min_requests: int = 1) -> Asked:
    return form(number, max_blocks, max_requests, min_requests, is_for_real_time=True)


def test_a_worker_full_of_documents_gets_chats_at_once() -> None:
    where = full_of_documents()
    pool_requests(where, 1)
    assert where.batches_to_form(0.1) == real_time(1, 20, 1)
    assert where.batches_to_form(0.1) == []  # until it is answered


def test_a_worker_has_one_batch_of_chats_to_come() -> None:
    where = full_of_documents(num_real_time_candidates=1)
    pool_requests(where, 1)
    assert where.batches_to_form(0.1) == []


def test_a_worker_full_of_chats_gets_more_when_they_are_worth_it_or_have_waited() -> None:
    where = placement({"best_effort_floor": 0.05}, decode_0={})
    decoding(where, DECODE, 3)
    where.workers[DECODE].last_batch_s = 0.0
    where.update_load(DECODE, WorkerLoad(num_running=3, num_free_blocks=8))
    pool_requests(where, 1)
    assert where.batches_to_form(0.1) == []
    assert where.batches_to_form(2.0) == real_time(1, 8, 1)


def test_a_chat_whose_next_token_is_late_does_not_wait_for_a_batch_worth_a_switch() -> None:
    where = placement({"best_effort_floor": 0.05}, decode_0={})
    decoding(where, DECODE, 3)
    where.workers[DECODE].last_batch_s = 0.0
    where.update_load(DECODE, WorkerLoad(num_running=3, num_free_blocks=8))
    chat = TrackedRequest(request("c1", slo=Slo(tpot_s=0.25)), GATEWAY, 1.0, pooled_s=0.25)
    chat.move(Stage.PREFILLING, PREFILL)
    where.set_pooled(chat, POOL, 1)
    assert where.batches_to_form(0.4) == []
    assert where.batches_to_form(0.5) == real_time(1, 8, 1)  # looked at again without any other change


def test_documents_are_ordered_when_no_chat_waits() -> None:
    where = placement({"best_effort_floor": 0.05}, decode_0={})
    pool_documents(where, 2)
    assert where.batches_to_form(0.0) == form(1, 20, 2, 2)


def test_a_pool_without_chats_is_asked_for_documents() -> None:
    where = placement({"best_effort_floor": 0.05}, decode_0={})
    pool_requests(where, 1)
    pool_documents(where, 1)
    assert where.batches_to_form(0.0) == real_time(1, 20, 1)
    refuse(where)  # the chat had gone meanwhile
    assert where.batches_to_form(0.0) == form(2, 20, 2, 2)


def test_without_classes_no_batch_goes_before_others() -> None:
    where = placement(decode_0={})
    pool_requests(where, 1)
    assert where.batches_to_form(0.0) == form(1, 20, 1, 1)


def asked(where: Placement, now: float = 0.1) -> Asked:
    return where.batches_to_form(now, lambda _: True)


def test_a_worker_that_is_busy_gets_what_is_next_at_once() -> None:
    where = busy(6, running=RUNNING)  # of four places, three are taken; with one tenant, it would wait for its lengths
    assert asked(where) == form(1, 8, 2, 1, by_turn=True)
    assert asked(where) == []  # until it is answered


def test_a_worker_that_has_one_ahead_of_need_gets_nothing() -> None:
    where = placement(decode_0={})
    decoding(where, DECODE, 5)
    pool_requests(where, 6)
    where.update_load(DECODE, WorkerLoad(num_running=3, num_free_blocks=8))
    assert asked(where, 10.0) == []


def test_real_time_requests_go_first_and_best_effort_ones_once_they_are_gone() -> None:
    where = placement({"best_effort_floor": 0.05}, decode_0={})
    for one in pool_documents(where, 4):
        where.set_decoding(one, where.workers[DECODE])
    pool_documents(where, 2)
    (chat,) = pool_requests(where, 1)
    where.update_load(DECODE, WorkerLoad(num_running=3, num_free_blocks=8))
    assert asked(where) == form(1, 8, 3, 1, is_for_real_time=True, by_turn=True)
    refuse(where)
    where.unassign(chat)
    assert asked(where) == form(2, 8, 1, 1, by_turn=True)


def test_one_larger_than_a_busy_workers_share_has_its_turn_too() -> None:
    where = busy(0)
    pool_requests(where, 1, num_blocks=15)  # of 20; its share is 8
    assert asked(where) == form(1, 15, 1, 1, by_turn=True)
