import io
import random

import numpy as np
import pytest
from rich.console import Console

from alignedserve.client.openai_client import ClientFailure, ClientFailureKind, CompletionOutcome
from alignedserve.core import metrics
from alignedserve.core.request import Slo
from lab.loadgen.load_generator import LoadRun, SentRequest
from lab.loadgen.load_plan import LoadRequest, TrafficClass
from lab.loadgen.report import print_counts
from lab.loadgen.summary import summarise
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
