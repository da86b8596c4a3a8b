"""A colocated worker whose requests share blocks: its real logic and a real engine, iteration by iteration.

Unused slots hold no numbers (NaN) at first, so a request that reads or loses one slot of another shows at once.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import Request, RequestClass, SampledToken, SamplingParams, Slo
from alignedserve.messages.events import PeerConnected, Received
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest
from alignedserve.runtime.device.streams import DeviceStreams
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.swap_space import SlotSwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.scheduling.policies import make_policy
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits, IterationPolicy
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.worker_core.logic import ColocatedLogic
from tests.harnesses.scheduling import EasyCosts
from tests.support.models.tiny_engines import random_tokens
from tests.support.samples import ROUTER, worker

BLOCK_SIZE = 4
MAX_CONTEXT_LEN = 64
MAX_REQUESTS = 16


@dataclass
class Counts:
    """Counts of events that blocks went through."""

    shares: int = 0
    checkpoints: int = 0  # parts of caches copied to the host
    moves: int = 0  # requests that left a shared block


@dataclass
class SharingWorker:
    """The worker. `tokens`: what each request has been sent."""

    decoder: Decoder
    make_streams: Callable[[int], DeviceStreams]
    seed: int = 0
    num_blocks: int = 14
    host_tokens: int = 60
    cache_dtype: str | None = None
    policy: IterationPolicy = field(default_factory=lambda: make_policy("bros"))
    tokens: dict[RequestId, list[SampledToken]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    now: float = 0.0

    def __post_init__(self) -> None:
        streams = self.make_streams(self.seed)
        layout = self.decoder.config.block_layout(BLOCK_SIZE, self.cache_dtype or self.decoder.dtype_name)
        self.storage = BlockStorage(layout, self.num_blocks)
        self.storage.bytes.fill_(0xFF)
        self.engine = Engine(
            model=self.decoder,
            storage=self.storage,
            options=EngineOptions(max_sequences=MAX_REQUESTS, max_context_len=MAX_CONTEXT_LEN),
            streams=streams,
        )
        self.swap_space = SlotSwapSpace(self.storage, streams)
        self.logic = ColocatedLogic(
            registered=worker(num_blocks=self.num_blocks, can_prefill=True, max_running_requests=MAX_REQUESTS),
            memory=DeviceMemory(self.num_blocks, self.num_blocks, BLOCK_SIZE, self.host_tokens, has_shared_blocks=True),
            scheduler=Scheduler(self.policy, EasyCosts(), IterationLimits(MAX_REQUESTS, 64)),
            eos_token_ids=frozenset(),
        )
        self._running: RunIteration | None = None
        self._do(PeerConnected(Role.ROUTER, ROUTER))

    @property
    def is_idle(self) -> bool:
        """Return whether no iteration has begun."""
        return self._running is None

    def hear(self, message: Message) -> None:
        """Take a message of the router."""
        self._do(Received(ROUTER, message))

    def step(self) -> None:
        """Perform the iteration that has begun."""
        command, self._running = self._running, None
        assert command is not None
        self._change_sequences(command)
        output = self.engine.execute(command.slices)
        assert not output.failed, "a slot that was not written, or of another"
        for token in output.sampled:
            self.tokens[token.request_id].append(token)
        self.now += 0.02
        self._do(IterationCompleted(tuple(output.sampled)))

    def check_nothing_is_held(self) -> None:
        """Check that all blocks and all host memory are free, once every request has ended."""
        held = self.logic._requests
        assert held.allocator.num_free == held.state.num_free == self.num_blocks
        assert held.state.num_free_host == self.host_tokens
        assert not held.state.shared

    def _do(self, event: object) -> None:
        for command in self.logic.on_event(event, self.now):  # type: ignore[arg-type]
            if isinstance(command, RunIteration):
                assert self._running is None
                self._running = command

    def _change_sequences(self, command: RunIteration) -> None:
        """Do as ModelExecutor does."""
        if command.swaps is not None:
            self.swap_space.perform(command.swaps)
            moved = {swap.request_id for swap in command.swaps.outs} & {swap.request_id for swap in command.swaps.ins}
            self.counts.moves += len(moved)
            self.counts.checkpoints += len(command.swaps.outs) - len(moved)
        for request_id in command.removals:
            self.engine.remove_sequence(request_id)
        for one in command.additions:
            of = one.request
            self.engine.add_sequence(
                NewSequence(
                    *(of.request_id, of.prompt_token_ids + one.generated_token_ids, of.prompt_len, one.num_cached),
                    *(one.block_ids, of.sampling),
                    is_reversed=one.is_reversed,
                )
            )
            self.tokens.setdefault(of.request_id, [])
        for request_id, block_ids in command.extensions:
            self.engine.append_blocks(request_id, block_ids)
        tables = [set(one.block_ids) for one in self.logic._requests]
        self.counts.shares += sum(map(len, tables)) - len(set().union(*tables))


def request_of(number: int, rng: random.Random) -> Request:
    """Draw a request; its kind is one of a few, so that what each generates alone is computed once."""
    is_real_time = rng.random() < 0.5
    prompt_len, max_tokens = 1 + number % 11 * 2, rng.randint(1, 24)
    return Request(
        RequestId(f"r{number}"),
        tuple(random_tokens(number % 11, prompt_len)),
        SamplingParams(max_tokens=max_tokens, temperature=0.0, num_logprobs=0),
        "gateway",
        0.0,
        RequestClass.REAL_TIME if is_real_time else RequestClass.BEST_EFFORT,
        Slo(0.5, 0.2) if is_real_time and rng.random() < 0.7 else Slo(),
    )


def run_history(made: SharingWorker, requests: Sequence[Request], rng: random.Random) -> set[RequestId]:
    """Let the requests come at random, and some of them leave again; return those that have not left."""
    coming, aborted = list(requests), set[RequestId]()
    while coming or not made.is_idle:
        if coming and (made.is_idle or rng.random() < 0.3):
            made.hear(PrefillRequest(coming.pop(0), 1))
        if made.tokens and rng.random() < 0.02:
            request_id = rng.choice(list(made.tokens))
            aborted.add(request_id)
            made.hear(AbortRequest(request_id, 1))
        if not made.is_idle:
            made.step()
    return {one.request_id for one in requests} - aborted


def generated_alone(decoder: Decoder, cache_dtype: str | None = None) -> Callable[[Request], list[SampledToken]]:
    """Return a function that gives the tokens of a request whose blocks are its own, with nothing beside it."""
    known: dict[tuple[int, ...], list[SampledToken]] = {}

    def alone(request: Request) -> list[SampledToken]:
        prompt = request.prompt_token_ids
        if prompt not in known:
            layout = decoder.config.block_layout(BLOCK_SIZE, cache_dtype or decoder.dtype_name)
            storage = BlockStorage(layout, MAX_CONTEXT_LEN // BLOCK_SIZE)
            engine = Engine(
                model=decoder, storage=storage, options=EngineOptions(max_sequences=1, max_context_len=MAX_CONTEXT_LEN)
            )
            name, blocks = RequestId("alone"), tuple(map(BlockId, range(storage.num_blocks)))
            sampling = SamplingParams(max_tokens=24, temperature=0.0, num_logprobs=0)
            engine.add_sequence(NewSequence(name, prompt, len(prompt), 0, blocks, sampling))
            steps = [engine.execute([(name, len(prompt))])] + [engine.execute([(name, 1)]) for _ in range(23)]
            known[prompt] = [token for step in steps for token in step.sampled]
        return known[prompt][: request.sampling.max_tokens]

    return alone
