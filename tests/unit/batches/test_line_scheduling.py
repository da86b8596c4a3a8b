"""Order of batches, deadlines of lines, expected ends of batches."""

import pytest

from alignedserve.batches.eta import RemainingWork, ThroughputEstimate, assumed_rate, estimate_eta, remaining_work
from alignedserve.batches.interfaces import ClusterTotals
from alignedserve.batches.line_scheduling import MeanLineDuration, ReadyBatch, by_slack, line_deadline_s
from alignedserve.batches.records import Counts, Progress, Risk, Usage
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.statistics import BatchStatistics
from alignedserve.batches.stores.memory_records import MemoryRecords
from tests.support.batch_samples import batch_record


def test_the_least_slack_goes_first() -> None:
    first = ReadyBatch(0, expires_s=3600.0, work_s=2000.0, created_s=1.0)
    second = ReadyBatch(1, expires_s=600.0, work_s=100.0, created_s=2.0)
    assert by_slack([first, second], 0.0) == [1, 0]
    assert by_slack([first, second._replace(expires_s=1700.0)], 0.0) == [0, 1]  # 1 600 s each: the older one
    assert by_slack([], 0.0) == []


def test_deadlines_spread_what_is_left_over_the_window() -> None:
    assert line_deadline_s(86_400.0, 64, 50_000, line_s=1.0) == pytest.approx(0.95 * 86_400 * 64 / 50_000)
    assert line_deadline_s(86_400.0, 1, 50_000, line_s=5.0) == 20.0  # a line usually takes 5 s: give it four times that
    assert line_deadline_s(10.0, 1, 50_000, line_s=5.0) == 10.0  # but never more than there is
    assert line_deadline_s(-3.0, 1, 1, line_s=5.0) == 0.001


def test_the_pace_is_learned() -> None:
    line_duration = MeanLineDuration()
    for _ in range(200):
        line_duration.add(2.0)
    assert line_duration.mean_s == pytest.approx(2.0, rel=0.1)


THROUGHPUT = ThroughputEstimate(tokens_per_s=100.0)


@pytest.mark.parametrize(
    ("window_s", "risk", "finish_s"),
    [(7200.0, Risk.FITS, 3000.0), (3600.0, Risk.AT_RISK, 3000.0), (1800.0, Risk.CANNOT_FIT, 2400.0)],
)
def test_the_example_of_the_quote(window_s: float, risk: Risk, finish_s: float) -> None:
    eta = estimate_eta(RemainingWork(window_s, 2000 * 150.0), [], THROUGHPUT, 0.0)
    assert (eta.risk, eta.finish_s, eta.is_measured) == (risk, finish_s, False)


def test_batches_that_end_before_it_stand_before_it() -> None:
    own = RemainingWork(1000.0, 10_000.0)
    assert (
        estimate_eta(own, [RemainingWork(900.0, 5000.0), RemainingWork(1100.0, 7000.0)], THROUGHPUT, 0.0).finish_s
        == 150.0
    )


def test_a_workload_comes_from_the_file_and_then_from_the_lines_that_ended() -> None:
    record = batch_record(input_lines=10, input_bytes=10 * 520)
    assert remaining_work(record, Progress(), THROUGHPUT).num_tokens == pytest.approx(10 * (100 + 64))
    half = Progress(counts=Counts(total=32, completed=16), usage=Usage(input_tokens=160, output_tokens=160))
    running = batch_record(num_lines=32, input_bytes=32 * 520)
    assert remaining_work(running, half, THROUGHPUT).num_tokens == pytest.approx(16 * (164 + 20) / 2)


def test_capacity_is_learned() -> None:
    measured = THROUGHPUT.with_rate(5000, 10.0)
    assert (measured.tokens_per_s, measured.is_measured) == (500.0, True)
    assert measured.with_rate(0, 60.0).tokens_per_s == 0.1
    known = THROUGHPUT
    for _ in range(2000):
        known = known.with_line(1120, 500, 10)
    assert known.line_tokens(1120) == pytest.approx(510, rel=0.01)


@pytest.mark.parametrize(
    ("sums", "rate"),
    [
        ((9000, 60.0, 30.0), 250.0),  # the example
        ((90_000, 60.0, 30.0), 1500.0),  # faster than assumed while busy: 3000/s
        ((0, 0.0, 0.0), 500.0),
        ((10, 60.0, 60.0), 500.0),
        ((30_000, 60.0, 0.0), 0.1),  # nothing is left
    ],
)
def test_what_is_assumed_is_what_others_leave(sums: tuple[int, float, float], rate: float) -> None:
    assert assumed_rate(500.0, *sums) == rate


def test_a_fleet_that_is_busy_makes_an_unmeasured_quote_worse() -> None:
    statistics = BatchStatistics(BatchRepository(MemoryRecords()), 500.0, 8)
    for cluster_totals in (ClusterTotals(0, 0.0, 0.0), ClusterTotals(100, 4.0, 0.0), ClusterTotals(4500, 10.0, 1.0)):
        statistics.note_cluster_totals(cluster_totals)
    assert statistics.throughput.tokens_per_s == pytest.approx(50.0)
    assert estimate_eta(RemainingWork(1000.0, 100_000.0), [], statistics.throughput, 0.0).risk is Risk.CANNOT_FIT
    statistics.note_cluster_totals(ClusterTotals(0, 0.0, 0.0))  # a new router
    statistics.note_cluster_totals(ClusterTotals(0, 20.0, 20.0))
    statistics.note_cluster_totals(ClusterTotals(0, 40.0, 40.0))
    assert statistics.throughput.tokens_per_s == 500.0


def test_what_was_measured_is_not_replaced_by_an_assumption() -> None:
    statistics = BatchStatistics(BatchRepository(MemoryRecords()), 500.0, 8)
    statistics.throughput = THROUGHPUT.with_rate(700, 1.0)
    statistics.note_cluster_totals(ClusterTotals(0, 0.0, 0.0))
    statistics.note_cluster_totals(ClusterTotals(0, 10.0, 0.0))
    assert statistics.throughput.tokens_per_s == 700.0
