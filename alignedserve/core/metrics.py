"""The formulas of all metrics, shared by load generator, simulator and benchmarks.

Times are seconds on one monotonic clock. A measure that does not exist (a request without tokens has no first token)
is None, never 0.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.request import Slo

READABLE_GAP_S = 2.0  # an answer that is silent for longer stands still before its reader's eyes
STEADY_FROM = 0.2  # of the time of sending: what came before is the filling of an empty system


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary statistics of a set of measurements."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Deadlines(NamedTuple):
    """The deadlines of tokens, and those that were met."""

    num_due: int
    num_met: int


NO_DEADLINES = Deadlines(0, 0)


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return a percentile, linearly interpolated between the two closest ranks.

    Rank `percent / 100 * (n - 1)` counted from 0, as numpy's default does. `ascending` is sorted and not empty.
    """
    assert ascending, "a percentile of nothing"
    assert 0.0 <= percent <= 100.0, "a percentile outside 0..100"
    rank = percent / 100.0 * (len(ascending) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (ascending[above] - ascending[below]) * (rank - below)


def describe(values: Sequence[float]) -> Distribution | None:
    """Compute mean, percentiles and maximum; None without values."""
    if not values:
        return None
    ascending = sorted(values)
    return Distribution(
        count=len(ascending),
        mean=math.fsum(ascending) / len(ascending),
        p50=percentile(ascending, 50),
        p90=percentile(ascending, 90),
        p95=percentile(ascending, 95),
        p99=percentile(ascending, 99),
        max=ascending[-1],
    )


def ttft_s(arrival_s: float, token_times_s: Sequence[float]) -> float | None:
    """Return the time to first token."""
    return token_times_s[0] - arrival_s if token_times_s else None


def tbt_s(token_times_s: Sequence[float]) -> tuple[float, ...]:
    """Return the time between tokens: each gap between an output token and the one before it."""
    return tuple(map(operator.sub, itertools.islice(token_times_s, 1, None), token_times_s))


def tpot_s(token_times_s: Sequence[float], num_tokens: int | None = None) -> float | None:
    """Return the time per output token after the first: a request's mean gap; None with fewer than two tokens.

    `num_tokens`: the true number of tokens if several came at one time and only one time was recorded.
    """
    count = len(token_times_s) if num_tokens is None else num_tokens
    if count < 2 or len(token_times_s) < 2:
        return None
    return (token_times_s[-1] - token_times_s[0]) / (count - 1)


def meets_slo(slo: Slo, *, ttft: float | None, tpot: float | None, end_to_end: float) -> bool:
    """Return True if a completed request met every objective it had.

    No first token misses a TTFT objective; a single token has no gap and so cannot miss a TPOT objective.
    """
    if slo.ttft_s is not None and (ttft is None or ttft > slo.ttft_s):
        return False
    if slo.tpot_s is not None and tpot is not None and tpot > slo.tpot_s:
        return False
    return slo.deadline_s is None or end_to_end <= slo.deadline_s


def token_deadlines(
    slo: Slo,
    arrival_s: float,
    token_times_s: Sequence[float],
    *,
    ended_s: float | None = None,
    is_cut: bool = False,
    pace: float = 1.0,
) -> Deadlines:
    """Count the deadlines of a request's tokens, of which the fluidity index (Etalon) is the share that was met.

    The first token is due a TTFT after the arrival and each other a TPOT after the deadline before, so that time gained
    is carried over. A late token misses its deadline and one more for every TPOT that it is late, and the schedule goes
    on from it. `ended_s`: when a request ended that did not complete; it misses the next deadline in any case.
    `is_cut`: it was the measurement that ended, and only what was due until then counts. `pace`: tokens that came at
    one recorded time, in the mean.
    """
    due_s = None if slo.ttft_s is None else arrival_s + slo.ttft_s
    step_s = None if slo.tpot_s is None else slo.tpot_s * pace
    num_due = num_met = 0
    for time_s in token_times_s:
        if due_s is not None and time_s <= due_s:
            num_due, num_met = num_due + 1, num_met + 1
        elif due_s is not None:
            num_due += _num_missed(time_s - due_s, step_s)
            due_s = time_s
        if step_s is None:
            due_s = None
            break
        due_s = (time_s if due_s is None else due_s) + step_s
    if ended_s is not None and due_s is not None and (ended_s > due_s or not is_cut):
        num_due += _num_missed(max(ended_s - due_s, 0.0), step_s)
    return Deadlines(num_due, num_met)


def _num_missed(late_s: float, step_s: float | None) -> int:
    return 1 + (int(late_s // step_s) if step_s else 0)


def completed_of_arrived(arrivals_s: Sequence[float], completions_s: Sequence[float]) -> float | None:
    """Return completions by arrivals while requests arrive, the first fifth of that time left out.

    Below about 1 the queue grows as long as the load lasts: the rate is not served, however well the first are.
    """
    first_s, last_s = min(arrivals_s, default=0.0), max(arrivals_s, default=0.0)
    from_s = first_s + STEADY_FROM * (last_s - first_s)
    num_arrived, num_completed = (
        sum(from_s < time_s <= last_s for time_s in times_s) for times_s in (arrivals_s, completions_s)
    )
    return num_completed / num_arrived if num_arrived else None


def stalled(longest_gaps_s: Sequence[float]) -> float | None:
    """Return the share of answers that stood still: whose longest gap passes the readable one, whatever their mean."""
    return attainment(sum(gap > READABLE_GAP_S for gap in longest_gaps_s), len(longest_gaps_s))


def attainment(num_met: int, num_sent: int) -> float | None:
    """Return the share of sent requests that met their objectives; a failed or rejected one counts as missed."""
    return num_met / num_sent if num_sent else None


def per_second(count: float, duration_s: float) -> float:
    """Return a rate: of requests, of tokens, or (goodput) of requests that met all their objectives."""
    return count / duration_s if duration_s > 0 else 0.0


_MOST_DIGITS = 8  # what differs less from a whole is what sums of floats leave


def in_percent(share: float, digits: int = 1) -> str:
    """Format a share with enough digits that rounding never shows 99.96 % as 100 %, or a small share as 0 %."""
    for more in range(digits, _MOST_DIGITS + 1):
        words = f"{share:.{more}%}"
        if not 0.0 < share < 1.0 or float(words.removesuffix("%")) not in {0.0, 100.0}:
            return words
    return f"{share:.{digits}%}"
