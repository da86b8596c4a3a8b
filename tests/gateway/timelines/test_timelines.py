"""What a gateway keeps of calls is bounded, and a collector that does not answer costs spans alone."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from alignedserve.api.timelines import explanation as standings
from alignedserve.api.timelines import exporter as exporter_module
from alignedserve.api.timelines.explanation import StandingQuestions, explanation, standing_text
from alignedserve.api.timelines.exporter import TraceExporter
from alignedserve.api.timelines.timeline import CallFacts, Timeline, Timelines, trace_of
from alignedserve.config.sections import ExplainConfig, TracingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import Request, SamplingParams, Slo
from alignedserve.messages.request_notes import (
    AskStandings,
    Cause,
    RequestNote,
    RequestsNoted,
    Standing,
    StandingsTold,
    Step,
)
from alignedserve.messages.wire import Message
from tests.gateway.support import Gateway, gateway, saying
from tests.support.marks import each
from tests.support.servers.otlp_receiver import collecting
from tests.support.waiting import holds

PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-"


def _begin(timelines: Timelines, name: str) -> Timeline:
    request = Request(RequestId(f"{name}-0"), (1, 2), SamplingParams(), "gateway-0", time.monotonic())
    trace = trace_of({}, 1.0)
    facts = CallFacts(f"cmpl-{name}", name, None, "us", "tiny", "default", 2, request.arrival_s, time.time(), trace)
    return timelines.begin(facts, [request])


def _whole(timelines: Timelines, name: str) -> Timeline:
    timeline = _begin(timelines, name)
    timeline.choice_ended(0, time.monotonic(), num_tokens=1, finish_reason="stop")
    timelines.end(timeline)
    return timeline


def test_the_oldest_calls_that_ended_make_room_for_new_ones() -> None:
    timelines = Timelines(ExplainConfig(max_requests=3))
    first = _begin(timelines, "running")
    for index in range(5):
        _whole(timelines, f"ended{index}")
    assert len(timelines) == 3
    assert timelines.find("cmpl-running", "us") is first
    assert timelines.find("cmpl-ended2", "us") is None
    assert timelines.find("cmpl-ended4", "us") is not None


def test_bytes_are_bounded_whatever_is_noted() -> None:
    timelines = Timelines(ExplainConfig(max_bytes=50_000))
    for index in range(50):
        _whole(timelines, f"call{index}")
        note = RequestNote(RequestId(f"call{index}-0"), Step.WAITING, time.monotonic())
        timelines.take("decode-0", RequestsNoted((note,) * 1000))
    _whole(timelines, "last")
    assert timelines.num_bytes <= 50_000
    assert timelines.find("cmpl-last", "us") is not None


def test_nothing_is_left_once_all_is_forgotten() -> None:
    timelines = Timelines(ExplainConfig(max_requests=1))
    for index in range(10):
        _whole(timelines, f"call{index}")
    assert (len(timelines), len(timelines._by_request)) == (1, 1)
    assert {owner for owner, _ in timelines._by_id} == {"us"}
    assert timelines.num_bytes == timelines.find("cmpl-call9", "us").num_bytes  # type: ignore[union-attr]


def test_an_explanation_says_whether_steps_may_still_come() -> None:
    timelines = Timelines(ExplainConfig())
    running, ended = _begin(timelines, "running"), _whole(timelines, "ended")
    assert ended.ended_s is not None
    note = RequestNote(RequestId("ended-0"), Step.HANDED_OVER, ended.ended_s - 0.1)
    just_ended = explanation(ended, "gateway-0", ended.ended_s + 0.2)
    timelines.take("prefill-0", RequestsNoted((note,)))  # by its own tick, after the decode worker's
    later = explanation(ended, "gateway-0", ended.ended_s + 1.5)
    assert [one["complete"] for one in (just_ended, later)] == [False, True]
    assert "handed over" in [event["step"] for event in later["choices"][0]["events"]]
    assert explanation(running, "gateway-0", running.facts.received_s + 60.0)["complete"] is False


def _course(*steps: tuple[float, str, Step]) -> Timeline:
    """A call that was received at 0, with these steps: when, where and what."""
    request = Request(RequestId("call-0"), (1, 2), SamplingParams(), "gateway-0", 0.0, slo=Slo(1.0, 0.1, 20.0))
    timeline = Timeline(CallFacts("cmpl-call", "call", None, "us", "tiny", "default", 2, 0.0, 0.0), [request])
    timeline.mark(0, Step.RECEIVED, 0.0)
    for at_s, source, step in steps:
        timeline.add(timeline.choices[0], source, RequestNote(RequestId("call-0"), step, at_s, peer="worker-1"))
    return timeline


def _phases(timeline: Timeline, now: float) -> list[tuple[str, str, float]]:
    (choice,) = explanation(timeline, "gateway-0", now)["choices"]
    return [(one["name"], one["where"], one["duration_ms"] / 1000) for one in choice["phases"]]


DECODES = (1.0, "worker-0", Step.JOINED)
ASKS = (2.0, "worker-0", Step.OFFERED)


def test_a_request_that_is_to_move_and_stays_was_decoded_all_the_time() -> None:
    told = ((2.1, "worker-0", Step.HANDOFF_REFUSED), (2.1, "router", Step.STAYED))
    expected = [("tokenise", "gateway-0", 1.0), ("decode", "worker-0", 8.0), ("stream end", "gateway-0", 1.0)]
    assert _phases(_course(DECODES, ASKS, *told, (9.0, "worker-0", Step.FINISHED)), 10.0) == expected
    failed = (told[1], (9.0, "worker-0", Step.FINISHED))  # its receiver was lost, or its copy failed
    assert _phases(_course(DECODES, ASKS, *failed), 10.0) == expected


def test_a_request_that_is_asked_for_again_waits_where_it_lies() -> None:
    lies = ((1.0, "router", Step.DISPATCHED), (1.0, "worker-0", Step.ACCEPTED))
    asked = tuple((at_s, "gateway-0", Step.RESUMED) for at_s in (3.0, 5.0, 7.0))
    expected = [("tokenise", "gateway-0", 1.0), ("worker queue", "worker-0", 8.0)]
    assert _phases(_course(*lies, *asked), 9.0) == expected


def test_one_that_moves_waits_from_when_its_cache_is_written() -> None:
    written = (3.0, "worker-0", Step.HANDED_OVER)
    moved = ((3.5, "worker-1", Step.ARRIVED), (4.0, "worker-1", Step.JOINED), (4.0, "worker-1", Step.MOVED))
    before = [("tokenise", "gateway-0", 1.0), ("decode", "worker-0", 2.0)]
    assert _phases(_course(DECODES, ASKS, written, *moved), 5.0) == [
        *before, ("handoff", "worker-0", 0.5), ("prefetch", "worker-1", 0.5), ("decode", "worker-1", 1.0)
    ]  # fmt: skip
    stays = ((3.5, "worker-0", Step.HANDOFF_REFUSED), (3.6, "router", Step.STAYED))
    assert _phases(_course(DECODES, ASKS, written, *stays), 5.0) == [
        *before, ("handoff", "worker-0", 0.5), ("decode", "worker-0", 1.5)
    ]  # fmt: skip


def test_what_follows_the_last_step_that_was_kept_is_no_phase_of_that_step() -> None:
    swaps = [(1.0 + n / 100, "worker-0", (Step.SWAPPED_OUT, Step.SWAPPED_IN)[n % 2]) for n in range(400)]
    phases = _phases(_course(*swaps, (9.0, "worker-0", Step.FINISHED)), 10.0)
    ((_, place, missing_s),) = (one for one in phases if one[0] == "not kept")
    assert place == "worker-0"
    assert missing_s == pytest.approx(9.0 - 1.0 - 256 / 100, abs=0.02)
    assert sum(duration_s for _, _, duration_s in phases) == pytest.approx(10.0)


def _held(timeline: Timeline, now: float) -> list[bool | None]:
    (choice,) = explanation(timeline, "gateway-0", now)["choices"]
    return [one["held"] for one in choice["objectives"]]


def test_an_objective_whose_time_is_over_is_missed_before_the_end() -> None:
    waiting = _course()
    assert [_held(waiting, now) for now in (0.9, 1.1, 20.1)] == [
        [None, None, None], [False, None, None], [False, None, False]
    ]  # fmt: skip


@each(
    ("cause", "held"),
    [
        (Cause.FAILED, [False, False, False]),
        (Cause.REJECTED, [False, False, False]),
        (Cause.CLIENT_GONE, [None, None, None]),
    ],
)
def test_what_failed_held_no_objective_and_of_a_client_that_left_none_is_known(
    cause: Cause, held: list[bool | None]
) -> None:
    ended = _course()
    ended.choice_ended(0, 0.5, num_tokens=0, cause=cause)
    assert _held(ended, 60.0) == held


async def test_asking_for_ten_thousand_unknown_ids_keeps_nothing(served: Gateway) -> None:
    timelines, questions = served.services.timelines, served.services.questions
    for index in range(10_000):
        assert await questions.explain(f"chatcmpl-{index}", "anyone") is None
    assert (len(timelines), timelines.num_bytes, len(questions._open)) == (0, 0, 0)
    response = await served.client.get("/v1/alignedserve/requests/" + "x" * 500)
    assert response.status_code == 404


@each("path", ["/v1/requests/mine", "/v1/alignedserve/requests/mine"])
async def test_an_open_call_of_which_no_router_tells_stands_nowhere_that_is_known(path: str) -> None:
    goes_on = asyncio.Event()
    async with gateway(saying("the", held_until=goes_on)) as served:
        waiting = asyncio.create_task(served.chat(headers={"x-request-id": "mine"}))
        await holds(lambda: bool(served.backend.submitted))
        told = (await served.client.get(path)).json()
        goes_on.set()
        await waiting
        ended = (await served.client.get(path)).json()
    standing = told["choices"][0]["standing"]
    assert (told["state"], standing["position"], standing["start_in_ms"]) == ("running", None, None)
    assert standing["text"].startswith("not known")
    assert (ended["state"], ended["choices"][0]["standing"]) == ("ended", None)


QUEUED = Standing(RequestId("r1"), Stage.QUEUED, "", 222, 12_000, 24.0, 480.0)


@each(
    ("standing", "text"),
    [
        (
            QUEUED,
            "number 223 in the queue, 12000 prompt tokens before it; it is expected to start in 24.0 s, "
            "by its class's share in 480.0 s if more real-time requests come",
        ),
        (
            replace(QUEUED, latest_start_s=None),
            "number 223 in the queue, 12000 prompt tokens before it; it is expected to start in 24.0 s",
        ),
        (
            replace(QUEUED, start_s=None, latest_start_s=None),
            "number 223 in the queue, 12000 prompt tokens before it; when it starts is not known: "
            "nothing has left the queue yet while others waited",
        ),
        (replace(QUEUED, num_before=None), "about to be queued again; when it starts is not known"),
        (
            Standing(RequestId("r1"), Stage.POOLED, "pool-0", num_others=7),
            "in pool-0 with 7 others; it starts with a batch of its length, when is not known",
        ),
    ],
)
def test_a_standing_in_words(standing: Standing, text: str) -> None:
    assert standing_text(standing) == text


async def test_every_router_is_asked_and_a_late_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    questions, asked = StandingQuestions(), list[AskStandings]()

    def ask_two(message: Message) -> int:
        assert isinstance(message, AskStandings)
        asked.append(message)
        questions.told(StandingsTold(message.number, ()))  # of another deployment
        asyncio.get_running_loop().call_later(0.0, questions.told, StandingsTold(message.number, (QUEUED,)))
        return 2

    assert await questions.ask((QUEUED.request_id,), ask_two) == {QUEUED.request_id: QUEUED}
    monkeypatch.setattr(standings, "_ANSWER_S", 0.05)
    assert await questions.ask((QUEUED.request_id,), lambda _: 1) == {}
    questions.told(StandingsTold(asked[0].number, (QUEUED,)))
    assert questions._open == {}


@each("flags", ["00", "02"])
def test_a_clients_decision_against_a_trace_is_followed(flags: str) -> None:
    assert trace_of({"traceparent": PARENT + flags}, 1.0) is None


@each("header", ["", "00-zz", PARENT, "ff" + PARENT[2:] + "01", "00-" + "0" * 32 + PARENT[35:] + "01"])
def test_a_parent_that_is_none_leaves_the_choice_to_the_ratio(header: str) -> None:
    assert trace_of({"traceparent": header}, 0.0) is None
    trace = trace_of({"traceparent": header}, 1.0)
    assert trace is not None
    assert trace.parent_id == b""


@contextmanager
def _exporting(url: str, **config: float) -> Iterator[TraceExporter]:
    exporter = TraceExporter(TracingConfig(endpoint=url, **config), "gateway-0")  # type: ignore[arg-type]
    try:
        yield exporter
    finally:
        exporter.close(0.0)


def _until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came to hold")


def test_a_collector_that_hangs_costs_spans_which_are_counted() -> None:
    timelines = Timelines(ExplainConfig())
    with collecting() as collector:
        collector.hangs = threading.Event()
        with _exporting(collector.url, max_queued_requests=2) as exporter:
            for index in range(200):  # none of which waits
                exporter.add(_whole(timelines, f"call{index}"))
            assert exporter.num_dropped > 0


@pytest.fixture
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it waits before and between its tries is not what these tests are about."""
    for name in ("LAST_NOTES_S", "_GATHER_S"):
        monkeypatch.setattr(exporter_module, name, 0.05)
    monkeypatch.setattr("opentelemetry.exporter.otlp.common.http.random.uniform", lambda low, high: 0.05)


@pytest.mark.usefixtures("_short_pauses")
def test_a_busy_collector_is_asked_again_and_a_refusal_is_final() -> None:
    timelines = Timelines(ExplainConfig())
    with collecting() as collector, _exporting(collector.url) as exporter:
        collector.statuses = [503]
        exporter.add(_whole(timelines, "first"))
        _until(lambda: exporter.num_exported > 0)
        for number, status in enumerate((400, 302), 1):
            collector.statuses = [status]
            exporter.add(_whole(timelines, f"refused{number}"))
            _until(lambda: exporter.num_dropped >= number * exporter.num_exported)  # noqa: B023
    assert [one.span.name for one in collector.spans if one.span.kind == one.span.SPAN_KIND_SERVER] == [
        "text_completion tiny"
    ]


@pytest.mark.usefixtures("_short_pauses")
def test_a_dead_collector_ends_nothing_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setattr(log, "filters", [])  # those of exporters before
    timelines = Timelines(ExplainConfig())
    with _exporting("http://user:secret@127.0.0.1:1", timeout_s=0.2) as exporter:
        exporter.add(_whole(timelines, "call"))
        _until(lambda: exporter.num_dropped > 0)
    (warning,) = (one.getMessage() for one in caplog.records if one.name == log.name)
    assert warning.startswith("the collector http://127.0.0.1:1 takes no traces: ")
