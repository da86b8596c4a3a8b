"""The search for the cheapest plan that holds: bisection inside each family, then the whole workload, cheapest first.

1. Where the workload has windows, bisection finds every family's cheapest plan that holds them. It starts from an
   estimate of the workers needed, and with the cheapest family, as plans that cost SLACK times as much as one that
   holds are left out.
2. The cheapest plan left plays the whole workload; of equally cheap plans the one that attained most. Where it fails,
   the next one plays it, until a plan holds that costs no more than any left. The plan with one worker less plays it
   too, and so checks what the windows said of it, unless the windows held more misses than the whole may.

Without windows the first step plays the whole workload, which leaves nothing to the second.

Families that can be served, and families that cannot be served yet, are searched apart, so that neither displaces the
other. Where no plan holds, the best of the largest ones plays the whole workload to its end, to say what it attains.

Pure: trials out, verdicts in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from lab.planning.candidates import Candidate, Family

SLACK = 1.3  # on windows: plans that cost as much more than one that holds are left out


class Trial(NamedTuple):
    """A plan to be simulated."""

    candidate: Candidate
    is_whole: bool  # the whole workload, else windows of it
    is_limited: bool = True  # it may be abandoned as soon as it cannot hold


class Verdict(NamedTuple):
    """The outcome of a trial."""

    attained: float  # at most, where it was abandoned
    holds: bool
    is_refuted: bool = False  # on windows: the whole cannot hold either
    num_windows: int = 0  # that were played
    is_abandoned: bool = False


@dataclass(slots=True)
class _Row:
    family: Family
    number: int
    first: int  # the member to begin with
    num_useful: int = 0  # members that cost little more than one that holds elsewhere
    tried: dict[int, Verdict] = field(default_factory=dict)  # by member, on windows if there are any
    played: dict[int, Verdict] = field(default_factory=dict)  # by member, the whole workload

    def cost(self, member: int) -> float:
        return self.family.members[member].cost if member < len(self.family.members) else inf

    @property
    def holding(self) -> int | None:
        return min((number for number, verdict in self.tried.items() if verdict.holds), default=None)

    @property
    def next_tried(self) -> int | None:
        failing = max((number for number, verdict in self.tried.items() if not verdict.holds), default=-1)
        holding = self.holding
        above = self.num_useful if holding is None else holding
        if above - failing <= 1:
            return None
        stride = 1 << max(len(self.tried) - 1, 0)
        if not self.tried:
            return min(self.first, above - 1)
        if holding is None:
            return min(failing + stride, above - 1)
        return max(holding - stride, 0) if failing < 0 else (failing + above) // 2

    @property
    def next_played(self) -> int:
        failing = max((number for number, verdict in self.played.items() if not verdict.holds), default=-1)
        beyond = max((number for number, verdict in self.tried.items() if not verdict.holds), default=-1)
        holding = min((number for number, verdict in self.played.items() if verdict.holds), default=inf)
        return int(min(max(failing, beyond) + 1, holding))

    @property
    def smaller(self) -> int | None:
        member = self.next_played - 1
        if member < 0 or member in self.played or (member in self.tried and self.tried[member].is_refuted):
            return None
        return member

    @property
    def rank(self) -> tuple[bool, int, float, int]:
        last = self.tried.get(len(self.family.members) - 1, Verdict(0.0, holds=False))
        return (not last.holds, -last.num_windows, -last.attained, self.number)


class PlanSearch:
    """One search. `next_trials` and `take` alternate until there are no more trials."""

    def __init__(self, families: Sequence[Family], *, has_windows: bool, firsts: Sequence[int] | None = None) -> None:
        """`firsts`: the member of each family to begin with; None: the one in the middle."""
        middles = [(len(family.members) - 1) // 2 for family in families]
        rows = zip(families, firsts or middles, strict=True)
        self._rows = [_Row(family, number, first) for number, (family, first) in enumerate(rows)]
        self._has_windows = has_windows
        self._places = {
            member.label: (row, index) for row in self._rows for index, member in enumerate(row.family.members)
        }

    def next_trials(self) -> list[Trial]:
        """Return the trials that can run side by side; none: the search is over."""
        served = [row for row in self._rows if row.family.can_be_served]
        others = [row for row in self._rows if not row.family.can_be_served]
        trials = [trial for rows in (served, others) for trial in self._tried_next(rows)]
        if trials:
            return trials
        if self._has_windows:
            trials = [*_played_next(served, inf), *_played_next(others, _least_cost(served))]
        return trials or self._to_the_end(served or others)

    def take(self, outcomes: Sequence[tuple[Trial, Verdict]]) -> None:
        for trial, verdict in outcomes:
            row, index = self._places[trial.candidate.label]
            if trial.is_whole:
                row.played[index] = verdict
            if trial.is_whole != self._has_windows:
                row.tried[index] = verdict

    def best(self, *, can_be_served: bool | None = None) -> Candidate | None:
        holding = [
            (row.cost(index), -verdict.attained, row.number, row.family.members[index])
            for row in self._rows
            for index, verdict in row.played.items()
            if verdict.holds and can_be_served in (None, row.family.can_be_served)
        ]
        return min(holding)[-1] if holding else None

    def nearest(self) -> Candidate:
        ended = [
            (not row.family.can_be_served, -verdict.attained, row.cost(index), row.number, row.family.members[index])
            for row in self._rows
            for index, verdict in row.played.items()
            if not verdict.is_abandoned
        ]
        return min(ended)[-1]

    def _tried_next(self, rows: Sequence[_Row]) -> list[Trial]:
        slack = SLACK if self._has_windows else 1.0
        costs = [row.cost(row.holding) for row in rows if row.holding is not None]
        for row in rows:
            row.num_useful = sum(member.cost <= slack * min(costs, default=inf) for member in row.family.members)
        tried = [(row, next_tried) for row in rows if (next_tried := row.next_tried) is not None]
        if not costs:
            least = min((row.cost(index) for row, index in tried), default=inf)
            tried = [(row, index) for row, index in tried if row.cost(index) <= least]
        return [Trial(row.family.members[index], is_whole=not self._has_windows) for row, index in tried]

    def _to_the_end(self, rows: Sequence[_Row]) -> list[Trial]:
        ended = (verdict for row in rows for verdict in row.played.values() if not verdict.is_abandoned)
        if self.best() is not None or next(ended, None) is not None:
            return []
        best = min(rows, key=lambda row: row.rank)
        return [Trial(best.family.members[-1], is_whole=True, is_limited=False)]


def _cheapest(rows: Sequence[_Row]) -> float:
    held = (row.cost(index) for row in rows for index, verdict in row.played.items() if verdict.holds)
    return min(held, default=inf)


def _least_cost(rows: Sequence[_Row]) -> float:
    return min((row.cost(row.next_played) for row in rows), default=inf)


def _played_next(rows: Sequence[_Row], below: float) -> list[Trial]:
    if not any(row.holding is not None for row in rows):
        return []
    cheapest, held = min(rows, key=_order), _cheapest(rows)
    member, smaller = cheapest.next_played, cheapest.smaller
    places = []
    if cheapest.cost(member) < min(below, held):
        places.append(member)
    if smaller is not None and cheapest.cost(member) < below:
        places.append(smaller)
    return [Trial(cheapest.family.members[index], is_whole=True) for index in places]


def _order(row: _Row) -> tuple[float, bool, float, int]:
    next_played = row.next_played
    verdict = row.played.get(next_played) or row.tried.get(next_played)
    return (
        row.cost(next_played),
        next_played not in row.played,
        -(verdict.attained if verdict is not None else 0.0),
        row.number,
    )
