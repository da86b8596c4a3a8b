"""What a colocated worker decides: prompts and decodes on one device, iteration by iteration, as its policy says.

The life of a request on a colocated worker:
1. PrefillRequest: it waits here, in the policy's table. The router keeps no queue of its own for such workers.
2. Before every iteration the policy says who computes how many tokens, and whose cache leaves the device for that:
   dropped, to be computed again, or swapped to host memory. Who is not in the iteration pauses, its blocks kept.
3. A request that has computed its whole context samples a token, which goes straight to its gateway. With the first
   one PrefillCompleted tells the router that its prompt is done.
4. It ends with its stop token or its limit: blocks freed, RequestFinished. Or the client leaves: AbortRequest.
Nobody is sent back to the router: what is preempted waits here and goes on from what it had generated.
"""

from dataclasses import dataclass, field

import msgspec

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send, SendTo, Ticked
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    IterationCompleted,
    RunIteration,
    Swap,
    Swaps,
)
from alignedserve.messages.workers import PrefillRequest, SetPredictedLength, WorkerLoad, WorkerRegistered
from alignedserve.scheduling.policy import DeviceMemory, Evict, Eviction, IterationPlan
from alignedserve.scheduling.worker_state import Entered, Scheduler, WorkerState
from alignedserve.worker_core.iteration_cycle import IterationCycle
from alignedserve.worker_core.iteration_log import IterationLog
from alignedserve.worker_core.request import WorkerRequest
from alignedserve.worker_core.router_link import RouterLink

ColocatedEvent = CommonEvent | IterationCompleted
ColocatedCommand = Send | SendTo | RunIteration


@dataclass(slots=True, eq=False)
class ColocatedRequest(WorkerRequest):
    """One request here; its progress is in the table."""

    block_ids: list[BlockId] = field(default_factory=list)
    is_in_engine: bool = False
    is_on_host: bool = False  # the engine keeps a host copy of it
    is_finished: bool = False  # it has had its last token, or has failed


class ColocatedLogic:
    """All requests of the worker, its blocks, and the one iteration that is in flight at a time."""

    def __init__(
        self,
        *,
        registered: WorkerRegistered,
        memory: DeviceMemory,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`memory`: with nothing in it, of as many blocks as the worker has registered."""
        assert memory.num_blocks == memory.num_free == registered.num_blocks, "memory that is not the worker's"
        self._registered = registered
        self._scheduler = scheduler
        self._state = WorkerState(memory)
        self._allocator = BlockAllocator(registered.num_blocks)
        self._held: dict[RequestId, ColocatedRequest] = {}
        self._members: tuple[ColocatedRequest, ...] = ()  # of the latest iteration
        self._removals: list[RequestId] = []  # for the engine, with the next iteration
        self._forgotten: list[RequestId] = []
        self._num_preemptions = 0
        self.iteration_log = IterationLog()
        self._router = RouterLink(registered)
        self._iterations: IterationCycle[ColocatedRequest, ColocatedCommand] = IterationCycle(
            router=self._router,
            eos_token_ids=eos_token_ids,
            release=self._finish,
            iteration_log=self.iteration_log,
        )

    def on_event(self, event: ColocatedEvent, now: float) -> list[ColocatedCommand]:
        """Same state, event and now always give the same commands. Touches nothing outside self."""
        commands = self._handle(event, now)
        # The next iteration first: it computes while the messages about the last one are sent.
        return [*self._start_iteration(now), *commands, *self._report()]

    def _handle(self, event: ColocatedEvent, now: float) -> list[ColocatedCommand]:
        match event:
            case IterationCompleted():
                return self._iteration_completed(event, now)
            case Received(_, PrefillRequest() as message):
                return self._take(message, now)
            case Received(_, SetPredictedLength() as message):
                return self._expect(message)
            case Received(_, AbortRequest(request_id=request_id, attempt=attempt)):
                return self._abort(request_id, attempt)
            case Received(_, message):
                raise AssertionError(f"a colocated worker does not take {type(message).__name__}")
            case PeerConnected(role, peer):
                return self._on_linked(role, peer)
            case PeerDisconnected():
                return []
            case Ticked():
                return [*self._router.totals(self.iteration_log, now)]

    # --- coming and going

    def _on_linked(self, role: Role, peer: str) -> list[ColocatedCommand]:
        if role is not Role.ROUTER:
            return []
        # A router that comes (back) knows nothing of what we hold: its gateways resume those requests through it.
        for request_id in list(self._held):
            self._abort(request_id)
        return [*self._router.connected(peer)]

    def _take(self, message: PrefillRequest, now: float) -> list[ColocatedCommand]:
        request, request_id = message.request, message.request.request_id
        if blocks_for(request.max_context_len, self._registered.block_size) > self._registered.num_blocks:
            reason = "its context needs more cache blocks than a worker has"
            return [*self._router.failed(message, FailureKind.UNSERVABLE, reason)]
        # What an earlier attempt left here is stale: its abort is on the way, over another link.
        self._abort(request_id, message.attempt - 1)
        earlier = self._held.get(request_id)
        if earlier is None:
            self._hold(message, now)
        else:
            earlier.successor = message
        return []

    def _hold(self, message: PrefillRequest, now: float) -> None:
        request, generated = message.request, list(message.generated_token_ids)
        self._held[request.request_id] = ColocatedRequest(request, message.attempt, generated, granted_s=now)
        self._state.add(request, now, predicted_len=message.predicted_output_len, num_generated=len(generated))

    def _expect(self, message: SetPredictedLength) -> list[ColocatedCommand]:
        held, predicted_len = self._held.get(message.request_id), message.predicted_output_len
        if held is None:
            return []
        if held.attempt == message.attempt:
            self._state.set_predicted_length(message.request_id, predicted_len)
        elif held.successor is not None and held.successor.attempt == message.attempt:
            held.successor = msgspec.structs.replace(held.successor, predicted_output_len=predicted_len)
        return []

    def _abort(self, request_id: RequestId, attempt: int | None = None) -> list[ColocatedCommand]:
        """End what is here of a request; with an attempt, only of that one and earlier ones."""
        held = self._held.get(request_id)
        if held is not None and held.abort(attempt) and not self._iterations.is_running:
            self._drop(held)
        return []

    def _drop(self, held: ColocatedRequest) -> None:
        """It is over here: its blocks are free."""
        request_id = held.request.request_id
        del self._held[request_id]
        self._allocator.free(held.block_ids)
        self._state.remove(request_id)
        if held.is_in_engine:
            self._removals.append(request_id)
        if held.is_on_host:
            self._forgotten.append(request_id)

    # --- starting an iteration

    def _start_iteration(self, now: float) -> list[ColocatedCommand]:
        if self._iterations.is_running or not self._held:
            return []
        plan = self._scheduler.plan(self._state, now)
        if not plan.shares:
            assert not plan.evictions, "evicts for nobody"
            return []
        request_ids = self._state.table.request_ids
        members = tuple(self._held[request_ids[share.row]] for share in plan.shares)
        self._state.begin(plan)
        iteration = self._perform(plan, members, now)
        self._iterations.start(now, members, has_changed=members != self._members)
        self._members = members
        return [iteration]

    def _perform(self, plan: IterationPlan, members: tuple[ColocatedRequest, ...], now: float) -> RunIteration:
        """Give and take blocks as the plan says, and tell the engine."""
        outs = [swap for part in plan.evictions if (swap := self._evict(part, now)) is not None]
        ins: list[Swap] = []
        additions: list[Addition] = []
        extensions: list[tuple[RequestId, tuple[BlockId, ...]]] = []
        for share, held in zip(plan.shares, members, strict=True):
            request_id, num_cached = held.request.request_id, int(self._state.table.num_cached[share.row])
            block_ids = self._bring_in(held, self._state.enter(share), ins)
            if not held.is_in_engine:
                generated, is_hidden = tuple(held.generated_token_ids), bool(self._state.table.is_hidden[share.row])
                additions.append(Addition(held.request, generated, tuple(held.block_ids), num_cached, is_hidden))
                held.is_in_engine = True
            elif block_ids:
                extensions.append((request_id, block_ids))
        for row in plan.uploads:
            self._bring_in(self._held[self._state.table.request_ids[row]], self._state.upload(row), ins)
        removals, self._removals = tuple(self._removals), []
        forgotten, self._forgotten = tuple(self._forgotten), []
        swaps = Swaps(forgotten, tuple(outs), tuple(ins)) if forgotten or outs or ins else None
        slices = tuple(
            (held.request.request_id, share.num_tokens) for share, held in zip(plan.shares, members, strict=True)
        )
        return RunIteration(removals, tuple(additions), tuple(extensions), slices, swaps)

    def _bring_in(self, held: ColocatedRequest, entered: Entered, ins: list[Swap]) -> tuple[BlockId, ...]:
        """Give the request its new blocks; what it has on the host comes back with the iteration."""
        block_ids = self._allocator.allocate(entered.num_blocks)
        assert block_ids is not None, "a plan that does not fit"
        held.block_ids += block_ids
        if entered.num_swapped:
            ins.append(Swap(held.request.request_id, entered.num_swapped, tuple(held.block_ids)))
            held.is_on_host = False
        return block_ids

    def _evict(self, part: Evict, now: float) -> Swap | None:
        request_id = self._state.table.request_ids[part.row]
        held = self._held[request_id]
        left = self._state.evict(part, now)
        num_kept = len(held.block_ids) - left.num_blocks
        leaving, held.block_ids = tuple(held.block_ids[num_kept:]), held.block_ids[:num_kept]
        self._allocator.free(leaving)
        self._num_preemptions += 1
        if held.is_in_engine:
            self._removals.append(request_id)
            held.is_in_engine = False
        if part.how is Eviction.SWAP:
            held.is_on_host = True
            return Swap(request_id, left.num_swapped, leaving)
        if held.is_on_host:
            self._forgotten.append(request_id)
            held.is_on_host = False
        return None

    # --- ending an iteration

    def _iteration_completed(self, event: IterationCompleted, now: float) -> list[ColocatedCommand]:
        self._scheduler.completed(self._state, now=now, duration_s=self._iterations.end(event, now))
        commands = self._iterations.outcome(event, self._held)
        for held in [held for held in self._held.values() if held.is_aborted or held.is_finished]:
            self._drop(held)
            if held.successor is not None:
                self._hold(held.successor, now)
        return commands

    def _finish(self, held: ColocatedRequest) -> list[ColocatedCommand]:
        held.is_finished = True
        return []

    # --- reports

    def _report(self) -> list[Send]:
        num_running = len(self._members) if self._iterations.is_running else 0
        load = WorkerLoad(
            num_waiting=len(self._held) - num_running,
            num_running=num_running,
            num_free_blocks=self._state.num_free,
            num_evictions=self._num_preemptions,
        )
        return self._router.load(load)
