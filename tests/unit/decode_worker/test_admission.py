"""Admission within objectives, and the pace that the pool is told.

An iteration takes 10 ms, 1 ms a token, 10 us a token of context.
"""

from typing import Any

import pytest

from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.caches import DecodePace
from alignedserve.messages.handshake import Role
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.scheduling.scheduler_state import MovedProgress, SchedulerState
from decode_worker.batching.admission import Admission
from decode_worker.batching.scheduled_batch import ScheduledBatch
from decode_worker.pace import Pace
from decode_worker.state import Candidate
from tests.harnesses.decode import scheduled_batch
from tests.harnesses.scheduling import EasyCosts
from tests.support.samples import POOL, handoff, request

BEST_EFFORT = RequestClass.BEST_EFFORT
SHARE = 0.9


def candidate(name: str, tpot_s: float | None = None, *, begun_s: float = 0.0, now: float = 0.0) -> Candidate:
    """Build a candidate of a hundred tokens, which add 2 ms; one with an objective is real-time."""
    of = request(name, prompt_len=99, max_tokens=50, **class_of(tpot_s))
    made = Candidate.of_handoff(handoff(of, 1), BatchId(1), now)
    made.first_token_s = now - begun_s
    return made


def class_of(tpot_s: float | None) -> dict[str, Any]:
    if tpot_s is None:
        return {"request_class": BEST_EFFORT}
    return {"request_class": RequestClass.REAL_TIME, "slo": Slo(tpot_s=tpot_s)}


class Worker:
    """Worker with requests of a hundred tokens that run."""

    def __init__(self, *tpots: float | None) -> None:
        self.state = SchedulerState(DeviceMemory(100, 100, 100))
        for number, tpot_s in enumerate(tpots):
            self.state.hold(1)
            of = request(f"running{number}", prompt_len=99, **class_of(tpot_s))
            self.state.attach(of, 0.0, MovedProgress(8.0, 1, 99, 1, 0.0, 0.0))
        self.admission = Admission(self.state.table, EasyCosts(), SHARE)

    def within(self, *candidates: Candidate, loading: tuple[Candidate, ...] = (), now: float = 0.0) -> list[str]:
        return [str(one.request.request_id) for one in self.admission.within(candidates, loading, now)]


def test_as_many_enter_as_keep_the_gap_of_what_runs() -> None:
    # 12 ms with what runs, 14 and 16 with the candidates; 0.9 * 17 ms are allowed.
    assert Worker(0.017).within(candidate("a", 0.05), candidate("b", 0.05)) == ["a"]


def test_what_is_being_loaded_counts_with_its_objective() -> None:
    assert Worker(None).within(candidate("a"), loading=(candidate("b", 0.017),)) == []


def test_without_objectives_all_enter() -> None:
    waiting = [candidate(f"c{number}") for number in range(20)]
    assert len(Worker(None).within(*waiting)) == 20


def test_one_enters_an_empty_worker_whatever_its_objective() -> None:
    assert Worker().within(candidate("a", 0.001), candidate("b", 0.001)) == ["a"]


def test_a_chat_does_not_wait_for_documents_that_run_and_they_wait_for_it() -> None:
    """They entered while no chat was there; their iteration takes 52 ms, and they pause for chats."""
    worker = Worker(0.017, *[None] * 20)
    given = (candidate("document"), candidate("a", 0.05), candidate("b", 0.05))
    assert worker.within(*given) == ["a"]  # 14 ms of chats; 16 with the other


def test_an_objective_that_no_decode_alone_would_hold_bounds_nothing() -> None:
    assert Worker(0.01).within(candidate("a", 0.05)) == ["a"]


def test_real_time_goes_first_and_of_it_what_is_not_late() -> None:
    late = candidate("late", 0.05, begun_s=60.0, now=60.0)
    given = (candidate("document", now=60.0), late, candidate("chat", 0.05, now=60.0))
    assert Worker(None).within(*given, now=60.0) == ["chat", "late", "document"]


def test_one_that_has_waited_for_a_minute_enters_in_any_case() -> None:
    waiting = candidate("document")
    assert Worker(0.0145).within(waiting, now=59.0) == []
    assert Worker(0.0145).within(waiting, now=60.0) == ["document"]


def told(pace: Pace) -> float | None:
    """Return the time that the pool is told now; None: nothing is said."""
    sent = pace.report()
    if not sent:
        return None
    (send,) = sent
    assert send.peer == POOL
    assert isinstance(send.message, DecodePace)
    return send.message.iteration_s


def decoding(batch: ScheduledBatch, name: str, context_len: int) -> None:
    of = handoff(request(name, prompt_len=context_len - 1), 1)
    candidate = Candidate.of_handoff(of, BatchId(1), 0.0)
    block_ids = batch.blocks_if_fits(candidate)
    assert block_ids is not None, "it does not fit"
    batch.enter(candidate, block_ids, context_len - 1, 0.0)


def test_without_a_cost_model_it_is_the_mean_of_what_ran() -> None:
    pace = Pace(POOL, None)
    pace.connected(Role.KV_POOL, POOL)
    assert told(pace) is None  # nothing has run
    pace.note(0.02)
    assert told(pace) == pytest.approx(0.02)
    pace.note(0.03)
    assert told(pace) is None  # 21 ms
    pace.note(0.04)
    assert told(pace) == pytest.approx(0.0229)


def test_with_one_it_is_what_the_requests_that_run_take() -> None:
    batch = scheduled_batch(make_policy("aligned_slo"), num_blocks=200)
    pace = Pace(POOL, batch.decode_s)
    pace.connected(Role.KV_POOL, POOL)
    decoding(batch, "a", 100)
    pace.note(0.5)
    assert told(pace) == pytest.approx(0.012)  # 10 ms, 1 of a token, 1 of its context
    decoding(batch, "b", 400)
    assert told(pace) == pytest.approx(0.017)
    for name in "ab":
        batch.drop(batch[RequestId(name)])
    assert told(pace) == pytest.approx(0.5)  # nothing runs: what did


def test_only_its_own_pool_is_told_and_one_that_is_back_anew() -> None:
    pace = Pace(POOL, None)
    pace.note(0.02)
    pace.connected(Role.KV_POOL, "pool-elsewhere")
    assert told(pace) is None
    pace.connected(Role.KV_POOL, POOL)
    assert told(pace) == pytest.approx(0.02)
    pace.disconnected(POOL)
    assert told(pace) is None
    pace.connected(Role.KV_POOL, POOL)
    assert told(pace) == pytest.approx(0.02)
