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
import numpy as np

from alignedserve.core.block_allocator import BlockAllocator, blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, SampledToken
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send, SendTo, Ticked
from alignedserve.messages.fields import FailureKind
from alignedserve.messages.gateways import AbortRequest, PromptScored, TokenDelta
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    IterationCompleted,
    RunIteration,
    Swap,
    Swaps,
    delta_of,
    group_by_gateway,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    AttemptFailed,
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    SetPredictedLength,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.scheduling.policy import DeviceMemory, Evict, Eviction, IterationPlan
from alignedserve.scheduling.table import Ints
from alignedserve.scheduling.worker_state import Entered, Scheduler, WorkerState
from decode_worker.iteration_log.iteration_log import IterationLog
from decode_worker.reports import RouterReports

ColocatedEvent = CommonEvent | IterationCompleted
ColocatedCommand = Send | SendTo | RunIteration


@dataclass(slots=True, eq=False)
class HeldRequest:
    """One request here; its progress is in the table."""

    request: Request
    attempt: int
    granted_s: float  # when it came to this worker
    generated_token_ids: list[int]
    block_ids: list[BlockId] = field(default_factory=list)
    is_in_engine: bool = False
    is_on_host: bool = False  # the engine keeps a host copy of it
    is_computed: bool = False  # the router knows that its prompt is done
    is_aborted: bool = False
    is_over: bool = False  # it has had its last token
    successor: PrefillRequest | None = None  # a later attempt, to be taken when this one is gone

    @property
    def context_len(self) -> int:
        """Prompt and generated tokens."""
        return self.request.prompt_len + len(self.generated_token_ids)


@dataclass(frozen=True, slots=True)
class InFlight:
    """The iteration that runs."""

    started_s: float
    members: tuple[HeldRequest, ...]
    rows: Ints  # in the table; nothing is removed from it meanwhile
    num_tokens: Ints
    work: IterationWork


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
        self._eos_token_ids = eos_token_ids
        self._state = WorkerState(memory)
        self._allocator = BlockAllocator(registered.num_blocks)
        self._held: dict[RequestId, HeldRequest] = {}
        self._in_flight: InFlight | None = None
        self._members: tuple[HeldRequest, ...] = ()  # of the latest iteration
        self._removals: list[RequestId] = []  # for the engine, with the next iteration
        self._forgotten: list[RequestId] = []
        self._num_preemptions = 0
        self.ledger = IterationLog()
        self._reports = RouterReports(registered, self.ledger)

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
                return [*self._reports.totals(now)]

    # --- coming and going

    def _on_linked(self, role: Role, peer: str) -> list[ColocatedCommand]:
        if role is not Role.ROUTER:
            return []
        # A router that comes (back) knows nothing of what we hold: its gateways resume those requests through it.
        for request_id in list(self._held):
            self._abort(request_id)
        return [*self._reports.linked(peer)]

    def _take(self, message: PrefillRequest, now: float) -> list[ColocatedCommand]:
        request, request_id = message.request, message.request.request_id
        if blocks_for(request.max_context_len, self._registered.block_size) > self._registered.num_blocks:
            reason = "its context needs more cache blocks than a worker has"
            return self._to_router(AttemptFailed(request_id, message.attempt, FailureKind.UNSERVABLE, reason))
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
        self._held[request.request_id] = HeldRequest(request, message.attempt, now, generated)
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
        if held is None:
            return []
        if held.successor is not None and (attempt is None or held.successor.attempt <= attempt):
            held.successor = None
        if attempt is None or held.attempt <= attempt:
            held.is_aborted = True
            if self._in_flight is None:
                self._drop(held)
        return []

    def _drop(self, held: HeldRequest) -> None:
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
        if self._in_flight is not None or not self._held:
            return []
        plan = self._scheduler.plan(self._state, now)
        if not plan.shares:
            assert not plan.evictions, "evicts for nobody"
            return []
        request_ids = self._state.table.request_ids
        members = tuple(self._held[request_ids[share.row]] for share in plan.shares)
        rows = np.array([share.row for share in plan.shares])
        num_tokens = np.array([share.num_tokens for share in plan.shares])
        self._in_flight = InFlight(now, members, rows, num_tokens, self._state.work_of(plan))
        iteration = self._perform(plan, members, now)
        has_changed = members != self._members
        self._members = members
        self.ledger.iteration_started(now, members, has_changed=has_changed)
        return [iteration]

    def _perform(self, plan: IterationPlan, members: tuple[HeldRequest, ...], now: float) -> RunIteration:
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

    def _bring_in(self, held: HeldRequest, entered: Entered, ins: list[Swap]) -> tuple[BlockId, ...]:
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
        in_flight, self._in_flight = self._in_flight, None
        assert in_flight is not None, "an iteration ended that was not started"
        self.ledger.iteration_completed(now, event)
        duration_s = event.duration_s(in_flight.started_s, now)
        self._state.completed(in_flight.rows, in_flight.num_tokens, now=now, duration_s=duration_s)
        self._scheduler.learn(in_flight.work, duration_s)
        commands: list[ColocatedCommand] = []
        scored: list[ColocatedCommand] = []
        for scores in event.prompt_scores:
            reply_to = self._held[scores.request_id].request.reply_to
            scored.append(SendTo(reply_to, PromptScored(scores.request_id, scores.first_position, scores.entries)))
        deltas: list[tuple[str, TokenDelta]] = []
        for token in event.sampled:
            commands += self._sampled(token, deltas)
        for request_id in event.failed:
            held = self._held[request_id]
            reason = "the model gave no usable logits"
            commands += self._to_router(AttemptFailed(request_id, held.attempt, FailureKind.INTERNAL, reason))
            held.is_over = True
        for held in [held for held in self._held.values() if held.is_aborted or held.is_over]:
            self._drop(held)
            if held.successor is not None:
                self._hold(held.successor, now)
        # Scores of a prompt go before its token; reports to the router last, nobody waits for them.
        return [*scored, *group_by_gateway(deltas), *commands]

    def _sampled(self, token: SampledToken, deltas: list[tuple[str, TokenDelta]]) -> list[ColocatedCommand]:
        held = self._held[token.request_id]
        request = held.request
        if held.is_aborted:
            return []
        commands: list[ColocatedCommand] = []
        if not held.is_computed:
            held.is_computed = True
            commands += self._to_router(PrefillCompleted(request.request_id, held.attempt, held.context_len))
        delta = delta_of(request, token, len(held.generated_token_ids), self._eos_token_ids)
        held.generated_token_ids += delta.token_ids
        deltas.append((request.reply_to, delta))
        return commands + self._finish(held) if delta.finish_reason is not None else commands

    def _finish(self, held: HeldRequest) -> list[ColocatedCommand]:
        held.is_over = True
        num_generated = len(held.generated_token_ids)
        return self._to_router(RequestFinished(held.request.request_id, held.attempt, num_generated))

    # --- reports

    def _to_router(self, message: Message) -> list[ColocatedCommand]:
        return [*self._reports.send(message)]

    def _report(self) -> list[ColocatedCommand]:
        num_running = len(self._members) if self._in_flight is not None else 0
        load = WorkerLoad(
            num_waiting=len(self._held) - num_running,
            num_running=num_running,
            num_free_blocks=self._state.num_free,
            num_evictions=self._num_preemptions,
        )
        return [*self._reports.load(load)]
