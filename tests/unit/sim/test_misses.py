"""Simulations that are abandoned, or have nothing left to be found out."""

from array import array
from dataclasses import replace

from alignedserve.core.request import Slo
from lab.sim.config import SimConfig
from lab.sim.records import SimulatedRequest
from lab.sim.result import SimulationResult
from lab.sim.simulation import MissWatch, Simulation
from lab.sim.sweep import WorkloadLine
from lab.workload.requests import TimedRequest
from tests.harnesses.simulation import colocated
from tests.support.marks import each

TIGHT = "rt: prompt=200, output=uniform(20,60), rate=40, ttft=0.5, tpot=0.02"
BESIDE = "be: prompt=200, output=400, outstanding=4"


def _open(slo: Slo, *times_s: float, output_len: int = 11) -> SimulatedRequest:
    timed = TimedRequest(0.0, 100, output_len, None, "rt", slo=slo)
    return SimulatedRequest(0, timed, 1.0, array("d", times_s))


@each(
    ("request_", "late_from_s"),
    [
        (_open(Slo(ttft_s=0.5)), 1.5),
        (_open(Slo(ttft_s=0.5, tpot_s=0.1), 1.25), 2.25),  # ten gaps
        (_open(Slo(deadline_s=3.0), 1.25), 4.0),
    ],
)
def test_an_open_request_is_late_once_it_can_no_longer_meet_an_objective(
    request_: SimulatedRequest, late_from_s: float
) -> None:
    watch = MissWatch({"rt": 0})
    assert not watch.is_over([], [request_], late_from_s - 0.01)
    assert not watch.is_settled([request_], late_from_s - 0.01)
    assert watch.is_over([], [request_], late_from_s + 0.01)
    assert watch.is_settled([request_], late_from_s + 0.01)


def test_a_late_first_token_settles_a_request_and_other_classes_do_not_count() -> None:
    late = _open(Slo(ttft_s=0.5, tpot_s=0.1), 1.75)
    assert MissWatch({"rt": 0}).is_over([], [late], 1.8)
    assert not MissWatch({"be": 0}).is_over([], [late], 1.8)
    assert MissWatch({"be": 0}).is_settled([_open(Slo())], 1.8)
    assert not MissWatch({"rt": 0}).is_settled([_open(Slo())], 1.8)


def _run(line: str, config: SimConfig) -> SimulationResult:
    return Simulation(config, WorkloadLine(line, seed=1, duration_s=2.0).build()).run()


def test_a_settled_run_attains_what_the_whole_one_does_and_is_shorter() -> None:
    whole = _run(f"{TIGHT}; {BESIDE}", colocated())
    settled = _run(f"{TIGHT}; {BESIDE}", replace(colocated(), miss_limits={"rt": 10**6}, ends_when_settled=True))
    assert not settled.is_abandoned
    assert settled.duration_s < whole.duration_s
    assert settled.classes["rt"].attainment == whole.classes["rt"].attainment
    for name in ("rt", "be", "all"):
        assert settled.classes[name].loaded_tokens_per_s == whole.classes[name].loaded_tokens_per_s
    assert whole.classes["be"].loaded_tokens_per_s


def test_a_run_with_more_misses_than_its_limit_is_abandoned_before_its_end() -> None:
    whole = _run(TIGHT, colocated())
    missed = round((1.0 - (whole.classes["rt"].attainment or 0.0)) * whole.classes["rt"].num_sent)
    assert missed > 5
    abandoned = _run(TIGHT, replace(colocated(), miss_limits={"rt": 5}))
    assert abandoned.is_abandoned
    assert abandoned.duration_s < whole.duration_s
    assert not _run(TIGHT, replace(colocated(), miss_limits={"rt": missed})).is_abandoned
