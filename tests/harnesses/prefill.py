"""A prefill worker to tell things to: twelve blocks of four tokens, ten tokens an iteration."""

from typing import Any

from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.core.request import Request, SampledToken, TokenLogprob
from alignedserve.messages.caches import (
    ArenaOffered,
    BlockCopy,
    BlockRun,
    BlocksReserved,
    BlocksWritten,
    CancelReservation,
    ReserveBlocks,
)
from alignedserve.messages.events import PeerConnected, Received, Send, SendTo
from alignedserve.messages.gateways import AbortRequest, TokenDelta, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    IterationCompleted,
    LoadBlocks,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    RunIteration,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest, WorkerLoad
from alignedserve.scheduling.iteration_scheduler import FcfsIterationScheduler, IterationScheduler
from alignedserve.worker_core.part import WorkerCommand
from prefill_worker.logic import PrefillLogic
from tests.support.samples import DECODE, POOL, R1, REPLY_TO, ROUTER, blocks, request, worker

ARENA = ArenaOffered("/dev/shm/x.arena", 8, 64, "digest")
BUFFER = ArenaOffered("/dev/shm/b.arena", 6, 64, "digest")
REGISTERED = worker(num_blocks=12, can_prefill=True, can_decode=False)
EOS = 2
RUNS = (BlockRun(5, 1, 99),)


class PrefillHarness:
    """A prefill worker with a router and a pool. Its load reports are left out."""

    def __init__(
        self,
        *,
        has_pool: bool = True,
        max_running_requests: int = 3,
        scheduler: IterationScheduler | None = None,
    ) -> None:
        self.logic = PrefillLogic(
            registered=REGISTERED,
            max_running_requests=max_running_requests,
            scheduler=scheduler or FcfsIterationScheduler(10),
            eos_token_ids=frozenset({EOS}),
        )
        self.do(PeerConnected(Role.ROUTER, ROUTER))
        if has_pool:
            self.hear(ARENA, POOL)

    def do(self, event: Any) -> list[WorkerCommand]:
        commands = self.logic.on_event(event, 0.0)
        return [one for one in commands if not (isinstance(one, Send) and isinstance(one.message, WorkerLoad))]

    def hear(self, message: Message, peer: str = ROUTER) -> list[WorkerCommand]:
        return self.do(Received(peer, message))

    def begin(self, of: Request, attempt: int = 1, *generated: int, **more: Any) -> list[WorkerCommand]:
        return self.hear(PrefillRequest(of, attempt, generated, **more))

    def sampled(self, *tokens: SampledToken, **more: Any) -> list[WorkerCommand]:
        return self.do(IterationCompleted(tokens, **more))

    def copied(self, command: OffloadBlocks, runs: tuple[BlockRun, ...] | None = RUNS) -> list[WorkerCommand]:
        return self.do(BlocksOffloaded(command, runs))

    def loaded(self, command: LoadBlocks, *refused: RequestId) -> list[WorkerCommand]:
        return self.do(BlocksLoaded(command.source, command.loads, frozenset(refused)))

    def relayed(self, command: RelayBlocks, runs: tuple[BlockRun, ...] | None = RUNS) -> list[WorkerCommand]:
        return self.do(BlocksRelayed(command, runs))

    def link(self, peer: str = DECODE) -> list[WorkerCommand]:
        """Connect a decode worker, which gets a buffer."""
        (opening,) = self.do(PeerConnected(Role.DECODE_WORKER, peer))
        assert isinstance(opening, OpenBuffer)
        return self.do(BufferOpened(peer, opening.link_epoch, BUFFER))

    def free_blocks(self) -> int:
        """Return the free blocks that the next router is told of."""
        commands = self.logic.on_event(PeerConnected(Role.ROUTER, ROUTER), 0.0)
        loads = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, WorkerLoad)]
        return loads[-1].num_free_blocks


def token(token_id: int, name: str = "r1", logprob: TokenLogprob | None = None) -> SampledToken:
    return SampledToken(RequestId(name), token_id, logprob)


def run(*additions: Addition, slices: dict[str, int], removals: tuple[str, ...] = ()) -> RunIteration:
    parts = tuple((RequestId(name), count) for name, count in slices.items())
    return RunIteration(tuple(map(RequestId, removals)), additions, (), parts)


def added(of: Request, *numbers: int, generated: tuple[int, ...] = (), num_cached: int = 0) -> Addition:
    return Addition(of, generated, blocks(*numbers), num_cached)


def reserved(lease: int = 1, attempt: int = 1) -> BlocksReserved:
    return BlocksReserved(R1, attempt, LeaseId(lease), lease, blocks(5))


def offload(lease: int = 1, attempt: int = 1, *, target: str = POOL) -> OffloadBlocks:
    """Build the command that follows `reserved` for r1, whose context lies in block 0."""
    return OffloadBlocks(R1, attempt, blocks(0), target, blocks(5), lease, LeaseId(lease))


def written(lease: int = 1, attempt: int = 1) -> BlocksWritten:
    return BlocksWritten(LeaseId(lease), BlockCopy(lease, 4, RUNS), attempt, request(), (7,))


def emitted(*deltas: TokenDelta) -> SendTo:
    return SendTo(REPLY_TO, TokensEmitted(deltas))


def to_router(message: Message) -> Send:
    return Send(ROUTER, message)


def to_pool(message: Message) -> Send:
    return Send(POOL, message)


RESERVE = to_pool(ReserveBlocks(R1, 1, 1))
CANCEL = to_pool(CancelReservation(R1, 1))
ABORT = AbortRequest(R1)


def computing() -> PrefillHarness:
    made = PrefillHarness()
    made.begin(request())
    return made


def leaving() -> PrefillHarness:
    """r1 is computed, its first token is out, and it has asked the pool for room."""
    made = computing()
    made.sampled(token(7))
    return made


def copying() -> PrefillHarness:
    made = leaving()
    made.hear(reserved(), POOL)
    return made


def offered() -> PrefillHarness:
    made = copying()
    made.copied(offload())
    return made
