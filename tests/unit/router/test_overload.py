"""The router refuses chats while those that it has accepted wait too long already."""

from collections.abc import Callable
from typing import Any

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.gateways import ResumeRequest
from alignedserve.messages.pools import PoolRegistered
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest, WorkerLoad
from router.admission import WaitingChats
from router.policies import FcfsOrder, PrefillOrder
from router.state import DispatchedPrefill, TrackedRequest, WorkerRecord
from tests.harnesses.router import RouterHarness, connected_router
from tests.support.marks import each
from tests.support.samples import GATEWAY, POOL, PREFILL, epoch, request, worker

LONGEST_S = 40.0
LOOSE = Slo(ttft_s=1000.0)


class _Chats:
    """Chats of 100 tokens that wait, of which one a second is computed. Their first tokens are on time all the same."""

    def __init__(self, longest_s: float | None = LONGEST_S) -> None:
        self.waiting = WaitingChats(longest_s)
        self.tracked: list[TrackedRequest] = []
        self._num_computed = 0

    def come(self, count: int, arrival_s: float = 0.0, **changes: Any) -> None:
        for _ in range(count):
            name = f"r{len(self.tracked)}"
            one = request(name, prompt_len=100, arrival_s=arrival_s, **{"slo": LOOSE, **changes})
            self.tracked.append(TrackedRequest(one, GATEWAY, 1.0))

    def go_on(self, begin_s: int, end_s: int) -> None:
        for now in range(begin_s, end_s):
            self.waiting.note(self.tracked, self._num_computed, float(now))
            first = next(one for one in self.tracked if one.prefilled_s is None)
            if first.stage is Stage.QUEUED:
                first.move(Stage.PREFILLING, PREFILL)
            first.prefilled_s = now + 1.0
            self._num_computed += 100
        self.waiting.note(self.tracked, self._num_computed, float(end_s))

    def retry_after_s(self, now: float, **changes: Any) -> float | None:
        newcomer = request("new", prompt_len=100, arrival_s=now, **{"slo": LOOSE, **changes})
        return self.waiting.refused_for_s(newcomer, self.tracked, now)


@each(("num_chats", "retry_after_s"), [(39, None), (41, 35.0)])
def test_a_newcomer_is_refused_where_one_that_has_come_would_wait_longer_than_it_may(
    num_chats: int, retry_after_s: float | None
) -> None:
    """After six seconds 33 of 39 are left, or 35 of 41, each of a second; and the newcomer."""
    chats = _Chats()
    chats.come(num_chats)
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0) == retry_after_s


def test_while_late_ones_wait_a_newcomer_is_refused_only_if_it_would_be_late_too() -> None:
    """Late ones have a tenth of the time: the six that are left after six seconds would wait for 60 s more."""
    chats = _Chats()
    chats.come(12, slo=Slo(ttft_s=2.0))
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0, slo=Slo(ttft_s=0.9)) == pytest.approx(6.0)
    assert chats.retry_after_s(6.0, slo=Slo()) == pytest.approx(6.0)  # without any, it goes after all that have some
    assert chats.retry_after_s(6.0, slo=Slo(ttft_s=1.1)) is None
    chats.go_on(6, 9)
    assert chats.retry_after_s(9.0, slo=Slo(ttft_s=0.9)) is None  # three are left, of 30 s


def test_a_burst_that_has_just_come_is_accepted() -> None:
    chats = _Chats()
    chats.come(500)
    chats.go_on(0, 4)
    assert chats.retry_after_s(4.0) is None
    chats.go_on(4, 5)
    assert chats.retry_after_s(5.0) == 120.0  # the longest that clients are told


def test_what_has_been_accepted_since_the_last_look_counts() -> None:
    chats = _Chats()
    chats.come(30)
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0) is None
    for number in range(12):
        one = request(f"more{number}", prompt_len=100, arrival_s=6.0, slo=LOOSE)
        chats.waiting.accepted(TrackedRequest(one, GATEWAY, 1.0), 6.0)
    assert chats.retry_after_s(6.0) is not None


@each("ends", [True, False], ids=["gone", "with its first token"])
def test_an_idle_server_refuses_nobody_however_long_the_last_chat_has_waited(ends: bool) -> None:
    chats = _Chats()
    chats.come(2)
    chats.tracked[0].prefilled_s = 0.0
    for now, num_computed in ((0.0, 0), (1.0, 100), (39.0, 100)):
        chats.waiting.note(chats.tracked, num_computed, now)
    assert chats.retry_after_s(39.1) is not None
    late = chats.tracked[1]
    if ends:
        late.move(Stage.ABORTED)
    else:
        late.move(Stage.PREFILLING, PREFILL)
        late.prefilled_s = 39.1
    assert chats.retry_after_s(39.2) is None  # before the next look at all of them


def test_a_tenant_that_floods_has_only_its_own_chats_refused() -> None:
    chats = _Chats()
    chats.come(100, tenant="flood")
    chats.come(2, tenant="other")
    chats.go_on(0, 6)
    assert chats.retry_after_s(6.0, tenant="flood") is not None
    assert chats.retry_after_s(6.0, tenant="other") is None
    assert chats.retry_after_s(6.0, tenant="newcomer") is None


def test_a_prompt_under_way_slows_nothing_down() -> None:
    """One has taken three seconds, and the next is under way for three: 20 take 60 s, not 120."""
    chats = _Chats()
    chats.come(20)
    for now in range(7):
        chats.waiting.note(chats.tracked, 100 * (now >= 3), float(now))
    assert chats.retry_after_s(6.0) == pytest.approx(60.0)


def test_answers_that_have_begun_do_not_wait_for_a_first_token() -> None:
    chats = _Chats()
    chats.come(1)
    chats.come(100)
    for one in chats.tracked[1:]:
        one.num_emitted = 3
    chats.go_on(0, 1)
    chats.waiting.note(chats.tracked, 100, 20.0)
    assert chats.retry_after_s(20.0) is None


def test_without_a_longest_wait_nobody_is_refused() -> None:
    chats = _Chats(None)
    chats.come(1000)
    chats.go_on(0, 100)
    assert chats.retry_after_s(100.0) is None


FIRST, SECOND = "decode-0", "decode-1"
CHAT = DispatchedPrefill(1, 3000, is_real_time=True)
BATCH: dict[str, Any] = {"request_class": RequestClass.BEST_EFFORT, "slo": Slo()}


def record() -> WorkerRecord:
    return WorkerRecord(FIRST, worker(can_prefill=True), WorkerLoad(prompt_tokens_per_s=5000))


def waits_s(of: WorkerRecord) -> tuple[float, float]:
    """Return the waits of a real-time prompt, and of another."""
    return of.wait_s(is_real_time=True), of.wait_s(is_real_time=False)


def test_prompts_take_the_time_of_their_tokens() -> None:
    one = record()
    assert waits_s(one) == (0.0, 0.0)
    one.start_prefill(RequestId("r1"), CHAT)
    assert waits_s(one) == (0.6, 0.6)


def test_real_time_passes_best_effort() -> None:
    one = record()
    one.start_prefill(RequestId("r1"), DispatchedPrefill(1, 2000))
    assert waits_s(one) == (0.0, 0.4)


def test_and_what_is_late() -> None:
    one = record()
    one.start_prefill(RequestId("r1"), CHAT)
    one.note_late(RequestId("r1"), attempt=2)  # another one's
    assert waits_s(one) == (0.6, 0.6)
    one.note_late(RequestId("r1"), attempt=1)
    one.note_late(RequestId("r1"), attempt=1)
    assert waits_s(one) == (0.0, 0.6)
    one.end_prefill(RequestId("r1"))
    assert (waits_s(one), one.num_late_tokens, one.late) == ((0.0, 0.0), 0, {})


def test_a_worker_that_tells_no_speed_counts_tokens() -> None:
    silent = WorkerRecord(FIRST, worker(can_prefill=True))
    silent.start_prefill(RequestId("r1"), CHAT)
    assert waits_s(silent) == (3000.0, 3000.0)


def two_workers(*speeds: int) -> RouterHarness:
    made = silent_workers(can_move=True)
    for name, speed in zip((FIRST, SECOND), speeds or (1000, 1000), strict=True):
        made.hear(name, WorkerLoad(prompt_tokens_per_s=speed))
    return made


def silent_workers(order: PrefillOrder | None = None, **facts: Any) -> RouterHarness:
    """Build two workers that do not tell their speed."""
    made = RouterHarness(order=order)
    made.hear(POOL, PoolRegistered(1000))
    for name in (FIRST, SECOND):
        made.hear(name, worker(can_prefill=True, num_blocks=1000, **facts))
    return made


def target(made: RouterHarness, name: str, prompt_len: int, **facts: Any) -> str:
    (peer,) = [
        one.peer for one in made.submit(request(name, prompt_len=prompt_len, **facts)) if _is_prompt(one.message)
    ]
    return peer


def _is_prompt(message: object) -> bool:
    return isinstance(message, PrefillRequest)


def test_a_worker_that_leaves_the_order_alone() -> None:
    one = WorkerRecord(FIRST, worker(can_prefill=True, is_fcfs=True), WorkerLoad(prompt_tokens_per_s=5000))
    one.start_prefill(RequestId("r1"), DispatchedPrefill(1, 2000))
    assert waits_s(one) == (0.4, 0.4)


@each("make", [two_workers, silent_workers], ids=["elastic", "colocated"])
def test_chat_goes_where_only_documents_wait(make: Callable[[], RouterHarness]) -> None:
    made = make()
    assert target(made, "r0", 500, **BATCH) == FIRST
    assert target(made, "r1", 300) == FIRST
    assert target(made, "r2", 100) == SECOND


def test_chat_goes_to_the_prefill_worker_with_no_chat_and_of_equals_with_the_fewest_tokens() -> None:
    made = silent_workers(can_decode=False)
    assert target(made, "r0", 500, **BATCH) == FIRST
    assert target(made, "r1", 300) == SECOND
    assert target(made, "r2", 100) == FIRST


def test_documents_count_where_no_policy_lets_chat_pass_them() -> None:
    made = silent_workers(FcfsOrder())
    assert target(made, "r0", 500, **BATCH) == FIRST
    assert target(made, "r1", 300) == SECOND
    assert target(made, "r2", 100) == SECOND


def test_a_document_goes_where_least_waits_in_all() -> None:
    made = two_workers()
    assert target(made, "r0", 500) == FIRST
    assert target(made, "r1", 400, **BATCH) == SECOND
    assert target(made, "r2", 300, **BATCH) == SECOND


def test_fewer_tokens_may_take_longer() -> None:
    made = two_workers(250, 1000)
    assert target(made, "r0", 100) == FIRST
    assert target(made, "r1", 300) == SECOND
    assert target(made, "r2", 100) == SECOND


def test_a_prompt_that_is_late_keeps_no_other_away() -> None:
    made = two_workers()
    assert target(made, "r0", 500, slo=Slo(ttft_s=1.0)) == FIRST
    assert target(made, "r1", 300, slo=Slo(ttft_s=100.0)) == SECOND
    made.now = 50.0
    assert target(made, "r2", 100) == FIRST
    made.hear(FIRST, PrefillCompleted(RequestId("r0"), epoch(1), 500))
    assert made.logic._placement.workers[FIRST].num_late_tokens == 0


def test_late_prompts_at_a_prefill_worker_keep_no_chat_on_time_in_the_queue() -> None:
    made = connected_router(max_prefill_tokens_per_worker=10)
    made.submit(request("late", prompt_len=10, slo=Slo(ttft_s=1.0)))
    made.now = 5.0
    assert not made.submit(request("too", prompt_len=10, slo=Slo(ttft_s=1.0)))  # late itself: it waits for the other
    (given,) = made.submit(request("chat", prompt_len=10, arrival_s=5.0, slo=Slo(ttft_s=1.0)))
    assert isinstance(given.message, PrefillRequest)
    assert given.message.request.request_id == "chat"
    assert not made.submit(request("next", prompt_len=10, arrival_s=5.0, slo=Slo(ttft_s=1.0)))  # for the last one


def test_documents_leave_places_of_a_worker_to_chat() -> None:
    held = WorkerRecord("worker-0", worker(can_prefill=True, max_running_requests=16))
    held.decoding |= {RequestId(f"document{number}") for number in range(14)}

    def has_room(*, leaves_room: bool) -> bool:
        return held.has_room(10, 8192, beside=None, leaves_room=leaves_room)

    assert not has_room(leaves_room=True)
    assert has_room(leaves_room=False)
    held.decoding.pop()
    assert has_room(leaves_room=True)


def test_chat_without_any_objective_goes_after_chat_that_has_one_and_before_documents() -> None:
    made = connected_router(max_prefill_tokens_per_worker=10)
    made.submit(request("running", prompt_len=10))
    plain, document = request("plain"), request("document", request_class=RequestClass.BEST_EFFORT)
    resumed = request("resumed")
    for one in (document, plain):
        made.submit(one)
    made.hear(GATEWAY, ResumeRequest(resumed, (7,)))
    made.now = 5.0
    made.submit(request("chat", arrival_s=5.0, slo=Slo(ttft_s=9.0)))
    queue = made.logic.records.registry.queue
    places = {one: queue.num_before(RequestId(one), made.now) for one in ("resumed", "chat", "plain", "document")}
    assert places == {"resumed": 0, "chat": 1, "plain": 2, "document": 3}
