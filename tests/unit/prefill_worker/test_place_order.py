"""A prefill worker gives places in the order of classes."""

from typing import Any

from alignedserve.core.class_floor import OVERDUE_S
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.workers import PrefillRequest
from prefill_worker.candidate_buffers import PlaceOrder
from prefill_worker.state import JobStage, PrefillJob
from tests.support.samples import request

TIGHT = Slo(ttft_s=1.0)


def _job(name: str, *, arrival_s: float = 0.0, **changes: Any) -> PrefillJob:
    of = request(name, prompt_len=100, arrival_s=arrival_s, **{"slo": TIGHT, **changes})
    return PrefillJob.of(PrefillRequest(of, 1, ()), 0.0)


def _names(order: PlaceOrder, jobs: list[PrefillJob], now: float) -> list[str]:
    return [job.request.request_id for job in order.of(jobs, now)]


_JOBS = [
    _job("document", request_class=RequestClass.BEST_EFFORT),
    _job("plain", slo=Slo()),
    _job("late"),
    _job("first", arrival_s=4.5),
    _job("second", arrival_s=4.9),
]


def test_chats_on_time_go_before_late_ones_and_documents_last() -> None:
    assert _names(PlaceOrder(knows_classes=True), _JOBS, 5.0) == ["first", "second", "plain", "late", "document"]


def test_where_the_policy_knows_no_classes_all_go_as_they_came() -> None:
    expected = ["document", "plain", "late", "first", "second"]
    assert _names(PlaceOrder(knows_classes=False), _JOBS, 5.0) == expected


def test_those_that_have_a_place_do_not_wait_for_one() -> None:
    placed = _job("placed")
    placed.stage = JobStage.COMPUTING
    assert _names(PlaceOrder(knows_classes=True), [placed, *_JOBS[:1]], 5.0) == ["document"]


def _got_places(order: PlaceOrder, waiting: list[PrefillJob], now: float) -> list[str]:
    """Return who gets a place, one after the other, while a chat on time comes for each of them."""
    got: list[str] = []
    for number in range(200):
        waiting.append(_job(f"chat{number}", arrival_s=now))
        job = order.of(waiting, now)[0]
        order.note(job, now)
        waiting.remove(job)
        got.append(job.request.request_id)
    return got


def test_an_overdue_chat_gets_a_twentieth_while_chats_on_time_keep_coming() -> None:
    waiting = [_job(f"late{number}") for number in range(20)]
    got = _got_places(PlaceOrder(knows_classes=True), waiting, OVERDUE_S + 10.0)
    assert sum(name.startswith("late") for name in got) == 10
    assert got.index("late0") == 19


def test_a_document_gets_its_floor_while_chats_keep_coming() -> None:
    """It waited until no chat did, which in an overload is never, though the router's floor had let it go."""
    waiting = [_job(f"document{number}", request_class=RequestClass.BEST_EFFORT) for number in range(20)]
    got = _got_places(PlaceOrder(knows_classes=True, floor=0.05), waiting, 5.0)
    assert sum(name.startswith("document") for name in got) == 10
    assert got.index("document0") == 19


def test_documents_that_are_not_computed_yet_keep_others_from_coming_by_the_floor() -> None:
    order = PlaceOrder(knows_classes=True, floor=0.5)
    placed = [_job(f"placed{number}", request_class=RequestClass.BEST_EFFORT) for number in range(2)]
    for job in placed:
        job.stage = JobStage.COMPUTING
    document, chat = _job("document", request_class=RequestClass.BEST_EFFORT), _job("chat", arrival_s=4.9)
    order.of([*placed, document, chat], 5.0)
    order.note(chat, 5.0)
    assert _names(order, [*placed, document, chat], 5.0) == ["chat", "document"]
    placed[0].stage = JobStage.DEPARTING
    assert _names(order, [*placed, document, chat], 5.0) == ["document", "chat"]
    assert order.by_floor is document
