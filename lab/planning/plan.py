"""Makes a plan: searches with the simulator, then asks how far the plan found can be trusted and what else there is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from alignedserve.core.errors import ConfigError
from lab.planning.candidates import Candidate, Choices, Family, families_of
from lab.planning.confidence import (
    SLOWDOWNS,
    Interval,
    attained_interval,
    caution_of_costs,
    cautions,
    compared,
)
from lab.planning.loads import UnitCosts, first_member, unit_costs
from lab.planning.search import PlanSearch, Trial, Verdict
from lab.planning.trials import (
    HOPELESS,
    Goals,
    Machines,
    Outcome,
    Run,
    Traffic,
    case_of,
    goals_of,
    judged,
    obstacle,
)
from lab.planning.windowed_trial import WindowedTrial
from lab.planning.windows import Group, WindowSizes, groups_of
from lab.sim.result import PartResult, SimulationResult
from lab.sim.sweep import CasePool, CaseProgress
from lab.workload.requests import TimeWindow, Workload, window_of

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
    windows: WindowSizes = field(default_factory=WindowSizes)


class Tried(NamedTuple):
    """A plan, and what its longest simulation says."""

    candidate: Candidate
    outcome: Outcome


class Variation(NamedTuple):
    """The plan chosen (or the nearest) under other circumstances."""

    words: str
    outcome: Outcome

    @property
    def holds(self) -> bool:
        return self.outcome.holds


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
    groups: Sequence[Group]  # whose windows plans were compared on; none: all played the whole workload

    @property
    def is_held(self) -> bool:
        """Return whether a plan was found."""
        return self.chosen is not None

    def frontier(self) -> list[Tried]:
        """Return the plans that attain more than every cheaper one, the cheapest first."""
        frontier: list[Tried] = []
        known = (trial for trial in self.tried if trial.outcome.is_representative)
        for trial in sorted(known, key=lambda trial: (trial.candidate.cost, -trial.outcome.attained)):
            if not frontier or trial.outcome.attained > frontier[-1].outcome.attained:
                frontier.append(trial)
        return frontier


def make_plan(request: PlanRequest, pool: CasePool, note: Note = lambda _words, _case: None) -> Plan:
    """Search for a plan. Raises ConfigError where the workload cannot be planned at all.

    Deterministic: the number of processes in the pool changes nothing.
    """
    planner = _Planner(request, pool, note)
    search = planner.search()
    best, best_of_all = search.best(can_be_served=True), search.best()
    nearest = best or best_of_all or search.nearest()
    tried, goals = planner.tried[nearest.label], planner.goals
    variations = planner.variations(tried)
    on_windows = planner.on_windows.get(nearest.label)
    is_cheaper = best_of_all is not None and (best is None or best_of_all.cost < best.cost)
    return Plan(
        goals=goals,
        chosen=planner.tried[best.label] if best is not None else None,
        nearest=tried,
        simulated_only=planner.tried[best_of_all.label] if best_of_all is not None and is_cheaper else None,
        tried=list(planner.tried.values()),
        skipped=planner.skipped,
        interval=attained_interval(_worst_parts(goals, tried.outcome), request.seed),
        variations=variations,
        cautions=[
            *compared(planner.groups, goals.span_s, on_windows, tried.outcome),
            *cautions(
                sum(goals.num_requests.values()),
                request.share,
                goals.span_s,
                caution_of_costs(nearest, request.machines),
            ),
        ],
        num_simulations=planner.num_simulations,
        groups=planner.groups,
    )


def _worst_parts(goals: Goals, outcome: Outcome) -> Sequence[PartResult]:
    classes = {} if outcome.result is None else outcome.result.classes
    bounded = [classes[name] for name in sorted(goals.bounded) if name in classes]
    worst = min(bounded, key=lambda trial: trial.attainment or 0.0, default=None)
    return worst.parts if worst is not None else ()


class _Variant(NamedTuple):
    candidate: Candidate
    speed: float = 1.0  # of arrivals
    slowdown: float = 1.0  # of iterations
    is_thorough: bool = False  # what it attains is wanted, not only whether it holds


class _Planner:
    def __init__(self, request: PlanRequest, pool: CasePool, note: Note) -> None:
        self._request, self._pool, self._note = request, pool, note
        workload = request.traffic.whole()
        self.goals = goals_of(workload, request.share)
        self.tried: dict[str, Tried] = {}
        self.on_windows: dict[str, Outcome] = {}
        self.skipped: list[tuple[str, str]] = []
        self.num_simulations = 0
        self._families = self._usable_families(workload)
        costs = {family.name: self._unit_costs(family, workload) for family in self._families}
        self.groups = groups_of(workload, costs[self._families[0].name], request.windows)
        self._firsts = self._first_members(workload, costs)

    def _usable_families(self, workload: Workload) -> list[Family]:
        machines = self._request.machines
        usable = []
        for family in families_of(self._request.choices):
            smallest = family.members[0]
            problem = obstacle(smallest, machines, workload)
            if problem is None:
                usable.append(family)
            else:
                self.skipped.append((smallest.label, problem))
        if not usable:
            raise ConfigError(f"no plan can run this workload: {self.skipped[0][1]}")
        return usable if self._request.choices.degrees is not None else _hardly_parallel(usable)

    def _unit_costs(self, family: Family, workload: Workload) -> UnitCosts:
        return unit_costs(self._request.machines.configured(family.members[0]), workload.requests)

    def _first_members(self, workload: Workload, costs: Mapping[str, UnitCosts]) -> list[int]:
        requests, duration_s = workload.requests, self.goals.span_s
        if self.groups:
            window = self.groups[min(1, len(self.groups) - 1)].window
            requests = window_of(workload, TimeWindow(window.start_s, window.end_s)).requests
            duration_s = window.end_s - window.start_s
        return [first_member(family, costs[family.name].of(requests), duration_s) for family in self._families]

    # --- simulations

    def search(self) -> PlanSearch:
        search = PlanSearch(self._families, has_windows=bool(self.groups), firsts=self._firsts)
        while trials := search.next_trials():
            on_windows = [trial for trial in trials if not trial.is_whole]
            on_whole = [trial for trial in trials if trial.is_whole]
            outcomes = self._play_windows("plans on windows", [_Variant(trial.candidate) for trial in on_windows])
            outcomes += self._play_whole(on_whole)
            pairs = list(zip((*on_windows, *on_whole), outcomes, strict=True))
            for trial, outcome in pairs:
                self._keep(trial.candidate, outcome)
            search.take([(trial, _verdict(outcome)) for trial, outcome in pairs])
        return search

    def _keep(self, candidate: Candidate, outcome: Outcome) -> None:
        if not outcome.is_whole:
            self.on_windows[candidate.label] = outcome
        self.tried[candidate.label] = Tried(candidate, outcome)

    def _play_whole(self, trials: Sequence[Trial]) -> list[Outcome]:
        exact, rough = self.goals.limits(), self.goals.limits(HOPELESS)
        limits = exact if self.groups else rough
        runs = [(trial.candidate, Run(limits=limits if trial.is_limited else None)) for trial in trials]
        words = f"{len(runs)} plans on the whole workload" if len(runs) > 1 else "a plan on the whole workload"
        return [judged(result, error, self.goals) for result, error in self._simulate(words, runs)]

    def _play_windows(self, words: str, variants: Sequence[_Variant]) -> list[Outcome]:
        trials = [
            WindowedTrial(self.groups, self.goals, speed=variant.speed, is_thorough=variant.is_thorough)
            for variant in variants
        ]
        while waiting := [(number, group) for number, trial in enumerate(trials) for group in trial.next_windows()]:
            runs = [
                (
                    variants[number].candidate,
                    Run(group.window, trials[number].limits(group), variants[number].speed, variants[number].slowdown),
                )
                for number, group in waiting
            ]
            for (number, group), (result, error) in zip(waiting, self._simulate(words, runs), strict=True):
                trials[number].take(group, result, error)
        return [trial.outcome() for trial in trials]

    def _play(self, words: str, variants: Sequence[_Variant]) -> list[Outcome]:
        if self.groups:
            return self._play_windows(words, variants)
        limits = self.goals.limits(HOPELESS)
        runs = [(variant.candidate, Run(None, limits, variant.speed, variant.slowdown)) for variant in variants]
        outcomes = zip(variants, self._simulate(words, runs), strict=True)
        return [judged(result, error, self.goals, variant.speed) for variant, (result, error) in outcomes]

    def _simulate(
        self, words: str, runs: Sequence[tuple[Candidate, Run]]
    ) -> list[tuple[SimulationResult | None, str | None]]:
        if not runs:
            return []
        request = self._request
        self._note(words, None)
        cases = [case_of(candidate, run, request.machines, request.traffic) for candidate, run in runs]
        self.num_simulations += len(cases)
        results = self._pool.run(cases, lambda case: self._note(words, case))
        return [(outcome.result, outcome.error) for outcome in results]

    # --- around the plan

    def variations(self, nearest: Tried) -> list[Variation]:
        holds, candidate = nearest.outcome.holds, nearest.candidate
        slower = SLOWDOWNS if holds else ()
        named = [
            (f"every iteration {group - 1:.0%} slower than simulated", _Variant(candidate, slowdown=group))
            for group in slower
        ]
        speeds = _FASTER if holds else _SLOWER
        named += [(f"{speed:g} times the requests per second", _Variant(candidate, speed=speed)) for speed in speeds]
        others = self._neighbours(candidate) if holds else self._larger(candidate)
        named += [
            (f"{tried.num_accelerators} x {tried.offer.label}, {tried.shape}", _Variant(tried, is_thorough=holds))
            for tried in others
        ]
        outcomes = self._play("the plan under other circumstances", [variant for _, variant in named])
        varied = []
        for (words, variant), outcome in zip(named, outcomes, strict=True):
            if variant.candidate is candidate or not holds:
                varied.append(Variation(words, outcome))
                continue
            known = self._failure(variant.candidate) if outcome.holds else None
            self._keep(variant.candidate, known or outcome)
            varied.append(Variation(words, known or outcome))
        return varied

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        for family in self._families:
            labels = [member.label for member in family.members]
            if candidate.label in labels:
                number = labels.index(candidate.label)
                near = [*family.members[max(number - 1, 0) : number], *family.members[number + 1 : number + 2]]
                return [neighbour for neighbour in near if not self._is_known(neighbour)]
        return []

    def _is_known(self, candidate: Candidate) -> bool:
        known = self.tried.get(candidate.label)
        return known is not None and known.outcome.is_representative

    def _failure(self, candidate: Candidate) -> Outcome | None:
        known = self.tried.get(candidate.label)
        return known.outcome if known is not None and known.outcome.is_whole and not known.outcome.holds else None

    @staticmethod
    def _larger(candidate: Candidate) -> list[Candidate]:
        larger = [
            replace(
                candidate,
                num_prefill=round(candidate.num_prefill * factor),
                num_decode=max(round(candidate.num_decode * factor), candidate.num_decode + 1),
            )
            for factor in _MORE
        ]
        return list({plan.label: plan for plan in larger}.values())


def _verdict(outcome: Outcome) -> Verdict:
    num_windows = outcome.windows.num_played if outcome.windows is not None else 0
    return Verdict(outcome.attained, outcome.holds, outcome.is_refuted, num_windows, outcome.is_abandoned)


def _hardly_parallel(families: Sequence[Family]) -> list[Family]:
    """Return the families of the smallest workers that hold the model, and of twice as large ones, for each kind of
    accelerator: pairs compute a prompt together, which held up to ten points more (docs/experiments/walls.md).

    Processes that share experts are considered beside one: they are for time, not for memory.
    """
    degrees: dict[str, int] = {}
    for family in families:
        first = family.members[0]
        size = first.worker_size // first.expert_parallel
        degrees[first.offer.name] = min(degrees.get(first.offer.name, size), size)
    return [family for family in families if _is_hardly_parallel(family.members[0], degrees)]


def _is_hardly_parallel(first: Candidate, degrees: Mapping[str, int]) -> bool:
    least, size = degrees[first.offer.name], first.worker_size // first.expert_parallel
    return size == least or (size == 2 * least and first.pipeline_parallel == 1)
