"""The pace of a decode worker: what is told to the pool, and when."""

import pytest

from alignedserve.core.ids import BatchId, RequestId
from alignedserve.messages.caches import DecodePace
from alignedserve.messages.handshake import Role
from alignedserve.scheduling.policies import make_policy
from decode_worker.batching.scheduled_batch import ScheduledBatch
from decode_worker.pace import Pace
from decode_worker.state import Candidate
from tests.harnesses.decode import scheduled_batch
from tests.support.samples import POOL, handoff, request


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
