"""A colocated worker to tell things to: twenty blocks of four tokens, four requests and ten tokens an iteration.

It does as its script says, and rests where that says nothing; or it follows a real policy.
"""

from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SampledToken
from alignedserve.messages.events import PeerConnected, Received, Send, SendTo
from alignedserve.messages.gateways import TokenDelta, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Addition, IterationCompleted, RunIteration, Swap, Swaps
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest, WorkerLoad
from alignedserve.prefix_cache.cached_blocks import StateBudget
from alignedserve.prefix_cache.contexts import PrefixCache
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits, IterationPolicy, WorkerView
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.yielding import Yielding
from alignedserve.worker_core.logic import ColocatedLogic
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.scheduling import EasyCosts, Script, Step
from tests.support.samples import REPLY_TO, ROUTER, blocks, request, worker

EOS = 2


class ColocatedHarness:
    """A colocated worker with a router. Its load reports are left out of what it answers, and kept."""

    def __init__(
        self,
        *,
        num_blocks: int = 20,
        host_tokens: int = 100,
        policy: IterationPolicy | None = None,
        can_move: bool = False,
        has_prefix_cache: bool = False,
        prefix_pool: str | None = None,
        yielding: Yielding | None = None,
        decode_pool: str | None = None,
        state_blocks: int = 0,
        max_states: int = 0,
        **memory: Any,
    ) -> None:
        """`state_blocks`: that each request has for its states; `max_states`: that are kept for others."""
        self.now = 0.0
        self.loads: list[WorkerLoad] = []
        self.script = Script()
        self.registered = worker(num_blocks=num_blocks, can_prefill=True, max_running_requests=16, can_move=can_move)
        limits = IterationLimits(max_running_requests=4, max_tokens=10)
        states = StateBudget(state_blocks, max_states) if state_blocks else None
        self.logic = ColocatedLogic(
            registered=self.registered,
            memory=DeviceMemory(num_blocks, num_blocks, 4, host_tokens, state_blocks=state_blocks, **memory),
            scheduler=Scheduler(policy or self.script, EasyCosts(), limits),
            eos_token_ids=frozenset({EOS}),
            prefixes=PrefixCache(4, takes_whole=states is not None, states=states) if has_prefix_cache else None,
            prefix_pool=prefix_pool,
            yielding=yielding,
            decode_pool=decode_pool,
        )
        self.do(PeerConnected(Role.ROUTER, ROUTER))

    def do(self, event: Any) -> list[WorkerCommand]:
        commands = self.logic.on_event(event, self.now)
        told = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, WorkerLoad)]
        self.loads += told
        return [one for one in commands if not (isinstance(one, Send) and one.message in told)]

    def hear(self, message: Message) -> list[WorkerCommand]:
        return self.do(Received(ROUTER, message))

    def begin(self, of: Request, attempt: int = 1, *generated: int, **more: Any) -> list[WorkerCommand]:
        return self.hear(PrefillRequest(of, attempt, generated, **more))

    def follow(self, *steps: Step) -> list[WorkerCommand]:
        """Set the next steps; a worker that rests takes the first one at once."""
        self.script.steps.extend(steps)
        return self.do(PeerConnected(Role.GATEWAY, "gateway-0"))  # nothing to it, but it is a moment to begin

    def sampled(self, **tokens: int) -> list[WorkerCommand]:
        """End the iteration with these tokens."""
        return self.completed(*(SampledToken(RequestId(name), token) for name, token in tokens.items()))

    def completed(self, *tokens: SampledToken, **more: Any) -> list[WorkerCommand]:
        return self.do(IterationCompleted(tokens, **more))

    @property
    def view(self) -> WorkerView:
        """Return what the policy saw last."""
        assert self.script.view is not None, "it was never asked"
        return self.script.view


def added(of: Request, *numbers: int, generated: tuple[int, ...] = (), num_cached: int = 0) -> Addition:
    return Addition(of, generated, blocks(*numbers), num_cached)


def run(
    *additions: Addition, removals: tuple[str, ...] = (), grown: Any = (), swaps: Swaps | None = None, **slices: int
) -> RunIteration:
    extensions = tuple((RequestId(name), blocks(*numbers)) for name, *numbers in grown)
    parts = tuple((RequestId(name), count) for name, count in slices.items())
    return RunIteration(tuple(map(RequestId, removals)), additions, extensions, parts, swaps)


def swap(name: str, num_tokens: int, *numbers: int) -> Swap:
    return Swap(RequestId(name), num_tokens, blocks(*numbers))


def runs(commands: list[WorkerCommand]) -> list[RunIteration]:
    return [one for one in commands if isinstance(one, RunIteration)]


def emitted(*deltas: TokenDelta) -> SendTo:
    return SendTo(REPLY_TO, TokensEmitted(deltas))


def to_router(message: Message) -> Send:
    return Send(ROUTER, message)


FOUR, SEVEN = request(), request("r2", prompt_len=7)  # r1 and r2


def decoding(**sizes: Any) -> ColocatedHarness:
    """r1 and r2 have one token each, and nothing runs; r1 holds block 0, and r2 blocks 1 and 2."""
    made = ColocatedHarness(**sizes)
    made.begin(FOUR)
    made.begin(SEVEN)
    made.follow(Step(r1=4, r2=6), Step(r2=1))
    made.sampled(r1=7)
    made.sampled(r2=7)
    return made
