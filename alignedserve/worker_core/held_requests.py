"""Requests of a worker where a policy decides: their rows in its table and their blocks, always changed together."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from alignedserve.core.ids import BatchId, BlockId, RequestId
from alignedserve.core.request import Request
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.iterations import BlockCopied
from alignedserve.messages.workers import PrefillRequest
from alignedserve.prefix_cache.cached_blocks import CachedBlock
from alignedserve.prefix_cache.contexts import PrefixCache
from alignedserve.scheduling.policy import DeviceMemory, ScheduledRequest
from alignedserve.scheduling.scheduler_state import MovedProgress, SchedulerState
from alignedserve.scheduling.shared_blocks import num_shared
from alignedserve.worker_core.candidate import Candidate
from alignedserve.worker_core.request import CacheStage, WorkerRequest
from alignedserve.worker_core.worker_blocks import BlockHolder, WorkerBlocks

_FORESEEN_TOKENS = 256  # of a request, while another moves


@dataclass(slots=True, eq=False)
class HeldRequest(BlockHolder):
    """One request of a worker with a policy; its progress is in the table."""

    is_in_engine: bool = False
    is_on_host: bool = False  # the engine keeps a host copy of it
    is_finished: bool = False  # it has had its last token, or has failed
    batch_id: BatchId = NO_BATCH  # that it came in, on a decode worker

    @property
    def can_outlast_router(self) -> bool:
        """True if it decodes here, wanted by nothing else: it goes on whichever router there is."""
        return self.is_prefilled and self.successor is None and not (self.is_aborted or self.is_finished)

    @property
    def is_away(self) -> bool:
        return self.stage in (CacheStage.AWAY, CacheStage.ASKING, CacheStage.LOADING)

    @property
    def num_shareable(self) -> int:
        return 0 if self.context is None else len(self.context.held)


class HeldRequests(WorkerBlocks[HeldRequest]):
    """Requests by id, in order of arrival, and what the engine has yet to hear of requests that have left."""

    def __init__(self, memory: DeviceMemory, prefixes: PrefixCache | None = None) -> None:
        super().__init__(memory.num_blocks, memory.block_size, prefixes, memory.state_blocks)
        self.state = SchedulerState(memory)
        self._shareable: dict[RequestId, list[CachedBlock]] = {}  # of the rows, blocks that may have other users
        if prefixes is not None:
            self.state.held_blocks = self._shareable
        self._has_exact_swaps = memory.swap_width >= 1.0
        self._to_copy: list[tuple[HeldRequest, CachedBlock]] = []  # with which their first own blocks begin
        self.num_away = 0  # blocks of requests that are leaving or coming, in no row
        self.num_copying: Callable[[], int] = lambda: 0  # of these, blocks of copies to and from the pool
        self.is_copying_out = False  # the engine copies from blocks that may be free already: none may be loaded
        self._has_shared_blocks = memory.has_shared_blocks
        self._requests: dict[RequestId, HeldRequest] = {}
        self._removals: list[RequestId] = []  # for the engine, with the next iteration
        self._forgotten: list[RequestId] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(self._requests.values())

    def __getitem__(self, request_id: RequestId) -> HeldRequest:
        return self._requests[request_id]

    @property
    def by_id(self) -> Mapping[RequestId, HeldRequest]:
        return self._requests

    def get(self, request_id: RequestId) -> HeldRequest | None:
        return self._requests.get(request_id)

    def of_row(self, row: int) -> HeldRequest:
        return self._requests[self.state.table.request_ids[row]]

    def num_cached(self, tracked: WorkerRequest) -> int:
        table = self.state.table
        return int(table.num_cached[table.row(tracked.request.request_id)])

    def is_reversed(self, tracked: HeldRequest) -> bool:
        return self._has_shared_blocks and not tracked.is_real_time

    def of_parts(self, scheduled: Sequence[ScheduledRequest]) -> tuple[HeldRequest, ...]:
        requests, request_ids = self._requests, self.state.table.request_ids
        return tuple([requests[request_ids[row]] for row, _, _ in scheduled])

    def add(self, message: PrefillRequest, now: float) -> None:
        request, generated = message.request, list(message.generated_token_ids)
        tracked = HeldRequest(request, message.attempt, generated, granted_s=now)
        self._requests[request.request_id] = tracked
        predicted, num_generated = message.predicted_output_len, len(generated)
        self.state.add(request, now, predicted_len=predicted, num_generated=num_generated, begun_s=message.begun_s)
        tracked.context = self._context_of(tracked)
        self._wait(tracked)

    def drop(self, tracked: HeldRequest) -> None:
        request_id = tracked.request.request_id
        del self._requests[request_id]
        self.states.settle(request_id, tracked.context, is_whole=False)
        shares_last = self.state.shared.partner(request_id) is not None
        (self.state.remove_elsewhere if tracked.is_away else self.state.remove)(request_id)
        self._leave_blocks(tracked, 0, shares_last=shares_last)
        self._shareable.pop(request_id, None)
        self.leave_engine(tracked)
        self.forget_host_copy(tracked)

    def leave_engine(self, tracked: HeldRequest) -> None:
        if tracked.is_in_engine:
            request_id = tracked.request.request_id
            self._removals.append(request_id)
            self._forget_replacements(request_id)
            tracked.is_in_engine = False

    def forget_host_copy(self, tracked: HeldRequest) -> None:
        if tracked.is_on_host:
            self._forgotten.append(tracked.request.request_id)
            tracked.is_on_host = False

    def num_of_states(self, tracked: HeldRequest) -> int:
        return self._state_blocks if len(tracked.block_ids) > tracked.num_shareable else 0

    def foresee_hits(self) -> None:
        """Tell the table what requests without blocks would find cached now; to be called before every plan."""
        if self._prefixes is not None:
            for context in self._prefixes.take_changed():
                self.state.foresee(context.request_id, self._prefixes.num_foreseen(context))

    def share_cached(self, tracked: HeldRequest) -> None:
        """Give a request that enters the blocks that were foreseen; before any block is allocated for others."""
        context, prefixes = tracked.context, self._prefixes
        if context is None or prefixes is None or not context.is_waiting:
            return
        run = prefixes.enter(context, tracked.context_len)
        tracked.block_ids = [block.block_id for block in run.held]
        request_id = tracked.request.request_id
        self._shareable[request_id] = run.held
        self.state.share(self.state.table.row(request_id), len(run.held))
        self.state.settle(self.allocator.num_free)
        if run.copied is not None:
            self._to_copy.append((tracked, run.copied))
        if run.state is not None:
            self._states_to_copy.append((tracked, run.state.state_ids))
        if not tracked.is_prefilled:
            tracked.num_hit_tokens = run.num_tokens

    @override
    def begin_copies(self) -> tuple[BlockCopied, ...]:
        copies = [
            BlockCopied(source.block_id, tracked.block_ids[tracked.num_shareable]) for tracked, source in self._to_copy
        ]
        self._to_copy.clear()
        return (*copies, *super().begin_copies())

    def store_filled(self, failed: Container[RequestId]) -> None:
        if not self._shareable:
            return
        for row in self.state.filling_rows():
            tracked = self.of_row(row)
            request_id = tracked.request.request_id
            if request_id not in failed:
                num_settled = tracked.settled_len(int(self.state.table.num_cached[row]))
                self._store(tracked, num_settled // self.block_size, is_in_engine=tracked.is_in_engine)
            self.states.settle(request_id, tracked.context, is_whole=request_id not in failed)
        self.state.settle(self.allocator.num_free)

    def leave_blocks(self, tracked: HeldRequest, num_kept: int, *, is_swapped: bool, shares_last: bool) -> None:
        self._leave_blocks(tracked, num_kept, shares_last=shares_last)
        if tracked.context is not None:
            tracked.context.is_closed = is_swapped and not self._has_exact_swaps
        if not is_swapped:
            self._wait(tracked)

    def _wait(self, tracked: HeldRequest) -> None:
        """Foresee what a request without blocks will find cached; a token is left to compute, or two, unlike a
        decode."""
        if tracked.context is not None and self._prefixes is not None:
            num_left = 2 if tracked.generated_token_ids else 1
            self._shareable.pop(tracked.request.request_id, None)
            self._prefixes.wait(tracked.context, tracked.context_len - num_left)

    def _leave_blocks(self, tracked: HeldRequest, num_kept: int, *, shares_last: bool = False) -> None:
        first = self.num_of_states(tracked)
        if first and not num_kept:
            self.allocator.free(tracked.block_ids[:first])
        private_ids = tracked.block_ids[max(num_kept, first + tracked.num_shareable) :]
        self.allocator.free(private_ids[:-1] if shares_last else private_ids)
        if tracked.context is not None and self._prefixes is not None:
            self._prefixes.leave(tracked.context, max(num_kept - first, 0))
        del tracked.block_ids[num_kept:]
        self.state.settle(self.allocator.num_free)

    # --- requests that move between workers

    def is_portable(self, request_id: RequestId) -> bool:
        table, row = self.state.table, self.state.table.row(request_id)
        is_whole = not table.is_hidden[row] and not table.num_swapped[row] and table.num_blocks[row] > 0
        is_alone = self.state.shared.partner(request_id) is None  # in its blocks
        return bool(is_whole and is_alone and table.is_decoding[row])

    def has_room_beside(self, num_blocks: int, leaving: HeldRequest | None = None) -> bool:
        return all(
            self.has_room_for(held.request, held.context_len, num_blocks) for held in self if held is not leaving
        )

    def has_room_for(self, request: Request, context_len: int, num_held: int = 0) -> bool:
        soon = min(context_len + _FORESEEN_TOKENS, request.max_context_len)
        return self.blocks_for(soon) <= self._num_usable - num_held

    @property
    def can_compute(self) -> bool:
        """Return whether any request here could be alone in the next iteration, which policies count on."""
        left = self._num_usable
        return not self.num_away or all(self.blocks_for(held.context_len) <= left for held in self)

    @property
    def _num_usable(self) -> int:
        return self.allocator.num_blocks - self.num_away + self.num_copying()

    def hold(self, num_blocks: int) -> tuple[BlockId, ...]:
        self.state.hold(num_blocks)
        block_ids = self.allocator.allocate(num_blocks)
        assert block_ids is not None, "fewer blocks than were counted"
        self.num_away += num_blocks
        return block_ids

    def free_held(self, block_ids: Sequence[BlockId]) -> None:
        self.allocator.free(block_ids)
        self.state.hold(-len(block_ids))
        self.num_away -= len(block_ids)

    def cache_held(self, num_blocks: int) -> None:
        self.num_away -= num_blocks
        self.state.settle(self.allocator.num_free)

    @property
    def num_promised(self) -> int:
        needs = (self.blocks_for(held.context_len + 1) - len(held.block_ids) for held in self)
        return sum(max(need, 0) for holder, need in zip(self, needs, strict=True) if holder.block_ids)

    def detach(self, tracked: HeldRequest) -> MovedProgress:
        self.leave_engine(tracked)
        request_id = tracked.request.request_id
        del self._requests[request_id]
        self._shareable.pop(request_id, None)
        self.num_away += len(tracked.block_ids)
        return self.state.detach(request_id)

    def free_detached(self, tracked: HeldRequest) -> None:
        self.num_away -= len(tracked.block_ids)
        self._leave_blocks(tracked, 0)

    # --- requests whose cache is in the pool

    def send_away(self, tracked: HeldRequest, progress: MovedProgress, now: float) -> None:
        tracked.go(CacheStage.AWAY)
        self._requests[tracked.request.request_id] = tracked
        self.state.add_elsewhere(tracked.request, now, replace(progress, num_blocks=0))

    def bring_back(self, tracked: HeldRequest, block_ids: Sequence[BlockId]) -> None:
        request_id = tracked.request.request_id
        tracked.go(CacheStage.HERE)
        tracked.block_ids = list(block_ids)
        self.num_away -= len(block_ids)
        self.state.bring_back(request_id, len(block_ids))
        if not block_ids:
            self._wait(tracked)
        elif tracked.context is not None:
            self._shareable[request_id] = tracked.context.held

    def num_own(self, tracked: HeldRequest) -> int:
        return len(tracked.block_ids) - (num_shared(tracked.context.held) if tracked.context is not None else 0)

    def enter(self, candidate: Candidate, block_ids: Sequence[BlockId], num_cached: int, now: float) -> None:
        tracked = HeldRequest(
            candidate.request,
            candidate.attempt,
            candidate.generated_token_ids,
            granted_s=candidate.granted_s,
            predicted_output_len=candidate.predicted_output_len,
            is_prefilled=True,
            block_ids=list(block_ids),
            batch_id=candidate.batch_id,
        )
        self.attach(tracked, candidate.progress(num_cached, len(block_ids)), now)

    def attach(self, tracked: HeldRequest, progress: MovedProgress, now: float) -> None:
        assert progress.num_blocks == len(tracked.block_ids), "other blocks than were held"
        self._requests[tracked.request.request_id] = tracked
        self.num_away -= progress.num_blocks
        self.state.attach(tracked.request, now, progress)
        if tracked.context is None:
            tracked.context = self._context_of(tracked)
        if tracked.context is not None:
            self._shareable[tracked.request.request_id] = tracked.context.held

    # --- what the engine is told

    def take_removals(self) -> tuple[RequestId, ...]:
        removals, self._removals = tuple(self._removals), []
        return removals

    def take_forgotten(self) -> tuple[RequestId, ...]:
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten
