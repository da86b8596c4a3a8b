"""Simulates what has to be known of a point, and no more.

1. The default, to its end. If it holds 99 % of the requests, no other can be a point ahead, and none is simulated.
2. Of the others each is abandoned as soon as it cannot hold as many as the best of them so far: exact, as misses only
   grow.
3. Where neither the default nor its own policy on colocated workers holds 99 %, the field (fcfs and sarathi) is
   compared with itself alone: the best of it is simulated to its end however far it is behind.
4. Token budgets and splits are climbed from the middle: on to the next neighbour as long as it does better than the one
   before it. That could miss a second peak; what it leaves out is named in the summary.
5. Points where one side is ahead by more than a point are repeated with further seeds, and all seeds together decide.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from alignedserve.sim.simulation import Simulation
from alignedserve.workload.requests import Workload
from benchmarks.measuring.recording import commit
from experiments.grid.points import SEEDS, Point
from experiments.grid.record import Outcome, Record
from experiments.grid.systems import DEFAULT, Family, System, field_families, others, own_families

ENOUGH = 0.99


Simulate = Callable[[Point, System, int | None], Outcome]


class NotSimulatedError(Exception):
    """A case of a point is not in the record."""


class _Search:
    """The outcomes of one point: recorded ones, and new ones when they are wanted, which are then recorded."""

    def __init__(self, point: Point, record: Record, simulated: Simulate) -> None:
        self._point = point
        self._record = record
        self._simulated = simulated

    def outcome_of(self, system: System, best: int | None) -> Outcome:
        """Return what is known of a system. `best`: it may be abandoned if it cannot hold more; None: it may not."""
        known = self._record.find(self._point.name, system.name(self._point.accelerators))
        if known is not None and (known.at_most is None or (best is not None and known.at_most <= best)):
            return known
        outcome = self._simulated(self._point, system, best)
        self._record.append(outcome)
        return outcome

    def best_of(self, families: Iterable[Family], best: int | None) -> int | None:
        """Return the most requests that a system of these families holds, or `best` if none holds more."""

        def outcome_of(system: System) -> Outcome:
            nonlocal best
            outcome = self.outcome_of(system, best)
            if outcome.at_most is None:
                best = outcome.num_met if best is None else max(best, outcome.num_met)
            return outcome

        for systems, first in families:
            climb(systems, first, outcome_of)
        return best


def search_point(point: Point, record: Record, simulated: Simulate) -> None:
    """Simulate what the record lacks of a point."""
    search = _Search(point, record, simulated)
    default = search.outcome_of(DEFAULT, None)
    if default.attainment >= ENOUGH:
        return
    colocated, splits = own_families(point.accelerators)
    own = search.best_of([colocated], None)
    assert own is not None, "simulated to its end"
    is_contested = max(default.num_met, own) < ENOUGH * default.num_sent
    field = search.best_of(field_families(point.accelerators), None if is_contested else own)
    assert field is not None, "the first is simulated to its end"
    search.best_of([splits], max(own, field))


def search_task(task: tuple[Point, Path]) -> None:
    """Search a point in a process of its own, by the record of this path."""
    point, path = task
    search_point(point, Record(path), simulate)


def is_searched(point: Point, record: Record) -> bool:
    """Return whether all that has to be known of a point is in the record."""
    return _is_recorded(search_point, point, record)


def repeat_point(point: Point, record: Record, simulated: Simulate) -> None:
    """Search a point with every seed, and simulate what one of them did not abandon to its end with all."""
    repeats = [replace(point, seed=seed) for seed in SEEDS]
    for one in repeats:
        search_point(one, record, simulated)
    ended = {
        name: system
        for name, system in others(point.accelerators).items()
        if any(_has_ended(record.find(one.name, name)) for one in repeats)
    }
    for one in repeats:
        search = _Search(one, record, simulated)
        for system in ended.values():
            search.outcome_of(system, None)


def is_repeated(point: Point, record: Record) -> bool:
    """Return whether the record has a point with every seed."""
    return _is_recorded(repeat_point, point, record)


def _has_ended(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.at_most is None


def _is_recorded(task: Callable[[Point, Record, Simulate], None], point: Point, record: Record) -> bool:
    try:
        task(point, record, _refuse)
    except NotSimulatedError:
        return False
    return True


def climb(systems: Sequence[System], first: int, outcome_of: Callable[[System], Outcome]) -> None:
    """Try the first, then in both directions the next as long as it has more merit than the one before."""
    merit = outcome_of(systems[first]).merit
    for step in (1, -1):
        place, before = first + step, merit
        while 0 <= place < len(systems):
            reached = outcome_of(systems[place]).merit
            if reached <= before:
                break
            place, before = place + step, reached


def _refuse(point: Point, system: System, _best: int | None) -> Outcome:
    raise NotSimulatedError(f"{point.name}: {system.name(point.accelerators)}")


def simulate(point: Point, system: System, best: int | None) -> Outcome:
    """Simulate one case until all is known of it, or until it cannot hold more than the best does."""
    workload = _workload(point)
    num_sent = len(workload.requests)
    # Equal ones are abandoned too: what counts is the best number, not whose it is.
    limit = num_sent if best is None else num_sent - best - 1
    config = replace(system.config(point.accelerators), miss_limits={"rt": limit}, ends_when_settled=True)
    result = Simulation(config, workload).run()
    name, code = system.name(point.accelerators), _code()
    if result.is_abandoned:
        ended_s = round(result.duration_s, 2)
        return Outcome(point.name, name, num_sent, at_most=best, ended_s=ended_s, commit=code)
    of_class = result.classes["rt"]
    beside = result.classes["be"].loaded_tokens_per_s if point.has_best_effort else None
    return Outcome(
        point.name,
        name,
        num_sent,
        num_met=round((of_class.attainment or 0.0) * num_sent),
        num_ttft_met=round((of_class.ttft_attainment or 0.0) * num_sent),
        num_tpot_met=round((of_class.tpot_attainment or 0.0) * num_sent),
        best_effort_tokens_per_s=None if beside is None else round(beside, 1),
        ended_s=round(result.duration_s, 2),
        commit=code,
    )


@lru_cache(maxsize=2)
def _workload(point: Point) -> Workload:
    return point.workload().build()


@cache
def _code() -> str:
    """Return the commit that this process began with."""
    return commit()
