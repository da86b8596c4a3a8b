from itertools import islice

import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from lab.loadgen.load_plan import LoadPlan, TrafficClass, plan_synthetic, plan_trace
from lab.workload.build import DEFAULT_NUM_REQUESTS
from lab.workload.distributions import LengthLimits
from lab.workload.traces import Terms, TraceRow


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
