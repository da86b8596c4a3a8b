"""Measured points as a function that never falls."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise


class Curve:
    """Piecewise linear through (x, y) points; a dip counts as what came before it.

    Below the first point it is flat, beyond the last it goes on as between the last two. At least two points, x rising.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        found = list(points)
        assert len(found) >= 2, "one point is no curve"
        assert all(left[0] < right[0] for left, right in pairwise(found)), "x must rise"
        self._xs = [x for x, _ in found]
        self._ys = list(accumulate((y for _, y in found), max))

    def at(self, x: float) -> float:
        if x <= self._xs[0]:
            return self._ys[0]
        last = min(bisect_right(self._xs, x), len(self._xs) - 1)
        left, right = self._xs[last - 1], self._xs[last]
        low, high = self._ys[last - 1], self._ys[last]
        return low + (high - low) * (x - left) / (right - left)
