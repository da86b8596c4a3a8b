"""Means over seeds, with how sure they are."""

import math
from collections.abc import Sequence
from typing import NamedTuple

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
