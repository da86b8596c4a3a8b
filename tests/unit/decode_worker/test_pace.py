"""The pace of a decode worker: what is told to the pool, and when."""

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.messages.caches import DecodePace
from alignedserve.messages.handshake import Role
from alignedserve.scheduling.iteration_scheduler import PolicyIterationScheduler
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import IterationLimits
from alignedserve.scheduling.scheduler_state import Scheduler
from decode_worker.pace import Pace
from tests.harnesses.scheduling import EasyCosts
from tests.support.samples import POOL, request


def told(pace: Pace) -> float | None:
    """Return the time that the pool is told now; None: nothing is said."""
    sent = pace.report()
    if not sent:
        return None
    (send,) = sent
    assert send.peer == POOL
    assert isinstance(send.message, DecodePace)
    return send.message.iteration_s


def decoding(scheduler: PolicyIterationScheduler, name: str, context_len: int) -> None:
    of = request(name, prompt_len=context_len - 1)
    scheduler.enter(of, 0.0, num_cached=context_len - 1, num_generated=1, predicted_len=None)


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
    scheduler = PolicyIterationScheduler(Scheduler(make_policy("aligned_slo"), EasyCosts(), IterationLimits(8, 100)))
    pace = Pace(POOL, scheduler)
    pace.connected(Role.KV_POOL, POOL)
    decoding(scheduler, "a", 100)
    pace.note(0.5)
    assert told(pace) == pytest.approx(0.012)  # 10 ms, 1 of a token, 1 of its context
    decoding(scheduler, "b", 400)
    assert told(pace) == pytest.approx(0.017)
    for name in "ab":
        scheduler.leave(RequestId(name))
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
