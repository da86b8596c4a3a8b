"""From a line to requests."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass, Slo
from experiments.ttft_objectives import with_ttft_from_prefill
from lab.workload.build import DEFAULT_NUM_REQUESTS, build_workload
from lab.workload.catalogue import Library
from lab.workload.distributions import parse_distribution
from lab.workload.rates import require_feasible
from lab.workload.requests import ClosedLoopRun, TimedRequest, Workload
from tests.support.marks import each

pytestmark = pytest.mark.slow

LIBRARY = Library()


def build(
    specification: str, *, seed: int = 1, num_requests: int | None = None, duration_s: float | None = None
) -> Workload:
    return build_workload(specification, seed=seed, library=LIBRARY, num_requests=num_requests, duration_s=duration_s)


# --- open loop


def test_evenly_spaced_requests() -> None:
    workload = build("chat: rate=4, cv=0, prompt=10, output=5, ttft=1, tpot=0.1, priority=3", duration_s=0.6)
    expected = {"prompt_len": 10, "output_len": 5, "max_tokens": None, "class_name": "chat", "slo": Slo(1.0, 0.1)}
    assert workload.requests == (
        TimedRequest(arrival_s=0.25, priority=3, **expected),  # type: ignore[arg-type]
        TimedRequest(arrival_s=0.5, priority=3, **expected),  # type: ignore[arg-type]
    )
    assert workload.ends_s == 0.6


def test_description_is_enough_to_make_it_again() -> None:
    workload = build("sharegpt, rate=2", seed=7, num_requests=20)
    again = workload.description
    assert (again.name, again.seed, dict(again.parameters)) == (
        "sharegpt, rate=2", 7, {"num_requests": 20, "duration_s": None}
    )  # fmt: skip
    assert build(again.name, seed=again.seed, num_requests=20) == workload
    assert build(again.name, seed=8, num_requests=20) != workload


def test_classes_are_merged_by_arrival_and_cut_together() -> None:
    workload = build("a: rate=1, cv=0, prompt=1, output=1; b: rate=2, cv=0, prompt=1, output=1", num_requests=4)
    assert [(request.class_name, request.arrival_s) for request in workload.requests] == [
        ("b", 0.5), ("a", 1.0), ("b", 1.0), ("b", 1.5)
    ]  # fmt: skip


def test_without_a_bound_there_is_a_default() -> None:
    assert len(build("rate=10,prompt=1,output=1").requests) == DEFAULT_NUM_REQUESTS
    with pytest.raises(ConfigError, match="days, more than a year"):
        build("rate=1e-9,prompt=1,output=1")


def test_another_rate_leaves_lengths_and_pattern_as_they_are() -> None:
    slow, fast = build("sharegpt, rate=1, cv=2", num_requests=50), build("sharegpt, rate=4, cv=2", num_requests=50)
    assert [request.prompt_len for request in slow.requests] == [request.prompt_len for request in fast.requests]
    assert [request.arrival_s / 4 for request in slow.requests] == [request.arrival_s for request in fast.requests]


def test_another_rate_or_end_changes_no_request() -> None:
    line = "prompt=skewed(100,200), output=skewed(50,60), max_total=800, ttft=uniform(1,2), predict=error(1), rate="
    slow, fast = build(f"{line}5", duration_s=600.0).requests, build(f"{line}50", duration_s=100.0).requests
    assert [replace(request, arrival_s=0.0) for request in slow] == [
        replace(request, arrival_s=0.0) for request in fast[: len(slow)]
    ]


def test_another_class_changes_no_other() -> None:
    alone = build("rt: sharegpt, rate=1", duration_s=50.0)
    mixed = build("x: arxiv, rate=1; rt: sharegpt, rate=1", duration_s=50.0)
    assert tuple(request for request in mixed.requests if request.class_name == "rt") == alone.requests


def test_limits_drop_and_clamp() -> None:
    workload = build("sharegpt, rate=1, max_total=2048, max_prompt=1500", num_requests=2000)
    assert all(request.final_context_len <= 2048 for request in workload.requests)
    assert max(request.prompt_len for request in workload.requests) == 1500


def test_limit_that_nothing_meets() -> None:
    with pytest.raises(ConfigError, match="workload class1: max_total=10: hardly any"):
        build("prompt=10, output=5, rate=1, max_total=10")


def test_client_limit_cuts_the_answer_but_not_the_other_way() -> None:
    workload = build("prompt=10, output=choice(5,50), rate=1, max_tokens=20", num_requests=50)
    assert {(request.output_len, request.max_tokens) for request in workload.requests} == {(5, 20), (20, 20)}


@each(
    ("setting", "limits"),
    [
        ("", {5: None, 50: None}),
        ("context", {5: None, 50: None}),
        ("power_of_two", {5: 8, 50: 64}),
        ("exact", {5: 5, 50: 50}),
    ],
)
def test_limits_tell_the_length_only_where_the_line_says_so(setting: str, limits: dict[int, int | None]) -> None:
    line = "prompt=10, output=choice(5,50), rate=1" + (f", max_tokens={setting}" if setting else "")
    workload = build(line, num_requests=50)
    assert {request.output_len: request.max_tokens for request in workload.requests} == limits


@each(("length", "limit"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_powers_of_two_hold_the_answer(length: int, limit: int) -> None:
    workload = build(f"prompt=10, output={length}, rate=1, max_tokens=power_of_two", num_requests=2)
    assert {request.max_tokens for request in workload.requests} == {limit}


def test_source_without_prompts_asks_for_them(tmp_path: Path) -> None:
    (tmp_path / "lmsys_vicuna13b_output_lengths.csv.gz").write_text("output_tokens,bert_predicted_class\n40,0\n72,0\n")
    library = Library(tmp_path)
    with pytest.raises(ConfigError, match="workload class1: prompt= is missing"):
        build_workload("lmsys_vicuna, rate=1", seed=0, library=library)
    workload = build_workload("lmsys_vicuna, prompt=9, rate=1", seed=0, library=library)
    assert {(request.prompt_len, request.output_len) for request in workload.requests} == {(9, 40), (9, 72)}


@each("arguments", [{"seed": -1}, {"num_requests": 0}, {"duration_s": 0.0}])
def test_bounds_that_make_no_sense(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a workload needs"):
        build("rate=1,prompt=1,output=1", **arguments)


# --- recorded arrivals


def test_trace_as_recorded() -> None:
    workload = build("azure_conv_slice, arrivals=recorded")
    assert len(workload.requests) == 751
    assert (workload.requests[0].arrival_s, workload.requests[0].prompt_len) == (0.0, 1227)


def test_trace_scaled_to_a_rate_and_repeated_for_an_hour() -> None:
    workload = build("azure_conv, arrivals=recorded, rate=10, repeat=yes", duration_s=3600.0)
    assert len(workload.requests) == 36_000
    arrivals = [request.arrival_s for request in workload.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 3600.0


def test_window_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "night.csv"
    path.write_text("arrival_s,prompt_len,output_len\n0,1,1\n10,2,1\n11,3,1\n15,4,1\n")
    workload = build(f"{path}, arrivals=recorded, start=10", duration_s=5.0)
    assert [(request.arrival_s, request.prompt_len) for request in workload.requests] == [(0.0, 2), (1.0, 3)]


def test_what_a_trace_says_of_a_request_counts_more_than_the_class(tmp_path: Path) -> None:
    path = tmp_path / "night.csv"
    path.write_text(
        "arrival_s,prompt_len,output_len,class,ttft_s,deadline_s,priority\n0,1,1,be,,60,5\n1,1,1,,,,\n2,1,1,,0.5,,\n"
    )
    requests = build(f"x: {path}, arrivals=recorded, ttft=1, tpot=0.1, priority=2").requests
    assert [(request.request_class.value, request.slo, request.priority) for request in requests] == [
        ("be", Slo(deadline_s=60.0), 5), ("rt", Slo(1.0, 0.1), 2), ("rt", Slo(0.5), 2)
    ]  # fmt: skip


def test_a_row_of_a_named_class_has_the_lines_objectives_for_that_class(tmp_path: Path) -> None:
    path = tmp_path / "night.csv"
    path.write_text("arrival_s,prompt_len,output_len,class\n" + "".join(f"{n},1,1,rt\n{n},1,1,be\n" for n in range(99)))
    for share in ("", ", be_share=0.5"):
        requests = build(f"{path}, arrivals=recorded, ttft=1, tpot=0.1, deadline=60{share}").requests
        assert [(one.request_class.value, one.slo) for one in requests] == 99 * [
            ("rt", Slo(1.0, 0.1)), ("be", Slo(deadline_s=60.0))
        ]  # fmt: skip
    requests = build(f"be: {path}, arrivals=recorded, ttft=1, tpot=0.1").requests
    assert {(one.request_class.value, one.slo) for one in requests} == {("rt", Slo(1.0, 0.1)), ("be", Slo())}


@each("arrivals", ["rate=2", "outstanding=3"])
def test_what_a_trace_says_of_a_request_is_drawn_with_its_lengths(tmp_path: Path, arrivals: str) -> None:
    path = tmp_path / "night.csv"
    path.write_text(
        "arrival_s,prompt_len,output_len,class,ttft_s,priority\n0,1,2,be,,5\n1,900,4,be,,\n2,5,6,,0.5,\n3,7,8,,,\n"
    )
    workload = build(f"{path}, {arrivals}, ttft=1, deadline=60, priority=2, max_total=800", num_requests=200)
    stream = workload.closed_loops[0].stream if workload.closed_loops else workload.requests
    found = [stream[number] for number in range(200)]
    assert {(one.prompt_len, one.request_class.value, one.slo, one.priority) for one in found} == {
        (1, "be", Slo(deadline_s=60.0), 5), (5, "rt", Slo(0.5), 2), (7, "rt", Slo(1.0, deadline_s=60.0), 2)
    }  # fmt: skip


def test_lengths_of_a_trace_with_arrivals_of_ones_own() -> None:
    workload = build("azure_conv_slice, rate=5, output=7", num_requests=10)
    assert {request.output_len for request in workload.requests} == {7}


def test_source_without_times_cannot_be_played() -> None:
    with pytest.raises(ConfigError, match="sharegpt has no arrival times"):
        build("sharegpt, arrivals=recorded")
    with pytest.raises(ConfigError, match="repeat= needs a duration"):
        build("azure_conv, arrivals=recorded, repeat=yes")


# --- objectives and predictions


def test_objectives_drawn_per_request() -> None:
    workload = build("sharegpt, rate=1, tpot=uniform(0.140625,0.234375), ttft=1", num_requests=2000)  # AccelGen
    tpots = [request.slo.tpot_s or 0.0 for request in workload.requests]
    assert 0.1406 < min(tpots) < 0.142
    assert 0.233 < max(tpots) < 0.2344
    assert {request.slo.ttft_s for request in workload.requests} == {1.0}


def test_share_of_best_effort_requests() -> None:
    workload = build("sharegpt, rate=1, be_share=0.3, ttft=1, deadline=600", num_requests=5000)
    best_effort = [request for request in workload.requests if request.request_class is RequestClass.BEST_EFFORT]
    assert len(best_effort) / 5000 == pytest.approx(0.3, abs=0.02)
    assert {request.slo for request in best_effort} == {Slo(deadline_s=600.0)}
    assert {request.slo for request in workload.requests} == {Slo(deadline_s=600.0), Slo(ttft_s=1.0)}


def test_predictions() -> None:
    def predicted(model: str) -> list[tuple[int, int | None]]:
        workload = build(f"prompt=1, output=choice(10,30), rate=1, predict={model}", num_requests=4000)
        return [(request.output_len, request.predicted_len) for request in workload.requests]

    assert set(predicted("exact")) == {(10, 10), (30, 30)}
    assert set(predicted("mean")) == {(10, 20), (30, 20)}
    assert set(predicted("error(0)")) == {(10, 10), (30, 30)}
    ratios = np.log([guess / length for length, guess in predicted("error(0.5)") if guess and length == 30])
    assert (np.median(ratios), ratios.std()) == pytest.approx((0.0, 0.5), abs=0.03)
    assert build("prompt=1,output=1,rate=1").requests[0].predicted_len is None


def test_ttft_from_the_prefill_time_of_similar_prompts() -> None:
    workload = build("prompt=choice(100,300,600), output=1, rate=1; be: prompt=9, output=1, rate=1", num_requests=60)
    prompts = [request.prompt_len for request in workload.requests if request.prompt_len <= 512]
    scaled = with_ttft_from_prefill(workload, lambda length: length / 100, scale=parse_distribution("2"), seed=0)
    for request in scaled.requests:
        if request.class_name == "be":
            assert request.slo == Slo()
        else:
            mean_s = sum(prompts) / len(prompts) / 100 if request.prompt_len <= 512 else 6.0
            assert request.slo.ttft_s == pytest.approx(2 * mean_s)


# --- closed loops


def test_outstanding_requests_are_replaced_one_by_one() -> None:
    workload = build("be: outstanding=3, prompt=uniform(1,999), output=1", num_requests=5)
    run = ClosedLoopRun(workload)
    first = run.first()
    assert [request.arrival_s for request in first] == [0.0] * 3
    (fourth,) = run.next_after("be", 2.5)
    assert fourth.arrival_s == 2.5
    assert len(run.next_after("be", 3.0)) == 1
    assert run.next_after("be", 4.0) == []  # five were asked for
    assert run.next_after("other", 4.0) == []


def test_a_wave_waits_for_its_last_request() -> None:
    workload = build("be: wave=2, prompt=1, output=1", duration_s=10.0)
    run = ClosedLoopRun(workload)
    assert len(run.first()) == 2
    assert run.next_after("be", 1.0) == []
    assert [request.arrival_s for request in run.next_after("be", 2.0)] == [2.0, 2.0]
    assert run.next_after("be", 9.0) == []
    assert run.next_after("be", 10.0) == []  # the end


def test_loops_end_with_the_last_open_request() -> None:
    workload = build("rt: rate=1, cv=0, prompt=1, output=1; be: outstanding=1, prompt=1, output=1", num_requests=4)
    assert (workload.ends_s, workload.max_closed) == (4.0, None)


def test_requests_of_a_loop_are_the_same_in_every_run() -> None:
    workload = build("be: outstanding=2, prompt=uniform(1,9999), output=uniform(1,99)", num_requests=2000)
    again = build("be: outstanding=2, prompt=uniform(1,9999), output=uniform(1,99)", num_requests=2000)
    stream, other = workload.closed_loops[0].stream, again.closed_loops[0].stream
    assert [stream[number] for number in range(1500)] == [other[number] for number in reversed(range(1500))][::-1]
    assert len({stream[number].prompt_len for number in range(1500)}) > 1200


# --- feasibility


def test_a_request_that_no_worker_can_hold() -> None:
    workload = build("chat: prompt=1000, output=100, rate=1; be: outstanding=1, prompt=10, output=2000", num_requests=2)
    require_feasible(workload, max_context_len=2010, memory_tokens=2010)
    with pytest.raises(ConfigError, match=r"be comes to hold 2010 tokens \(10 of .* one worker holds 2009"):
        require_feasible(workload, memory_tokens=2009)
    with pytest.raises(ConfigError, match="the model's context is 100 "):
        require_feasible(workload, max_context_len=100)


@each(("cv", "distribution"), [(1, "gamma"), (3, "gamma"), (2, "weibull")])
def test_rate_and_burstiness_are_what_was_asked_for(cv: int, distribution: str) -> None:
    workload = build(f"sharegpt, rate=10, cv={cv}, arrivals={distribution}", duration_s=3600.0)
    gaps = np.diff([request.arrival_s for request in workload.requests])
    assert len(gaps) / gaps.sum() == pytest.approx(10.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
