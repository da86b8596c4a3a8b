"""Whose line is next, and by when it should be done.

Slack of a batch is the time left to its window's end less the time that its remaining lines take at the present rate.
The batch with the least goes first. Example: A has 3 600 s and 2 000 s of work left, B 600 s and 100 s of work: A's
slack is 1 600 s and B's 500 s, so B goes first. A waits and loses nothing, as slack is what it can spare.

A line's own deadline spreads what is left over the window, so that a batch asks for a steady share and not for nothing
at first and everything at the end: the k-th of n lines in the cluster gets `k / n_left` of the time left, but never
less than a line usually takes, four times over. Example: 24 h left, 50 000 lines: the 64th in flight has 110 s.
"""

from collections.abc import Iterable
from typing import NamedTuple

_WINDOW = 64.0  # observations that weigh in a running mean
_FIRST_LINE_S = 10.0  # what a line is thought to take before one has ended
_PATIENCE = 4.0  # of what a line usually takes, the least that its deadline allows
_MARGIN = 0.95  # of the time left; the rest is for writing and for what was not foreseen


class Contender(NamedTuple):
    """A batch that has a line to run now."""

    place: int  # whatever names it to the caller
    expires_s: float
    work_s: float  # that what is left of it takes
    created_s: float


class Pace:
    """How long a line is in the cluster, learned from those that ended."""

    def __init__(self) -> None:
        self.line_s = _FIRST_LINE_S
        self._num_ended = 0

    def ended(self, duration_s: float) -> None:
        """A line ended after so long in the cluster."""
        self._num_ended += 1
        weight = max(1.0 / _WINDOW, 1.0 / (self._num_ended + 1))
        self.line_s += (duration_s - self.line_s) * weight


def by_slack(contenders: Iterable[Contender], now: float) -> list[int]:
    """Places of the batches, the one with the least slack first."""
    ordered = sorted(contenders, key=lambda one: (one.expires_s - now - one.work_s, one.created_s, one.place))
    return [one.place for one in ordered]


def line_deadline_s(time_left_s: float, place: int, num_left: int, line_s: float) -> float:
    """Seconds that the `place`-th line in flight (from 1) of `num_left` may take."""
    paced_s = _MARGIN * time_left_s * place / max(num_left, 1)
    return max(0.001, min(time_left_s, max(paced_s, _PATIENCE * line_s)))
