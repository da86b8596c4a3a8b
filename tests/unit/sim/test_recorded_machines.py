"""Simulations of a recorded machine: its messages, its clients, and what its workers know."""

from dataclasses import replace
from typing import Any

import pytest

from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel, Sample
from alignedserve.messages.iterations import IterationCompleted
from lab.sim.config import SimConfig, Slowdowns
from lab.sim.simulation import Simulation
from lab.workload.requests import ClosedLoop, ClosedLoopRun
from tests.harnesses.simulation import LINKS, MESSAGE_S, colocated, timed, workload_of
from tests.support.costs import decodes, prefill
from tests.support.marks import each

PREFILL_S = 0.010 + 0.001 * 40


def ttfts_of(config: SimConfig) -> list[float]:
    """Return the first tokens of requests that never meet."""
    simulation = Simulation(config, workload_of(*(timed(float(number)) for number in range(12))))
    simulation.run()
    return [record.ttft_s for record in simulation.records() if record.ttft_s is not None]


def test_tokens_may_count_when_they_leave_the_worker() -> None:
    for found in ttfts_of(replace(colocated(), links=replace(LINKS, token_s=0.0))):
        assert found == pytest.approx(2 * MESSAGE_S + PREFILL_S)


def test_each_request_takes_one_of_the_recorded_times_to_the_router() -> None:
    config = replace(colocated(), links=replace(LINKS, submit_times_s=(0.02, 0.03)))
    beside = {round(found - 2 * MESSAGE_S - PREFILL_S, 6) for found in ttfts_of(config)}
    assert beside == {0.02, 0.03}
    assert ttfts_of(config) == ttfts_of(config)
    assert ttfts_of(config) != ttfts_of(replace(config, seed=1))


class _Heard:
    """A logic, and the iterations whose end it heard of: what its worker measured, and how long it really took."""

    def __init__(self, logic: Any) -> None:
        self._logic = logic
        self._begun_s = 0.0
        self.iterations: list[tuple[float, float]] = []

    def on_event(self, event: Any, now: float) -> Any:
        if isinstance(event, IterationCompleted):
            self.iterations.append((event.duration_s(0.0, now), now - self._begun_s))
            self._begun_s = now
        commands = self._logic.on_event(event, now)
        if any(type(command).__name__ == "RunIteration" for command in commands):
            self._begun_s = now
        return commands


@each("slowdown", [0.0, 0.5])
def test_policies_learn_what_the_engine_measures(slowdown: float) -> None:
    unmeasured = LinearIterationModel(LinearCoefficients(base_s=0.002, decode_s=0.001))
    config = replace(colocated(), unmeasured_costs=unmeasured, slowdowns=Slowdowns.alike(slowdown))
    simulation = Simulation(config, workload_of(timed()))
    worker = simulation._workers["worker-0"].component
    worker.logic = heard = _Heard(worker.logic)
    simulation.run()
    beside = [pytest.approx(0.002), pytest.approx(0.003), pytest.approx(0.003)]
    assert [took_s - measured_s for measured_s, took_s in heard.iterations] == beside
    assert heard.iterations[0][1] == pytest.approx(PREFILL_S)


def test_a_worker_knows_what_it_measured_before_it_served() -> None:
    measured = tuple(Sample(work, 0.5) for work in (prefill(16), prefill(256), decodes(4, 100), decodes(32, 100)))
    simulation = Simulation(replace(colocated(), measured={"worker-0": measured}), workload_of(timed()))
    logic: Any = simulation.logics()["worker-0"]
    assert logic._scheduler.costs.iteration_s(prefill(100)) == pytest.approx(0.5, rel=0.2)


def test_a_client_pauses_before_its_next_request() -> None:
    class Endless:
        def __getitem__(self, number: int) -> Any:
            return timed(class_name="loop")

    loop = ClosedLoop("loop", 1, is_wave=False, stream=Endless(), think_s=0.25)
    workload = workload_of(closed_loops=(loop,), max_closed=3)
    run = ClosedLoopRun(workload)
    assert [one.arrival_s for one in run.first()] == [0.0]
    assert [one.arrival_s for one in run.next_after("loop", 2.0)] == [2.25]
    simulation = Simulation(colocated(), workload)
    simulation.run()
    first, second, third = simulation.records()
    assert second.arrival_s - first.ended_s == pytest.approx(0.25)
    assert third.arrival_s - second.ended_s == pytest.approx(0.25)
