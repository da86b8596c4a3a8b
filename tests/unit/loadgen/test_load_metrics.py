""""""

import errno
import io
import random
import socket
from itertools import islice

import aiohttp
import numpy as np
import pytest
from rich.console import Console

from alignedserve.client.openai_client import (
    ClientFailure,
    ClientFailureKind,
    CompletionOutcome,
    OpenAiClient,
    take_events,
)
from alignedserve.client.sse import SseEvent, SseParser, error_message, read_chunk
from alignedserve.client.unreachable import unreachable
from alignedserve.core import metrics
from alignedserve.core.errors import ConfigError, PeerLost, ProtocolError
from alignedserve.core.request import Slo
from lab.loadgen.load_generator import LoadRun, SentRequest
from lab.loadgen.load_plan import LoadPlan, LoadRequest, TrafficClass, plan_synthetic, plan_trace
from lab.loadgen.report import print_counts
from lab.loadgen.summary import summarise
from lab.workload.build import DEFAULT_NUM_REQUESTS
from lab.workload.distributions import LengthLimits
from lab.workload.traces import Terms, TraceRow
from tests.support.marks import each


def test_percentile_interpolates_between_closest_ranks() -> None:
    assert metrics.percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert metrics.percentile([1.0, 2.0, 3.0, 4.0], 0) == 1.0
    assert metrics.percentile([1.0, 2.0, 3.0, 4.0], 100) == 4.0
    assert metrics.percentile([7.0], 99) == 7.0


def test_percentile_agrees_with_numpy() -> None:
    rng = random.Random(0)
    values = sorted(rng.random() for _ in range(137))
    for percent in (1, 37.5, 50, 90, 95, 99):
        assert metrics.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_nothing_to_describe() -> None:
    assert metrics.describe([]) is None
    found = metrics.describe([3.0, 1.0])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == (2, 2.0, 2.0, 3.0)


def test_token_times() -> None:
    times = [10.0, 10.5, 11.5]
    assert metrics.ttft_s(9.0, times) == 1.0
    assert metrics.ttft_s(9.0, []) is None
    assert metrics.tbt_s(times) == (0.5, 1.0)
    assert metrics.tpot_s(times) == 0.75
    assert metrics.tpot_s(times, 4) == 0.5
    assert metrics.tpot_s([10.0]) is None


@each(
    ("slo", "met"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.5), True),
        (Slo(ttft_s=0.4), False),
        (Slo(ttft_s=0.5, tpot_s=0.05), False),
        (Slo(deadline_s=2.0), True),
        (Slo(deadline_s=1.9), False),
    ],
)
def test_slo(slo: Slo, met: bool) -> None:
    assert metrics.meets_slo(slo, ttft=0.5, tpot=0.1, end_to_end=2.0) is met


def test_slo_of_one_token_and_of_none() -> None:
    assert metrics.meets_slo(Slo(tpot_s=0.1), ttft=0.5, tpot=None, end_to_end=1.0)
    assert not metrics.meets_slo(Slo(ttft_s=0.1), ttft=None, tpot=None, end_to_end=1.0)


def _sent(index: int, name: str, ttft: float, failure: ClientFailure | None = None) -> SentRequest:
    outcome = CompletionOutcome(
        sent_s=0.0, ended_s=ttft + 0.2, token_times_s=[ttft, ttft + 0.1, ttft + 0.2], failure=failure
    )
    return SentRequest(LoadRequest(index, name, 0.0, 10, 3), outcome, lateness_s=0.001)


def test_report_by_class() -> None:
    refused = ClientFailure(ClientFailureKind.HTTP, "full", 503)
    run = LoadRun(
        0.0, 10.0, [_sent(0, "rt", 0.1), _sent(1, "rt", 9.0), _sent(2, "rt", 0.1, refused), _sent(3, "be", 5.0)]
    )
    report = summarise(run, [TrafficClass("rt", Slo(ttft_s=1.0)), TrafficClass("be")])
    chat, documents = report.classes
    assert (chat.num_sent, chat.num_completed, chat.failures) == (3, 2, {"http 503": 1})
    assert chat.slo_attainment == pytest.approx(1 / 3)  # the refused one counts as missed
    assert chat.goodput_per_s == pytest.approx(0.1)
    assert documents.slo_attainment is None
    assert (report.total.num_sent, report.total.slo_attainment) == (4, 0.5)
    assert chat.tbt_s is not None
    assert chat.tbt_s.count == 4
    assert report.total.input_tokens == 30
    assert not report.generator.was_limit


def test_late_generator_says_so() -> None:
    run = LoadRun(0.0, 1.0, [SentRequest(LoadRequest(0, "a", 0.0, 1, 1), CompletionOutcome(), lateness_s=0.5)])
    assert summarise(run, [TrafficClass("a")]).generator.was_limit


def test_what_warms_up_is_not_counted_but_every_token_is_that_comes_after_it() -> None:
    def sent(index: int, sent_s: float, times_s: list[float]) -> SentRequest:
        outcome = CompletionOutcome(sent_s=sent_s, ended_s=times_s[-1], token_times_s=times_s)
        return SentRequest(LoadRequest(index, "a", 0.0, 10, len(times_s)), outcome, lateness_s=0.0)

    warming = sent(0, 100.5, [101.0, 109.0, 110.0, 111.0])
    counted = sent(1, 110.5, [112.0, 112.5])
    cut_off = sent(2, 111.0, [113.0])
    report = summarise(LoadRun(100.0, 120.0, [warming, counted], [cut_off], warm_up_s=10.0), [TrafficClass("a")])
    assert (report.duration_s, report.total.num_sent, report.total.num_completed) == (10.0, 1, 1)
    assert report.total.ttft_s is not None
    assert report.total.ttft_s.max == 1.5
    assert report.classes[0].output_tokens == 2 + 2 + 1
    assert report.total.output_tokens_per_s == 0.5


def test_a_closed_loop_that_was_cut_off_is_not_blamed_for_the_wait_for_the_others() -> None:
    """Its rate would be the lower the later the last chat is answered."""
    run = LoadRun(0.0, 40.0, [_sent(0, "rt", 0.1)], [_sent(1, "be", 5.0)], cut_off_s=10.0)
    classes = [TrafficClass("rt"), TrafficClass("be", outstanding=1)]
    chat, documents = summarise(run, classes).classes
    assert (chat.duration_s, documents.duration_s) == (40.0, 10.0)
    assert (chat.output_tokens_per_s, documents.output_tokens_per_s) == (3 / 40, 3 / 10)
    run.cut_off_s = None  # it was waited for, as the chat was
    assert summarise(run, classes).classes[1].output_tokens_per_s == 3 / 40


def test_a_report_counts_missed_token_deadlines_and_what_stays_behind() -> None:
    stalled = _sent(1, "rt", 9.0)  # due at 1.0: it misses that deadline and sixteen more of 0.5 s
    stalled.outcome.sent_s = 1.0
    run = LoadRun(0.0, 10.0, [_sent(0, "rt", 0.1), stalled])
    (chat,) = summarise(run, [TrafficClass("rt", Slo(ttft_s=1.0, tpot_s=0.5))]).classes
    assert chat.fluidity == pytest.approx((3 + 2) / (3 + 1 + 14 + 2))
    assert chat.completed_of_arrived == 1.0  # one arrived after the first fifth, the other ended in it
    without = summarise(run, [TrafficClass("rt")]).classes[0]
    assert without.fluidity is None


def test_no_more_than_all_is_shown_as_completed_of_what_was_sent() -> None:
    run = LoadRun(
        0.0, 10.0, [_sent(index, "rt", 5.0 + index) for index in range(4)]
    )  # of a burst before the steady time
    for sent_s in (5.0, 9.0):
        later = _sent(9, "rt", 0.1)
        later.outcome.sent_s, later.outcome.ended_s = sent_s, sent_s + 0.2
        run.sent.append(later)
    report = summarise(run, [TrafficClass("rt")])
    assert report.total.completed_of_arrived == 2.5
    console = Console(width=100, record=True, file=io.StringIO())
    print_counts(console, report, title="")
    (row,) = (line for line in console.export_text().splitlines() if "completed of sent" in line)
    assert row.split("│")[2].strip() == "100.0 %"


def test_a_report_tells_answers_that_stood_still_though_their_mean_held_and_what_failed() -> None:
    ahead = _sent(0, "rt", 0.1)
    ahead.outcome.token_times_s[:] = [0.1 + 0.001 * place for place in range(100)] + [
        33.0 + 0.1 * n for n in range(300)
    ]
    said = ClientFailure(ClientFailureKind.ERROR_EVENT, 'No token came for 60 s of "my secret".', code="timeout")
    broken = _sent(1, "rt", 0.1, said)
    broken.outcome.ended_s = 60.3
    run = LoadRun(0.0, 100.0, [ahead, broken, _sent(2, "rt", 0.1), _sent(3, "rt", 0.1)])
    (chat,) = summarise(run, [TrafficClass("rt", Slo(ttft_s=1.0, tpot_s=0.2))]).classes
    assert (chat.slo_attainment, chat.stalled) == (0.75, 0.5)
    assert chat.failures == {"error event": 1}
    assert chat.failure_reasons == {"error event, timeout: No token came for 60 s of ….": 1}


def test_failures_that_differ_in_numbers_alone_are_counted_as_one() -> None:
    said = "However, you requested {} tokens in the prompt, which is more than this model of 2048 tokens can ever read"
    failed = [ClientFailure(ClientFailureKind.HTTP, said.format(9**n), 400, "context_length") for n in range(4, 9)]
    run = LoadRun(0.0, 10.0, [_sent(number, "rt", 0.1, failure) for number, failure in enumerate(failed)])
    ((reason, count),) = summarise(run, [TrafficClass("rt")]).total.failure_reasons.items()
    assert count == 5
    assert reason.startswith("http 400, context_length: However, you requested 6561 tokens")


def synthetic(specification: str, *, num_requests: int | None = None, duration_s: float | None = None) -> LoadPlan:
    return plan_synthetic(
        specification, seed=1, num_requests=num_requests, duration_s=duration_s, limits=LengthLimits()
    )


def test_same_seed_same_plan() -> None:
    specification = "a: rate=2,prompt=uniform(1,99),output=5; b: rate=1,prompt=7,output=exponential(30)"
    plan = synthetic(specification, num_requests=50)
    assert plan == synthetic(specification, num_requests=50)
    assert [request.index for request in plan.open_requests] == list(range(50))
    arrivals = [request.arrival_s for request in plan.open_requests]
    assert arrivals == sorted(arrivals)


def test_duration_ends_open_arrivals() -> None:
    plan = synthetic("rate=10,cv=0,prompt=1,output=1", duration_s=2.05)
    assert len(plan.open_requests) == 20


def test_without_a_bound_there_is_a_default() -> None:
    assert len(synthetic("rate=10,prompt=1,output=1").open_requests) == DEFAULT_NUM_REQUESTS


def test_closed_loops_have_indexes_of_their_own() -> None:
    plan = synthetic("a: outstanding=1,prompt=1,output=1; b: outstanding=1,prompt=1,output=1", num_requests=10)
    assert plan.max_closed == 10
    drawn = [request.index for loop in plan.closed_loops for request in islice(loop.requests, 20)]
    assert len(set(drawn)) == 40


def test_trace_lengths_are_scaled_then_clamped_and_counted() -> None:
    rows = [TraceRow(0.0, 100, 10), TraceRow(1.0, 1000, 400)]
    limits = LengthLimits(prompt_scale=0.5, max_prompt=200, max_output=300)
    plan = plan_trace(rows, TrafficClass("t", Slo()), limits, None)
    assert [(request.prompt_len, request.output_len) for request in plan.open_requests] == [(50, 10), (200, 300)]
    assert (plan.num_clamped_prompts, plan.num_clamped_outputs) == (1, 1)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("max_tokens=9", "max_tokens= is for simulations"),
        ("predict=exact", "predict="),
        ("be_share=0.5", "be_share="),
        ("priority=1", "priority="),
        ("tpot=uniform(0.1,0.2)", "drawn per request"),
    ],
)
def test_what_a_client_cannot_send_is_refused(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        synthetic(f"rate=1,prompt=2,output=3,{setting}")


def test_a_trace_with_objectives_of_its_own_is_refused() -> None:
    rows = [TraceRow(0.0, 1, 1, Terms(priority=2))]
    with pytest.raises(ConfigError, match="per request"):
        plan_trace(rows, TrafficClass("t"), LengthLimits(), None)


def test_limits_apply_to_made_up_traffic_open_and_closed() -> None:
    plan = plan_synthetic(
        "a: rate=1,prompt=100,output=50; b: outstanding=1,prompt=100,output=50",
        seed=0,
        num_requests=1,
        duration_s=None,
        limits=LengthLimits(max_prompt=10, output_scale=0.1),
    )
    closed = next(plan.closed_loops[0].requests)
    assert [(request.prompt_len, request.output_len) for request in (*plan.open_requests, closed)] == [(10, 5), (10, 5)]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    stream = b": hello\n\ndata: one\n\nevent: error\r\ndata: two\r\ndata:three\r\n\r\n\n\ndata: never ended\n"
    parser = SseParser()
    events = [event for start in range(0, len(stream), size) for event in parser.feed(stream[start : start + size])]
    assert events == [SseEvent(b"one"), SseEvent(b"two\nthree", b"error")]


def test_endless_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.client.sse.MAX_EVENT_BYTES", 10)
    with pytest.raises(ProtocolError, match="larger than"):
        SseParser().feed(b"x" * 11)


@pytest.mark.parametrize("payload", [b"not json", b"[1]", b'{"choices": 3}', b'{"choices": [{"text": 3}]}', b"\xff"])
def test_what_is_no_chunk_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_chunk(SseEvent(payload))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "old style"}', "old style"),
        (b"<html>502</html>", "<html>502</html>"),
    ],
)
def test_error_messages_of_several_servers(body: bytes, message: str) -> None:
    assert error_message(body) == message


def _take(*payloads: bytes) -> CompletionOutcome:
    outcome = CompletionOutcome()
    take_events([SseEvent(payload) for payload in payloads], outcome, 5.0)
    return outcome


def test_logprobs_tell_how_many_tokens_a_chunk_holds() -> None:
    outcome = _take(b'{"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{"t": 1}, {"t": 2}]}}]}')
    assert outcome.token_times_s == [5.0, 5.0]


def test_running_usage_tells_how_many_tokens_a_chunk_holds() -> None:
    chunk = b'{"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 9, "completion_tokens": %d}}'
    outcome = _take(chunk % 3, chunk % 4)
    assert len(outcome.token_times_s) == 4


def test_final_usage_overrules_the_sum_but_not_the_times() -> None:
    outcome = _take(
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        b'{"choices": [{"delta": {"content": "ab"}}]}',
        b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}',
    )
    assert (len(outcome.token_times_s), outcome.num_tokens, outcome.num_prompt_tokens) == (1, 2, 9)


def test_cached_tokens_are_read_where_the_server_tells_them() -> None:
    usage = b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": %b}}'
    told = [_take(usage % details).num_cached_tokens for details in (b'{"cached_tokens": 8}', b"{}", b"null")]
    assert told == [8, 0, 0]


def test_error_object_without_an_event_name() -> None:
    outcome = _take(b'{"error": {"message": "worker lost"}}')
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.message) == (ClientFailureKind.ERROR_EVENT, "worker lost")


# A server that cannot be reached is named with the reason, in words.

URL = "http://server:8000"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "x"),
            f"nothing answers at {URL}; `alignedserve serve` starts a server",
        ),
        (OSError(errno.EHOSTUNREACH, "x"), f"nothing answers at {URL} (No route to host)"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), f"no host is known by the name in {URL} (unknown)"),
        (TimeoutError(), f"{URL} does not answer in time"),
        (aiohttp.InvalidURL(URL), f"{URL} is no address of a server"),
        (
            aiohttp.ServerDisconnectedError(),
            f"{URL} closes the connection without an answer; its address may begin with https://",
        ),
        (aiohttp.ClientPayloadError(), f"nothing answers at {URL} (ClientPayloadError)"),
    ],
)
def test_the_reason_is_told_in_words(error: Exception, words: str) -> None:
    wrapped = RuntimeError("of a library")
    wrapped.__cause__ = error
    assert str(unreachable(URL, error)) == words
    if not isinstance(error, aiohttp.ClientError) or isinstance(error, aiohttp.InvalidURL):
        assert str(unreachable(URL, wrapped)) == words


async def test_clients_tell_it() -> None:
    with socket.socket() as free:  # bound, and nobody listens
        free.bind(("127.0.0.1", 0))
        url = f"http://localhost:{free.getsockname()[1]}"  # of which a host may have two addresses
        async with OpenAiClient(url=url) as client:
            with pytest.raises(PeerLost, match=f"^nothing answers at {url}; `alignedserve serve` starts a server$"):
                await client.model_name()
