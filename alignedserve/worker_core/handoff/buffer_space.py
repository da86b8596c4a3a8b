"""Block accounting of the buffers that a worker has in others' memory (of a decode worker: candidate buffers)."""

from dataclasses import dataclass

from alignedserve.core.block_allocator import BlockAllocator
from alignedserve.core.ids import BlockId

# Prefetches leave this share of a buffer free, so that an eviction finds free blocks without waiting.
_EVICTION_SHARE = 0.25
# Evictions of best effort leave this share free, so that chat finds blocks that comes straight from a prefill worker.
_CHAT_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """Blocks of the buffer that this worker has in another's memory."""

    peer: str
    link_epoch: int  # of the link to it: a buffer does not outlive its link
    block_ids: tuple[BlockId, ...]
    generation: int  # stamped on them by their writer


class BufferSpace:
    """One allocator for each linked prefill worker. This worker alone decides what lies where in its buffers."""

    def __init__(self) -> None:
        self._allocators: dict[str, BlockAllocator] = {}
        self._far: dict[str, None] = {}  # those beside another pool
        self._link_epochs: dict[str, int] = {}
        self._num_link_epochs = 0
        self._generation = 0
        self.version = 0  # changes with the free blocks

    def opened(self, peer: str, num_blocks: int, *, is_far: bool = False) -> None:
        """Add the empty buffer that a prefill worker offers, in place of any it offered before.

        `is_far`: it is beside another pool than this worker; requests come straight into it, and nothing else does.
        """
        self._far.pop(peer, None)
        if is_far:
            self._far[peer] = None
        self._num_link_epochs += 1
        self.version += 1
        self._allocators[peer] = BlockAllocator(num_blocks)
        self._link_epochs[peer] = self._num_link_epochs

    def lost(self, peer: str) -> None:
        """Remove the buffer of a prefill worker that is gone."""
        self._allocators.pop(peer, None)
        self._far.pop(peer, None)
        self._link_epochs.pop(peer, None)

    def holds(self, slot: BufferSlot) -> bool:
        """Return whether the slot's buffer still exists."""
        return self._link_epochs.get(slot.peer) == slot.link_epoch

    def is_far(self, slot: BufferSlot) -> bool:
        """Return whether the slot's buffer is beside another pool."""
        return slot.peer in self._far

    @property
    def num_used(self) -> int:
        """Number of blocks in use, over all buffers."""
        return sum(allocator.num_used for allocator in self._allocators.values())

    @property
    def is_short(self) -> bool:
        """True if every buffer for evictions has fewer free blocks than are kept for them."""
        near = [allocator for peer, allocator in self._allocators.items() if peer not in self._far]
        free = [allocator.num_free / max(allocator.num_blocks, 1) for allocator in near]
        return bool(free) and max(free) < _EVICTION_SHARE

    def for_prefetch(self, num_blocks: int) -> BufferSlot | None:
        """Allocate in the emptiest buffer, except the share kept for evictions."""
        return self._allocate(num_blocks, _EVICTION_SHARE, None)

    def for_eviction(self, num_blocks: int, *, leaves_room: bool = False) -> BufferSlot | None:
        """Allocate in the emptiest buffer. `leaves_room`: except the share kept for chat."""
        return self._allocate(num_blocks, _CHAT_SHARE if leaves_room else 0.0, None)

    def at(self, peer: str, num_blocks: int) -> BufferSlot | None:
        """Allocate in this prefill worker's buffer, for a request that comes straight from it."""
        return self._allocate(num_blocks, 0.0, peer)

    def free(self, slot: BufferSlot) -> None:
        """Free the blocks; those of a lost buffer are gone already."""
        self.version += 1
        if self.holds(slot):
            self._allocators[slot.peer].free(slot.block_ids)

    def _allocate(self, num_blocks: int, share_kept: float, wanted: str | None) -> BufferSlot | None:
        peers = [peer for peer in self._allocators if peer == wanted or (wanted is None and peer not in self._far)]
        peer = max(peers, key=lambda name: (self._allocators[name].num_free, name), default=None)
        if peer is None:
            return None
        allocator = self._allocators[peer]
        if allocator.num_free - num_blocks < share_kept * allocator.num_blocks:
            return None
        block_ids = allocator.allocate(num_blocks)
        assert block_ids is not None, "fewer blocks than were counted"
        self._generation += 1
        return BufferSlot(peer, self._link_epochs[peer], block_ids, self._generation)
