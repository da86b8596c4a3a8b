"""Blocks of a prefill worker's jobs (worker_core/worker_blocks.py). A job has all that its context needs, at once."""

from collections.abc import Container, Iterable, Mapping

from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import BlockCopied, StateKept
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.prefix_cache.contexts import Passed, PrefixCache
from alignedserve.worker_core.worker_blocks import WorkerBlocks
from prefill_worker.state import PrefillJob

_KEPT_SHARE = 0.25  # of blocks and places, from best effort


class JobBlocks(WorkerBlocks[PrefillJob]):
    """The worker's blocks. A job has its blocks from when it is admitted until it has left."""

    def __init__(
        self, num_blocks: int, block_size: int, prefixes: PrefixCache | None = None, *, state_blocks: int = 0
    ) -> None:
        super().__init__(num_blocks, block_size, prefixes, state_blocks)
        self._is_copying = False  # from blocks that may be free already

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def num_query_tokens(self) -> int:
        return 0 if self._prefixes is None else self._prefixes.num_query_tokens

    @property
    def num_hit_tokens(self) -> int:
        return 0 if self._prefixes is None else self._prefixes.num_hit_tokens

    @property
    def has_own_states(self) -> bool:
        return self._state_blocks > 0

    def leave_room(self, job: PrefillJob, jobs: Iterable[PrefillJob], max_jobs: int) -> bool:
        beside = [other for other in jobs if other.block_ids and not other.is_real_time]
        num_blocks = sum(len(other.block_ids) for other in beside) + self.blocks_for(job.context_len)
        num_jobs, share = len(beside) + 1, 1.0 - _KEPT_SHARE
        fits = num_blocks <= share * self.allocator.num_blocks and num_jobs <= share * max_jobs
        return fits or not beside

    def allocate(self, job: PrefillJob) -> bool:
        """Give a job all its blocks, cached ones first; return False if too few are free.

        A job to be loaded waits while states are copied, as their source may be among its blocks.
        """
        prefixes = self._prefixes
        if job.has_copy and (self._states_to_copy or self._is_copying):
            return False
        if job.context is None and not job.has_copy:
            job.context = self._context_of(job)
        context = job.context
        num_blocks = self.blocks_for(job.context_len)
        if context is None or prefixes is None:
            job.block_ids = list(self.allocator.allocate(num_blocks) or ())
            return bool(job.block_ids)
        prefixes.wait(context, (job.context_len - 1) // self.block_size * self.block_size)
        cached = context.run[: prefixes.num_foreseen(context) // self.block_size]
        num_free = self.num_free - sum(not block.num_users for block in cached)
        if num_blocks - len(cached) > num_free:
            prefixes.leave(context)
            return False
        run = prefixes.enter(context, job.context_len)
        if run.state is not None:
            self._states_to_copy.append((job, run.state.state_ids))
        private_ids = self.allocator.allocate(num_blocks - len(run.held))
        assert private_ids is not None, "fewer blocks than were counted"
        of_states, private_ids = private_ids[: self._state_blocks], private_ids[self._state_blocks :]
        job.block_ids = [*of_states, *(block.block_id for block in run.held), *private_ids]
        job.num_hit_tokens = run.num_tokens
        return True

    def store(self, job: PrefillJob) -> None:
        self._store(job, job.context_len // self.block_size, is_in_engine=False)

    def free(self, job: PrefillJob) -> None:
        context, request_id = job.context, job.request.request_id
        self.states.settle(request_id, context, is_whole=False)
        self._states_to_copy = [entry for entry in self._states_to_copy if entry[0] is not job]
        self._forget_replacements(request_id)
        num_states = self._state_blocks if job.block_ids else 0
        self.allocator.free(job.block_ids[:num_states])
        self.allocator.free(job.block_ids[num_states + (0 if context is None else len(context.held)) :])
        if context is not None and self._prefixes is not None:
            self._prefixes.leave(context)

    # --- states in blocks of their own

    @override
    def begin_copies(self) -> tuple[BlockCopied, ...]:
        copies = super().begin_copies()
        self._is_copying |= bool(copies)
        return copies

    def begin_states(
        self, jobs: Mapping[RequestId, PrefillJob], slices: Iterable[tuple[RequestId, int]]
    ) -> tuple[StateKept, ...]:
        if not self.states.are_kept:
            return ()
        states: list[StateKept] = []
        for request_id, num_tokens in slices:
            job = jobs[request_id]
            first, job.num_passed = job.num_passed, job.num_passed + num_tokens
            if job.context is not None:
                passed = Passed(first, job.num_passed, is_answer=False)
                states += self.states.begin(request_id, job.context, passed, num_kept_free=0)
        return tuple(states)

    def passed(self, jobs: Iterable[PrefillJob], failed: Container[RequestId]) -> None:
        for job in jobs:
            request_id = job.request.request_id
            if self.states.has_coming(request_id):
                is_whole = request_id not in failed
                if is_whole:
                    self._store(job, job.num_passed // self.block_size, is_in_engine=True)
                self.states.settle(request_id, job.context, is_whole=is_whole)

    def copied(self) -> None:
        self._is_copying = False

    def changes(self) -> PrefixBlocksChanged | None:
        return None if self._prefixes is None else self._prefixes.blocks.told_changes()

    def all_cached(self) -> PrefixBlocksChanged | None:
        return None if self._prefixes is None else self._prefixes.blocks.told_all()
