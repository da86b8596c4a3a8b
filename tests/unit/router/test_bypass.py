"""Requests that bypass the pool, and their workers."""

from typing import Any

from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.request import Request, RequestClass, Slo
from alignedserve.messages.workers import ANY_LENGTH, PACKED_FROM, JoinedBatch, WorkerLoad
from router.policies import DirectHandoff, PackedBypass, UrgentBypass
from router.state import WorkerRecord
from tests.support.marks import each
from tests.support.samples import R1, R2, request, worker


def after_waits_of(wait_s: float) -> UrgentBypass:
    bypass = UrgentBypass()
    for _ in range(200):
        bypass.observe_wait(wait_s)
    return bypass


def chat(tpot_s: float | None = 0.05, prompt_len: int = 900, **changes: Any) -> Request:
    return request(prompt_len=prompt_len, slo=Slo(tpot_s=tpot_s), **changes)


def decoder(name: str, start: int | None = None, stop: int | None = None, **changes: Any) -> WorkerRecord:
    """Return a decoder that runs lengths from `start` to before `stop`; without them none of one length."""
    running = JoinedBatch(BatchId(1), start, stop) if start is not None and stop is not None else None
    return WorkerRecord(name, worker(**changes), load=WorkerLoad(running=running))


def chosen(of: Request, *workers: WorkerRecord, wait_s: float = 0.08) -> str | None:
    target = after_waits_of(wait_s).target(of, of.prompt_len, workers)
    return target.name if target is not None else None


def test_as_in_its_docstring() -> None:
    workers = (decoder("decode-0", 16, 512), decoder("decode-1", 512, 832), decoder("decode-2", 1600, 1700))
    assert chosen(chat(0.05), *workers) == "decode-1"
    assert chosen(chat(0.2), *workers) is None


@each(
    "of",
    [
        chat(None),
        chat(request_class=RequestClass.BEST_EFFORT),
        request(prompt_len=900, slo=Slo(ttft_s=0.01)),
        chat(0.08),
    ],
)
def test_who_has_no_token_slo_that_would_be_missed_waits(of: Request) -> None:
    assert chosen(of, decoder("decode-0")) is None


def test_before_any_request_waited_none_bypasses() -> None:
    assert UrgentBypass().target(chat(1e-9), 900, [decoder("decode-0")]) is None


def test_the_expected_wait_rises_at_once_and_falls_by_one_in_sixteen() -> None:
    bypass = UrgentBypass()
    bypass.observe_wait(1.6)
    bypass.observe_wait(0.0)
    assert bypass.target(chat(1.5), 900, [decoder("decode-0")]) is None
    assert bypass.target(chat(1.49), 900, [decoder("decode-0")]) is not None


def test_a_pool_that_nobody_has_left_yet_is_expected_to_keep_the_next_as_long() -> None:
    bypass = UrgentBypass()
    bypass.observe_waiting(0.5)
    assert bypass.target(chat(0.4), 900, [decoder("decode-0")]) is not None


def test_chat_goes_to_a_worker_whose_places_documents_have() -> None:
    full = decoder("decode-0", max_running_requests=2)
    full.decoding |= {R1, R2}
    assert chosen(chat(), full) == "decode-0"
    full.decoding_real_time |= {R1, R2}
    assert chosen(chat(), full) is None


def test_the_expected_wait_falls_again() -> None:
    bypass = after_waits_of(0.08)
    for _ in range(200):
        bypass.observe_wait(0.01)
    assert bypass.target(chat(0.05), 900, [decoder("decode-0")]) is None


@each(
    ("prompt_len", "expected"),
    [
        (1, "decode-0"),
        (100, "decode-0"),
        (199, "decode-0"),
        (229, "decode-0"),  # 30 above 199, and 71 below 300
        (249, "decode-0"),  # 50 above 199, and 51 below 300
        (250, "decode-1"),
        (300, "decode-1"),
        (5000, "decode-1"),
    ],
)
def test_the_nearest_lengths_are_chosen(prompt_len: int, expected: str) -> None:
    assert chosen(chat(prompt_len=prompt_len), decoder("decode-1", 300, 400), decoder("decode-0", 100, 200)) == expected


@each(("num_places", "expected"), [(256, [8, 2, 0]), (8, [4, 3, 3])])
def test_few_chats_stay_together_and_many_are_shared_out(num_places: int, expected: list[int]) -> None:
    """By lengths alone all went to the first worker until it was full. Those on their way to a worker count."""
    workers = [decoder(f"decode-{number}", max_running_requests=num_places) for number in range(3)]
    for number in range(10):
        target = after_waits_of(0.08).target(chat(), 900, workers)
        assert target is not None
        (target.decoding_real_time if number % 2 else target.coming).add(RequestId(f"r{number}"))
    assert [worker.num_chats for worker in workers] == expected


def test_one_that_runs_no_certain_length_is_as_near_as_can_be_and_ties_go_by_name() -> None:
    workers = (decoder("decode-2", 880, 912), decoder("decode-1"), decoder("decode-0", 100, 200))
    assert chosen(chat(), *workers) == "decode-1"


def test_one_that_has_not_reported_yet_may_be_chosen() -> None:
    assert chosen(chat(), WorkerRecord("decode-0", worker())) == "decode-0"


def test_one_without_a_place_is_passed_over() -> None:
    near, far = decoder("decode-0", 880, 912, max_running_requests=2), decoder("decode-1", 100, 200)
    near.decoding.add(R1)
    assert chosen(chat(), near, far) == "decode-0"
    near.decoding.add(R2)
    assert chosen(chat(), near, far) == "decode-1"


@each("changes", [{"can_decode": False, "can_prefill": True}, {"can_prefill": True}])
def test_only_decode_workers_are_chosen(changes: dict[str, bool]) -> None:
    assert chosen(chat(), decoder("worker-0", **changes)) is None


def test_when_all_go_past_the_pool_it_is_tried_again() -> None:
    bypass = after_waits_of(0.08)
    for _ in range(100):
        bypass.observe_bypass()
    assert bypass.target(chat(0.05), 900, [decoder("decode-0")]) is None


# --- direct handoff (DistServe)


def handed_to(*workers: WorkerRecord) -> str | None:
    """Return the target of a request without any SLO, whatever was waited before."""
    direct = DirectHandoff()
    direct.observe_wait(9.0)
    direct.observe_bypass()
    target = direct.target(request(), 900, workers)
    return target.name if target is not None else None


def holding(name: str, count: int, **changes: Any) -> WorkerRecord:
    made = decoder(name, **changes)
    made.decoding.update([R1, R2][:count])
    return made


def test_every_request_goes_to_the_worker_with_the_fewest_requests() -> None:
    assert handed_to(holding("decode-0", 2), holding("decode-1", 1), holding("decode-2", 2)) == "decode-1"


def test_among_equals_by_name() -> None:
    assert handed_to(holding("decode-1", 1), holding("decode-0", 1)) == "decode-0"


def test_no_request_goes_to_a_full_worker_or_to_one_that_does_not_only_decode() -> None:
    full, prefill = (
        holding("decode-0", 2, max_running_requests=2),
        holding("prefill-0", 0, can_decode=False, can_prefill=True),
    )
    assert handed_to(full, prefill, holding("decode-1", 0, can_prefill=True)) is None
    assert handed_to(full, prefill, holding("decode-2", 1, max_running_requests=2)) == "decode-2"


def packed(of: Request, *workers: WorkerRecord) -> str | None:
    target = PackedBypass().target(of, of.prompt_len, workers)
    return target.name if target is not None else None


def with_room(name: str, num_free_blocks: int, room: int = ANY_LENGTH, **load: Any) -> WorkerRecord:
    """Return a decoder that runs some, and has so much slack, and blocks of four tokens."""
    running = JoinedBatch(BatchId(1), PACKED_FROM, room) if room else None
    counts: dict[str, Any] = {"num_running": 2, "running": running, "num_free_blocks": num_free_blocks, **load}
    return WorkerRecord(name, worker(), load=WorkerLoad(**counts))


def test_packed_it_goes_to_the_worker_with_most_room() -> None:
    roomy, tight = with_room("decode-0", 12), with_room("decode-1", 9)
    assert packed(chat(), roomy, tight) == "decode-0"
    assert packed(chat(), with_room("decode-0", 12, num_candidate_blocks=4), tight) == "decode-1"
    assert packed(chat(), with_room("decode-0", 12, 32), tight) == "decode-1"
    assert packed(chat(), with_room("decode-0", 12, 0), tight) == "decode-1"
    assert packed(chat(), with_room("decode-0", 12, 0)) == "decode-0"
    assert packed(chat(None), roomy) is None  # it has no gaps to hold


def test_packed_it_is_as_before_where_a_worker_keeps_lengths_apart() -> None:
    bypass = PackedBypass()
    bypass.observe_wait(0.08)
    workers = [decoder("decode-0", 16, 512), decoder("decode-1", 512, 832)]
    assert bypass.target(chat(), 900, workers) is workers[1]
    assert bypass.target(chat(0.2), 900, workers) is None
