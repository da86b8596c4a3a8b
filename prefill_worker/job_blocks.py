"""Blocks of a prefill worker's jobs: the first blocks of a prompt may be cached from earlier prompts.

Where states have blocks of their own, these are a job's first; it begins with a copy of the states that are kept behind
the cached blocks which it takes, and leaves its own at edges where others may go on.
"""

from collections.abc import Container, Iterable, Mapping

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import BlockCopied, BlockReplacement, StateKept
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.prefix_cache.cached_blocks import CachingAllocator
from alignedserve.prefix_cache.contexts import CachedContext, Passed, PrefixCache, StatesOnWay
from prefill_worker.state import PrefillJob

_KEPT_SHARE = 0.25  # of blocks and places, from best effort


class JobBlocks:
    """The worker's blocks. A job has all that its context needs from when it is admitted until it has left."""

    def __init__(
        self, num_blocks: int, block_size: int, prefixes: PrefixCache | None = None, *, state_blocks: int = 0
    ) -> None:
        """`prefixes`: the prefix cache in these blocks, empty; None: jobs share nothing. `state_blocks`: of each job,
        before those of its tokens."""
        self._allocator = CachingAllocator(num_blocks, None if prefixes is None else prefixes.blocks)
        self._block_size, self._state_blocks = block_size, state_blocks
        self._prefixes = prefixes
        self._states = StatesOnWay(self._allocator, prefixes)
        self._states_to_copy: list[tuple[PrefillJob, tuple[BlockId, ...]]] = []  # for the engine, as the next
        self._replacements: list[BlockReplacement] = []
        self._is_copying = False  # from blocks that may be free already

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_query_tokens(self) -> int:
        return 0 if self._prefixes is None else self._prefixes.num_query_tokens

    @property
    def num_hit_tokens(self) -> int:
        return 0 if self._prefixes is None else self._prefixes.num_hit_tokens

    @property
    def has_own_states(self) -> bool:
        return self._state_blocks > 0

    def count_for(self, num_tokens: int) -> int:
        return self._state_blocks + blocks_for(num_tokens, self._block_size)

    def leave_room(self, job: PrefillJob, jobs: Iterable[PrefillJob], max_jobs: int) -> bool:
        beside = [other for other in jobs if other.block_ids and not other.is_real_time]
        num_blocks = sum(len(other.block_ids) for other in beside) + self.count_for(job.context_len)
        num_jobs, share = len(beside) + 1, 1.0 - _KEPT_SHARE
        fits = num_blocks <= share * self._allocator.num_blocks and num_jobs <= share * max_jobs
        return fits or not beside

    def allocate(self, job: PrefillJob) -> bool:
        """Give a job all its blocks, cached ones first; return False if too few are free.

        A job to be loaded waits while states are copied, as their source may be among its blocks.
        """
        prefixes = self._prefixes
        if job.has_copy and (self._states_to_copy or self._is_copying):
            return False
        if job.context is None:
            job.context = self._context_of(job)
        context = job.context
        num_blocks = self.count_for(job.context_len)
        if context is None or prefixes is None:
            job.block_ids = self._allocator.allocate(num_blocks) or ()
            return bool(job.block_ids)
        prefixes.wait(context, (job.context_len - 1) // self._block_size * self._block_size)
        cached = context.run[: prefixes.num_foreseen(context) // self._block_size]
        num_free = self.num_free - sum(not block.num_users for block in cached)
        if num_blocks - len(cached) > num_free:
            prefixes.leave(context)
            return False
        run = prefixes.enter(context, job.context_len)
        if run.state is not None:
            self._states_to_copy.append((job, run.state.state_ids))
        private_ids = self._allocator.allocate(num_blocks - len(run.held))
        assert private_ids is not None, "fewer blocks than were counted"
        of_states, private_ids = private_ids[: self._state_blocks], private_ids[self._state_blocks :]
        job.block_ids = (*of_states, *(block.block_id for block in run.held), *private_ids)
        job.num_hit_tokens = run.num_tokens
        return True

    def store(self, job: PrefillJob) -> None:
        self._store(job, job.context_len)

    def _store(self, job: PrefillJob, num_tokens: int, *, is_in_engine: bool = False) -> None:
        if job.context is None or self._prefixes is None:
            return
        block_ids, num_full = list(job.block_ids), num_tokens // self._block_size
        for adopted in self._prefixes.store(job.context, num_full, block_ids, job.tokens_between, self._state_blocks):
            self._allocator.free((adopted.freed,))
            if is_in_engine:
                replaced = BlockReplacement(job.request.request_id, adopted.place, adopted.block_id)
                self._replacements.append(replaced)
        job.block_ids = tuple(block_ids)

    def free(self, job: PrefillJob) -> None:
        context, request_id = job.context, job.request.request_id
        self._states.settle(request_id, context, is_whole=False)
        self._states_to_copy = [entry for entry in self._states_to_copy if entry[0] is not job]
        self._replacements = [replacement for replacement in self._replacements if replacement.request_id != request_id]
        num_states = self._state_blocks if job.block_ids else 0
        self._allocator.free(job.block_ids[:num_states])
        self._allocator.free(job.block_ids[num_states + (0 if context is None else len(context.held)) :])
        if context is not None and self._prefixes is not None:
            self._prefixes.leave(context)

    # --- states in blocks of their own

    def begin_copies(self) -> tuple[BlockCopied, ...]:
        """Return the copies of states that jobs begin with; only the iteration itself writes to their sources."""
        copies = [
            BlockCopied(*pair)
            for job, state_ids in self._states_to_copy
            for pair in zip(state_ids, job.block_ids[: self._state_blocks], strict=True)
        ]
        self._states_to_copy.clear()
        self._is_copying |= bool(copies)
        return tuple(copies)

    def begin_states(
        self, jobs: Mapping[RequestId, PrefillJob], slices: Iterable[tuple[RequestId, int]]
    ) -> tuple[StateKept, ...]:
        if not self._states.are_kept:
            return ()
        states: list[StateKept] = []
        for request_id, num_tokens in slices:
            job = jobs[request_id]
            first, job.num_passed = job.num_passed, job.num_passed + num_tokens
            if job.context is not None:
                passed = Passed(first, job.num_passed, is_answer=False)
                states += self._states.begin(request_id, job.context, passed, num_kept_free=0)
        return tuple(states)

    def take_replacements(self) -> tuple[BlockReplacement, ...]:
        replacements, self._replacements = tuple(self._replacements), []
        return replacements

    def passed(self, jobs: Iterable[PrefillJob], failed: Container[RequestId]) -> None:
        for job in jobs:
            request_id = job.request.request_id
            if self._states.has_coming(request_id):
                is_whole = request_id not in failed
                if is_whole:
                    self._store(job, job.num_passed, is_in_engine=True)
                self._states.settle(request_id, job.context, is_whole=is_whole)

    def copied(self) -> None:
        self._is_copying = False

    def changes(self) -> PrefixBlocksChanged | None:
        return None if self._prefixes is None else self._prefixes.blocks.told_changes()

    def all_cached(self) -> PrefixBlocksChanged | None:
        return None if self._prefixes is None else self._prefixes.blocks.told_all()

    def _context_of(self, job: PrefillJob) -> CachedContext | None:
        request = job.request
        is_private = not request.prefix_root or request.sampling.num_prompt_logprobs is not None or job.has_copy
        if self._prefixes is None or is_private:
            return None
        return self._prefixes.add(request.request_id, request.prefix_root, job.tokens_between(0, job.context_len))
