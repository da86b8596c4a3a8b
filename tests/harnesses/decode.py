"""A decode worker to tell things to: twenty blocks of four tokens, four requests."""

from collections.abc import Sequence
from typing import Any

from alignedserve.core.ids import BatchId, LeaseId, RequestId
from alignedserve.core.request import SampledToken
from alignedserve.messages.caches import (
    ArenaOffered,
    BatchGranted,
    BlockCopy,
    BlockRun,
    BlocksPrefetched,
    CancelPrefetch,
    Handoff,
    LeasesReleased,
    LeasesReturned,
    PrefetchBlocks,
)
from alignedserve.messages.events import PeerConnected, Received, Send, SendTo
from alignedserve.messages.gateways import TokenDelta, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    BlocksLoaded,
    BlocksOffloaded,
    IterationCompleted,
    Load,
    LoadBlocks,
    OffloadBlocks,
    RunIteration,
)
from alignedserve.messages.pools import BatchReceived
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import WorkerLoad
from alignedserve.scheduling.policy import CandidateChoice, DeviceMemory, IterationLimits, IterationPolicy
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.worker_core.part import WorkerCommand
from decode_worker.batching.batch_order import DecodeLimits, SwitchLimits
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.batching.scheduled_batch import DecodeBatch, ScheduledBatch
from decode_worker.batching.slack_packing import SlackPack
from decode_worker.logic import DecodeLogic
from tests.harnesses.scheduling import EasyCosts
from tests.support.samples import POOL, PREFILL, REPLY_TO, ROUTER, blocks, handoff, request, worker

BATCH = BatchId(1)
EOS = 2
BUFFER_RUNS = (BlockRun(0, 1, 55),)


class DecodeHarness:
    """A decode worker with a router and a pool. Its load reports are left out."""

    def __init__(
        self,
        *,
        num_blocks: int = 20,
        max_running_requests: int = 4,
        min_requests: int = 36,
        buffer_blocks: int = 0,
        policy: IterationPolicy | None = None,
        packing: SlackPack | None = None,
        host_tokens: int = 0,
        best_effort_floor: float | None = None,
        **scheduled: Any,
    ) -> None:
        self.now = 0.0
        self.registered = worker(num_blocks=num_blocks, max_running_requests=max_running_requests)
        switch = SwitchLimits(min_requests, min_requests, starvation_s=2.0, best_effort_floor=best_effort_floor)
        limits = DecodeLimits(max_running_requests, switch)
        batch: DecodeBatch | None = None
        if policy is not None:
            batch = scheduled_batch(policy, num_blocks, max_running_requests, host_tokens, **scheduled)
        elif packing is not None:
            batch = RunningBatch.of_worker(self.registered, max_running_requests, packing)
        self.logic = DecodeLogic(registered=self.registered, limits=limits, eos_token_ids=frozenset({EOS}), batch=batch)
        self.do(PeerConnected(Role.ROUTER, ROUTER))
        if buffer_blocks:
            self.lend(buffer_blocks)

    def do(self, event: Any) -> list[WorkerCommand]:
        commands = self.logic.on_event(event, self.now)
        return [one for one in commands if not (isinstance(one, Send) and isinstance(one.message, WorkerLoad))]

    def hear(self, message: Message, peer: str = ROUTER) -> list[WorkerCommand]:
        return self.do(Received(peer, message))

    def lend(self, num_blocks: int, peer: str = PREFILL) -> list[WorkerCommand]:
        """Connect a prefill worker that lends a buffer of so many blocks."""
        self.do(PeerConnected(Role.PREFILL_WORKER, peer))
        return self.hear(ArenaOffered(f"/dev/shm/{peer}.arena", num_blocks, 64, "digest"), peer)

    def grant(
        self, *handoffs: Handoff, batch: int = BATCH, joins: int | None = None, is_aligned: bool = True
    ) -> list[WorkerCommand]:
        joined = BatchId(joins) if joins is not None else None
        return self.hear(BatchGranted(BatchId(batch), handoffs, joined, is_aligned), POOL)

    def loaded(self, command: LoadBlocks, *refused: RequestId) -> list[WorkerCommand]:
        return self.do(BlocksLoaded(command.source, command.loads, frozenset(refused)))

    def enter(self, *handoffs: Handoff, **batch: Any) -> list[WorkerCommand]:
        """Grant requests, load those that may enter at once, and return what follows from that."""
        return self.all_loaded(self.grant(*handoffs, **batch))

    def all_loaded(self, commands: Sequence[WorkerCommand]) -> list[WorkerCommand]:
        return [one for command in loads(commands) for one in self.loaded(command)]

    def offloaded(
        self, command: OffloadBlocks, copied: tuple[BlockRun, ...] | None = BUFFER_RUNS
    ) -> list[WorkerCommand]:
        return self.do(BlocksOffloaded(command, copied))

    def prefetched(
        self, name: str, generation: int, context_len: int = 4, copied: tuple[BlockRun, ...] = BUFFER_RUNS
    ) -> list[WorkerCommand]:
        copy = BlockCopy(generation, context_len, copied)
        return self.hear(BlocksPrefetched(RequestId(name), generation, copy), PREFILL)

    def sampled(self, **tokens: int) -> list[WorkerCommand]:
        """End the iteration with these tokens."""
        return self.completed(*(SampledToken(RequestId(name), token) for name, token in tokens.items()))

    def completed(self, *tokens: SampledToken, **more: Any) -> list[WorkerCommand]:
        return self.do(IterationCompleted(tokens, **more))

    def load(self) -> WorkerLoad:
        """Return the load that the next router is told; its coming empties the worker."""
        commands = self.logic.on_event(PeerConnected(Role.ROUTER, ROUTER), self.now)
        return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, WorkerLoad)][-1]


def scheduled_batch(
    policy: IterationPolicy,
    num_blocks: int = 20,
    max_running_requests: int = 4,
    host_tokens: int = 0,
    *,
    hidden_ratio: float | None = None,
    choice: CandidateChoice = CandidateChoice.ALL,
) -> ScheduledBatch:
    """Build an empty batch of a policy: blocks of four tokens, twice as many places as run, ten tokens an iteration."""
    return ScheduledBatch(
        memory=DeviceMemory(num_blocks, num_blocks, 4, host_tokens, hidden_ratio=hidden_ratio),
        scheduler=Scheduler(policy, EasyCosts(), IterationLimits(max_running_requests, 10)),
        max_running_requests=max_running_requests,
        max_held=2 * max_running_requests,
        choice=choice,
    )


def added(of: Handoff, *numbers: int) -> Addition:
    return Addition(of.request, of.generated_token_ids, blocks(*numbers), of.copy.context_len)


def load(of: Handoff, *numbers: int) -> Load:
    return Load(of.request.request_id, of.copy, blocks(*numbers))


def from_pool(*parts: Load) -> LoadBlocks:
    return LoadBlocks(POOL, parts)


def run(*additions: Addition, removals: tuple[str, ...] = (), grown: Any = (), slices: dict[str, int]) -> RunIteration:
    extensions = tuple((RequestId(name), blocks(number)) for name, number in grown)
    parts = tuple((RequestId(name), count) for name, count in slices.items())
    return RunIteration(tuple(map(RequestId, removals)), additions, extensions, parts)


def runs(commands: Sequence[WorkerCommand]) -> list[RunIteration]:
    return [one for one in commands if isinstance(one, RunIteration)]


def loads(commands: Sequence[WorkerCommand]) -> list[LoadBlocks]:
    return [one for one in commands if isinstance(one, LoadBlocks)]


def offloads(commands: Sequence[WorkerCommand]) -> list[OffloadBlocks]:
    return [one for one in commands if isinstance(one, OffloadBlocks)]


def emitted(*deltas: TokenDelta) -> SendTo:
    return SendTo(REPLY_TO, TokensEmitted(deltas))


def received(*members: tuple[RequestId, int], batch: int = BATCH) -> Send:
    return Send(ROUTER, BatchReceived(BatchId(batch), members))


def released(lease: int) -> Send:
    return Send(POOL, LeasesReleased((LeaseId(lease),)))


def returned(lease: int) -> Send:
    return Send(POOL, LeasesReturned((LeaseId(lease),)))


def prefetch(of: Handoff, generation: int, *numbers: int) -> Send:
    message = PrefetchBlocks(of.request.request_id, of.attempt, of.copy, blocks(*numbers), generation)
    return Send(PREFILL, message)


def cancel(name: str, generation: int) -> Send:
    return Send(PREFILL, CancelPrefetch(RequestId(name), generation))


def to_router(message: Message) -> Send:
    return Send(ROUTER, message)


H1 = handoff(request(), 11)  # four tokens cached, one to compute: two blocks
H2 = handoff(request("r2", prompt_len=7), 12)  # the same with seven tokens
H3 = handoff(request("r3"), 13)


def running(**sizes: Any) -> DecodeHarness:
    """r1 is in its first iteration here, in blocks 0 and 1."""
    made = DecodeHarness(**sizes)
    made.enter(H1)
    return made
