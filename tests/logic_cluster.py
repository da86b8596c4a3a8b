"""All logics joined by queues, without sockets, clocks or tensors: links deliver in order, but in any order among them.

The engine is a stand-in with the engine's one rule: the next token is a function of the tokens before it. So whatever
the schedule, the right answer of a request is known.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import FinishReason, Request, SampledToken
from alignedserve.messages.events import CommonEvent, PeerLinked, PeerLost, Received, Send, SendTo, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    IterationCompleted,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    RelayBlocks,
    RunIteration,
    UnmapArena,
)
from alignedserve.messages.links import (
    AbortRequest,
    ArenaOffered,
    BlockCopy,
    BlockRun,
    ClusterStatus,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    TokensEmitted,
    WorkerRegistered,
)
from alignedserve.messages.wire import Message
from alignedserve.runtime.block_sums import neighbours
from decode_worker.batches import SwitchLimits
from decode_worker.logic import DecodeLimits, DecodeLogic
from kvpool.logic import PoolLogic, StampBlocks
from kvpool.policies import make_batch_former
from prefill_worker.buffers import BufferOpened, CloseBuffer, OpenBuffer
from prefill_worker.logic import PrefillLimits, PrefillLogic
from router.logic import RouterLogic
from router.policies import make_prefill_order

GATEWAY, ROUTER, POOL = "gateway-0", "router", "pool-0"
BLOCK_SIZE = 4
VOCAB_SIZE = 50
EOS = 0


WorkDone = IterationCompleted | BlocksLoaded | BlocksOffloaded | BlocksRelayed | BufferOpened


def next_token(token_ids: Sequence[int]) -> int:
    """The model: any function of all tokens before; now and then it ends the answer."""
    return random.Random(hash(tuple(token_ids))).randrange(VOCAB_SIZE)


def right_answer(request: Request) -> list[int]:
    """What one undisturbed run generates."""
    answer: list[int] = []
    while len(answer) < request.sampling.max_tokens and (not answer or answer[-1] != EOS):
        answer.append(next_token((*request.prompt_token_ids, *answer)))
    return answer


@dataclass
class FakeArena:
    """Blocks that others see: what is stamped on each, and the tokens whose cache it holds."""

    stamps: dict[int, int] = field(default_factory=dict)
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)
    is_buffer: bool = False

    def read(self, copy: BlockCopy) -> list[tuple[int, ...]] | None:
        """What lies in the copy's blocks; None: it is not what its writer wrote."""
        rows = []
        for run in copy.runs:
            numbers = range(run.first_block, run.first_block + run.num_blocks)
            if any(self.stamps.get(number) != copy.generation for number in numbers):
                return None
            part = [self.content.get(number, ()) for number in numbers]
            if hash(tuple(part)) != run.checksum:
                return None
            rows += part
        return rows

    def write(
        self, rows: list[tuple[int, ...]], block_ids: Sequence[int], generation: int
    ) -> tuple[BlockRun, ...] | None:
        if self.is_buffer:
            self.stamps.update(dict.fromkeys(block_ids, generation))
        if any(self.stamps.get(number) != generation for number in block_ids):
            return None
        self.content.update(zip(block_ids, rows, strict=True))
        return tuple(
            BlockRun(first, count, hash(tuple(self.content[first + offset] for offset in range(count))))
            for first, count in neighbours([BlockId(number) for number in block_ids])
        )


@dataclass
class FakeEngine:
    """Performs commands on token lists and checks what the real engine would assert, and that every cache is right."""

    tokens: dict[RequestId, list[int]] = field(default_factory=dict)
    num_computed: dict[RequestId, int] = field(default_factory=dict)
    blocks: dict[RequestId, list[int]] = field(default_factory=dict)
    storage: dict[int, tuple[int, ...]] = field(default_factory=dict)
    arenas: dict[str, FakeArena] = field(default_factory=dict)  # by peer
    refuse: float = 0.0

    def run(self, command: RunIteration) -> IterationCompleted:
        for request_id in command.removals:
            del self.tokens[request_id], self.num_computed[request_id], self.blocks[request_id]
        for addition in command.additions:
            request_id = addition.request.request_id
            assert request_id not in self.tokens, "added twice"
            self.tokens[request_id] = [*addition.request.prompt_token_ids, *addition.generated_token_ids]
            self.num_computed[request_id] = addition.num_cached
            self.blocks[request_id] = list(addition.block_ids)
            cached = [token for block_id in addition.block_ids for token in self.storage.get(block_id, ())]
            known = self.tokens[request_id][: addition.num_cached]
            assert cached[: addition.num_cached] == known, "a cache of other tokens"
        for request_id, block_ids in command.extensions:
            self.blocks[request_id] += block_ids
        owned = [block_id for block_ids in self.blocks.values() for block_id in block_ids]
        assert len(owned) == len(set(owned)), "a block belongs to two sequences"
        sampled = [self._step(*part) for part in command.slices]
        return IterationCompleted(tuple(token for token in sampled if token is not None))

    def load(self, command: LoadBlocks, rng: random.Random) -> BlocksLoaded:
        refused = set()
        for part in command.loads:
            arena = self.arenas.get(command.source)
            rows = arena.read(part.copy) if arena is not None and rng.random() >= self.refuse else None
            if rows is None:
                refused.add(part.request_id)
            else:
                assert len(rows) <= len(part.block_ids), "more blocks than were set aside"
                self.storage.update(zip(part.block_ids, rows, strict=False))
        return BlocksLoaded(command.source, command.loads, frozenset(refused))

    def offload(self, command: OffloadBlocks) -> BlocksOffloaded:
        arena = self.arenas.get(command.target)
        rows = [self.storage.get(block_id, ()) for block_id in command.block_ids]
        runs = arena.write(rows, command.target_block_ids, command.generation) if arena is not None else None
        return BlocksOffloaded(command, runs)

    def relay(self, command: RelayBlocks) -> BlocksRelayed:
        source, target = self.arenas.get(command.source), self.arenas.get(command.target)
        rows = source.read(command.copy) if source is not None else None
        if rows is None or target is None:
            return BlocksRelayed(command, None)
        return BlocksRelayed(command, target.write(rows, command.target_block_ids, command.generation))

    def _step(self, request_id: RequestId, num_tokens: int) -> SampledToken | None:
        self.num_computed[request_id] += num_tokens
        tokens, computed = self.tokens[request_id], self.num_computed[request_id]
        assert computed <= len(tokens), "computes tokens that nobody knows"
        assert computed <= len(self.blocks[request_id]) * BLOCK_SIZE, "computes beyond its blocks"
        for index, block_id in enumerate(self.blocks[request_id]):
            self.storage[block_id] = tuple(tokens[index * BLOCK_SIZE : min((index + 1) * BLOCK_SIZE, computed)])
        if computed < len(tokens):
            return None
        token_id = next_token(tokens)
        tokens.append(token_id)
        return SampledToken(request_id, token_id)


@dataclass
class Client:
    """The gateway: collects tokens as a client sees them."""

    requests: dict[RequestId, Request] = field(default_factory=dict)
    answers: dict[RequestId, list[int]] = field(default_factory=dict)
    ends: dict[RequestId, FinishReason | RequestFailed | RequestRejected] = field(default_factory=dict)
    aborted: set[RequestId] = field(default_factory=set)
    early: dict[tuple[RequestId, int], tuple[list[int], FinishReason | None]] = field(default_factory=dict)
    status: ClusterStatus | None = None

    def on_event(self, event: CommonEvent) -> list[Send]:
        if isinstance(event, PeerLinked) and event.role is Role.ROUTER:
            return [Send(ROUTER, self._resumption(request_id)) for request_id in self._open()]
        if isinstance(event, PeerLost) and event.role is not Role.ROUTER:
            return [Send(ROUTER, self._resumption(request_id)) for request_id in self._open()]
        if not isinstance(event, Received):
            return []
        message = event.message
        match message:
            case TokensEmitted():
                for delta in message.deltas:
                    self.early[delta.request_id, delta.first_index] = (list(delta.token_ids), delta.finish_reason)
                    self._take(delta.request_id)
            case RequestFailed() | RequestRejected():
                self._end(message.request_id, message)
            case RequestInterrupted() if message.request_id in self._open():
                return [Send(ROUTER, self._resumption(message.request_id))]
            case RequestInterrupted():
                return [Send(ROUTER, AbortRequest(message.request_id))]
            case ClusterStatus():
                self.status = message
        return []

    def _open(self) -> list[RequestId]:
        return [key for key in self.requests if key not in self.ends and key not in self.aborted]

    def _resumption(self, request_id: RequestId) -> ResumeRequest:
        return ResumeRequest(self.requests[request_id], tuple(self.answers[request_id]))

    def _take(self, request_id: RequestId) -> None:
        answer = self.answers[request_id]
        while (entry := self.early.pop((request_id, len(answer)), None)) is not None and request_id not in self.ends:
            answer += entry[0]
            if entry[1] is not None:
                self._end(request_id, entry[1])

    def _end(self, request_id: RequestId, end: FinishReason | RequestFailed | RequestRejected) -> None:
        assert request_id not in self.ends, "a request ended twice"
        self.ends[request_id] = end


@dataclass(frozen=True)
class Shape:
    """Sizes of the system under test."""

    num_prefill: int = 1
    num_decode: int = 1
    is_colocated: bool = False
    pool_blocks: int = 40
    worker_blocks: int = 30
    buffer_blocks: int = 16
    max_running: int = 6
    min_requests: int = 3
    policy: str = "density_first"
    refuse: float = 0.0
    max_requeues: int = 50


class LogicCluster:
    """Steps the system in a random order given by one seed."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shape = shape
        self.now = 0.0
        self.client = Client()
        self.logics: dict[str, RouterLogic | PoolLogic | PrefillLogic | DecodeLogic] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.links: dict[tuple[str, str], deque[Message]] = {}
        self.pending: list[tuple[str, Callable[[], WorkDone]]] = []
        self.computing: set[str] = set()
        self.offered: dict[str, FakeArena] = {}  # by path
        self.pool_arena = FakeArena()
        self.roles = {GATEWAY: Role.GATEWAY, ROUTER: Role.ROUTER}
        self.start(ROUTER)
        if not shape.is_colocated:
            self.start(POOL)
            for index in range(shape.num_prefill):
                self.start(f"prefill-{index}")
        for index in range(shape.num_decode):
            self.start(f"decode-{index}")
        self._link(GATEWAY, ROUTER)

    # --- what happens to it

    def submit(self, request: Request) -> None:
        self.client.requests[request.request_id] = request
        self.client.answers[request.request_id] = []
        self._send(GATEWAY, ROUTER, SubmitRequest(request))

    def abort(self, request_id: RequestId) -> None:
        if request_id not in self.client.ends:
            self.client.aborted.add(request_id)
            self._send(GATEWAY, ROUTER, AbortRequest(request_id))

    def start(self, name: str) -> None:
        self.logics[name], self.roles[name] = self._make(name)
        self.engines[name] = FakeEngine(refuse=self.shape.refuse)
        if name == ROUTER:
            others = [other for other in self.logics if other != ROUTER]
            for other in [*others, *([GATEWAY] if self.client.requests else [])]:
                self._link(other, ROUTER)
            return
        self._link(name, ROUTER)
        for other in list(self.logics):
            if self._do_meet(name, other):
                self._link(name, other)

    def _do_meet(self, name: str, other: str) -> bool:
        """Whether these two have a link, beside those to the router."""
        kinds = {name.split("-")[0], other.split("-")[0]}
        return kinds in ({"pool", "prefill"}, {"pool", "decode"}, {"prefill", "decode"})

    def kill(self, name: str) -> None:
        """SIGKILL: what it was computing and sending is gone; its peers notice."""
        del self.logics[name]
        self.pending = [entry for entry in self.pending if entry[0] != name]
        self.computing.discard(name)
        for source, target in [key for key in self.links if name in key]:
            del self.links[source, target]
        for other in [*self.logics, GATEWAY]:
            if ROUTER in (name, other) or self._do_meet(name, other) or other == GATEWAY:
                self._deliver(other, PeerLost(self.roles[name], name))

    def cut(self, one: str, other: str) -> None:
        """The link between these two breaks: what was under way on it is gone. At once it is there again."""
        for source, target in ((one, other), (other, one)):
            del self.links[source, target]
        for source, target in ((one, other), (other, one)):
            self._deliver(target, PeerLost(self.roles[source], source))
        self._link(one, other)

    def step(self) -> bool:
        """Let one random thing happen; False when nothing is left to happen."""
        self.now += 0.01
        ready = [key for key, queue in self.links.items() if queue]
        if not ready and not self.pending:
            return False
        choice = self.rng.randrange(len(ready) + len(self.pending))
        if choice < len(ready):
            source, target = ready[choice]
            self._deliver(target, Received(source, self.links[source, target].popleft()))
        else:
            name, perform = self.pending.pop(choice - len(ready))
            done = perform()
            if isinstance(done, IterationCompleted):
                self.computing.discard(name)
            self._deliver(name, done)
        return True

    def run(self, max_steps: int = 200_000) -> None:
        """Until nothing moves, time passing now and then."""
        for number in range(max_steps):
            if not self.step():
                self.tick()
                if not any(self.links.values()) and not self.pending:
                    return
            elif number % 50 == 0:
                self.tick()
        raise AssertionError("the system never comes to rest")

    def tick(self) -> None:
        for name in list(self.logics):
            self._deliver(name, Ticked())

    def status(self) -> ClusterStatus:
        """Fresh counts, after everything has come to rest."""
        for _ in range(8):
            self.tick()
            self.run()
        assert self.client.status is not None
        return self.client.status

    # --- inside

    def _make(self, name: str) -> tuple[RouterLogic | PoolLogic | PrefillLogic | DecodeLogic, Role]:
        shape, eos = self.shape, frozenset({EOS})
        batching = BatchingConfig(policy=shape.policy, min_requests=shape.min_requests, starvation_s=0.3)
        registered = WorkerRegistered(
            num_blocks=shape.worker_blocks,
            block_size=BLOCK_SIZE,
            max_running=shape.max_running,
            pool_name=POOL,
            can_prefill=shape.is_colocated or name.startswith("prefill"),
            can_decode=name.startswith("decode"),
        )
        if name == ROUTER:
            config = RouterConfig(max_queued_requests=200, max_requeues=shape.max_requeues, candidate_requests=4)
            return RouterLogic(config=config, batching=batching, order=make_prefill_order("least_slack")), Role.ROUTER
        if name == POOL:
            self.pool_arena = FakeArena()
            arena = self._offer(self.pool_arena, shape.pool_blocks)
            former = make_batch_former(shape.policy, block_size=BLOCK_SIZE, starvation_s=batching.starvation_s)
            first = self.rng.randrange(1, 1 << 20)
            return (
                PoolLogic(arena=arena, block_size=BLOCK_SIZE, batch_former=former, lease_s=1e9, first_lease=first),
                Role.KV_POOL,
            )
        if name.startswith("prefill"):
            limits = PrefillLimits(max_tokens=10, max_running=4)
            return PrefillLogic(registered=registered, limits=limits, eos_token_ids=eos), Role.PREFILL_WORKER
        min_requests = shape.min_requests if batching.is_aligned else 1
        switch = SwitchLimits(min_requests, max(shape.max_running * 3 // 4, 1), batching.starvation_s)
        return (
            DecodeLogic(registered=registered, limits=DecodeLimits(shape.max_running, 12, switch), eos_token_ids=eos),
            Role.DECODE_WORKER,
        )

    def _offer(self, arena: FakeArena, num_blocks: int) -> ArenaOffered:
        path = f"/arena-{len(self.offered)}"
        self.offered[path] = arena
        return ArenaOffered(path, num_blocks, 64, "")

    def _link(self, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            self.links[source, target] = deque()
        for source, target in ((one, other), (other, one)):
            self._deliver(target, PeerLinked(self.roles[source], source))

    def _send(self, source: str, target: str, message: Message) -> None:
        key = (source, target)
        if key in self.links:
            self.links[key].append(message)
        elif target == GATEWAY:  # tokens: dialled on first use
            self.links[key] = deque([message])

    def _deliver(self, name: str, event: CommonEvent | WorkDone) -> None:
        if name == GATEWAY:
            for answer in self.client.on_event(event):  # type: ignore[arg-type]
                self._send(GATEWAY, answer.peer, answer.message)
            return
        for command in self.logics[name].on_event(event, self.now):  # type: ignore[arg-type]
            self._perform(name, command)

    def _perform(self, name: str, command: object) -> None:
        match command:
            case Send(peer, message):
                self._send(name, peer, message)
            case SendTo(_, message):
                self._send(name, GATEWAY, message)
            case RunIteration():
                assert name not in self.computing, "two iterations at a time"
                self.computing.add(name)
                engine = self.engines[name]
                self.pending.append((name, lambda: engine.run(command)))
            case _:
                self._perform_copy(name, self.engines[name], command)

    def _perform_copy(self, name: str, engine: FakeEngine, command: object) -> None:
        match command:
            case LoadBlocks():
                self.pending.append((name, lambda: engine.load(command, self.rng)))
            case OffloadBlocks():
                self.pending.append((name, lambda: engine.offload(command)))
            case RelayBlocks():
                self.pending.append((name, lambda: engine.relay(command)))
            case MapArena(peer, offered):
                engine.arenas[peer] = self.offered[offered.path]
            case UnmapArena(peer) | CloseBuffer(peer):
                engine.arenas.pop(peer, None)
            case OpenBuffer(peer, life):
                engine.arenas[peer] = arena = FakeArena(is_buffer=True)
                num_blocks = self.shape.buffer_blocks
                made = self._offer(arena, num_blocks) if num_blocks else None
                self.pending.append((name, lambda: BufferOpened(peer, life, made)))
            case StampBlocks(block_ids, generation):
                self.pool_arena.stamps.update(dict.fromkeys(block_ids, generation))
            case _:
                raise AssertionError(f"unknown command {command}")
