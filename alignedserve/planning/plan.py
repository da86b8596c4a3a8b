"""Makes a plan: searches with the simulator, then asks how far the plan found can be trusted and what else there is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from alignedserve.core.errors import ConfigError
from alignedserve.planning.candidates import Candidate, Choices, Family, families_of
from alignedserve.planning.confidence import SLOWDOWN, Interval, attained_interval, cautions
from alignedserve.planning.search import PlanSearch, Trial, Verdict
from alignedserve.planning.trials import (
    Goals,
    Machines,
    Outcome,
    Run,
    Stage,
    Traffic,
    case_of,
    goals_of,
    judged,
    usable,
)
from alignedserve.sim.sweep import CasePool, CaseProgress, WorkloadLine
from alignedserve.workload.requests import Workload, beginning_of

SHRINKING = 4  # a beginning is this part of the next longer one
_LEAST_REQUESTS, _LEAST_S = 300, 60.0  # of the shortest beginning
_NUM_STAGES = 4
_FASTER = (1.1, 1.25, 1.5)  # times the arrivals, that a plan is tried with
_SLOWER = (0.9, 0.75, 0.5)
_MORE = (1.5, 2.0)  # times the accelerators, where those that there are do not hold

Note = Callable[[str, CaseProgress | None], None]  # what is done now, and how far a simulation of it has come


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for a plan."""

    traffic: Traffic
    share: float  # of the requests of each class that are to meet their objectives
    choices: Choices
    machines: Machines
    seed: int = 0


class Tried(NamedTuple):
    """A plan, and what its longest simulation says."""

    candidate: Candidate
    stage: Stage
    outcome: Outcome


class Variation(NamedTuple):
    """The plan chosen (or the nearest) under other circumstances."""

    words: str
    attained: float
    holds: bool
    is_abandoned: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that was found, and those beside it."""

    goals: Goals
    chosen: Tried | None  # the cheapest that holds and can be served
    nearest: Tried  # the chosen one; where none holds, the one that attains most
    simulated_only: Tried | None  # a cheaper one that holds, which `serve` cannot start yet
    tried: Sequence[Tried]
    skipped: Sequence[tuple[str, str]]  # plans that cannot run the workload, and why
    interval: Interval  # of what the nearest attains
    variations: Sequence[Variation]
    cautions: Sequence[str]
    num_simulations: int

    @property
    def is_held(self) -> bool:
        """Return whether a plan was found."""
        return self.chosen is not None

    def frontier(self) -> list[Tried]:
        """Return the plans of which none cheaper attains as much, the cheapest first."""
        found: list[Tried] = []
        whole = (one for one in self.tried if one.stage.is_whole and not one.outcome.is_abandoned)
        for one in sorted(whole, key=lambda one: (one.candidate.cost, -one.outcome.attained)):
            if not found or one.outcome.attained > found[-1].outcome.attained:
                found.append(one)
        return found


def make_plan(request: PlanRequest, pool: CasePool, note: Note = lambda _words, _case: None) -> Plan:
    """Search for a plan. Raises ConfigError where the workload cannot be planned at all.

    Deterministic: the number of processes in the pool changes nothing.
    """
    planner = _Planner(request, pool, note)
    search = planner.search()
    best, best_of_all = search.best(can_be_served=True), search.best()
    nearest = best or best_of_all or search.nearest()
    found = planner.tried[nearest.label]
    variations = planner.variations(found)
    of_goals = planner.stages[-1].goals
    result = found.outcome.result
    names = of_goals.bounded if result is not None else ()
    shares = [result.classes[name] for name in sorted(names) if result is not None and name in result.classes]
    worst = min(shares, key=lambda one: one.attainment or 0.0, default=None)
    is_cheaper = best_of_all is not None and (best is None or best_of_all.cost < best.cost)
    return Plan(
        goals=of_goals,
        chosen=planner.tried[best.label] if best is not None else None,
        nearest=found,
        simulated_only=planner.tried[best_of_all.label] if best_of_all is not None and is_cheaper else None,
        tried=list(planner.tried.values()),
        skipped=planner.skipped,
        interval=attained_interval(worst.parts if worst is not None else (), request.seed),
        variations=variations,
        cautions=cautions(
            sum(of_goals.num_requests.values()),
            request.share,
            of_goals.span_s,
            is_calculated=request.machines.costs == "roofline" and not nearest.offer.is_profiled,
        ),
        num_simulations=planner.num_simulations,
    )


class _Planner:
    """Runs simulations for one request, and keeps what they say."""

    def __init__(self, request: PlanRequest, pool: CasePool, note: Note) -> None:
        self._request, self._pool, self._note = request, pool, note
        source = request.traffic.source
        workload = source.build() if isinstance(source, WorkloadLine) else source
        self.stages = _stages(workload, request.share)
        self.tried: dict[str, Tried] = {}
        self.skipped: list[tuple[str, str]] = []
        self.num_simulations = 0
        self._families = self._usable_families(workload)

    def _usable_families(self, workload: Workload) -> list[Family]:
        machines = self._request.machines
        found = []
        for family in families_of(self._request.choices):
            members = usable(family.members[:1], machines, workload, self._skip) and family.members
            if members:
                found.append(family)
        if not found:
            raise ConfigError(f"no plan can run this workload: {self.skipped[0][1]}")
        return found if self._request.choices.degrees is not None else _least_parallel(found)

    def _skip(self, candidate: Candidate, reason: str) -> None:
        self.skipped.append((candidate.label, reason))

    def search(self) -> PlanSearch:
        """Search among all families."""
        search = PlanSearch(self._families, num_stages=len(self.stages))
        while trials := search.next_trials():
            stage = self.stages[search.stage]
            length = "the whole workload" if stage.is_whole else f"its first {stage.beginning_s:.0f} s"
            runs = [(trial.candidate, Run(stage, is_limited=trial.is_limited)) for trial in trials]
            outcomes = self._simulate(f"{len(trials)} plans on {length}", runs)
            search.take(
                [(trial, Verdict(one.attained, one.holds)) for trial, one in zip(trials, outcomes, strict=True)]
            )
            self._keep(trials, stage, outcomes)
        return search

    def _keep(self, trials: Sequence[Trial], stage: Stage, outcomes: Sequence[Outcome]) -> None:
        for trial, outcome in zip(trials, outcomes, strict=True):
            self.tried[trial.candidate.label] = Tried(trial.candidate, stage, outcome)

    def _simulate(self, words: str, runs: Sequence[tuple[Candidate, Run]]) -> list[Outcome]:
        request = self._request
        self._note(words, None)
        cases = [case_of(candidate, run, request.machines, request.traffic) for candidate, run in runs]
        self.num_simulations += len(cases)
        results = self._pool.run(cases, lambda case: self._note(words, case))
        return [judged(one.result, one.error, run) for one, (_, run) in zip(results, runs, strict=True)]

    # --- around the plan

    def variations(self, nearest: Tried) -> list[Variation]:
        """Try the plan with slower iterations, other rates, and fewer or more workers."""
        short = self.stages[max(len(self.stages) - 2, 0)]
        length = "" if short.is_whole else f" (first {short.beginning_s:.0f} s)"
        holds = nearest.outcome.holds
        candidate = nearest.candidate
        named: list[tuple[str, Candidate, Run]] = []
        if holds:
            words = f"every iteration {SLOWDOWN - 1:.0%} slower than simulated{length}"
            named.append((words, candidate, Run(short, slowdown=SLOWDOWN)))
        for speed in _FASTER if holds else _SLOWER:
            words = f"{speed:g} times the requests per second{length}"
            named.append((words, candidate, Run(short, is_limited=True, speed=speed)))
        neighbours = self._neighbours(candidate) if holds else self._larger(candidate)
        for one in neighbours:
            run = Run(short, is_limited=not holds)
            named.append((f"{one.num_accelerators} x {one.offer.name}, {one.shape}{length}", one, run))
        outcomes = self._simulate("the plan under other circumstances", [(one, run) for _, one, run in named])
        for (_, one, run), outcome in zip(named, outcomes, strict=True):
            if one is not candidate and holds and not self._is_known(one):
                self.tried[one.label] = Tried(one, run.stage, outcome)
        return [
            Variation(words, outcome.attained, outcome.holds, outcome.is_abandoned)
            for (words, _, _), outcome in zip(named, outcomes, strict=True)
        ]

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return the plans of one worker less and one more, as far as they are not known yet."""
        for family in self._families:
            labels = [member.label for member in family.members]
            if candidate.label in labels:
                place = labels.index(candidate.label)
                near = [*family.members[max(place - 1, 0) : place], *family.members[place + 1 : place + 2]]
                return [one for one in near if not self._is_known(one)]
        return []

    def _is_known(self, candidate: Candidate) -> bool:
        known = self.tried.get(candidate.label)
        least_s = self.stages[max(len(self.stages) - 2, 0)].goals.span_s
        return known is not None and known.stage.goals.span_s >= least_s and not known.outcome.is_abandoned

    @staticmethod
    def _larger(candidate: Candidate) -> list[Candidate]:
        """Return plans of more workers than there are accelerators for."""
        larger = [
            replace(
                candidate,
                num_prefill=round(candidate.num_prefill * factor),
                num_decode=max(round(candidate.num_decode * factor), candidate.num_decode + 1),
            )
            for factor in _MORE
        ]
        return list({one.label: one for one in larger}.values())


def _least_parallel(families: Sequence[Family]) -> list[Family]:
    """Return, of each kind of accelerator, the families of the smallest workers that hold the model."""
    degrees: dict[str, int] = {}
    for family in families:
        first = family.members[0]
        degrees[first.offer.name] = min(degrees.get(first.offer.name, first.tensor_parallel), first.tensor_parallel)
    return [one for one in families if one.members[0].tensor_parallel == degrees[one.members[0].offer.name]]


def _stages(workload: Workload, share: float) -> list[Stage]:
    """Return the beginnings to search with, each SHRINKING times as long as the one before, then the whole."""
    whole = Stage(None, goals_of(workload, share))
    stages = [whole]
    beginning_s = whole.goals.span_s / SHRINKING
    while len(stages) < _NUM_STAGES and beginning_s >= _LEAST_S:
        beginning = beginning_of(workload, beginning_s)
        if sum(request.class_name in whole.goals.bounded for request in beginning.requests) < _LEAST_REQUESTS:
            break
        stages.insert(0, Stage(beginning_s, goals_of(beginning, share)))
        beginning_s /= SHRINKING
    return stages
