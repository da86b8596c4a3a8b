"""Blocks of a prefill worker's jobs: the first blocks of a prompt may be cached from earlier prompts."""

from collections.abc import Iterable

from alignedserve.core.block_allocator import blocks_for
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.prefix_cache.cached_blocks import CachingAllocator
from alignedserve.prefix_cache.contexts import CachedContext, PrefixCache
from prefill_worker.state import PrefillJob

_KEPT_SHARE = 0.25  # of blocks and places, from best effort


class JobBlocks:
    """The worker's blocks. A job has all that its context needs from when it is admitted until it has left."""

    def __init__(self, num_blocks: int, block_size: int, prefixes: PrefixCache | None = None) -> None:
        """`prefixes`: the prefix cache in these blocks, empty; None: jobs share nothing."""
        self._allocator = CachingAllocator(num_blocks, None if prefixes is None else prefixes.blocks)
        self._block_size = block_size
        self._prefixes = prefixes

    @property
    def num_free(self) -> int:
        """Number of blocks that no job has."""
        return self._allocator.num_free

    @property
    def num_query_tokens(self) -> int:
        """Tokens of contexts that were looked up in the cache."""
        return 0 if self._prefixes is None else self._prefixes.num_query_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Tokens of those, taken from it."""
        return 0 if self._prefixes is None else self._prefixes.num_hit_tokens

    def count_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return blocks_for(num_tokens, self._block_size)

    def leave_room(self, job: PrefillJob, jobs: Iterable[PrefillJob], max_jobs: int) -> bool:
        """Return whether real-time jobs keep their share of blocks and places beside this best-effort one.

        Best effort waits here for room in the pool, with the blocks that it has computed: it would keep chat out.
        """
        beside = [other for other in jobs if other.block_ids and not other.is_real_time]
        num_blocks = sum(len(other.block_ids) for other in beside) + self.count_for(job.context_len)
        num_jobs, share = len(beside) + 1, 1.0 - _KEPT_SHARE
        fits = num_blocks <= share * self._allocator.num_blocks and num_jobs <= share * max_jobs
        return fits or not beside

    def allocate(self, job: PrefillJob) -> bool:
        """Give a job all its blocks, cached ones first; return False if too few are free."""
        prefixes = self._prefixes
        if job.context is None:
            job.context = self._context_of(job)
        context = job.context
        num_blocks = self.count_for(job.context_len)
        if context is None or prefixes is None:
            job.block_ids = self._allocator.allocate(num_blocks) or ()
            return bool(job.block_ids)
        prefixes.wait(context, (job.context_len - 1) // self._block_size * self._block_size)
        num_free = self.num_free - sum(not block.num_users for block in context.run)
        if num_blocks - len(context.run) > num_free:
            prefixes.leave(context)
            return False
        run = prefixes.enter(context, job.context_len)
        own = self._allocator.allocate(num_blocks - len(run.held))
        assert own is not None, "fewer blocks than were counted"
        job.block_ids = (*(block.block_id for block in run.held), *own)
        job.num_hit_tokens = run.num_tokens
        return True

    def store(self, job: PrefillJob) -> None:
        """Cache the blocks of a job whose context is computed, and which the engine is about to remove."""
        if job.context is None or self._prefixes is None:
            return
        block_ids = list(job.block_ids)
        num_full = job.context_len // self._block_size
        for adopted in self._prefixes.store(job.context, num_full, block_ids, job.tokens_between):
            self._allocator.free((adopted.freed,))
        job.block_ids = tuple(block_ids)

    def free(self, job: PrefillJob) -> None:
        """Free the blocks of a job that has left; cached blocks stay in the cache until they are needed."""
        context = job.context
        self._allocator.free(job.block_ids[0 if context is None else len(context.held) :])
        if context is not None and self._prefixes is not None:
            self._prefixes.leave(context)

    def changes(self) -> PrefixBlocksChanged | None:
        """Return, for the router, which blocks have come and gone since it was last told; None: there are none."""
        return None if self._prefixes is None else self._prefixes.blocks.told_changes()

    def all_cached(self) -> PrefixBlocksChanged | None:
        """Return, for a router that is new, all cached blocks; None: there are none."""
        return None if self._prefixes is None else self._prefixes.blocks.told_all()

    def _context_of(self, job: PrefillJob) -> CachedContext | None:
        """Return the context of a job that shares: not of one that scores its prompt, or is loaded from the pool."""
        request = job.request
        is_private = not request.prefix_root or request.sampling.num_prompt_logprobs is not None or job.has_copy
        if self._prefixes is None or is_private:
            return None
        return self._prefixes.add(request.request_id, request.prefix_root, job.tokens_between(0, job.context_len))
