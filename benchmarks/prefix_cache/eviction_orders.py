"""Orders of eviction from the literature, for caches whose blocks follow one another: only last blocks can leave.

What the product uses is `alignedserve/prefix_cache/`; these are here to be compared with it.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from typing_extensions import override


class Cache(Protocol):
    """A cache that prompts come to, one after the other."""

    def take(self, prompt: Sequence[int]) -> int:
        """Return how many blocks of a prompt it holds, from the first on; hold the prompt from now on."""


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    parent: "_Block | None"
    num_children: int = 0
    num_hits: int = 0
    is_main: bool = False  # in the larger of two queues


class _Forest(ABC):
    """Blocks, and what a prompt does to them; a subclass chooses which leaves."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: dict[int, _Block] = {}

    def take(self, prompt: Sequence[int]) -> int:
        """Return how many blocks of a prompt are held, from the first on; hold the prompt from now on."""
        num_hits, parent = 0, None
        path: list[_Block] = []
        for number in prompt:
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = _Block(number, parent)
                if parent is not None:
                    parent.num_children += 1
            else:
                num_hits += 1
            path.append(block)
            parent = block
        for place in range(len(path) - 1, -1, -1):
            self._used(path[place], is_hit=place < num_hits)
        while len(self._blocks) > self._capacity:
            self._drop(self._victim())
        return num_hits

    def _drop(self, block: _Block) -> None:
        del self._blocks[block.number]
        if block.parent is not None:
            block.parent.num_children -= 1

    @abstractmethod
    def _used(self, block: _Block, *, is_hit: bool) -> None:
        """Note that a prompt had this block, or has it from now on."""

    @abstractmethod
    def _victim(self) -> _Block:
        """Choose the block that leaves."""


class TwoQueues(_Forest):
    """Segmented LRU: blocks that were hit are in a queue of their own, at most three quarters of the memory."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._probation: OrderedDict[int, _Block] = OrderedDict()
        self._main: OrderedDict[int, _Block] = OrderedDict()

    @override
    def _used(self, block: _Block, *, is_hit: bool) -> None:
        queue = self._main if is_hit else self._probation
        (self._probation if is_hit else self._main).pop(block.number, None)
        queue[block.number] = block
        queue.move_to_end(block.number)
        while len(self._main) > 3 * self._capacity // 4:
            number, oldest = self._main.popitem(last=False)
            self._probation[number] = oldest

    @override
    def _victim(self) -> _Block:
        for queue in (self._probation, self._main):
            for number, block in queue.items():
                if not block.num_children:
                    del queue[number]
                    return block
        raise AssertionError("no block without followers")


class Sieve(_Forest):
    """SIEVE (Zhang et al., NSDI 2024): a hand passes over blocks in order of their coming and spares those hit since.

    A spared block stays in its place.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: dict[int, _Block] = {}
        self._hand: Iterator[_Block] = iter(())

    @override
    def _used(self, block: _Block, *, is_hit: bool) -> None:
        block.num_hits += is_hit
        if not is_hit:
            self._order[block.number] = block

    @override
    def _victim(self) -> _Block:
        while True:
            for block in self._hand:
                if self._order.get(block.number) is not block:
                    continue
                if not (block.num_hits or block.num_children):
                    del self._order[block.number]
                    return block
                block.num_hits = 0
            self._hand = iter(list(self._order.values()))


class S3Fifo(_Forest):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main one for what was hit, a list of ghosts.

    A tenth of the memory is the small queue's. Ghosts are what left that queue; when they come again they are main.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: deque[_Block] = deque()
        self._main: deque[_Block] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    @override
    def _used(self, block: _Block, *, is_hit: bool) -> None:
        if is_hit:
            block.num_hits = min(block.num_hits + 1, 3)
            return
        block.is_main = block.number in self._ghosts
        self._ghosts.pop(block.number, None)
        (self._main if block.is_main else self._small).append(block)

    @override
    def _victim(self) -> _Block:
        for passed in count():
            is_full = len(self._small) > self._capacity // 10
            is_other_turn = passed // (len(self._blocks) + 1) % 2 == 1  # nothing could leave the queue whose turn it is
            is_small = bool(self._small) and (not self._main or is_full is not is_other_turn)
            block = (self._small if is_small else self._main).popleft()
            if not (block.num_hits or block.num_children):
                if is_small:
                    self._remember(block)
                return block
            if is_small and block.num_hits:
                block.is_main = True
                block.num_hits = 0
            elif block.num_hits:
                block.num_hits -= 1
            (self._main if block.is_main else self._small).append(block)
        raise AssertionError("unreachable")

    def _remember(self, block: _Block) -> None:
        self._ghosts[block.number] = None
        if len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)
