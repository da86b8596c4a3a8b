"""The router's records of workers and pools, and who prefills next."""

from alignedserve.core.lifecycle import Stage
from alignedserve.messages.pools import PoolLoad, PoolRegistered
from alignedserve.messages.workers import WorkerLoad
from router.state import DispatchedPrefill, TrackedRequest
from tests.harnesses.placement import empty_fleet, placement
from tests.support.marks import each
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, epoch, request, worker

# --- what fits at all


@each(("max_context_len", "expected"), [(80, True), (81, False)])
def test_a_request_must_fit_some_decode_worker(max_context_len: int, expected: bool) -> None:
    where = placement(decode_0={"num_blocks": 20}, decode_1={"num_blocks": 10})
    assert where.can_ever_hold(max_context_len) is expected


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
