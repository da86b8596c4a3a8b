"""Predicts what a prompt takes in parts: each costs an iteration with all decodes, and reads keys of earlier ones."""

import math

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork


def in_parts_s(
    costs: CostModel, num_tokens: int, part: int, num_cached: int, *, now: IterationWork, later: IterationWork
) -> float:
    """Return the seconds until a prompt is computed in parts, one in each iteration from now on; inf without a part.

    `num_tokens`: of the prompt, after `num_cached`. `part`: tokens of each but the last, which may have fewer. `now`,
    `later`: what else this iteration and each of those that follow compute. A part reads as many keys more than the one
    before it: of all that follow in full, the mean of the first and the last stands for each.
    """
    if part <= 0:
        return math.inf
    end = num_cached + num_tokens

    def part_s(beside: IterationWork, start: int, size: int) -> float:
        iteration = beside.copy()
        iteration.add_chunk(size, start, is_last=start + size == end)
        return costs.iteration_s(iteration)

    first = min(part, num_tokens)
    total_s = part_s(now, num_cached, first)
    num_full, num_last = divmod(num_tokens - first, part)
    if num_full:
        total_s += num_full * (part_s(later, num_cached + first, part) + part_s(later, end - num_last - part, part)) / 2
    if num_last:
        total_s += part_s(later, end - num_last, num_last)
    return total_s
