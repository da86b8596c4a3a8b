"""Simulates what has to be known of a point, and no more.

1. The default, to its end, with every seed.
2. With the first seed every system of the field; one is abandoned as soon as it is sure to hold over a point less than
   the best of them so far. That is exact: misses only grow. Where the default holds 99 %, so is one that is sure to
   hold less than 98 %: it cannot be the better of the two.
3. Those of the field within a point of its best, two at most, to their end with every seed. By all seeds together
   they are compared with the default.
4. Token budgets and splits are climbed from the middle: on to the next neighbour as long as it does better than the one
   before it. That could miss a second peak; what it leaves out is named in the summary.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from experiments.grid.points import SEEDS, Point
from experiments.grid.record import Outcome, Record
from experiments.grid.systems import DEFAULT, System, families
from experiments.validity.decision_code import digests
from experiments.validity.rows import is_stale, repeats, state_of
from lab.sim.result import SimulationResult
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload

ENOUGH = 0.99
_MARGIN = 0.01  # by which the first seed may be wrong about who is best
_MOST_FINALISTS = 2

Simulate = Callable[[Point, System, int], Outcome]
"""Simulates a system, which is abandoned once it is sure to hold fewer requests than this."""


class NotSimulatedError(Exception):
    """A case of a point is not in the record."""


class _Search:
    """The outcomes of one point: recorded ones, and new ones when they are wanted, which are then recorded."""

    def __init__(self, point: Point, record: Record, simulated: Simulate) -> None:
        self._point = point
        self._record = record
        self._simulated = simulated

    def outcome_of(self, system: System, seed: int, least: int = 0) -> Outcome:
        """Return what is known of a system with a seed. `least`: below so many held it may be abandoned."""
        point = self._point.of_seed(seed)
        known = self._record.find(point.name, system.name(point.accelerators))
        if known is not None and (known.at_most is None or known.at_most < least):
            return known
        outcome = self._simulated(point, system, least)
        self._record.append(outcome)
        return outcome

    def screened(self, seed: int, least: int) -> list[tuple[System, int]]:
        """Return the systems of the field that were not abandoned, with the requests that each holds."""
        ended: list[tuple[System, int]] = []
        best = 0

        def outcome_of(system: System) -> Outcome:
            nonlocal best
            outcome = self.outcome_of(system, seed, max(least, best - _margin(best)))
            if outcome.at_most is None:
                best = max(best, outcome.num_met)
                ended.append((system, outcome.num_met))
            return outcome

        for systems, first in families(self._point.accelerators, has_best_effort=self._point.has_best_effort):
            climb(systems, first, outcome_of)
        return ended


def _margin(num: int) -> int:
    return math.ceil(_MARGIN * num)


def search_point(point: Point, record: Record, simulated: Simulate, seeds: Sequence[int] = SEEDS) -> None:
    search = _Search(point, record, simulated)
    default, *_ = [search.outcome_of(DEFAULT, seed) for seed in seeds]
    is_held = default.attainment >= ENOUGH
    least = math.ceil((ENOUGH - _MARGIN) * default.num_sent) if is_held else 0
    for system in finalists(search.screened(seeds[0], least)):
        for seed in seeds[1:]:
            search.outcome_of(system, seed)


def finalists(ended: Sequence[tuple[System, int]]) -> list[System]:
    """Return the systems within a point of the best, the best ones first."""
    ranked = sorted(ended, key=lambda one: -one[1])
    least = ranked[0][1] - _margin(ranked[0][1]) if ranked else 0
    return [system for system, num_met in ranked if num_met >= least][:_MOST_FINALISTS]


class SearchTask(NamedTuple):
    """A point to search, in a process of its own."""

    point: Point
    path: Path  # of the record
    seeds: Sequence[int] = SEEDS
    is_again: bool = False  # what another code decided does not count, unless a repeated sample decides so today


def search_task(task: SearchTask) -> float:
    """Search a point by the record of this path; return the seconds of the processor that it took."""
    before_s = time.process_time()
    record = Record(task.path, _still_holds if task.is_again else None)
    search_point(task.point, record, simulate, task.seeds)
    return time.process_time() - before_s


def _still_holds(outcome: Outcome) -> bool:
    of = {"system": outcome.kind, "code": outcome.code}
    return not is_stale(state_of(of, repeats("grid"), digests().values()))


def is_searched(point: Point, record: Record, seeds: Sequence[int] = SEEDS) -> bool:
    try:
        search_point(point, record, _refuse, seeds)
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


def _refuse(point: Point, system: System, _least: int) -> Outcome:
    raise NotSimulatedError(f"{point.name}: {system.name(point.accelerators)}")


def simulate(point: Point, system: System, least: int) -> Outcome:
    """Simulate one case until all is known of it, or until it is sure to hold less than `least`."""
    before_s = time.process_time()
    workload = _workload(point)
    num_sent = len(workload.requests)
    limits = {"rt": num_sent - least}
    config = replace(system.config(point.accelerators), miss_limits=limits, ends_when_settled=True)
    result = Simulation(config, workload).run()
    known = Outcome(
        point.name,
        system.name(point.accelerators),
        num_sent,
        ended_s=round(result.duration_s, 2),
        cpu_s=round(time.process_time() - before_s, 2),
        code=digests()[system.policy],
    )
    if result.is_abandoned:
        return _changed(known, at_most=least - 1)
    return _changed(known, **_figures_of(result, num_sent))


def _changed(outcome: Outcome, **fields: float | None) -> Outcome:
    changed: Outcome = msgspec.structs.replace(outcome, **fields)
    return changed


def _figures_of(result: SimulationResult, num_sent: int) -> dict[str, float | None]:
    of_class, beside = result.classes["rt"], result.classes.get("be")
    return {
        "num_met": round((of_class.attainment or 0.0) * num_sent),
        "num_ttft_met": round((of_class.ttft_attainment or 0.0) * num_sent),
        "num_tpot_met": round((of_class.tpot_attainment or 0.0) * num_sent),
        "completed_of_arrived": _rounded(of_class.completed_of_arrived, 4),
        "fluidity": _rounded(of_class.fluidity, 5),
        "longest_gap_s": _rounded(of_class.longest_gap_s, 3),
        "best_effort_tokens_per_s": None if beside is None else _rounded(beside.loaded_tokens_per_s, 1),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


@lru_cache(maxsize=2)
def _workload(point: Point) -> Workload:
    return point.workload().build()
