"""Simulates a recorded run and compares its times with the real ones."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from alignedserve.config.sections import ClusterConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.process.recording import RunMetadata
from lab.replay.fitting import JitteryCosts, MachineFit, Ratio
from lab.replay.observed import ObservedRequest, ObservedRun
from lab.sim.config import NO_SLOWDOWNS, SimConfig, SimLinks, Slowdowns
from lab.sim.records import GapSample, RequestEnding, RequestRecord, SimulatedRequest
from lab.sim.result import ClassResult, Measure, classes_of
from lab.sim.simulation import Simulation
from lab.workload.requests import ClosedLoop, TimedRequest, Workload, WorkloadDescription

OTHERS = "others"  # probes, and requests that did not complete: part of the load, not of the comparison
NUM_RUNS = 5
NO_PAUSES: Mapping[str, float] = {}
_PROBE = "canary-"
_QUANTILES = {"ttft": "ttft_s", "tbt": "tbt_s", "tpot": "tpot_s", "end to end": "end_to_end_s"}


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request of the run, as part of a workload, with its observed times."""

    timed: TimedRequest
    observed: ObservedRequest


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of one class."""

    class_name: str
    measure: str
    real: float
    simulated: float

    @property
    def ratio(self) -> float | None:
        """Simulated value by the real one."""
        return self.simulated / self.real if self.real else None


@dataclass(frozen=True, slots=True)
class WorkerCosts:
    """Costs of iterations, and the measured ratios to them."""

    costs: CostModel
    ratios: Mapping[str, tuple[Ratio, ...]] = field(default_factory=dict)  # by worker

    def drawn(self, seed: int) -> dict[str, CostModel]:
        """Return the costs of these workers' engines, each with its own jitter."""
        return {name: JitteryCosts(self.costs, ratios, f"{seed} {name}") for name, ratios in self.ratios.items()}

    def drawn_for_others(self, seed: int) -> CostModel:
        """Return the jittery costs of other workers' engines."""
        ratios = [ratio for of_worker in self.ratios.values() for ratio in of_worker]
        return JitteryCosts(self.costs, ratios, seed) if ratios else self.costs


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """Cluster and costs of a simulation."""

    cluster: ClusterConfig
    layout: BlockLayout
    links: SimLinks
    decode: WorkerCosts
    prefill: WorkerCosts | None = None  # None: as `decode`
    slowdowns: Slowdowns = NO_SLOWDOWNS
    num_nodes: int = 1
    measured: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)  # see SimConfig, as the next
    unmeasured: CostModel | None = None


def fitted_machine(metadata: RunMetadata, fit: MachineFit) -> SimulatedMachine:
    """Combine a recorded run's cluster with fitted costs."""
    decode = WorkerCosts(fit.decode.costs, fit.decode.ratios)
    prefill = WorkerCosts(fit.prefill.costs, fit.prefill.ratios) if fit.prefill is not None else None
    return SimulatedMachine(
        metadata.config,
        metadata.layout,
        fit.links,
        decode,
        prefill,
        fit.slowdowns,
        metadata.num_nodes,
        fit.measured,
        fit.unmeasured,
    )


def requests_of(run: ObservedRun) -> list[ReplayedRequest]:
    """Return the requests that got at least one token, by arrival; times count from the first arrival."""
    observed = [request for request in run.requests.values() if request.token_times_s.get(0) is not None]
    observed.sort(key=lambda request: (request.request.arrival_s, request.request.request_id))
    return [ReplayedRequest(_timed(request, observed[0].request.arrival_s), request) for request in observed]


def think_times_s(requests: Sequence[ReplayedRequest], outstanding: Mapping[str, int]) -> dict[str, float]:
    """Return how long the clients of closed loops took from the end of one request to the next, by class.

    The time runs from the last token's worker to the next request's gateway, so it includes both.
    """
    pause_s = {}
    for name, size in outstanding.items():
        observed = [request.observed for request in requests if request.timed.class_name == name]
        arrivals = [request.request.arrival_s for request in observed][size:]  # in order, as `requests` are
        ends = sorted(request.finished_s for request in observed if request.finished_s is not None)
        pauses = [arrival_s - end_s for end_s, arrival_s in zip(ends, arrivals, strict=False)]
        pause_s[name] = max(statistics.median(pauses), 0.0) if pauses else 0.0
    return pause_s


def workload_of(
    requests: Sequence[ReplayedRequest],
    outstanding: Mapping[str, int],
    think_s: Mapping[str, float] = NO_PAUSES,
) -> Workload:
    """Build a workload of the same requests; classes in `outstanding` become closed loops of that size.

    `think_s`: from the end of a request to the next one of its loop, by class.
    """
    present = {request.timed.class_name for request in requests}
    loops = tuple(
        _loop(name, size, requests, think_s.get(name, 0.0))
        for name, size in sorted(outstanding.items())
        if name in present
    )
    return Workload(
        WorkloadDescription("recorded", 0),
        tuple(request.timed for request in requests if request.timed.class_name not in outstanding),
        loops,
        max_closed=sum(request.timed.class_name in outstanding for request in requests) if loops else None,
    )


class EndedRequests(NamedTuple):
    """The requests of a run with their gaps by class; `duration_s`: from the first arrival to the last end."""

    records: Sequence[RequestRecord]
    gaps: Mapping[str, GapSample]
    duration_s: float


def compare(
    rounds: Sequence[Sequence[ReplayedRequest]],
    outstanding: Mapping[str, int],
    machine: SimulatedMachine,
    think_s: Mapping[str, float] = NO_PAUSES,
    num_runs: int = NUM_RUNS,
) -> list[Comparison]:
    """Simulate the rounds `num_runs` times, with different jitter, and compare the means of each class's measures.

    Each round is a run by itself, with nothing before it; a measure covers all of them together. Raises ConfigError if
    the configuration cannot work.
    """
    workloads = [workload_of(requests, outstanding, think_s) for requests in rounds]
    real = measures_of(rounds)
    simulated = []
    for seed in range(0, num_runs * len(rounds), len(rounds)):
        runs = [simulated_requests(workload, machine, seed + number) for number, workload in enumerate(workloads)]
        simulated.append(_measures(_together(runs)))
    return [
        Comparison(*key, value, statistics.fmean(values))
        for key, value in real.items()
        if len(values := [run[key] for run in simulated if key in run]) == num_runs
    ]


def simulate(workload: Workload, machine: SimulatedMachine, seed: int) -> dict[str, ClassResult]:
    """Simulate the workload; return the result of each class. `seed` is the jitter's."""
    return Simulation(simulation_of(machine, seed), workload).run().classes


def simulated_requests(workload: Workload, machine: SimulatedMachine, seed: int) -> EndedRequests:
    simulation = Simulation(simulation_of(machine, seed), workload)
    duration_s = simulation.run().duration_s
    return EndedRequests(simulation.records(), simulation.gaps(), duration_s)


def simulation_of(machine: SimulatedMachine, seed: int) -> SimConfig:
    decode, prefill, engine = machine.decode, machine.prefill, machine.cluster.engine
    return SimConfig(
        cluster=machine.cluster,
        layout=machine.layout,
        links=machine.links,
        decode_costs=decode.drawn_for_others(seed),
        prefill_costs=prefill.drawn_for_others(seed) if prefill is not None else None,
        own_costs=decode.drawn(seed) | (prefill.drawn(seed) if prefill is not None else {}),
        learns_costs=True,
        slowdowns=machine.slowdowns,
        num_pools=machine.num_nodes,
        measured=machine.measured,
        unmeasured_costs=machine.unmeasured,
        can_stop=engine.device == "cpu" and engine.num_processes == 1,
        seed=seed,
    )


def measures_of(rounds: Sequence[Sequence[ReplayedRequest]]) -> dict[tuple[str, str], float]:
    """Return the measures of real rounds together, by class and name."""
    return _measures(_together([real_requests(requests) for requests in rounds]))


def _together(runs: Sequence[EndedRequests]) -> dict[str, ClassResult]:
    gaps: dict[str, GapSample] = {}
    for run in runs:
        for name, sample in run.gaps.items():
            gaps.setdefault(name, GapSample()).add(tuple(sample.values()))
    return classes_of([record for run in runs for record in run.records], gaps, sum(run.duration_s for run in runs))


def real_requests(requests: Sequence[ReplayedRequest]) -> EndedRequests:
    gaps: dict[str, GapSample] = {}
    records = []
    for number, request in enumerate(requests):
        timed, times = request.timed, request.observed.times_in_order
        ending = RequestEnding.COMPLETED if request.observed.finished_s is not None else RequestEnding.UNFINISHED
        under_way = SimulatedRequest(number, timed, request.observed.request.arrival_s, times)
        records.append(under_way.close(ending, times[-1], gaps.setdefault(timed.class_name, GapSample())))
    begin_s = min(request.observed.request.arrival_s for request in requests)
    return EndedRequests(records, gaps, max(record.ended_s for record in records) - begin_s)


def _timed(observed: ObservedRequest, begin_s: float) -> TimedRequest:
    request = observed.request
    is_other = observed.finished_s is None or request.request_id.startswith(_PROBE)
    output_len = len(observed.times_in_order)
    return TimedRequest(
        arrival_s=request.arrival_s - begin_s,
        prompt_len=request.prompt_len,
        output_len=output_len,
        max_tokens=max(request.sampling.max_tokens, output_len),
        class_name=OTHERS if is_other else request.request_class.value,
        request_class=request.request_class,
        slo=request.slo,
        priority=request.priority,
        predicted_len=None if observed.predicted_len is None else round(observed.predicted_len),
        num_encoder_tokens=request.num_encoder_tokens,
    )


def _loop(name: str, size: int, requests: Sequence[ReplayedRequest], think_s: float) -> ClosedLoop:
    stream = _CyclicStream(
        [replace(request.timed, arrival_s=0.0) for request in requests if request.timed.class_name == name]
    )
    return ClosedLoop(name, size, is_wave=False, stream=stream, think_s=think_s)


class _CyclicStream:
    def __init__(self, requests: Sequence[TimedRequest]) -> None:
        self._requests = requests

    def __getitem__(self, number: int) -> TimedRequest:
        return self._requests[number % len(self._requests)]


def _measures(classes: Mapping[str, ClassResult]) -> dict[tuple[str, str], float]:
    measures = {}
    for name, result in classes.items():
        if name == OTHERS:
            continue
        measures[name, "requests/s"] = result.requests_per_s
        measures[name, "tokens/s"] = result.tokens_per_s
        for label, attribute in _QUANTILES.items():
            measure: Measure | None = getattr(result, attribute)
            if measure is not None:
                measures[name, f"{label} p50, s"] = measure.distribution.p50
                measures[name, f"{label} p90, s"] = measure.distribution.p90
    return measures
