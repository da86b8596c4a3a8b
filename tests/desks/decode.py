"""A decode worker to tell things to: twenty blocks of four tokens, four requests, ten tokens an iteration."""

from typing import Any

from alignedserve.core.ids import BatchId, LeaseId, RequestId
from alignedserve.core.request import Request, SampledToken
from alignedserve.messages.events import PeerLinked, Received, Send, SendTo
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration
from alignedserve.messages.links import (
    BatchGranted,
    BatchReceived,
    Handoff,
    LeasesReleased,
    PrefillRequest,
    TokenDelta,
    TokensEmitted,
    WorkerLoad,
)
from alignedserve.messages.wire import Message
from decode_worker.logic import DecodeCommand, DecodeLimits, DecodeLogic
from tests.samples import POOL, REPLY_TO, ROUTER, blocks, handoff, request, worker

BATCH = BatchId(1)
EOS = 2


class Desk:
    """A decode worker with a router and a pool. Its load reports are left out."""

    def __init__(self, *, num_blocks: int = 20, max_running: int = 4, max_tokens: int = 10) -> None:
        self.registered = worker(num_blocks=num_blocks, max_running=max_running)
        limits = DecodeLimits(max_running, max_tokens)
        self.logic = DecodeLogic(registered=self.registered, limits=limits, eos_token_ids=frozenset({EOS}))
        self.do(PeerLinked(Role.ROUTER, ROUTER))

    def do(self, event: Any) -> list[DecodeCommand]:
        commands = self.logic.on_event(event, 0.0)
        return [one for one in commands if not (isinstance(one, Send) and isinstance(one.message, WorkerLoad))]

    def hear(self, message: Message, peer: str = ROUTER) -> list[DecodeCommand]:
        return self.do(Received(peer, message))

    def grant(self, *handoffs: Handoff) -> list[DecodeCommand]:
        return self.hear(BatchGranted(BATCH, handoffs), POOL)

    def begin(self, of: Request, attempt: int = 1, *generated: int) -> list[DecodeCommand]:
        return self.hear(PrefillRequest(of, attempt, generated))

    def sampled(self, **tokens: int) -> list[DecodeCommand]:
        """The iteration is over with these tokens."""
        return self.completed(*(SampledToken(RequestId(name), token) for name, token in tokens.items()))

    def completed(self, *tokens: SampledToken, **more: Any) -> list[DecodeCommand]:
        return self.do(IterationCompleted(tokens, **more))

    def load(self) -> WorkerLoad:
        """As the next router is told."""
        commands = self.logic.on_event(PeerLinked(Role.ROUTER, ROUTER), 0.0)
        return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, WorkerLoad)][-1]


def added(of: Handoff, *numbers: int) -> Addition:
    return Addition(of.request, of.generated_token_ids, blocks(*numbers), of)


def run(*additions: Addition, removals: tuple[str, ...] = (), grown: Any = (), slices: dict[str, int]) -> RunIteration:
    extensions = tuple((RequestId(name), blocks(number)) for name, number in grown)
    parts = tuple((RequestId(name), count) for name, count in slices.items())
    return RunIteration(tuple(map(RequestId, removals)), additions, extensions, parts)


def runs(commands: list[DecodeCommand]) -> list[RunIteration]:
    return [one for one in commands if isinstance(one, RunIteration)]


def emitted(*deltas: TokenDelta) -> SendTo:
    return SendTo(REPLY_TO, TokensEmitted(deltas))


def received(*members: tuple[RequestId, int]) -> Send:
    return Send(ROUTER, BatchReceived(BATCH, members))


def released(*leases: int) -> Send:
    return Send(POOL, LeasesReleased(tuple(map(LeaseId, leases))))


def to_router(message: Message) -> Send:
    return Send(ROUTER, message)


H1 = handoff(request(), 11)  # four tokens cached, one to compute: two blocks
H2 = handoff(request("r2", prompt_len=7), 12)  # the same with seven tokens


def running() -> Desk:
    """r1 is in its first iteration here, which fetches its cache."""
    made = Desk()
    made.grant(H1)
    return made
