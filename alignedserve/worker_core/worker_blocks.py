"""A worker's blocks. The first blocks of a request may be cached from earlier requests.

Where states have blocks of their own, these are a request's first; it begins with a copy of the states that are kept
behind the cached blocks which it takes, and leaves its own at edges where others may go on.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import BlockCopied, BlockReplacement
from alignedserve.prefix_cache.cached_blocks import CachingAllocator
from alignedserve.prefix_cache.contexts import CachedContext, PrefixCache, StatesOnWay
from alignedserve.worker_core.request import WorkerRequest


@dataclass(slots=True, eq=False)
class BlockHolder(WorkerRequest):
    """A request with blocks of its worker."""

    block_ids: list[BlockId] = field(default_factory=list)  # blocks of recurrent states first
    context: CachedContext | None = None  # None: it shares nothing


HolderT = TypeVar("HolderT", bound=BlockHolder)


class WorkerBlocks(Generic[HolderT]):
    """Takes and frees blocks, and tells the engine what became of them with the next iteration."""

    def __init__(self, num_blocks: int, block_size: int, prefixes: PrefixCache | None, state_blocks: int) -> None:
        """`prefixes`: the prefix cache in these blocks, empty; None: requests share nothing. `state_blocks`: of each
        request, before those of its tokens."""
        self.allocator = CachingAllocator(num_blocks, None if prefixes is None else prefixes.blocks)
        self.block_size, self._state_blocks = block_size, state_blocks
        self._prefixes = prefixes
        self.states = StatesOnWay(self.allocator, prefixes)
        self._states_to_copy: list[tuple[HolderT, tuple[BlockId, ...]]] = []  # that requests begin with
        self._replacements: list[BlockReplacement] = []

    def blocks_for(self, num_tokens: int) -> int:
        return self._state_blocks + -(-num_tokens // self.block_size)

    def begin_copies(self) -> tuple[BlockCopied, ...]:
        """Return the copies that requests begin with, once their blocks are allocated.

        Their sources may leave the cache meanwhile: only the iteration itself writes there, after the copies.
        """
        pairs = [pair for holder, ids in self._states_to_copy for pair in zip(ids, holder.block_ids, strict=False)]
        self._states_to_copy.clear()
        return tuple(BlockCopied(source, target) for source, target in pairs)

    def take_replacements(self) -> tuple[BlockReplacement, ...]:
        replacements, self._replacements = tuple(self._replacements), []
        return replacements

    def _forget_replacements(self, request_id: RequestId) -> None:
        self._replacements = [replacement for replacement in self._replacements if replacement.request_id != request_id]

    def _context_of(self, holder: HolderT) -> CachedContext | None:
        request = holder.request
        if self._prefixes is None or not request.prefix_root or request.sampling.num_prompt_logprobs is not None:
            return None
        token_ids = holder.tokens_between(0, holder.context_len)
        return self._prefixes.add(request.request_id, request.prefix_root, token_ids)

    def _store(self, holder: HolderT, num_full: int, *, is_in_engine: bool) -> None:
        """Cache its first blocks, full by now; where the cache has one already, the request goes on with that."""
        context, prefixes = holder.context, self._prefixes
        if context is None or prefixes is None:
            return
        for adopted in prefixes.store(context, num_full, holder.block_ids, holder.tokens_between, self._state_blocks):
            self.allocator.free((adopted.freed,))
            if is_in_engine:
                request_id = holder.request.request_id
                self._replacements.append(BlockReplacement(request_id, adopted.place, adopted.block_id))
