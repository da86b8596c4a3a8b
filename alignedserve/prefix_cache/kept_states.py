"""Recurrent states that are kept behind cached blocks, so that later requests go on from there.

Of a model with large states a state takes as much room as hundreds of tokens, so few edges of blocks have one: those
where others are likely to go on. A context keeps the states
1. at the last edge before its last token when it enters: a next turn has all of its prompt before it;
2. at the last edge up to which others had the same tokens: there contexts part, and the next one may as well;
3. at the last edge that its answer has passed, in place of the one before: a next turn has that before it too.
When there are too many, or memory is needed, the one goes that was used last the longest ago.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from alignedserve.config.sections import PrefixCacheConfig
from alignedserve.core.ids import BlockId
from alignedserve.prefix_cache.block_hashes import BlockHash, NamedBlock, block_hash

Block = TypeVar("Block")  # a cached one


@dataclass(frozen=True, slots=True)
class StateBudget:
    """What states may take of a worker's blocks."""

    num_blocks: int  # of one
    max_states: int  # that are kept


def budget_of(config: PrefixCacheConfig, num_blocks: int, state_blocks: int) -> StateBudget | None:
    """Return what states may take of so many blocks; None: they have no blocks of their own."""
    return StateBudget(state_blocks, int(config.state_share * num_blocks) // state_blocks) if state_blocks else None


class KeptStates(Generic[Block]):
    """The blocks behind which states are kept, by use."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()  # those used last come last
        self.observers: list[Callable[[Block], None]] = []  # called with a block whose state came or went
        self.num_used = 0  # contexts that began with one, since it was made

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: Block) -> None:
        self._blocks[block] = None
        self._tell(block)

    def remove(self, block: Block) -> None:
        del self._blocks[block]
        self._tell(block)

    def use(self, block: Block) -> None:
        self._blocks.move_to_end(block)
        self.num_used += 1

    def oldest(self) -> Block:
        return next(iter(self._blocks))

    def _tell(self, block: Block) -> None:
        for observer in self.observers:
            observer(block)


class KeptEdge(NamedTuple):
    """An edge of blocks, in tokens of a context, where an iteration leaves its states for later contexts."""

    num_tokens: int
    state_ids: tuple[BlockId, ...]
    is_latest: bool  # in place of the one before


def state_names(edge: BlockHash, num_blocks: int) -> list[NamedBlock]:
    """Return the names under which a pool keeps the states behind the block of this hash, one block after another.

    Like blocks that follow it, whose place in a context is behind its tokens. No block of tokens has such a name: in
    place of tokens it has one byte.
    """
    names = list[NamedBlock]()
    for number in range(num_blocks):
        packed = bytes([number % 256])
        names.append(NamedBlock(block_hash(names[-1].block_hash if names else edge, packed), packed))
    return names
