"""Simulates what has to be known of a point, and no more.

1. The default, to its end. If it holds 99 % of the requests, no other can be a point ahead, and none is simulated.
2. Of the others each is abandoned as soon as it cannot hold as many as the best of them so far: exact, as misses only
   grow.
3. Token budgets and splits are climbed from the middle: on to the next neighbour as long as it does better than the one
   before it. That could miss a second peak; what it leaves out is named in the summary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from alignedserve.sim.simulation import Simulation
from alignedserve.workload.requests import Workload
from benchmarks.support.recording import commit
from experiments.grid.points import Point
from experiments.grid.record import Outcome, Record
from experiments.grid.systems import DEFAULT, UNION, System, families

ENOUGH = 0.99


Simulate = Callable[[Point, System, int | None], Outcome]


class NotSimulatedError(Exception):
    """A case of a point is not in the record."""


def is_searched(point: Point, record: Record) -> bool:
    """Return whether all that has to be known of a point is in the record."""
    try:
        search_point(point, record, _refuse)
    except NotSimulatedError:
        return False
    return True


def search_point(point: Point, record: Record, simulated: Simulate) -> None:
    """Simulate what the record lacks of a point."""

    def recorded(system: System, best: int | None) -> Outcome:
        known = record.find(point.name, system.name(point.accelerators))
        if known is not None and (known.at_most is None or (best is not None and known.at_most <= best)):
            return known
        outcome = simulated(point, system, best)
        record.append(outcome)
        return outcome

    if recorded(DEFAULT, None).attainment >= ENOUGH:
        return
    best: int | None = None

    def outcome_of(system: System) -> Outcome:
        nonlocal best
        outcome = recorded(system, best)
        if outcome.at_most is None:
            best = outcome.num_met if best is None else max(best, outcome.num_met)
        return outcome

    for systems, first in families(point.accelerators):
        climb(systems, first, outcome_of)


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


def finish_baseline(point: Point, record: Record, simulated: Simulate) -> None:
    """Simulate to its end the baseline that came furthest, where all were abandoned: how far the field is behind.

    Which is best of those abandoned is not known; the one abandoned last is taken for it.
    """
    systems = {system.name(point.accelerators): system for row, _ in families(point.accelerators) for system in row}
    known = [one for name in systems if (one := record.find(point.name, name)) is not None]
    baselines = [one for one in known if systems[one.system].policy != UNION]
    if baselines and all(one.at_most is not None for one in baselines):
        last = max(baselines, key=lambda one: one.ended_s)
        record.append(simulated(point, systems[last.system], None))


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
