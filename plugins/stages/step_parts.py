"""How a step is cut into parts that follow each other through the stages of a worker. Pure.

With as many parts on their way as there are stages, each stage has one to compute. While a step only decodes, its parts
are groups of sequences, of equal sizes: when the tokens of the first group are known, the group goes on with its next
ones, and is ahead of the step that will ask for them; so the groups go round. Prompts are cut into pieces, whose order
keeps each token behind those before it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from alignedserve.core.ids import RequestId

Slice = tuple[RequestId, int]  # tokens to compute of a sequence

# Pieces of prompts have at least so many tokens: a part reads all weights of its stage.
LEAST_TOKENS = 64
_MOST_PARTS = 4  # for each stage


def group_size(num_sequences: int, num_stages: int) -> int:
    return max(-(-num_sequences // num_stages), 1)


def step_parts(
    slices: Sequence[Slice],
    ahead_sizes: Sequence[int],
    num_stages: int,
    is_whole: Callable[[RequestId], bool] = lambda request_id: False,
) -> list[list[Slice]]:
    """Return the parts of a step. `ahead_sizes`: sequences of the step's parts that are on their way already.

    `is_whole`: sequences whose slices are not cut.
    """
    if not slices:
        return []
    num_tokens = sum(count for _, count in slices)
    if num_tokens == len(slices):
        return _groups(slices, ahead_sizes, num_stages)
    return _pieces(slices, num_tokens, num_stages, is_whole)


def _groups(slices: Sequence[Slice], ahead_sizes: Sequence[int], num_stages: int) -> list[list[Slice]]:
    total = len(slices) + sum(ahead_sizes)
    least = total // num_stages
    lacking = sum(max(least - size, 0) for size in ahead_sizes)
    groups = []
    if 0 < lacking < len(slices):
        groups.append(list(slices[:lacking]))
        slices = slices[lacking:]
    num_groups = min(max(num_stages - len(ahead_sizes), 1), len(slices))
    ends = [len(slices) * index // num_groups for index in range(num_groups + 1)]
    return groups + [list(slices[first:end]) for first, end in pairwise(ends)]


def _pieces(
    slices: Sequence[Slice], num_tokens: int, num_stages: int, is_whole: Callable[[RequestId], bool]
) -> list[list[Slice]]:
    num_parts = min(max(num_tokens // LEAST_TOKENS, 1), _MOST_PARTS * num_stages)
    size = -(-num_tokens // num_parts)
    ordered = sorted(slices, key=lambda piece: piece[1] > 1)  # stable
    parts: list[list[Slice]] = [[]]
    room = size
    for request_id, count in ordered:
        left = count
        while left:
            if not room:
                parts.append([])
                room = size
            taken = left if is_whole(request_id) else min(left, room)
            parts[-1].append((request_id, taken))
            left, room = left - taken, max(room - taken, 0)
    return parts
