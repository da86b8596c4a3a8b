"""The search for the cheapest plan that holds: successive halving over families, bisection inside each.

1. On the shortest beginning of the workload every family's cheapest plan that holds is found by bisection.
2. The better half of the families, at least KEPT of them, goes on to the next, longer beginning. From the plan found
   before, the search goes down while plans hold, and up until one does.
3. FINALISTS of them play the whole workload. The cheapest plan that holds it is the result; of equally cheap ones the
   one that holds more.

Families that can be served and those that cannot yet are halved apart, so that neither displaces the other. Where none
holds, the best of each family at its largest go on to the end, to say what they attain.

Pure: trials out, verdicts in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from alignedserve.planning.candidates import Candidate, Family

KEPT, KEPT_OTHERS = 4, 2  # families at least, of those that can be served and of those that cannot
FINALISTS, OTHER_FINALISTS = 2, 1  # on the whole workload
SLACK = 1.3  # on the first beginning: plans that cost as much more than one that holds are left out


class Trial(NamedTuple):
    """A plan to be simulated on one of the beginnings."""

    candidate: Candidate
    stage: int
    is_limited: bool  # it may be abandoned as soon as it cannot hold


class Verdict(NamedTuple):
    """The outcome of a trial."""

    attained: float  # at most, where it was abandoned
    holds: bool


@dataclass(slots=True)
class _Row:
    """One family at one stage: the boundary between its plans that hold and those that do not."""

    family: Family
    start: int | None  # the member to begin with; None: bisection
    is_limited: bool
    num_useful: int  # members that cost no more than one that holds elsewhere
    tried: dict[int, Verdict] = field(default_factory=dict)

    @property
    def holding(self) -> int | None:
        """Return the first member known to hold."""
        return min((number for number, verdict in self.tried.items() if verdict.holds), default=None)

    @property
    def next_member(self) -> int | None:
        """Return the member to try next; None: the boundary is known."""
        if not self.tried and self.start is not None:
            return self.start if self.start < self.num_useful else None
        failing = max((number for number, verdict in self.tried.items() if not verdict.holds), default=-1)
        holding = self.holding
        above = self.num_useful if holding is None else holding
        if above - failing <= 1:
            return None
        if self.start is None:
            return (failing + above) // 2
        return failing + 1 if holding is None else holding - 1

    @property
    def rank(self) -> tuple[float, float, float]:
        """Return what families are halved by: those that hold by cost, then the others by what they attain."""
        holding = self.holding
        if holding is not None:
            return (0.0, self.family.members[holding].cost, -self.tried[holding].attained)
        return (1.0, -max((verdict.attained for verdict in self.tried.values()), default=0.0), 0.0)


class PlanSearch:
    """One search. `next_trials` and `take` alternate until there are no more trials."""

    def __init__(self, families: Sequence[Family], *, num_stages: int) -> None:
        assert num_stages >= 1, "there is the whole workload at least"
        self._num_stages = num_stages
        members = [member for family in families for member in family.members]
        self._order = {member.label: number for number, member in enumerate(members)}  # of equally good ones
        self.stage = 0
        self._rows = [_row(family, None, is_limited=False) for family in families]
        self.verdicts: dict[str, tuple[Trial, Verdict]] = {}  # of each candidate, on its longest beginning

    def next_trials(self) -> list[Trial]:
        """Return the trials that can run side by side; none: the search is over."""
        while True:
            self._bound()
            trials = [
                Trial(row.family.members[member], self.stage, row.is_limited)
                for row in self._rows
                if (member := row.next_member) is not None
            ]
            if trials or self.stage + 1 == self._num_stages:
                return trials
            self._advance()

    def take(self, outcomes: Sequence[tuple[Trial, Verdict]]) -> None:
        """Take the outcomes of the latest trials."""
        found = {trial.candidate.label: (trial, verdict) for trial, verdict in outcomes}
        self.verdicts.update(found)
        for row in self._rows:
            member = row.next_member
            if member is not None and row.family.members[member].label in found:
                row.tried[member] = found[row.family.members[member].label][1]

    def best(self, *, can_be_served: bool | None = None) -> Candidate | None:
        """Return the cheapest plan that holds the whole workload; None: none does."""
        holding = [
            (trial.candidate.cost, -verdict.attained, self._order[trial.candidate.label], trial.candidate)
            for trial, verdict in self.verdicts.values()
            if verdict.holds and self._is_final(trial) and can_be_served in (None, trial.candidate.can_be_served)
        ]
        return min(holding)[-1] if holding else None

    def nearest(self) -> Candidate:
        """Return the plan that attains most of the whole workload, of those that can be served if there are any."""
        final = [
            (not one.can_be_served, -verdict.attained, one.cost, self._order[one.label], one)
            for (one, stage, _), verdict in self.verdicts.values()
            if stage + 1 == self._num_stages
        ]
        return min(final)[-1]

    def _is_final(self, trial: Trial) -> bool:
        return trial.stage + 1 == self._num_stages

    def _bound(self) -> None:
        """Leave out plans that cost more than one that holds the same beginning."""
        slack = SLACK if self.stage == 0 and self._num_stages > 1 else 1.0
        for can_be_served in (True, False):
            rows = [row for row in self._rows if row.family.can_be_served is can_be_served]
            costs = [row.family.members[row.holding].cost for row in rows if row.holding is not None]
            for row in rows if costs else ():
                row.num_useful = sum(member.cost <= slack * min(costs) for member in row.family.members)

    def _advance(self) -> None:
        """Take the better families to the next beginning."""
        self.stage += 1
        served = [row for row in self._rows if row.family.can_be_served]
        others = [row for row in self._rows if not row.family.can_be_served]
        if self.stage + 1 == self._num_stages:
            kept = _ranked(served)[:FINALISTS] + _ranked(others)[:OTHER_FINALISTS]
        else:
            kept = _better_half(served, KEPT) + _better_half(others, KEPT_OTHERS)
        any_holds = any(row.holding is not None for row in kept)
        self._rows = [
            _row(row.family, len(row.family.members) - 1 if row.holding is None else row.holding, is_limited=any_holds)
            for row in kept
            if row.holding is not None or not any_holds
        ]


def _row(family: Family, start: int | None, *, is_limited: bool) -> _Row:
    return _Row(family, start, is_limited, len(family.members))


def _ranked(rows: Sequence[_Row]) -> list[_Row]:
    return sorted(rows, key=lambda row: row.rank)


def _better_half(rows: Sequence[_Row], least: int) -> list[_Row]:
    return _ranked(rows)[: max(least, len(rows) // 2)]
