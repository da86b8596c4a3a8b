"""What a figure needs to be called a rate: time enough, seeds enough, and as many completions as arrivals."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

LEAST_S = 600.0  # of arrivals
LEAST_SEEDS = 5
LEAST_COMPLETED = 0.95  # of arrivals, after the first fifth of their time
_TWO_SIDED_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, by degrees of freedom
_NORMAL_95 = 1.96


class Interval(NamedTuple):
    """A mean over seeds and the half of its 95 % interval; None: of one seed alone there is none."""

    mean: float
    half: float | None

    @property
    def low(self) -> float:
        """Return the lower end; of one seed alone, its value."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """Return the upper end."""
        return self.mean + (self.half or 0.0)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of a figure over seeds, with Student's 95 % interval. There must be some values."""
    num = len(values)
    mean = math.fsum(values) / num
    if num == 1:
        return Interval(mean, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (num - 1))
    quantile = _TWO_SIDED_95[num - 2] if num - 2 < len(_TWO_SIDED_95) else _NORMAL_95
    return Interval(mean, quantile * deviation / math.sqrt(num))


def is_long(row: dict[str, Any]) -> bool:
    """Return whether the requests of a row were sent for as long as a rate needs."""
    return float(row.get("sent_s") or 0.0) >= LEAST_S


def is_served(completed_of_arrived: Iterable[float]) -> bool:
    """Return whether the rate is served: by the mean over its seeds, completions keep up with arrivals."""
    values = list(completed_of_arrived)
    return sum(values) / len(values) >= LEAST_COMPLETED
