"""A plan on one window after another until it is known whether it holds.

The busiest window comes first. A plan that holds it plays the next busy one, and is taken to hold once two windows are
played and none misses more than the share allowed: lighter ones miss less. One that does not plays the windows that
stand for most, and fails as soon as the windows played miss more than the whole may, group by group, with a margin for
chance. Windows start empty, which flatters a plan that is overloaded for longer than a window.

Pure: results in, windows to play out.
"""

from collections.abc import Iterator, Sequence
from math import floor, sqrt
from typing import NamedTuple

from lab.planning.trials import HOPELESS, Goals, Outcome, WindowsPlayed, attained_of, backlog_of
from lab.planning.windows import Group
from lab.sim.result import SimulationResult

_MARGIN_DEVIATIONS = 1.64  # by which an estimate may fall short of the goal
_LEAST_MARGIN = 0.002
_LEAST_PLAYED = 2  # windows, before the lighter ones are taken for granted


class _Played(NamedTuple):
    group: Group
    result: SimulationResult
    missing: dict[str, float]  # share of each class with objectives; at least, where it was abandoned
    backlog: float  # of all classes without, for all windows of the group

    def total(self, name: str) -> float:
        return self.group.total_requests.get(name) or self.group.num_windows * self.result.classes[name].num_sent


class WindowedTrial:
    """One plan. `next_windows` and `take` alternate until there are no more windows."""

    def __init__(self, groups: Sequence[Group], goals: Goals, *, speed: float = 1.0, is_thorough: bool = False) -> None:
        assert groups, "there are windows"
        self._groups, self._goals = groups, goals
        self._speed, self._is_thorough = speed, is_thorough
        self._played: list[_Played] = []
        self._error: str | None = None
        self._margins = {name: self._margin(name) for name in goals.bounded}

    def next_windows(self) -> list[Group]:
        """Return the windows to play next, side by side; none: enough is known."""
        if self._is_settled():
            return []
        played = {played.group.window for played in self._played}
        left = [group for group in self._groups if group.window not in played]
        if self._is_thorough and self._played:
            return left
        return left[:1] if self._is_well() else [max(left, key=lambda group: group.num_windows)]

    def limits(self, group: Group) -> dict[str, int]:
        """Return the misses of a window beyond which it is not played to its end."""
        missing = 1.0 - min(HOPELESS, self._goals.share)
        wanted = ((name, number) for name, number in group.num_requests.items() if name in self._goals.num_requests)
        return {name: floor(number * missing + 1e-9) for name, number in wanted}

    def take(self, group: Group, result: SimulationResult | None, error: str | None) -> None:
        if result is None:
            self._error = self._error or error or "no result"
            return
        span_s = (group.window.end_s - group.window.begins_s) / self._speed
        missing, backlog = {}, 0.0
        for name, class_result in result.classes.items():
            if name in self._goals.bounded:
                missing[name] = 1.0 - attained_of(class_result, group.num_requests.get(name))
            elif name in self._goals.queued:
                backlog += backlog_of(class_result, span_s)
        self._played.append(_Played(group, result, missing, group.num_windows * backlog))

    def outcome(self) -> Outcome:
        played = WindowsPlayed(len(self._played), len(self._groups))
        if self._error is not None:
            return Outcome(0.0, holds=False, keeps_up=False, result=None, error=self._error, windows=played)
        keeps_up = sum(run.backlog for run in self._played) <= 0.0
        return Outcome(
            attained=min((self._attained(name) for name in self._goals.bounded), default=0.0),
            holds=keeps_up and not self._is_failing(),
            keeps_up=keeps_up,
            result=self._played[0].result,
            windows=played,
            is_abandoned=any(run.result.is_abandoned for run in self._played),
            is_refuted=self._is_refuted(),
        )

    # --- what is known

    def _is_settled(self) -> bool:
        if self._error is not None or len(self._played) == len(self._groups):
            return True
        if self._is_thorough:
            return any(run.result.is_abandoned for run in self._played)
        return self._is_failing() or (len(self._played) >= _LEAST_PLAYED and self._is_well())

    def _is_failing(self) -> bool:
        if self._is_refuted():
            return True
        has_played_all = len(self._played) == len(self._groups)
        for name in self._goals.bounded:
            if name not in self._goals.num_requests and not has_played_all:
                continue  # how many requests a closed loop will have is not known
            if self._missed(name) > self._allowed(name) + 1e-9:
                return True
        return False

    def _is_well(self) -> bool:
        allowed = 1.0 - self._goals.share + 1e-9
        return all(max(run.missing.values(), default=0.0) <= allowed and run.backlog <= 0.0 for run in self._played)

    def _is_refuted(self) -> bool:
        limits = self._goals.limits()
        return any(
            sum(run.missing.get(name, 0.0) * run.group.num_requests.get(name, 0) for run in self._played) > limit + 1e-6
            for name, limit in limits.items()
        )

    def _of(self, name: str) -> Iterator[_Played]:
        return (played for played in self._played if name in played.missing)

    def _missed(self, name: str) -> float:
        return sum(run.missing[name] * run.total(name) for run in self._of(name))

    def _allowed(self, name: str) -> float:
        number = self._goals.num_requests.get(name)
        known = sum(run.total(name) for run in self._of(name)) if number is None else number
        return known * (1.0 - self._goals.share + self._margins[name])

    def _attained(self, name: str) -> float:
        total = sum(run.total(name) for run in self._of(name))
        return 1.0 - self._missed(name) / total if total else 1.0

    def _margin(self, name: str) -> float:
        pairs = [(group.num_requests.get(name, 0), group.total_requests.get(name, 0)) for group in self._groups]
        total = sum(of_group for _, of_group in pairs)
        squares = sum(of_group * of_group / number for number, of_group in pairs if number)
        share = self._goals.share
        deviation = sqrt(share * (1.0 - share) * squares) / total if total else 0.0
        return _MARGIN_DEVIATIONS * deviation + _LEAST_MARGIN
