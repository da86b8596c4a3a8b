"""Block accounting: the one allocator that pool, workers, simulator and benchmarks share."""

from collections.abc import Iterable

from alignedserve.core.ids import BlockId


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks of `block_size` token slots that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def contiguous_runs(block_ids: Iterable[BlockId]) -> list[tuple[int, int]]:
    """Split a list of blocks into (first block, count) runs of consecutive ids, in order."""
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and sum(runs[-1]) == block_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return runs


class BlockAllocator:
    """Allocates block ids 0 .. num_blocks - 1, all or none, the most recently freed block first.

    The last-in-first-out order keeps the working set warm in caches and makes every run repeatable.
    """

    __slots__ = ("_free", "_is_used", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, "a negative number of blocks"
        self.num_blocks = num_blocks
        self._free: list[BlockId] = [BlockId(block_id) for block_id in range(num_blocks - 1, -1, -1)]
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of allocated blocks."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> tuple[BlockId, ...] | None:
        """Allocate `count` blocks; return None, allocating none, if fewer are free."""
        assert count >= 0, "a negative number of blocks"
        if count > len(self._free):
            return None
        first = len(self._free) - count
        block_ids = tuple(reversed(self._free[first:]))
        del self._free[first:]
        for block_id in block_ids:
            self._is_used[block_id] = 1
        return block_ids

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Free blocks; freeing one twice is a broken invariant."""
        for block_id in reversed(tuple(block_ids)):
            assert self._is_used[block_id], f"block {block_id} freed twice"
            self._is_used[block_id] = 0
            self._free.append(block_id)
