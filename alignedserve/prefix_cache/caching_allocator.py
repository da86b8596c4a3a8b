"""Block accounting of a memory whose free blocks are cached until they are needed."""

from collections.abc import Iterable

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId
from alignedserve.prefix_cache.cached_blocks import CachedBlocks


class CachingAllocator:
    """A block allocator to which cached blocks without users are free: it evicts them when others are lacking."""

    __slots__ = ("_allocator", "_cached")

    def __init__(self, num_blocks: int, cached: CachedBlocks | None = None) -> None:
        """`cached`: empty, of the same memory; None: nothing is cached."""
        self._allocator = BlockAllocator(num_blocks)
        self._cached = cached

    @property
    def num_blocks(self) -> int:
        """Number of all blocks."""
        return self._allocator.num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks that nothing uses, cached or not."""
        unused = 0 if self._cached is None else self._cached.num_unused
        return self._allocator.num_free + unused

    def allocate(self, count: int) -> tuple[BlockId, ...] | None:
        """Allocate `count` blocks; return None, allocating and evicting none, if fewer are free."""
        missing = count - self._allocator.num_free
        if missing > 0:
            if self._cached is None or missing > self._cached.num_unused:
                return None
            self._allocator.free(self._cached.evict(missing))
        return self._allocator.allocate(count)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Free blocks that are not cached."""
        self._allocator.free(block_ids)
