"""How long a prompt takes in parts: each costs an iteration with all decodes, and reads the keys of those before it."""

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork


def in_parts_s(costs: CostModel, work: IterationWork, num_tokens: int, part: int, *, num_cached: int) -> float:
    """Return the seconds until a prompt is computed in parts, each in an iteration with all of `work`; inf without one.

    `num_tokens`: of the prompt, after `num_cached`. `part`: tokens of each but the last, which may have fewer. Each
    reads as many keys more than the one before it: the mean of the first and the last stands for all of one size.
    """
    if part <= 0:
        return float("inf")
    num_full, num_last = divmod(num_tokens, part)
    end = num_cached + num_tokens

    def part_s(size: int, start: int) -> float:
        iteration = work.copy()
        iteration.add_chunk(size, start, is_last=start + size == end)
        return costs.iteration_s(iteration)

    total_s = 0.0
    if num_full:
        total_s += num_full * (part_s(part, num_cached) + part_s(part, end - num_last - part)) / 2
    if num_last:
        total_s += part_s(num_last, end - num_last)
    return total_s
