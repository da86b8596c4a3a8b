"""Simulations of plans: what is simulated, and what its result says about the objectives."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import floor
from typing import NamedTuple

import msgspec

from alignedserve.config.sections import ClusterConfig, EngineConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from alignedserve.costmodel.gpu_limits import running_requests
from alignedserve.costmodel.model import AttentionKernel, CostModel
from alignedserve.costmodel.work import IterationWork
from lab.costmodel.choice import WorkerSpec
from lab.costmodel.profile_file import MachineProfile
from lab.planning.candidates import Candidate
from lab.planning.experts import with_shared_experts
from lab.planning.hardware_list import RECORDED
from lab.sim.config import NO_SLOWDOWNS, SimConfig, Slowdowns
from lab.sim.policies import ClusterHardware, simulated_policy, with_policy
from lab.sim.result import ALL, ClassResult, SimulationResult
from lab.sim.sweep import Case, WorkloadLine, part_of
from lab.workload.rates import require_feasible
from lab.workload.requests import TimeWindow, Workload

HOPELESS = 0.75  # attained, of a window or of a short workload: what cannot reach it is abandoned
_MAX_BACKLOG = 0.05  # of the requests of a class without objectives, beside those just under way
_FEW = 2  # requests that are left by chance


@dataclass(frozen=True, slots=True)
class Machines:
    """Sources of a plan's sizes and costs. `profiles`: of measured machines, by the name of the offer."""

    cluster: ClusterConfig  # plans change its topology, policy and counts
    model: str | None  # of named accelerators
    costs: str = "roofline"
    kernel: AttentionKernel = AttentionKernel.LOAD_BALANCED  # of named accelerators
    profiles: Mapping[str, MachineProfile] = field(default_factory=dict)
    slowdowns: Slowdowns = NO_SLOWDOWNS  # of measured machines, as in SimConfig
    seed: int = 0
    runs_what_fits: bool = False  # named accelerators: as many requests at a time as `serve` would choose there

    def configured(self, candidate: Candidate) -> SimConfig:
        """Return the simulation of a plan. Raises ConfigError where it cannot be."""
        policy, changed = candidate.policy, msgspec.structs.replace
        cluster = with_policy(self.cluster, policy.name, policy.params, topology=candidate.topology)
        cluster = changed(
            cluster,
            prefill=changed(cluster.prefill, count=max(candidate.num_prefill, 1)),
            decode=changed(cluster.decode, count=candidate.num_decode),
            engine=self._divided(cluster.engine, candidate),
        )
        profile = self.profiles.get(candidate.offer.name)
        if profile is not None:
            shared = with_shared_experts(profile, candidate.expert_parallel)
            config = replace(simulated_policy(shared, cluster), slowdowns=self.slowdowns)
        else:
            assert self.model is not None, "named accelerators have no model of their own"
            worker = WorkerSpec(
                self.model,
                candidate.offer.name,
                candidate.tensor_parallel,
                self.kernel,
                candidate.pipeline_parallel,
            )
            config = simulated_policy(ClusterHardware(worker, source=self.costs), cluster)
            if self.runs_what_fits:
                config = _running_what_fits(config, worker)
        return replace(config, seed=self.seed)

    @staticmethod
    def _divided(engine: EngineConfig, candidate: Candidate) -> EngineConfig:
        if candidate.offer.name == RECORDED:
            return engine
        return msgspec.structs.replace(
            engine,
            tensor_parallel=candidate.tensor_parallel,
            pipeline_parallel=candidate.pipeline_parallel,
            expert_parallel=candidate.expert_parallel,
        )


def _running_what_fits(config: SimConfig, worker: WorkerSpec) -> SimConfig:
    running = running_requests(config.memory_tokens, config.decode_costs)
    decode = msgspec.structs.replace(config.cluster.decode, max_running_requests=running)
    return replace(config, cluster=msgspec.structs.replace(config.cluster, decode=decode))


@dataclass(frozen=True, slots=True)
class Goals:
    """Goals that a plan is to hold: the objectives of a share of the requests of every class that has any."""

    share: float
    num_requests: Mapping[str, int]  # of the open-loop classes with objectives
    bounded: frozenset[str]  # classes with objectives, closed loops with them
    queued: frozenset[str]  # open-loop classes without objectives: what comes must be done
    span_s: float  # of arrivals

    def limits(self, least_share: float | None = None) -> dict[str, int]:
        """Return how many requests of each class may miss, for the wanted share or a smaller one."""
        missing = 1.0 - (self.share if least_share is None else min(least_share, self.share))
        return {name: floor(count * missing + 1e-9) for name, count in self.num_requests.items()}


def goals_of(workload: Workload, share: float) -> Goals:
    """Return the goals of a workload. Raises ConfigError where there is no request, or none has an objective."""
    if not (workload.requests or workload.closed_loops):
        raise ConfigError("no request of the workload comes: give it a longer duration or a higher rate")
    counts: dict[str, int] = {}
    bounded = {request.class_name for request in workload.requests if request.slo != Slo()}
    for request in workload.requests:
        if request.class_name in bounded:
            counts[request.class_name] = counts.get(request.class_name, 0) + 1
    bounded |= {loop.class_name for loop in workload.closed_loops if loop.stream[0].slo != Slo()}
    if not bounded:
        raise ConfigError("no request of the workload has an objective: give --ttft and --tpot (or ttft=, tpot= in it)")
    queued = frozenset(request.class_name for request in workload.requests) - bounded
    span_s = max((request.arrival_s for request in workload.requests), default=workload.ends_s or 0.0)
    return Goals(share, counts, frozenset(bounded), queued, span_s)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a plan: the traffic, when it may end early, and what is made harder."""

    window: TimeWindow | None = None  # None: the whole workload
    limits: Mapping[str, int] | None = None  # misses of each class, beyond which it is abandoned
    speed: float = 1.0  # of arrivals
    slowdown: float = 1.0  # of iterations


@dataclass(frozen=True, slots=True)
class Traffic:
    """The workload: a line, built in each process, or the requests themselves."""

    source: WorkloadLine | Workload

    def part(self, run: Run) -> WorkloadLine | Workload:
        """Return what a run plays."""
        if isinstance(self.source, WorkloadLine):
            return replace(self.source, window=run.window, speed=run.speed)
        return part_of(self.source, run.window, run.speed)

    def whole(self) -> Workload:
        """Return all requests. Raises ConfigError."""
        return self.source.build() if isinstance(self.source, WorkloadLine) else self.source


class SlowedCosts:
    """The same costs, every iteration longer by a factor: what the error of a cost model could hide."""

    def __init__(self, costs: CostModel, factor: float) -> None:
        self._costs = costs
        self._factor = factor

    def iteration_s(self, work: IterationWork) -> float:
        return self._factor * self._costs.iteration_s(work)

    def swap_s(self, num_tokens: float) -> float:
        return self._factor * self._costs.swap_s(num_tokens)


def case_of(candidate: Candidate, run: Run, machines: Machines, traffic: Traffic) -> Case:
    config = machines.configured(candidate)
    if run.slowdown != 1.0:
        prefill = config.prefill_costs
        config = replace(
            config,
            decode_costs=SlowedCosts(config.decode_costs, run.slowdown),
            prefill_costs=None if prefill is None else SlowedCosts(prefill, run.slowdown),
        )
    config = replace(config, miss_limits=run.limits)
    played = "all" if run.window is None else f"from {run.window.start_s:.3f} s"
    return Case(f"{candidate.label}, {played}, {run.speed:g}, {run.slowdown:g}", config, traffic.part(run))


class WindowsPlayed(NamedTuple):
    """Windows that a plan was simulated on, of those chosen."""

    num_played: int
    num_chosen: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a plan: of the whole workload, or of windows of it."""

    attained: float  # of the class that attains least, of what was played; where it was abandoned: at most about that
    holds: bool
    keeps_up: bool  # with the requests that have no objectives
    result: SimulationResult | None  # of the whole, or of the busiest window
    error: str | None = None
    windows: WindowsPlayed | None = None  # None: the whole was played
    is_abandoned: bool = False
    is_refuted: bool = False  # more missed in what was played than may in the whole

    @property
    def is_whole(self) -> bool:
        """Return whether the whole workload was played, though perhaps not to its end."""
        return self.windows is None

    @property
    def is_representative(self) -> bool:
        """Return whether its attainment is known: on the whole, or estimated from all windows."""
        is_all = self.windows is None or self.windows.num_played == self.windows.num_chosen
        return is_all and not self.is_abandoned and self.error is None


def judged(result: SimulationResult | None, error: str | None, goals: Goals, speed: float = 1.0) -> Outcome:
    if result is None:
        return Outcome(0.0, holds=False, keeps_up=False, result=None, error=error)
    classes = [(name, figures) for name, figures in result.classes.items() if name != ALL]
    shares = [attained_of(figures, goals.num_requests.get(name)) for name, figures in classes if name in goals.bounded]
    attained = min(shares, default=0.0)
    span_s = goals.span_s / speed
    keeps_up = all(backlog_of(figures, span_s) <= 0.0 for name, figures in classes if name in goals.queued)
    holds = not result.is_abandoned and keeps_up and attained >= goals.share - 1e-9
    return Outcome(attained, holds, keeps_up, result, is_abandoned=result.is_abandoned)


def attained_of(of_class: ClassResult, num_requests: int | None) -> float:
    """Return the share of a class that met its objectives; after an abandoned run, later requests count as met."""
    num_met = sum(part.num_met for part in of_class.parts)
    num_to_come = max((num_requests or 0) - of_class.num_sent, 0)
    return (num_met + num_to_come) / max(of_class.num_sent + num_to_come, 1)


def backlog_of(of_class: ClassResult, span_s: float) -> float:
    """Return how many more requests are left when the last has come than just take their time; above 0: it grows."""
    if of_class.num_sent < 2 or span_s <= 0.0:
        return 0.0
    if of_class.end_to_end_s is None:
        return float(of_class.num_sent)
    waited_s = 0.0 if of_class.ttft_s is None else of_class.ttft_s.distribution.p50
    generating_s = of_class.end_to_end_s.distribution.p50 - waited_s  # without the wait, or a queue would excuse itself
    num_left = of_class.num_sent - of_class.loaded_requests_per_s * span_s
    return num_left - _FEW - (_MAX_BACKLOG + generating_s / span_s) * of_class.num_sent


def obstacle(candidate: Candidate, machines: Machines, workload: Workload) -> str | None:
    """Return why a plan cannot run the workload at all; None: it can."""
    try:
        config = machines.configured(candidate)
        require_feasible(workload, max_context_len=config.context_len, memory_tokens=config.memory_tokens)
    except ConfigError as error:
        return str(error)
    return None
