"""Demand of clients, as the router reports it."""

from dataclasses import replace

import msgspec
import pytest

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.gateways import Demand
from router.placement import Placement
from router.state import TrackedRequest
from router.status import QueueForecast, demand_of
from tests.support.samples import DECODE, request, worker

SOON, LATE = replace(request("soon"), slo=Slo(ttft_s=2.0)), replace(request("late"), slo=Slo(ttft_s=30.0))
LINE = replace(request("line"), request_class=RequestClass.BEST_EFFORT)


@pytest.fixture
def where() -> Placement:
    made = Placement(max_candidate_requests=16, batching=BatchingConfig())
    made.register(DECODE, worker(max_running_requests=4))
    made.register("decode-1", worker(max_running_requests=2))
    made.register("prefill-0", worker(can_decode=False, can_prefill=True, max_running_requests=16))
    return made


def tracked(*stages: Stage) -> list[TrackedRequest]:
    made = [TrackedRequest(one, "gateway-0", 8.0) for one in (SOON, LATE, LINE)]
    for one, stage in zip(made, stages, strict=True):
        one.stage = stage
    return made


@pytest.mark.parametrize(
    ("wait_s", "num_at_risk"),
    [(0.0, 0), (2.0, 0), (2.5, 1), (31.0, 2), (61.0, 2)],  # the line of a batch adds no node
)
def test_queued_requests_that_are_due_before_the_queue_is_done_are_at_risk(
    where: Placement, wait_s: float, num_at_risk: int
) -> None:
    queued = tracked(Stage.QUEUED, Stage.QUEUED, Stage.QUEUED)
    assert demand_of(queued, where, QueueForecast(0.0, wait_s)) == Demand(2, 6, wait_s, num_at_risk)


@pytest.mark.parametrize(("now", "num_at_risk"), [(0.0, 0), (1.0, 0), (1.5, 1), (29.5, 2)])
def test_the_time_that_a_request_has_waited_counts(where: Placement, now: float, num_at_risk: int) -> None:
    queued = tracked(Stage.QUEUED, Stage.QUEUED, Stage.QUEUED)
    assert demand_of(queued, where, QueueForecast(now, 1.0)).num_at_risk == num_at_risk


def test_a_request_that_has_had_its_first_token_is_not_at_risk(where: Placement) -> None:
    moved, *_ = tracked(Stage.QUEUED, Stage.QUEUED, Stage.QUEUED)
    moved.set_generated((7,))
    assert demand_of([moved], where, QueueForecast(100.0, 1.0)).num_at_risk == 0


def test_workers_that_drain_have_no_places(where: Placement) -> None:
    where.set_draining([DECODE])
    assert demand_of([], where, QueueForecast(0.0, 0.0)).num_decode_places == 2


def test_requests_that_wait_in_an_elastic_worker_have_no_places(where: Placement) -> None:
    elastic = msgspec.structs.replace(worker(can_prefill=True, max_running_requests=1032), num_places=8)
    where.register("decode-2", elastic)
    assert demand_of([], where, QueueForecast(0.0, 0.0)).num_decode_places == 4 + 2 + 8


def test_what_is_being_served_is_not_at_risk_and_counts_until_it_has_finished(where: Placement) -> None:
    served = tracked(Stage.DECODING, Stage.PREFILLING, Stage.POOLED)
    assert demand_of(served, where, QueueForecast(0.0, 100.0)) == Demand(2, 6, 100.0, 0)


def test_without_workers_there_are_no_places() -> None:
    nowhere = Placement(max_candidate_requests=16, batching=BatchingConfig())
    assert demand_of([], nowhere, QueueForecast(0.0, 0.0)) == Demand()
