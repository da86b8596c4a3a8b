"""All logics joined by queues, without sockets, clocks or tensors: links deliver in order, but in any order among them.

The engine is a stand-in: tests/support/token_engine.py.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from alignedserve.config.sections import PoolConfig, PrefillWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.events import (
    CommonEvent,
    Dial,
    HangUp,
    PeerConnected,
    PeerDisconnected,
    Received,
    Send,
    SendTo,
    StopDialling,
    Ticked,
)
from alignedserve.messages.gateways import AbortRequest, ClusterStatus, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    BufferOpened,
    CloseBuffer,
    IterationCompleted,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    OpenBuffer,
    RelayBlocks,
    RunIteration,
    UnmapArena,
)
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.process.addresses import ROUTER
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.worker_core import factory as colocated_factory
from alignedserve.worker_core.logic import ColocatedLogic
from decode_worker import factory as decode_factory
from decode_worker.batching.candidates import HEEDED_S
from decode_worker.logic import DecodeLogic
from kvpool import logic as pool_logic
from kvpool.logic import LINK_WAIT_S, PoolLogic
from kvpool.state import SetBlockGeneration
from prefill_worker import logic as prefill_logic
from prefill_worker.logic import PrefillLogic
from router import logic as router_logic
from router.logic import RouterLogic
from tests.harnesses.clusters.cluster_shape import Shape
from tests.harnesses.clusters.logic_client import Client, block_names_of
from tests.harnesses.scheduling import EasyCosts
from tests.support.token_engine import BLOCK_SIZE, EOS, FakeArena, FakeEngine

GATEWAY, POOL = "gateway-0", "pool-0"

Logic = RouterLogic | PoolLogic | PrefillLogic | DecodeLogic | ColocatedLogic
WorkDone = IterationCompleted | BlocksLoaded | BlocksOffloaded | BlocksRelayed | BufferOpened


class LogicCluster:
    """Steps the system in a random order given by one seed."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shape = shape
        self.now = 0.0
        self.router_ahead_s = 0.0  # of the clock of the router's host
        self.client = Client(shape.gateway_beside)
        self.logics: dict[str, Logic] = {}
        self.engines: dict[str, FakeEngine] = {}
        self.links: dict[tuple[str, str], deque[Message]] = {}
        self.pending: list[tuple[str, Callable[[], WorkDone]]] = []
        self.computing: dict[str, RunIteration] = {}
        self.urgent: set[str] = set()  # workers that compute an urgent iteration as well
        self.num_urgent = 0
        self.dialled: dict[tuple[str, str], None] = {}  # (decode worker, prefill worker that it wants a link to)
        self.offered: dict[str, FakeArena] = {}  # by path
        self.pool_arenas: dict[str, FakeArena] = {}
        self.far_loads: dict[str, list[LoadBlocks]] = {}  # by worker: from pools of other nodes
        self.roles = {GATEWAY: Role.GATEWAY, ROUTER: Role.ROUTER}
        self.start(ROUTER)
        if not shape.is_colocated or shape.prefix_pool_blocks or shape.decode_pool_blocks:
            for index in range(shape.num_nodes):
                self.start(f"pool-{index}")
        if not shape.is_colocated:
            for index in range(shape.num_prefill):
                self.start(f"prefill-{index}")
        for index in range(shape.num_decode):
            self.start(f"decode-{index}")
        self._link(GATEWAY, ROUTER)

    # --- what happens to it

    def submit(self, request: Request) -> None:
        self.client.requests[request.request_id] = request
        self.client.answers[request.request_id] = []
        self._send(GATEWAY, ROUTER, SubmitRequest(request, block_names_of(request)))

    def abort(self, request_id: RequestId) -> None:
        if request_id not in self.client.ends:
            self.client.aborted.add(request_id)
            self._send(GATEWAY, ROUTER, AbortRequest(request_id))

    def start(self, name: str) -> None:
        self.logics[name], self.roles[name] = self._make(name)
        shape, ratio = self.shape, self.shape.hidden_ratio or 1.0
        self.engines[name] = FakeEngine(refuse=shape.refuse, hidden_ratio=ratio, state_blocks=shape.state_blocks)
        if name == ROUTER:
            others = [other for other in self.logics if other != ROUTER]
            for other in [*others, *([GATEWAY] if self.client.requests else [])]:
                self._link(other, ROUTER)
            return
        self._link(name, ROUTER)
        for other in list(self.logics):
            if self._do_meet(name, other):
                self._link(name, other)

    def start_router_slowly(self) -> None:
        """Start a router to which gateway, workers and pools connect one by one, in any order, while it works."""
        self.logics[ROUTER], _ = self._make(ROUTER)
        others = [GATEWAY, *(other for other in self.logics if other != ROUTER)]
        self.rng.shuffle(others)
        for other in others:
            self._link(other, ROUTER)
            for _ in range(self.rng.randrange(20)):
                self.step()

    def _do_meet(self, name: str, other: str) -> bool:
        """Return True if these two have a link from the start; others are linked when one of them dials."""
        kinds = {name.split("-")[0], other.split("-")[0]}
        return kinds in ({"pool", "prefill"}, {"pool", "decode"}) and self.pool_of(name) == self.pool_of(other)

    def pool_of(self, name: str) -> str:
        """Return the pool of this process's node."""
        return f"pool-{int(name.rpartition('-')[2]) % self.shape.num_nodes}"

    def node_of(self, name: str) -> list[str]:
        """Return everything that runs on the node of this process."""
        return [other for other in self.logics if "-" in other and self.pool_of(other) == self.pool_of(name)]

    def kill(self, name: str) -> None:
        """Kill a process: what it was computing and sending is gone; its peers notice."""
        del self.logics[name]
        self.pending = [entry for entry in self.pending if entry[0] != name]
        self.computing.pop(name, None)
        self.urgent.discard(name)
        self.dialled = {key: None for key in self.dialled if key[0] != name}
        linked = [target for source, target in self.links if source == name]
        for source, target in [key for key in self.links if name in key]:
            del self.links[source, target]
        for other in [*self.logics, GATEWAY]:
            if other in linked or other == GATEWAY:
                self._deliver(other, PeerDisconnected(self.roles[name], name))

    def cut(self, one: str, other: str) -> None:
        """Cut the link between these two: what was under way on it is gone. It is there again, at once or soon."""
        for source, target in ((one, other), (other, one)):
            del self.links[source, target]
        for source, target in ((one, other), (other, one)):
            self._deliver(target, PeerDisconnected(self.roles[source], source))
        if self._do_meet(one, other) or ROUTER in (one, other):
            self._link(one, other)

    def step(self) -> bool:
        """Let one random thing happen; False when nothing is left to happen."""
        self.now += 0.01
        ready = [key for key, queue in self.links.items() if queue]
        dials = [pair for pair in self.dialled if pair not in self.links and pair[1] in self.logics]
        if not ready and not self.pending and not dials:
            return False
        choice = self.rng.randrange(len(ready) + len(self.pending) + len(dials))
        if choice >= len(ready) + len(self.pending):
            self._link(*dials[choice - len(ready) - len(self.pending)])
        elif choice < len(ready):
            source, target = ready[choice]
            self._deliver(target, Received(source, self.links[source, target].popleft()))
        else:
            name, perform = self.pending.pop(choice - len(ready))
            done = perform()
            if isinstance(done, IterationCompleted):
                if done.is_urgent:
                    self.urgent.remove(name)
                else:
                    del self.computing[name]
            self._deliver(name, done)
        return True

    def run(self, max_steps: int = 200_000) -> None:
        """Run until nothing moves, time passing now and then."""
        for number in range(max_steps):
            if not self.step():
                self.tick()
                if not any(self.links.values()) and not self.pending:
                    # A pool may wait for a link that does not come, a decode worker for a word that was lost.
                    self.now += max(LINK_WAIT_S, HEEDED_S)
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
        """Return fresh counts, after everything has come to rest."""
        for _ in range(8):
            self.tick()
            self.run()
        assert self.client.status is not None
        return self.client.status

    # --- inside

    def _make(self, name: str) -> tuple[Logic, Role]:
        if name == ROUTER:
            return router_logic.make_logic(config=self.shape.router, batching=self.shape.batching), Role.ROUTER
        if name.startswith("pool"):
            return self._make_pool(name), Role.KV_POOL
        if name.startswith("prefill"):
            return self._make_prefill(name), Role.PREFILL_WORKER
        return (self._make_colocated(name) if self.shape.is_colocated else self._make_decode(name)), Role.DECODE_WORKER

    def _make_pool(self, name: str) -> PoolLogic:
        arena = self.pool_arenas[name] = FakeArena()
        return pool_logic.make_logic(
            config=PoolConfig(lease_s=1e9),
            batching=self.shape.batching,
            arena=self._offer(arena, self.shape.node_pool_blocks),
            block_size=BLOCK_SIZE,
            first_lease=self.rng.randrange(1, 1 << 20),
            takes_requests=not self.shape.is_colocated,
            state_blocks=self.shape.state_blocks,
        )

    def _make_prefill(self, name: str) -> PrefillLogic:
        return prefill_logic.make_logic(
            registered=self._registered(name, self.shape.max_running_requests, can_prefill=True, can_decode=False),
            config=PrefillWorkerConfig(max_running_requests=4, max_num_batched_tokens=10),
            scheduling=self.shape.disaggregated_scheduling,
            eos_token_ids=frozenset({EOS}),
            costs=EasyCosts(base_s=0.001) if self.shape.yields else EasyCosts(),
            prefix_cache=PrefixCacheConfig(enabled=self.shape.has_prefix_cache),
            num_layers=12,
            state_blocks=self.shape.state_blocks,
        )

    def _make_decode(self, name: str) -> DecodeLogic:
        config = self.shape.decode
        return decode_factory.make_logic(
            registered=self._registered(name, config.max_running_requests, can_prefill=False, can_decode=True),
            config=config,
            batching=self.shape.batching,
            scheduling=self.shape.disaggregated_scheduling,
            memory=self._memory(),
            eos_token_ids=frozenset({EOS}),
            costs=EasyCosts(),
        )

    def _memory(self) -> DeviceMemory:
        shape, blocks = self.shape, self.shape.worker_blocks
        memory = DeviceMemory(blocks, blocks, BLOCK_SIZE, shape.host_tokens, hidden_ratio=shape.hidden_ratio)
        return replace(memory, state_blocks=shape.state_blocks)

    def _make_colocated(self, name: str) -> ColocatedLogic:
        shape, config = self.shape, self.shape.decode
        return colocated_factory.make_colocated_logic(
            registered=self._registered(name, colocated_factory.max_held(config), can_prefill=True, can_decode=True),
            memory=self._memory(),
            config=config,
            scheduling=SchedulingConfig(
                policy=shape.scheduling, policy_params=dict(shape.settings), yield_between_layers=shape.yields
            ),
            eos_token_ids=frozenset({EOS}),
            costs=EasyCosts(base_s=0.001) if shape.yields else EasyCosts(),
            prefix_cache=PrefixCacheConfig(enabled=shape.has_prefix_cache),
            prefix_pool=self.pool_of(name) if shape.prefix_pool_blocks else None,
            num_layers=12,
            decode_pool=self.pool_of(name) if shape.decode_pool_blocks else None,
        )

    def _registered(
        self, name: str, max_running_requests: int, *, can_prefill: bool, can_decode: bool
    ) -> WorkerRegistered:
        return WorkerRegistered(
            num_blocks=self.shape.worker_blocks,
            block_size=BLOCK_SIZE,
            max_running_requests=max_running_requests,
            pool_name=self.pool_of(name),
            node=self.pool_of(name),
            can_prefill=can_prefill,
            can_decode=can_decode,
            can_move=self.shape.is_elastic,
            state_blocks=self.shape.state_blocks,
        )

    def _offer(self, arena: FakeArena, num_blocks: int, pool_name: str = "") -> ArenaOffered:
        path = f"/arena-{len(self.offered)}"
        self.offered[path] = arena
        return ArenaOffered(path, num_blocks, 64, "", pool_name=pool_name)

    def _link(self, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            self.links[source, target] = deque()
        for source, target in ((one, other), (other, one)):
            self._deliver(target, PeerConnected(self.roles[source], source))

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
        now = self.now + self.router_ahead_s if name == ROUTER else self.now
        for command in self.logics[name].on_event(event, now):  # type: ignore[arg-type]
            self._perform(name, command)

    def _perform(self, name: str, command: object) -> None:
        match command:
            case Send(peer, message):
                self._send(name, peer, message)
            case SendTo(_, message):
                self._send(name, GATEWAY, message)
            case Dial(peer):
                self.dialled[name, peer] = None
            case StopDialling(peer):
                del self.dialled[name, peer]
            case HangUp(peer):
                del self.dialled[name, peer]
                if (name, peer) in self.links:
                    self.cut(name, peer)
            case RunIteration():
                self.pending.append((name, self._iteration(name, command)))
            case _:
                self._perform_copy(name, self.engines[name], command)

    def _iteration(self, name: str, command: RunIteration) -> Callable[[], WorkDone]:
        engine = self.engines[name]
        if not command.is_urgent:
            assert name not in self.computing, "two iterations at a time"
            self.computing[name] = command
            return lambda: engine.run(command)
        assert name in self.computing, "an urgent iteration within none"
        assert name not in self.urgent, "two urgent iterations at a time"
        self.urgent.add(name)
        self.num_urgent += 1
        within = self.computing[name]

        def run() -> WorkDone:
            if engine.begun is not within:
                engine.begin(within)
            return engine.run(command)

        return run

    def _perform_copy(self, name: str, engine: FakeEngine, command: object) -> None:
        match command:
            case LoadBlocks():
                if command.source.startswith("pool") and command.source != self.pool_of(name):
                    self.far_loads.setdefault(name, []).append(command)
                self.pending.append((name, lambda: engine.load(command, self.rng)))
            case OffloadBlocks():
                self.pending.append((name, lambda: engine.offload(command)))
            case RelayBlocks():
                self.pending.append((name, lambda: engine.relay(command)))
            case MapArena(peer, offered):
                engine.arenas[peer] = self.offered[offered.path]
            case UnmapArena(peer) | CloseBuffer(peer):
                engine.arenas.pop(peer, None)
            case OpenBuffer(peer, link_epoch):
                engine.arenas[peer] = arena = FakeArena(is_buffer=True)
                num_blocks = self.shape.buffer_blocks
                made = self._offer(arena, num_blocks, self.pool_of(name)) if num_blocks else None
                self.pending.append((name, lambda: BufferOpened(peer, link_epoch, made)))
            case SetBlockGeneration(block_ids, generation):
                self.pool_arenas[name].stamps.update(dict.fromkeys(block_ids, generation))
            case _:
                raise AssertionError(f"unknown command {command}")
