"""Jitter of iteration times, as measured in a recorded run."""

import random
from collections.abc import Sequence

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork

_RUN_LENGTH = 16  # a busy machine is slow for several successive iterations


class JitteryCosts:
    """Cost model for engines, which multiplies each iteration's cost by a measured ratio.

    Ratios come in runs as they were recorded, each run from a place drawn by the seed. Not for policies, which need the
    expected cost.
    """

    def __init__(self, costs: CostModel, ratios: Sequence[float], seed: int) -> None:
        """`ratios`: measured by expected, of consecutive iterations; at least one."""
        assert ratios, "nothing to draw from"
        self._costs = costs
        self._ratios = ratios
        self._random = random.Random(seed)  # noqa: S311
        self._place = 0
        self._num_left = 0

    def iteration_s(self, work: IterationWork) -> float:
        """See CostModel."""
        if not self._num_left:
            self._place, self._num_left = self._random.randrange(len(self._ratios)), _RUN_LENGTH
        ratio = self._ratios[self._place]
        self._place = (self._place + 1) % len(self._ratios)
        self._num_left -= 1
        return ratio * self._costs.iteration_s(work)

    def swap_s(self, num_tokens: float) -> float:
        """See CostModel."""
        return self._costs.swap_s(num_tokens)
