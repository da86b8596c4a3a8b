"""Values of cached blocks: which one leaves first when memory is needed.

Frequency with dynamic aging (GreedyDual: Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency
caching", 1998): a block's value is the value of the one evicted last, plus how often it was used. The first term makes
values age: a block that is not used any more is overtaken, however often it was used, and where uses are equal the
order is that of the latest use. Blocks of one cache have the same size, so that bytes cancel out. How often a block
was used is remembered for a while after it has left, so that one that keeps coming back is told from a new one.

What was tried and lost, and the figures: docs/prefix-cache.md.
"""

from collections.abc import Callable
from typing import Protocol

MAX_COUNTED_USES = 8  # more uses do not make a block more valuable
REMEMBERED_SHARE = 4  # blocks that have left and are remembered, by those in the cache


class ValuedBlock(Protocol):
    """A block with the two numbers that eviction looks at: its uses, and the blocks before it."""

    @property
    def depth(self) -> int:
        """Blocks before this one in its context."""

    @property
    def num_uses(self) -> int:
        """Contexts that began with this block, the one that computed it included."""


def saved_cost(block: ValuedBlock) -> float:
    """Return what a block saves, by how often it was used.

    What it costs to compute depends little on its place: attention over 32 768 tokens costs an 8B model as much as its
    products, and with that for a factor fewer tokens are found.
    """
    return float(min(block.num_uses, MAX_COUNTED_USES))


SavedCost = Callable[[ValuedBlock], float]
