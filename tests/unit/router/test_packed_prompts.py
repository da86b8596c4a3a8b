"""Where slack is packed a prompt with a TPOT waits until there is room to decode it."""

from typing import Any

from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.workers import ANY_LENGTH, PACKED_FROM, JoinedBatch, WorkerLoad
from router.prefill_choice import PromisedRoom, is_decoded_soon
from router.state import PooledRecord, PoolRecord, TrackedRequest, WorkerRecord
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, request, worker

SOME = JoinedBatch(BatchId(1), 32, 48)


def decoder(room: int = 40, **load: Any) -> WorkerRecord:
    """Return a decode worker of twenty blocks of four tokens that runs some; fifteen are free."""
    running = JoinedBatch(BatchId(1), PACKED_FROM, room) if room else None
    counts: dict[str, Any] = {"num_running": 2, "num_free_blocks": 15, "running": running, **load}
    return WorkerRecord(DECODE, worker(), load=WorkerLoad(**counts))


def soon(num_tokens: int, *decoders: WorkerRecord, pool: PoolRecord | None = None) -> bool:
    prefiller = WorkerRecord(PREFILL, worker(can_prefill=True, can_decode=False))
    return is_decoded_soon(num_tokens, pool, [prefiller, *decoders])


def test_it_needs_room_at_one_worker_beside_what_that_is_promised_to() -> None:
    assert soon(40, decoder(40))
    assert not soon(41, decoder(40), decoder(0))
    having = decoder(40)
    having.num_promised = 10
    assert soon(30, having)
    assert not soon(31, having)
    assert soon(31, having, decoder(32))
    assert not soon(61, decoder(ANY_LENGTH))  # memory
    assert soon(80, decoder(0, num_running=0))  # it is idle


def test_none_goes_while_as_many_wait_with_their_first_token_as_there_are_workers() -> None:
    pool = PoolRecord(POOL, 1, 100)
    pool.add_pooled(RequestId("p"), PooledRecord(1, 0.0, is_real_time=True))
    assert not soon(10, decoder(), pool=pool)
    assert not soon(10, decoder(num_real_time_candidates=1))
    assert soon(10, decoder(num_real_time_candidates=1), decoder())


def test_documents_that_wait_hold_up_no_chat() -> None:
    pool = PoolRecord(POOL, 1, 100)
    for number in range(50):
        pool.add_pooled(RequestId(f"d{number}"), PooledRecord(1, 0.0))
    assert soon(10, decoder(num_candidate_requests=9), pool=pool)


def test_no_prompt_waits_where_lengths_are_kept_apart_or_nobody_decodes() -> None:
    apart = WorkerRecord(DECODE, worker(), load=WorkerLoad(num_running=2, running=SOME, num_real_time_candidates=9))
    assert soon(1000, apart)
    assert soon(1000)


def test_room_is_promised_until_the_worker_has_told_a_load_with_it() -> None:
    tracked, having = TrackedRequest(request(prompt_len=7), GATEWAY, 1.0), decoder()
    workers = {DECODE: having, PREFILL: WorkerRecord(PREFILL, worker(can_prefill=True, can_decode=False))}
    requests = {R1: tracked}
    promised = PromisedRoom(requests, workers)
    tracked.move(Stage.PREFILLING, PREFILL)
    tracked.destination = DECODE
    promised.add(tracked)
    assert counted(promised, having) == 7 + 96
    tracked.move(Stage.DECODING, DECODE)
    assert counted(promised, having) == 7 + 96
    having.load = WorkerLoad(num_running=3)
    assert counted(promised, having) == 0


def counted(promised: PromisedRoom, having: WorkerRecord) -> int:
    promised.count()
    return having.num_promised


def test_a_promise_ends_with_its_request_and_where_that_waits_again() -> None:
    for stage in (Stage.POOLED, None):
        tracked = TrackedRequest(request(prompt_len=7), GATEWAY, 1.0)
        requests, having = {R1: tracked}, decoder()
        promised = PromisedRoom(requests, {PREFILL: WorkerRecord(PREFILL, worker()), DECODE: having})
        tracked.move(Stage.PREFILLING, PREFILL)
        tracked.destination = DECODE
        promised.add(tracked)
        assert counted(promised, having) == 7 + 96
        if stage is None:
            requests.clear()
        else:
            tracked.move(stage, POOL)
        assert counted(promised, having) == 0
