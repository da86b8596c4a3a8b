"""Batches while several tenants share: what had its turn first, a few ahead of need, whatever its length."""

from alignedserve.messages.workers import WorkerLoad
from router.placement import Placement
from tests.harnesses.placement import RUNNING, Asked, busy, decoding, form, placement, pool_requests, refuse
from tests.support.samples import DECODE
from tests.unit.router.test_batches_for_chat import pool_documents


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
