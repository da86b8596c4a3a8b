"""Ideal prefix caches, to compare real ones with: what one cache of some size would have hit in a workload.

An ideal cache is a single one, holds a prompt's blocks as soon as the prompt comes, and gives none of its memory to
requests that run. Prompts come one after the other, each as the ids of its blocks, where equal ids mean that the blocks
and all before them are equal.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from alignedserve.workload.requests import TextRun

Prompt = Sequence[Hashable]  # ids of its full blocks, in order


class HitCount(NamedTuple):
    """Blocks that were looked up, and found."""

    num_blocks: int = 0
    num_hits: int = 0

    @property
    def rate(self) -> float:
        """Return the share that was found; 0 of none."""
        return self.num_hits / self.num_blocks if self.num_blocks else 0.0

    def plus(self, num_blocks: int, num_hits: int) -> "HitCount":
        """Return the count with a further prompt."""
        return HitCount(self.num_blocks + num_blocks, self.num_hits + num_hits)


class PromptBlocks:
    """Numbers the blocks of prompts by what they hold and what comes before them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[tuple[int, tuple[TextRun, ...]], int] = {}

    def of(self, runs: Sequence[TextRun], prompt_len: int) -> list[int]:
        """Return the numbers of the full blocks that a prompt's runs cover, the last token of the prompt left out."""
        size, parent, numbers = self._block_size, -1, []
        num_left = prompt_len - 1  # a prompt's last token is always computed
        piece: list[TextRun] = []
        room = size
        for run in runs:
            rest = min(run.num_tokens, num_left)
            num_left -= rest
            while rest >= room:
                piece.append(TextRun(run.text, room))
                rest, room = rest - room, size
                parent = self._numbers.setdefault((parent, tuple(piece)), len(self._numbers))
                numbers.append(parent)
                piece = []
            if rest:
                piece.append(TextRun(run.text, rest))
                room -= rest
        return numbers


def unbounded(prompts: Sequence[Prompt]) -> HitCount:
    """Count the hits of a cache that keeps everything."""
    return least_recently_used(prompts, math.inf)


def least_recently_used(prompts: Sequence[Prompt], capacity: float) -> HitCount:
    """Count the hits of a cache of `capacity` blocks that drops the least recently used ones.

    Of one prompt's blocks the last ones are dropped first.
    """
    cached: OrderedDict[Hashable, None] = OrderedDict()
    count = HitCount()
    for prompt in prompts:
        count = count.plus(len(prompt), _num_hits(prompt, cached))
        for block in reversed(prompt):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return count


def farthest_next_use(prompts: Sequence[Prompt], capacity: float) -> HitCount:
    """Count the hits of Belady's choice, which knows the future: no cache of this size has more.

    It drops the block that is needed last. A block is needed no later than any that follows it, so that the last blocks
    of prompts leave first by themselves.
    """
    next_uses = _next_uses(prompts)
    cached: dict[Hashable, int] = {}  # next use of each
    last_needed: list[tuple[int, int, Hashable]] = []  # a heap; an entry with another next use is void
    count = HitCount()
    for prompt, uses in zip(prompts, next_uses, strict=True):
        count = count.plus(len(prompt), _num_hits(prompt, cached))
        for depth, (block, use) in enumerate(zip(prompt, uses, strict=True)):
            cached[block] = use
            heapq.heappush(last_needed, (-use, -depth, block))
        while len(cached) > capacity:
            use, _, block = heapq.heappop(last_needed)
            if cached.get(block) == -use:
                del cached[block]
    return count


def _num_hits(prompt: Prompt, cached: dict[Hashable, int] | OrderedDict[Hashable, None]) -> int:
    return next((place for place, block in enumerate(prompt) if block not in cached), len(prompt))


def _next_uses(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return, for every block of every prompt, the number of the next prompt that has it."""
    latest: dict[Hashable, int] = {}
    found: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        found.append([latest.get(block, len(prompts)) for block in prompts[number]])
        latest.update(dict.fromkeys(prompts[number], number))
    return found[::-1]
