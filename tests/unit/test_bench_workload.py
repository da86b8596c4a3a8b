import random
import statistics
from itertools import islice

import pytest

from alignedserve.bench.grammar import parse_classes, parse_length
from alignedserve.bench.traces import TraceRow
from alignedserve.bench.workload import (
    DEFAULT_NUM_REQUESTS,
    LengthLimits,
    Plan,
    TrafficClass,
    arrival_gaps,
    plan_synthetic,
    plan_trace,
)
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo


def synthetic(specification: str, *, num_requests: int | None = None, duration_s: float | None = None) -> Plan:
    return plan_synthetic(
        specification, seed=1, num_requests=num_requests, duration_s=duration_s, limits=LengthLimits()
    )


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrival_gaps_have_the_rate_and_variation_asked_for(cv: float) -> None:
    gap = arrival_gaps(4.0, cv, random.Random(5))
    gaps = [gap() for _ in range(20_000)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.25, rel=0.06)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.1, abs=1e-9)


def test_lognormal_takes_median_and_95th_percentile() -> None:
    length = parse_length("lognormal(100,300)")
    rng = random.Random(3)
    drawn = sorted(length.draw(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(100, rel=0.03)
    assert drawn[19_000] == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize(
    ("text", "mean"), [("60", 60), ("uniform(10,30)", 20), ("exponential(50)", 50), ("choice(1,2,6)", 3)]
)
def test_distributions_have_their_mean(text: str, mean: float) -> None:
    length, rng = parse_length(text), random.Random(2)
    assert statistics.fmean(length.draw(rng) for _ in range(20_000)) == pytest.approx(mean, rel=0.03)


def test_two_classes_with_objectives() -> None:
    chat, documents = parse_classes(
        "rt: rate=2, cv=1.5, prompt=lognormal(100,300), output=60, ttft=1, tpot=0.1;"
        "be: outstanding=4, prompt=800, output=100, deadline=60, tier=flex"
    )
    assert (chat.name, chat.rate, chat.cv, chat.ttft_s, chat.tpot_s) == ("rt", 2.0, 1.5, 1.0, 0.1)
    assert (documents.outstanding, documents.deadline_s, documents.tier, documents.rate) == (4, 60.0, "flex", None)


@pytest.mark.parametrize(
    ("specification", "complaint"),
    [
        ("", "empty"),
        ("rate=2,output=3", "prompt= is missing"),
        ("prompt=2,output=3", "rate="),
        ("rate=1,outstanding=2,prompt=2,output=3", "rate="),
        ("rate=x,prompt=2,output=3", "not a number"),
        ("rate=inf,prompt=2,output=3", "not finite"),
        ("rate=0,prompt=2,output=3", "above 0"),
        ("outstanding=1.5,prompt=2,output=3", "whole number"),
        ("rate=1,prompt=gauss(1,2),output=3", "distributions are"),
        ("rate=1,prompt=uniform(5),output=3", "takes 2"),
        ("rate=1,prompt=uniform(5,2),output=3", "must not exceed"),
        ("rate=1,prompt=-5,output=3", "above 0"),
        ("rate=1,prompt=2,output=3,name=x", "is not one of"),
        ("a: rate=1,prompt=2,output=3; a: rate=1,prompt=2,output=3", "same name"),
    ],
)
def test_wrong_specification_says_what_is_wrong(specification: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_classes(specification)


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
