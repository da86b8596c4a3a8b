"""Requests of a worker where a policy decides: their rows in its table and their blocks, always changed together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.ids import BatchId, BlockId, RequestId
from alignedserve.core.request import Request
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.workers import PrefillRequest
from alignedserve.scheduling.policy import DeviceMemory, ScheduledRequest
from alignedserve.scheduling.scheduler_state import Progress, SchedulerState
from alignedserve.worker_core.request import WorkerRequest

_FORESEEN_TOKENS = 256  # of a request, while another moves


@dataclass(slots=True, eq=False)
class HeldRequest(WorkerRequest):
    """One request on such a worker; its progress is in the table."""

    block_ids: list[BlockId] = field(default_factory=list)
    is_in_engine: bool = False
    is_on_host: bool = False  # the engine keeps a host copy of it
    is_finished: bool = False  # it has had its last token, or has failed
    batch_id: BatchId = NO_BATCH  # that it came in, on a decode worker


class HeldRequests:
    """Requests by id, in order of arrival; and what the engine is to be told of those that have left."""

    def __init__(self, memory: DeviceMemory) -> None:
        """`memory`: empty."""
        self.state = SchedulerState(memory)
        self.allocator = BlockAllocator(memory.num_blocks)
        self.num_away = 0  # blocks of requests that are leaving or coming, in no row
        self.is_copying_out = False  # the engine copies blocks to the host that are free already: none may be loaded
        self._block_size = memory.block_size
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
        """The requests, for many look-ups."""
        return self._requests

    def get(self, request_id: RequestId) -> HeldRequest | None:
        """Return the request, if it is here."""
        return self._requests.get(request_id)

    def of_row(self, row: int) -> HeldRequest:
        """Return the request of this row."""
        return self._requests[self.state.table.request_ids[row]]

    def of_parts(self, scheduled: Sequence[ScheduledRequest]) -> tuple[HeldRequest, ...]:
        """Return the requests of these parts of a plan."""
        requests, request_ids = self._requests, self.state.table.request_ids
        return tuple([requests[request_ids[part.row]] for part in scheduled])

    def add(self, message: PrefillRequest, now: float) -> None:
        """Add a request without any cache."""
        request, generated = message.request, list(message.generated_token_ids)
        self._requests[request.request_id] = HeldRequest(request, message.attempt, generated, granted_s=now)
        self.state.add(request, now, predicted_len=message.predicted_output_len, num_generated=len(generated))

    def drop(self, tracked: HeldRequest) -> None:
        """Remove a request and free its blocks."""
        request_id = tracked.request.request_id
        del self._requests[request_id]
        self.allocator.free(tracked.block_ids)
        self.state.remove(request_id)
        self.leave_engine(tracked)
        self.forget_host_copy(tracked)

    def leave_engine(self, tracked: HeldRequest) -> None:
        """Remove it from the engine with the next iteration."""
        if tracked.is_in_engine:
            self._removals.append(tracked.request.request_id)
            tracked.is_in_engine = False

    def forget_host_copy(self, tracked: HeldRequest) -> None:
        """Free its cache on the host with the next iteration."""
        if tracked.is_on_host:
            self._forgotten.append(tracked.request.request_id)
            tracked.is_on_host = False

    # --- requests that move between workers

    def is_portable(self, request_id: RequestId) -> bool:
        """Return whether its whole cache is on this device, as keys and values, and only its next token is missing."""
        table, row = self.state.table, self.state.table.row(request_id)
        is_whole = not table.is_hidden[row] and not table.num_swapped[row] and table.num_blocks[row] > 0
        return bool(is_whole and table.is_decoding[row])

    def has_room_beside(self, num_blocks: int, leaving: HeldRequest | None = None) -> bool:
        """Return whether every request here could still have what it may soon need, alone, while these are held.

        `leaving`: they are this one's, which needs no others.
        """
        return all(self.has_room_for(one.request, one.context_len, num_blocks) for one in self if one is not leaving)

    def has_room_for(self, request: Request, context_len: int, num_held: int = 0) -> bool:
        """Return whether a request could have what it may soon need, alone, beside blocks on their way and these."""
        soon = min(context_len + _FORESEEN_TOKENS, request.max_context_len)
        return blocks_for(soon, self._block_size) <= self.allocator.num_blocks - self.num_away - num_held

    @property
    def can_compute(self) -> bool:
        """Whether any request here could be alone in the next iteration, which policies count on.

        False only while a request that has grown far needs blocks that are on their way.
        """
        left = self.allocator.num_blocks - self.num_away
        return not self.num_away or all(blocks_for(one.context_len, self._block_size) <= left for one in self)

    def hold(self, num_blocks: int) -> tuple[BlockId, ...]:
        """Take free blocks for a request that comes."""
        self.state.hold(num_blocks)
        block_ids = self.allocator.allocate(num_blocks)
        assert block_ids is not None, "fewer blocks than were counted"
        self.num_away += num_blocks
        return block_ids

    def free_held(self, block_ids: Sequence[BlockId]) -> None:
        """Free blocks of a request that has left, or does not come."""
        self.allocator.free(block_ids)
        self.state.hold(-len(block_ids))
        self.num_away -= len(block_ids)

    def detach(self, tracked: HeldRequest) -> Progress:
        """Take a request whose cache is on the device out of the scheduler and the engine; its blocks stay held."""
        self.leave_engine(tracked)
        del self._requests[tracked.request.request_id]
        self.num_away += len(tracked.block_ids)
        return self.state.detach(tracked.request.request_id)

    def attach(self, tracked: HeldRequest, progress: Progress, now: float) -> None:
        """Add a request with its cache, in blocks that were held."""
        assert progress.num_blocks == len(tracked.block_ids), "other blocks than were held"
        self._requests[tracked.request.request_id] = tracked
        self.num_away -= progress.num_blocks
        self.state.attach(tracked.request, now, progress)

    # --- what the engine is told

    def take_removals(self) -> tuple[RequestId, ...]:
        """Return requests that the engine is to remove, each once."""
        removals, self._removals = tuple(self._removals), []
        return removals

    def take_forgotten(self) -> tuple[RequestId, ...]:
        """Return requests whose cache on the host is to be freed, each once."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten
