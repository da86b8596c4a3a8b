"""The running batch and this worker's blocks: members, their growth, and the blocks that the next iterations need."""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.ids import BatchId, BlockId, RequestId
from alignedserve.messages.iterations import Addition
from alignedserve.scheduling.iteration_scheduler import PolicyIterationScheduler, Slices
from decode_worker.state import Candidate, Loading, RunningRequest

# A request is admitted only if all in the batch can then generate so many tokens without an eviction.
_FORESEEN_TOKENS = 32

Extensions = tuple[tuple[RequestId, tuple[BlockId, ...]], ...]


class Changes(NamedTuple):
    """For the engine, in the fields of RunIteration."""

    removals: tuple[RequestId, ...]
    additions: tuple[Addition, ...]
    extensions: Extensions


class Growth(NamedTuple):
    """Blocks that the next iterations lack."""

    num_stalled: int  # requests that skip this iteration, for want of a block
    num_missing: int  # blocks wanting in this iteration and the one after it


class RunningBatch:
    """Requests in the engine or about to enter it, and those whose cache is being copied in or out."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_running_requests: int,
        scheduler: PolicyIterationScheduler | None = None,
    ) -> None:
        """`scheduler`: chooses the requests of each iteration; None: all are in every one."""
        self._scheduler = scheduler
        self._allocator = BlockAllocator(num_blocks)
        self._block_size = block_size
        self._max_running_requests = max_running_requests
        self._running: dict[RequestId, RunningRequest] = {}
        self._loading: dict[RequestId, Loading] = {}
        self._num_leaving_blocks = 0  # of requests that are being copied out
        self._foreseen: int | None = None  # blocks that all will grow by; None: to be counted anew
        self.version = 0  # changes with the members
        self._additions: dict[RequestId, Addition] = {}  # for the engine, with the next iteration, like these
        self._extensions: dict[RequestId, tuple[BlockId, ...]] = {}
        self._removals: list[RequestId] = []
        self._chunks: Slices = ()  # of the iteration that runs: requests with more than one token to compute
        self._has_stalled = False
        self._decodes: Slices = ()  # one token of each request, and the version for which that was built
        self._decodes_of = -1

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._running.values())

    def __getitem__(self, request_id: RequestId) -> RunningRequest:
        return self._running[request_id]

    def all(self) -> Collection[RunningRequest]:
        """Return all members."""
        return self._running.values()

    def get(self, request_id: RequestId) -> RunningRequest | None:
        """Return the request, if it runs."""
        return self._running.get(request_id)

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return self._allocator.num_free

    @property
    def num_holding(self) -> int:
        """Number of requests that run or are being loaded."""
        return len(self._running) + len(self._loading)

    @property
    def is_empty(self) -> bool:
        """True if no request runs, is being loaded or is being evicted."""
        return not (self._running or self._loading or self._num_leaving_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return blocks_for(num_tokens, self._block_size)

    # --- coming in

    def blocks_if_fits(self, candidate: Candidate) -> tuple[BlockId, ...] | None:
        """Allocate blocks for this candidate's context, if the next iterations of all will fit as well."""
        request_id = candidate.request.request_id
        if self.num_holding >= self._max_running_requests or request_id in self._running or request_id in self._loading:
            return None
        num_blocks = blocks_for(candidate.context_len, self._block_size)
        if self.is_empty:
            return self._allocator.allocate(num_blocks)
        if self._foreseen is None:
            self._foreseen = self._foreseen_blocks()
        foreseen = self._foreseen + self._growth(candidate, num_blocks)
        if num_blocks + foreseen > self._allocator.num_free:
            return None
        return self._allocator.allocate(num_blocks)

    def _foreseen_blocks(self) -> int:
        running = sum(self._growth(running, len(running.block_ids)) for running in self._running.values())
        return running + sum(self._growth(part.candidate, len(part.block_ids)) for part in self._loading.values())

    def _growth(self, one: RunningRequest | Candidate, num_held: int) -> int:
        foreseen = min(one.context_len + _FORESEEN_TOKENS, one.max_context_len)
        return max(-(-foreseen // self._block_size) - num_held, 0)

    def load(self, loading: Loading) -> None:
        """Add a candidate whose cache is being copied in."""
        if self._foreseen is not None:
            self._foreseen += self._growth(loading.candidate, len(loading.block_ids))
        self._loading[loading.candidate.request.request_id] = loading

    def loading_candidate(self, request_id: RequestId) -> Candidate | None:
        """Return the candidate, if its cache is being copied in."""
        entry = self._loading.get(request_id)
        return entry.candidate if entry is not None else None

    def loading_candidates(self) -> list[Candidate]:
        """Return all candidates whose cache is being copied in."""
        return [entry.candidate for entry in self._loading.values()]

    def loaded(self, request_id: RequestId) -> Loading:
        """Remove and return an entry whose copy has ended, successfully or not."""
        self._foreseen = None
        return self._loading.pop(request_id)

    def enter(self, running: RunningRequest, now: float) -> None:
        """Add a request to the next iteration; its blocks hold the cache of `num_computed` tokens."""
        if self._scheduler is not None:
            self._scheduler.enter(
                running.request,
                now,
                num_cached=running.num_computed,
                num_generated=len(running.generated_token_ids),
                predicted_len=running.predicted_output_len,
                first_token_s=running.first_token_s,
            )
        self._add(running)

    def _add(self, running: RunningRequest) -> None:
        request, request_id = running.request, running.request.request_id
        self._running[request_id] = running
        self._foreseen = None
        self.version += 1
        generated, block_ids = tuple(running.generated_token_ids), tuple(running.block_ids)
        self._additions[request_id] = Addition(request, generated, block_ids, running.num_computed)

    # --- iterations

    def grow(self) -> Growth:
        """Give one more block to each request that fills its last one; a request that gets none stalls."""
        num_stalled = num_soon = 0
        block_size = self._block_size
        self._foreseen = None
        for request_id, running in self._running.items():
            num_free_slots = len(running.block_ids) * block_size - running.context_len
            if num_free_slots > 0:
                continue
            if num_free_slots < 0:
                block_ids = self._allocator.allocate(1)
                running.is_stalled = block_ids is None
                if block_ids is None:
                    num_stalled += 1
                    continue
                running.block_ids += block_ids
                if request_id in self._additions:
                    self._add(running)
                else:
                    self._extensions[request_id] = self._extensions.get(request_id, ()) + block_ids
            else:
                num_soon += running.context_len < running.max_context_len
        self._has_stalled = num_stalled > 0
        num_coming = self._allocator.num_free + self._num_leaving_blocks
        return Growth(num_stalled, num_stalled + num_soon - num_coming)

    def stuck(self) -> RunningRequest | None:
        """Return the only request if it stalls, so that no other one will ever free a block for it."""
        only = next(iter(self._running.values())) if len(self._running) == 1 and self.num_holding == 1 else None
        return only if only is not None and only.is_stalled else None

    def slices(self, now: float) -> Slices:
        """Return the tokens to compute by request: all up to its next token, or what the scheduler chooses.

        The same tuple as for the iteration before, if only contexts have changed.
        """
        if self._scheduler is not None and self._running:
            return self._scheduled_slices(self._scheduler, now)
        if self._decodes_of == self.version and not self._has_stalled:
            return self._decodes
        slices = tuple((key, running.num_remaining) for key, running in self._running.items() if not running.is_stalled)
        if not self._has_stalled and all(num_tokens == 1 for _, num_tokens in slices):
            self._decodes, self._decodes_of = slices, self.version
        return slices

    def _scheduled_slices(self, scheduler: PolicyIterationScheduler, now: float) -> Slices:
        stalled = [one.request.request_id for one in self._running.values() if one.is_stalled]
        slices = scheduler.choose(now, stalled=stalled)
        self._chunks = tuple(part for part in slices if self._running[part[0]].num_remaining > 1)
        return slices

    def note_chunks(self) -> None:
        """Note at the end of an iteration that its chunks are computed. (Sampled tokens are noted by `append`.)"""
        chunks, self._chunks = self._chunks, ()
        for request_id, num_tokens in chunks:
            self._running[request_id].num_computed += num_tokens

    def take_changes(self) -> Changes:
        """Return and reset the removals, additions and extensions for the iteration that begins."""
        removals, self._removals = tuple(self._removals), []
        additions, self._additions = tuple(self._additions.values()), {}
        extensions, self._extensions = tuple(self._extensions.items()), {}
        return Changes(removals, additions, extensions)

    # --- leaving

    def drop(self, running: RunningRequest) -> None:
        """Remove a request and free its blocks."""
        self._allocator.free(self._take_out(running))

    def begin_eviction(self, running: RunningRequest) -> tuple[BlockId, ...]:
        """Remove a request whose blocks are being copied out; they stay taken until `end_eviction`."""
        block_ids = self._take_out(running)
        self._num_leaving_blocks += len(block_ids)
        return block_ids

    def end_eviction(self, block_ids: tuple[BlockId, ...]) -> None:
        """Free the blocks of an evicted request, as they are copied."""
        self._num_leaving_blocks -= len(block_ids)
        self._allocator.free(block_ids)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Free the blocks of a request that was to be loaded and is not."""
        self._allocator.free(block_ids)

    def _take_out(self, running: RunningRequest) -> tuple[BlockId, ...]:
        request_id = running.request.request_id
        del self._running[request_id]
        if self._scheduler is not None:
            self._scheduler.leave(request_id)
        self._foreseen = None
        self.version += 1
        self._extensions.pop(request_id, None)
        if self._additions.pop(request_id, None) is None:
            self._removals.append(request_id)
        return tuple(running.block_ids)

    # --- lengths

    def span(self, batch_id: BatchId) -> tuple[int, int] | None:
        """Return the shortest and longest context of one batch's requests; None when none of them runs."""
        lengths = [running.context_len for running in self._running.values() if running.batch_id == batch_id]
        return (min(lengths), max(lengths)) if lengths else None
