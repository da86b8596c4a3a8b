"""Jitter of iteration times, as measured in a recorded run."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork

_RUN_LENGTH = 256  # a machine that others use too is slow for seconds, in which policies learn that it is


class Ratio(NamedTuple):
    """Measured by expected time of an iteration, and whether it had a part of a prompt."""

    value: float
    has_prompt: bool = False


class JitteryCosts:
    """Cost model for engines, which multiplies each iteration's cost by a measured ratio.

    Ratios come in runs as they were recorded, each run from a place drawn by the seed; an iteration with a prompt takes
    the next ratio of one with a prompt, as these vary less, and any other the next of one without. Not for policies,
    which need the expected cost.
    """

    def __init__(self, costs: CostModel, ratios: Sequence[Ratio], seed: int | str) -> None:
        assert ratios, "nothing to draw from"
        self._costs = costs
        self._ratios = ratios
        self._next = {has_prompt: _next_of(ratios, has_prompt=has_prompt) for has_prompt in (False, True)}
        self._random = random.Random(seed)  # noqa: S311
        self._place = 0
        self._num_left = 0

    def iteration_s(self, work: IterationWork) -> float:
        if not self._num_left:
            self._place, self._num_left = self._random.randrange(len(self._ratios)), _RUN_LENGTH
        found = self._next[work.num_chunks > 0][self._place]
        self._place = (found + 1) % len(self._ratios)
        self._num_left -= 1
        return self._ratios[found].value * self._costs.iteration_s(work)

    def swap_s(self, num_tokens: float) -> float:
        return self._costs.swap_s(num_tokens)


def _next_of(ratios: Sequence[Ratio], *, has_prompt: bool) -> list[int]:
    places = [place for place, ratio in enumerate(ratios) if ratio.has_prompt is has_prompt]
    if not places:
        return list(range(len(ratios)))
    following, coming = places[0], [0] * len(ratios)
    for place in reversed(range(len(ratios))):
        if ratios[place].has_prompt is has_prompt:
            following = place
        coming[place] = following
    return coming
