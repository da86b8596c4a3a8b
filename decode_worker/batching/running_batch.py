"""The running batch and this worker's blocks: members, their growth, and the blocks that the next iterations need."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.ids import BatchId, BlockId, RequestId
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.held_requests import HeldRequest
from alignedserve.worker_core.request import WorkerRequest
from decode_worker.batching.slack_packing import SlackPack, SlackPacking
from decode_worker.state import LoadingCandidate, RunningRequest

# A request is admitted only if every request of the batch can then generate this many tokens without an eviction.
FORESEEN_TOKENS = 32

BatchMember = RunningRequest | HeldRequest


class Begun(NamedTuple):
    """An iteration that begins, and candidates whose caches are to be loaded beside it."""

    command: RunIteration | None  # None: only they
    members: Collection[BatchMember]
    has_changed: bool = True  # other members than in the iteration before
    loads: tuple[LoadingCandidate, ...] = ()
    alone_s: float = 0.0  # of its real-time part, as in the plan


class LoadingCandidates(dict[RequestId, LoadingCandidate]):
    """Candidates whose caches are being copied in, with the blocks that they are copied into."""

    def candidate(self, request_id: RequestId) -> Candidate | None:
        return self[request_id].candidate if request_id in self else None

    def candidates(self) -> list[Candidate]:
        return [entry.candidate for entry in self.values()]

    def growth(self, block_size: int, state_blocks: int = 0) -> int:
        entries = self.values()
        return sum(growth_of(entry.candidate, len(entry.block_ids) - state_blocks, block_size) for entry in entries)


def growth_of(request: WorkerRequest, num_held: int, block_size: int) -> int:
    foreseen = min(request.context_len + FORESEEN_TOKENS, request.max_context_len)
    return max(blocks_for(foreseen, block_size) - num_held, 0)


def span_of(members: Iterable[BatchMember], batch_id: BatchId) -> tuple[int, int] | None:
    lengths = [member.context_len for member in members if member.batch_id == batch_id]
    return (min(lengths), max(lengths)) if lengths else None


class Leaving(NamedTuple):
    """Remainder of a request that was taken out of the batch, to be copied out."""

    block_ids: tuple[BlockId, ...]
    num_cached: int
    first_token_s: float
    last_token_s: float | None  # None: not known
    service_s: float = 0.0  # that it spent in iterations, where a policy asks


Slices = tuple[tuple[RequestId, int], ...]
Extensions = tuple[tuple[RequestId, tuple[BlockId, ...]], ...]


class Changes(NamedTuple):
    """Changes for the engine, in the fields of RunIteration."""

    removals: tuple[RequestId, ...]
    additions: tuple[Addition, ...]
    extensions: Extensions


class Growth(NamedTuple):
    """Blocks that the next iterations lack."""

    num_stalled: int  # requests without a block, which skip this iteration
    num_missing: int  # blocks wanting in this and the next iteration


class RunningBatch:
    """Requests in the engine or about to enter it, and those whose cache is being copied in or out."""

    num_preemptions = 0  # nothing leaves but into a candidate buffer
    decode_s = None  # its pace is that of the iterations that were

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_running_requests: int,
        packing: SlackPack | None = None,
        state_blocks: int = 0,
    ) -> None:
        self._allocator = BlockAllocator(num_blocks)
        self._block_size, self._state_blocks = block_size, state_blocks
        self._max_running_requests = max_running_requests
        self._running: dict[RequestId, RunningRequest] = {}
        self.packing = self.admission = SlackPacking(self._running, packing) if packing is not None else None
        self.is_mixing_cheaper = self.packing.is_mixing_cheaper if self.packing is not None else None
        self.loading = LoadingCandidates()
        self._num_leaving_blocks = 0  # of requests that are being copied out
        self._foreseen: int | None = None  # blocks that all will grow by; None: to be counted anew
        self.version = 0  # changes with the members
        self._additions: dict[RequestId, Addition] = {}  # for the engine, with the next iteration, like these
        self._extensions: dict[RequestId, tuple[BlockId, ...]] = {}
        self._removals: list[RequestId] = []
        self._has_stalled = False
        self._decodes: Slices = ()  # one token of each request, and the version for which that was built
        self._decodes_of = -1

    @classmethod
    def of_worker(
        cls, registered: WorkerRegistered, most: int, packing: SlackPack | None = None, state_blocks: int = 0
    ) -> "RunningBatch":
        sizes = {"num_blocks": registered.num_blocks, "block_size": registered.block_size}
        return cls(**sizes, max_running_requests=most, packing=packing, state_blocks=state_blocks)

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._running.values())

    def __getitem__(self, request_id: RequestId) -> RunningRequest:
        return self._running[request_id]

    @property
    def by_id(self) -> Mapping[RequestId, RunningRequest]:
        return self._running

    def get(self, request_id: RequestId) -> RunningRequest | None:
        return self._running.get(request_id)

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    @property
    def has_place(self) -> bool:
        return self.num_holding < self._max_running_requests

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_holding(self) -> int:
        return len(self._running) + len(self.loading)

    @property
    def is_empty(self) -> bool:
        return not (self._running or self.loading or self._num_leaving_blocks)

    def never_fits(self, candidate: Candidate) -> bool:
        """Return False: a request that outgrows the worker ends when it is alone and stalls."""
        return False

    def blocks_for(self, num_tokens: int) -> int:
        return self._state_blocks + blocks_for(num_tokens, self._block_size)

    def blocks_if_fits(self, candidate: Candidate) -> tuple[BlockId, ...] | None:
        request_id = candidate.request.request_id
        if self.num_holding >= self._max_running_requests or request_id in self._running or request_id in self.loading:
            return None
        num_blocks = self.blocks_for(candidate.context_len)
        if self.is_empty:
            return self._allocator.allocate(num_blocks)
        if self._foreseen is None:
            size, beside = self._block_size, self._state_blocks
            growing = (growth_of(entry, len(entry.block_ids) - beside, size) for entry in self._running.values())
            self._foreseen = sum(growing) + self.loading.growth(size, beside)
        foreseen = self._foreseen + growth_of(candidate, num_blocks - self._state_blocks, self._block_size)
        if num_blocks + foreseen > self._allocator.num_free:
            return None
        return self._allocator.allocate(num_blocks)

    def load(self, loading: LoadingCandidate) -> None:
        if self._foreseen is not None:
            self._foreseen += growth_of(
                loading.candidate, len(loading.block_ids) - self._state_blocks, self._block_size
            )
        self.loading[loading.candidate.request.request_id] = loading

    def loaded(self, request_id: RequestId) -> LoadingCandidate:
        self._foreseen = None
        return self.loading.pop(request_id)

    def enter(self, candidate: Candidate, block_ids: tuple[BlockId, ...], num_cached: int, now: float) -> None:
        self._add(RunningRequest.of_candidate(candidate, block_ids, num_cached))

    def _add(self, running: RunningRequest) -> None:
        request, request_id = running.request, running.request.request_id
        self._running[request_id] = running
        self._foreseen = None
        self.version += 1
        generated, block_ids = tuple(running.generated_token_ids), tuple(running.block_ids)
        self._additions[request_id] = Addition(request, generated, block_ids, running.num_computed)

    def grow(self) -> Growth:
        """Give a block to each request that fills its last; without one a request stalls."""
        num_stalled = num_soon = 0
        block_size = self._block_size
        self._foreseen = None
        for request_id, running in self._running.items():
            num_free_slots = (len(running.block_ids) - self._state_blocks) * block_size - running.context_len
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
        """Return the only request if it stalls: no other will ever free a block."""
        only = next(iter(self._running.values())) if len(self._running) == 1 and self.num_holding == 1 else None
        return only if only is not None and only.is_stalled else None

    def view(self, candidates: Iterable[Candidate], now: float) -> None:
        """Do nothing: there is no policy that would choose among candidates."""

    def begin(self, now: float) -> Begun | None:
        slices = self.slices()
        if not slices:
            return None
        if self.packing is not None:
            self.packing.began(now)
        changes = self.take_changes()
        has_changed = bool(changes.additions or changes.removals)
        return Begun(RunIteration(*changes, slices), self._running.values(), has_changed=has_changed)

    def completed(self, event: IterationCompleted, now: float, duration_s: float) -> None:
        if self.packing is not None:
            self.packing.completed(duration_s, event.grammar_s)

    def slices(self) -> Slices:
        if self._decodes_of == self.version and not self._has_stalled:
            return self._decodes
        slices = tuple((key, running.num_remaining) for key, running in self._running.items() if not running.is_stalled)
        if not self._has_stalled and all(num_tokens == 1 for _, num_tokens in slices):
            self._decodes, self._decodes_of = slices, self.version
        return slices

    def take_changes(self) -> Changes:
        removals, self._removals = tuple(self._removals), []
        additions, self._additions = tuple(self._additions.values()), {}
        extensions, self._extensions = tuple(self._extensions.items()), {}
        return Changes(removals, additions, extensions)

    def drop(self, running: WorkerRequest) -> None:
        self._allocator.free(self._take_out(running.request.request_id).block_ids)

    def is_portable(self, request_id: RequestId) -> bool:
        return True

    def num_cached(self, running: WorkerRequest) -> int:
        return self._running[running.request.request_id].num_computed

    def begin_eviction(self, running: WorkerRequest) -> Leaving:
        leaving = self._take_out(running.request.request_id)
        block_ids = tuple(leaving.block_ids)
        self._num_leaving_blocks += len(block_ids)
        return Leaving(block_ids, leaving.num_computed, leaving.first_token_s, None)

    def end_eviction(self, block_ids: tuple[BlockId, ...]) -> None:
        self._num_leaving_blocks -= len(block_ids)
        self._allocator.free(block_ids)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        self._allocator.free(block_ids)

    def _take_out(self, request_id: RequestId) -> RunningRequest:
        running = self._running.pop(request_id)
        self._foreseen = None
        self.version += 1
        self._extensions.pop(request_id, None)
        if self._additions.pop(request_id, None) is None:
            self._removals.append(request_id)
        return running

    def set_predicted_length(self, request_id: RequestId, predicted_len: float) -> None:
        """Do nothing: no decision here depends on it."""
