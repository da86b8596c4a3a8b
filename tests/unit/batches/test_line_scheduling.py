"""Order of batches, deadlines of lines, expected ends of batches."""

from collections import Counter

import pytest

from alignedserve.batches.driver import ThroughputMeter
from alignedserve.batches.eta import (
    RemainingWork,
    ThroughputEstimate,
    Throughputs,
    assumed_rate,
    estimate_eta,
    remaining_work,
)
from alignedserve.batches.interfaces import ClusterTotals, ModelState
from alignedserve.batches.line_scheduling import (
    LineDurations,
    LineSlots,
    ReadyBatch,
    by_slack,
    client_turns,
    line_deadline_s,
    owner_turns,
)
from alignedserve.batches.records import BatchTotals, Counts, Progress, Risk, Usage
from alignedserve.batches.repository import BatchRepository
from tests.support.batch_samples import batch_record
from tests.support.marks import each
from tests.support.memory_records import MemoryRecords


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


def test_the_pace_is_learned_by_model() -> None:
    durations = LineDurations()
    for _ in range(200):
        durations.add("fast", 2.0)
        durations.add("slow", 300.0)
    assert durations.mean_s("fast") == pytest.approx(2.0, rel=0.1)
    assert durations.mean_s("slow") == pytest.approx(300.0, rel=0.1)
    assert durations.mean_s("new") == 10.0
    for number in range(256):
        durations.add(f"gone-{number}", 1.0)
    assert durations.mean_s("fast") == 10.0


THROUGHPUT = ThroughputEstimate(tokens_per_s=100.0)
AT_100 = Throughputs(THROUGHPUT)


def work(expires_s: float, num_tokens: float, model: str = "tiny") -> RemainingWork:
    return RemainingWork(expires_s, {model: num_tokens})


@each(
    ("window_s", "risk", "finish_s"),
    [(7200.0, Risk.FITS, 3000.0), (3600.0, Risk.AT_RISK, 3000.0), (1800.0, Risk.CANNOT_FIT, 2400.0)],
)
def test_the_example_of_the_quote(window_s: float, risk: Risk, finish_s: float) -> None:
    eta = estimate_eta(work(window_s, 2000 * 150.0), [], AT_100, 0.0)
    assert (eta.risk, eta.finish_s, eta.is_measured) == (risk, finish_s, False)


def test_batches_that_end_before_it_stand_before_it() -> None:
    others = [work(900.0, 5000.0), work(1100.0, 7000.0)]
    assert estimate_eta(work(1000.0, 10_000.0), others, AT_100, 0.0).finish_s == 150.0


def test_every_model_has_its_own_rate_and_its_own_queue() -> None:
    quick = ThroughputEstimate(tokens_per_s=1000.0, is_measured=True)
    throughputs = Throughputs(THROUGHPUT, {"large": THROUGHPUT, "small": quick})
    before = [work(900.0, 5000.0, "large"), work(900.0, 2000.0, "small")]
    large = estimate_eta(work(1000.0, 10_000.0, "large"), before, throughputs, 0.0)
    small = estimate_eta(work(1000.0, 10_000.0, "small"), before, throughputs, 0.0)
    assert (large.finish_s, large.is_measured) == (150.0, False)
    assert (small.finish_s, small.is_measured) == (12.0, True)


def test_a_batch_of_several_models_ends_with_the_slowest_part() -> None:
    quick = ThroughputEstimate(tokens_per_s=1000.0)
    throughputs = Throughputs(THROUGHPUT, {"large": THROUGHPUT, "small": quick})
    both = RemainingWork(1000.0, {"large": 2000.0, "small": 10_000.0})
    assert estimate_eta(both, [work(900.0, 1000.0, "large")], throughputs, 0.0).finish_s == 30.0
    assert both.seconds(throughputs) == 20.0
    # What is not validated yet may be of any model.
    assert estimate_eta(work(1000.0, 5000.0, "small"), [work(900.0, 5000.0, "")], throughputs, 0.0).finish_s == 10.0
    assert Throughputs(THROUGHPUT, {"small": quick}).of("") is quick


def test_a_workload_comes_from_the_file_and_then_from_the_lines_that_ended() -> None:
    record = batch_record(input_lines=10, input_bytes=10 * 520)
    assert remaining_work(record, Progress(), AT_100).num_tokens == pytest.approx(10 * (100 + 64))
    half = Progress(counts=Counts(total=32, completed=16), usage=Usage(input_tokens=160, output_tokens=160))
    running = batch_record(num_lines=32, input_bytes=32 * 520)
    assert remaining_work(running, half, AT_100).num_tokens == pytest.approx(16 * (164 + 20) / 2)
    mixed = batch_record(num_lines=32, input_bytes=32 * 520, lines_by_model={"large": 8, "small": 24})
    parts = remaining_work(mixed, half, AT_100).tokens_by_model
    assert parts == {"large": pytest.approx(4 * 92), "small": pytest.approx(12 * 92)}


def test_capacity_is_learned() -> None:
    measured = THROUGHPUT.with_rate(5000, 10.0)
    assert (measured.tokens_per_s, measured.is_measured) == (500.0, True)
    assert measured.with_rate(0, 60.0).tokens_per_s == 0.1
    known = THROUGHPUT
    for _ in range(2000):
        known = known.with_line(1120, 500, 10)
    assert known.line_tokens(1120) == pytest.approx(510, rel=0.01)


@each(
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


def meter(rate: float = 500.0, **measured: ThroughputEstimate) -> ThroughputMeter:
    return ThroughputMeter(Throughputs(ThroughputEstimate(tokens_per_s=rate), measured))


def told(tiny: ClusterTotals, **others: ClusterTotals) -> dict[str, ModelState]:
    return {model: ModelState(4, totals) for model, totals in {"tiny": tiny, **others}.items()}


def test_a_model_that_is_busy_makes_an_unmeasured_quote_worse_and_no_other() -> None:
    made = meter()
    for totals in (ClusterTotals(0, 0.0, 0.0), ClusterTotals(100, 4.0, 0.0), ClusterTotals(4500, 10.0, 1.0)):
        made.note_states(told(totals, idle=ClusterTotals(0, totals.wall_s, totals.wall_s)))
    assert made.current.of("tiny").tokens_per_s == pytest.approx(50.0)
    assert made.current.of("idle").tokens_per_s == 500.0
    assert estimate_eta(work(1000.0, 100_000.0), [], made.current, 0.0).risk is Risk.CANNOT_FIT
    made.note_states(told(ClusterTotals(0, 0.0, 0.0)))  # a new router
    made.note_states(told(ClusterTotals(0, 20.0, 20.0)))
    made.note_states(told(ClusterTotals(0, 40.0, 40.0)))
    assert made.current.of("tiny").tokens_per_s == 500.0


def test_what_was_measured_is_not_replaced_by_an_assumption() -> None:
    made = meter(tiny=THROUGHPUT.with_rate(700, 1.0))
    made.note_states(told(ClusterTotals(0, 0.0, 0.0)))
    made.note_states(told(ClusterTotals(0, 10.0, 0.0)))
    assert made.current.of("tiny").tokens_per_s == 700.0


def test_the_rate_of_a_model_is_learned_while_its_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    made = meter()
    limits = {"large": 8, "small": 8}
    for _ in range(2):
        made.note_tokens("large", 300)
        made.note_tokens("small", 4000)
        clock[0] += 2.0
        made.learn({"large": 4.0, "small": 8.0}, limits)
    assert (made.current.of("large").tokens_per_s, made.current.of("small").tokens_per_s) == (150.0, 2000.0)
    made.note_tokens("large", 1)
    clock[0] += 60.0
    made.learn({"large": 1.0, "small": 8.0}, limits)  # its lines run out: no measure of its speed
    assert made.current.of("large").tokens_per_s == 150.0


async def test_estimates_are_kept_across_restarts_of_the_driver() -> None:
    records = MemoryRecords()
    await BatchRepository(records).save_statistics(Throughputs(THROUGHPUT, {"tiny": THROUGHPUT}), BatchTotals())
    found = await BatchRepository(records).throughputs(500.0)
    assert (found.of("tiny"), found.of("other").tokens_per_s) == (THROUGHPUT, 500.0)


def test_places_follow_the_workers_of_each_model() -> None:
    slots = LineSlots({"large": 2, "small": 8})
    assert (slots.num_free({"large": 1.0}), slots.num_free({"small": 1.0})) == (4, 16)
    slots.take({"small": 1.0}, 13)
    assert (slots.num_free({"large": 1.0}), slots.num_free({"small": 1.0})) == (4, 3)
    assert slots.num_free({"large": 0.25, "small": 0.75}) == 4
    slots.take({"small": 1.0}, 9)  # a worker has gone
    assert slots.num_free({"small": 1.0}) == 0
    assert LineSlots({}).num_free({"gone": 1.0}) > 0  # its lines are to fail


def test_a_model_without_workers_takes_no_places_of_others() -> None:
    slots = LineSlots({"large": 0, "small": 8})
    assert slots.closed == {"large"}
    assert (slots.num_free({"large": 1.0}), slots.num_free({"large": 0.5, "small": 0.5})) == (0, 16)
    slots.take({"large": 0.5, "small": 0.5}, 13)
    assert slots.num_free({"small": 1.0}) == 3


def test_a_bound_of_the_configuration_holds_for_all_models_together() -> None:
    slots = LineSlots({"large": 2, "small": 8}, max_in_flight=6)
    slots.take({"large": 1.0}, 4)
    assert slots.num_free({"small": 1.0}) == 2


def test_owners_get_places_by_their_weights() -> None:
    free = iter(range(12))
    started = list(
        owner_turns({"b": 0, "a": 0}, {"a": 2.0, "b": 1.0}.__getitem__, lambda _: next(free, None) is not None)
    )
    assert (started.count("a"), started.count("b")) == (8, 4)


def test_a_client_of_several_apis_has_the_places_of_one() -> None:
    started = Counter[str]()

    def start(owner: str) -> bool:
        if started.total() == 12 or started[owner] == {"a/messages": 1}.get(owner):  # which has no more lines
            return False
        started[owner] += 1
        return True

    list(client_turns(("a", "a/background", "b", "a/messages"), {}, lambda _: 1.0, start))
    assert started == {"b": 6, "a": 3, "a/background": 2, "a/messages": 1}


def test_lines_that_a_client_has_in_flight_count_whichever_api_made_them() -> None:
    free = iter(range(4))
    in_flight = {"a": 0, "a/background": 4, "b": 0}
    started = list(client_turns(("a", "b"), in_flight, lambda _: 1.0, lambda _: next(free, None) is not None))
    assert started == ["b"] * 4


def test_an_owner_without_lines_leaves_its_places_to_others() -> None:
    left = {"a": 2, "b": 9}

    def start(owner: str) -> bool:
        left[owner] -= 1
        return left[owner] >= 0

    assert sorted(owner_turns({"a": 0, "b": 5}, lambda _: 1.0, start)) == ["a"] * 2 + ["b"] * 9
