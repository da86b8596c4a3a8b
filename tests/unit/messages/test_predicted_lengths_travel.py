"""A predicted output length on its way: from the prefill worker through the pool to the decode worker, and back."""

import msgspec

from alignedserve.config.sections import DecodeWorkerConfig, SchedulingConfig
from alignedserve.core.ids import BatchId
from alignedserve.messages.caches import BlockRun, BlocksReserved, BlocksWritten, ReturnRequest
from alignedserve.messages.events import Received, Send
from alignedserve.messages.iterations import OffloadBlocks
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength
from alignedserve.scheduling.factory import limits_of, make_scheduler
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.logic import ColocatedLogic
from alignedserve.worker_core.part import WorkerCommand
from decode_worker.state import RunningRequest, set_predicted_length
from tests.harnesses import decode as decode_harness
from tests.harnesses import pool as pool_harness
from tests.harnesses import prefill as prefill_harness
from tests.support.samples import POOL, PREFILL, R1, R2, ROUTER, blocks, handoff, request, worker


def written(commands: list[WorkerCommand]) -> BlocksWritten:
    (message,) = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, BlocksWritten)]
    return message


def left_for_the_pool(made: prefill_harness.PrefillHarness, attempt: int = 1) -> BlocksWritten:
    made.sampled(prefill_harness.token(7))
    (command,) = made.hear(prefill_harness.reserved(attempt=attempt), POOL)
    assert isinstance(command, OffloadBlocks)
    return written(made.copied(command))


def test_a_prefill_worker_hands_it_on_with_the_blocks() -> None:
    made = prefill_harness.PrefillHarness()
    made.begin(request(), predicted_output_len=6.5)
    assert left_for_the_pool(made).predicted_output_len == 6.5


def test_a_prediction_that_comes_later_replaces_it() -> None:
    made = prefill_harness.PrefillHarness()
    made.begin(request(), predicted_output_len=6.5)
    assert made.hear(SetPredictedLength(R1, 1, 3.5)) == []
    assert left_for_the_pool(made).predicted_output_len == 3.5


def test_a_prediction_of_another_epoch_or_request_changes_nothing() -> None:
    made = prefill_harness.PrefillHarness()
    made.begin(request(), attempt=2, predicted_output_len=6.5)
    assert made.hear(SetPredictedLength(R1, 1, 3.5)) == []
    assert made.hear(SetPredictedLength(R2, 2, 3.5)) == []
    assert left_for_the_pool(made, attempt=2).predicted_output_len == 6.5


def test_a_prediction_for_a_later_attempt_that_waits_is_kept_for_it() -> None:
    """The attempt before is in an iteration; its abort is on the way, over another link."""
    made = prefill_harness.PrefillHarness()
    made.begin(request())
    made.begin(request(), attempt=2)
    assert made.hear(SetPredictedLength(R1, 2, 3.5)) == []
    made.sampled(prefill_harness.token(7))
    assert left_for_the_pool(made, attempt=2).predicted_output_len == 3.5


def test_a_decode_worker_has_it_from_the_handoff_and_while_it_runs() -> None:
    granted = msgspec.structs.replace(handoff(request(), 1), predicted_output_len=6.5)
    candidate = Candidate.of_handoff(granted, BatchId(1), 0.0)
    assert candidate.predicted_output_len == 6.5
    assert RunningRequest.of_candidate(candidate, blocks(0), 4).predicted_output_len == 6.5


def test_a_prediction_that_comes_later_replaces_that_of_a_candidate() -> None:
    candidate = Candidate.of_handoff(handoff(request(), 1), BatchId(1), 0.0)
    set_predicted_length((candidate,), SetPredictedLength(R1, 1, 3.5))
    assert candidate.predicted_output_len == 3.5
    set_predicted_length((candidate,), SetPredictedLength(R1, 1 << 20, 9.0))  # of a life that this is not
    assert candidate.predicted_output_len == 3.5


def test_a_pool_hands_it_on() -> None:
    pool = pool_harness.PoolHarness()
    (sent,) = [one for one in pool.reserve("r1", 1) if isinstance(one, Send)]
    assert isinstance(sent.message, BlocksReserved)
    pool.hear(PREFILL, pool_harness.written("r1", sent.message, predicted_output_len=6.5))
    (granted,) = pool_harness.grants(pool.hear(ROUTER, pool_harness.FORM))
    assert granted.predicted_output_len == 6.5


def test_a_pool_hands_a_later_one_on_in_its_place() -> None:
    pool = pool_harness.PoolHarness()
    (sent,) = [one for one in pool.reserve("r1", 1) if isinstance(one, Send)]
    assert isinstance(sent.message, BlocksReserved)
    pool.hear(PREFILL, pool_harness.written("r1", sent.message, predicted_output_len=6.5))
    assert pool.hear(ROUTER, SetPredictedLength(R1, pool_harness.L1, 3.5)) == []
    assert pool.hear(ROUTER, SetPredictedLength(R1, pool_harness.L1 << 4, 9.0)) == []  # of a life that this is not
    assert pool.hear(ROUTER, SetPredictedLength(R2, pool_harness.L1, 9.0)) == []
    (granted,) = pool_harness.grants(pool.hear(ROUTER, pool_harness.FORM))
    assert granted.predicted_output_len == 3.5


def test_one_that_comes_while_a_cache_is_copied_in_counts_for_the_request_that_enters() -> None:
    made = decode_harness.DecodeHarness()
    (command,) = decode_harness.loads(made.grant(handoff(request(), 11)))
    made.hear(SetPredictedLength(R1, 1, 3.5))
    made.loaded(command)
    assert made.logic._batch[R1].predicted_output_len == 3.5


def test_an_evicted_request_takes_it_back_to_the_pool() -> None:
    made = decode_harness.DecodeHarness(buffer_blocks=12)
    both = (handoff(request("r1", prompt_len=7, max_tokens=60), 11), handoff(request("r2", max_tokens=60), 12))
    made.enter(*(msgspec.structs.replace(granted, predicted_output_len=6.5) for granted in both))
    evictions: list[OffloadBlocks] = []
    while not evictions:  # they grow until the worker's blocks do not hold both
        evictions = [one for one in made.sampled(r1=20, r2=20) if isinstance(one, OffloadBlocks)]
    answers = made.offloaded(evictions[0], (BlockRun(0, len(evictions[0].block_ids), 55),))
    messages = [one.message for one in answers if isinstance(one, Send)]  # the buffer is short of room with it
    assert [one.predicted_output_len for one in messages if isinstance(one, ReturnRequest)] == [6.5]


def test_the_policy_of_a_colocated_worker_sees_the_latest_prediction() -> None:
    registered = worker(can_prefill=True)
    made = ColocatedLogic(
        registered=registered,
        memory=DeviceMemory(registered.num_blocks, registered.num_blocks, registered.block_size),
        scheduler=make_scheduler(SchedulingConfig(), limits_of(DecodeWorkerConfig())),
        eos_token_ids=frozenset({2}),
    )
    made.on_event(Received(ROUTER, PrefillRequest(request(), 1, predicted_output_len=6.5)), 0.0)
    assert made._state.table.predicted_len.tolist() == [6.5]
    made.on_event(Received(ROUTER, SetPredictedLength(R1, 1, 3.5)), 0.0)
    assert made._state.table.predicted_len.tolist() == [3.5]
    made.on_event(Received(ROUTER, SetPredictedLength(R1, 2, 9.5)), 0.0)  # of an attempt that this is not
    assert made._state.table.predicted_len.tolist() == [3.5]
