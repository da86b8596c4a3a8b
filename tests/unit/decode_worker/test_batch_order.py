"""The order of batches, and when the next replaces the running one: batches of three or more are full."""

from collections.abc import Collection

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig
from alignedserve.core.ids import BatchId
from alignedserve.messages.fields import NO_BATCH
from alignedserve.worker_core.candidate import Candidate
from decode_worker.batching.batch_order import BatchOrder, SwitchLimits, WaitingBatch
from decode_worker.factory import batch_limits_of
from tests.support.marks import each
from tests.support.samples import handoff, request


def candidate(name: str, batch: int) -> Candidate:
    return Candidate.of_handoff(handoff(request(name), 1), BatchId(batch), 0.0)


def names(chosen: list[Candidate]) -> list[str]:
    return [one.request.request_id for one in chosen]


def members(batch: int, count: int = 3) -> list[Candidate]:
    return [candidate(f"b{batch}-{number}", batch) for number in range(count)]


def order(*batches: int, is_aligned: bool = True, count: int = 3, granted_s: float = 0.0) -> BatchOrder:
    """Build an order in which these batches wait."""
    made = BatchOrder(SwitchLimits(min_requests=3, low_running=3, starvation_s=2.0))
    for batch in batches:
        made.granted(WaitingBatch(BatchId(batch), is_aligned, count, granted_s))
    return made


def running_first() -> BatchOrder:
    """Build an order in which batch 1 runs, and batch 2 waits."""
    made = order(1, 2)
    made.choose([*members(1), *members(2)], 0, 0.0)
    return made


def test_a_batch_that_saturates_the_worker_is_not_replaced() -> None:
    made = running_first()
    assert made.choose(members(2), 3, 0.5) == []
    assert made.running_id == 1


@each(("num_blocks", "expected"), [(8, []), (7, ["b2-0", "b2-1", "b2-2"])])
def test_a_small_batch_that_fills_the_memory_is_not_replaced(num_blocks: int, expected: list[str]) -> None:
    made = BatchOrder(SwitchLimits(min_requests=3, low_running=3, low_blocks=8))
    for batch in (1, 2):
        made.granted(WaitingBatch(BatchId(batch), True, 3, 0.0))
    made.choose([*members(1), *members(2)], 0, 0.0)
    assert names(made.choose(members(2), 2, 0.5, num_blocks=num_blocks)) == expected


@each(("max_running_requests", "low_running"), [(16, 12), (48, 36), (64, 36), (256, 36)])
def test_enough_requests_saturate_a_worker_of_any_number_of_places(max_running_requests: int, low_running: int) -> None:
    limits = batch_limits_of(
        DecodeWorkerConfig(max_running_requests=max_running_requests), BatchingConfig(), num_blocks=100
    )
    assert (limits.switch.low_running, limits.switch.low_blocks) == (low_running, 75)


@each(("now", "expected"), [(1.9, ["own"]), (2.0, ["b2-0", "b2-1", "b2-2"])])
def test_a_batch_that_is_overdue_goes_before_candidate_requests(now: float, expected: list[str]) -> None:
    assert names(running_first().choose([candidate("own", 1), *members(2)], 3, now)) == expected


def test_an_urgent_request_goes_even_before_a_batch_that_is_overdue() -> None:
    chosen = running_first().choose([*members(2), candidate("urgent", NO_BATCH)], 3, 2.0)
    assert names(chosen) == ["urgent", "b2-0", "b2-1", "b2-2"]


def test_a_small_batch_joins_what_runs_and_lengths_are_then_mixed() -> None:
    made = running_first()
    made.choose(members(2), 2, 0.5)
    made.is_switching = False
    made.granted(WaitingBatch(BatchId(3), True, 2, 0.5))
    small = members(3, 2)
    assert names(made.choose(small, 1, 0.6)) == ["b3-0", "b3-1"]
    assert [one.batch_id for one in small] == [2, 2]
    assert (made.running_id, made.is_aligned, made.is_switching) == (2, False, False)


def test_a_batch_of_any_lengths_joins_at_once_even_a_full_one() -> None:
    made = order(1, 2, is_aligned=False)
    made.choose([*members(1), *members(2)], 0, 0.0)
    others = members(2)
    assert names(made.choose(others, 30, 0.0)) == ["b2-0", "b2-1", "b2-2"]
    assert {one.batch_id for one in others} == {1}
    assert not made.is_switching


def test_a_waiting_batch_whose_requests_are_all_gone_is_forgotten() -> None:
    made = running_first()
    assert names(made.choose([candidate("own", 1)], 1, 9.0)) == ["own"]
    assert made.is_stray(candidate("late", 2))


def test_candidate_requests_are_those_of_the_running_batch_and_of_none() -> None:
    made = running_first()
    joining = {batch: made.joins_running(candidate("r", batch)) for batch in (NO_BATCH, 1, 2)}
    assert joining == {NO_BATCH: True, 1: True, 2: False}


def test_a_batch_that_is_worth_mixing_joins_what_runs_however_much_that_is() -> None:
    asked: list[list[int]] = []

    def note(context_lens: Collection[int]) -> bool:
        asked.append(list(context_lens))
        return True

    made = BatchOrder(SwitchLimits(min_requests=3, low_running=3), note)
    for batch in (1, 2):
        made.granted(WaitingBatch(BatchId(batch), True, 3, 0.0))
    made.choose([*members(1), *members(2)], 0, 0.0)
    others = members(2)
    assert names(made.choose(others, 30, 0.0, num_blocks=100)) == ["b2-0", "b2-1", "b2-2"]
    assert asked == [[one.context_len for one in others]]
    assert [one.batch_id for one in others] == [1, 1, 1]
    assert (made.running_id, made.is_aligned, made.is_switching) == (1, True, False)
