"""The routers' decisions alone: processor time and memory by the number of nodes, requests in flight and routers.

    python -m benchmarks.scheduling.router_decisions [--sharing | --tenants]

Each case runs in a process of its own, on one thread: `RouterLogic` without links, codec and length predictor, between
nodes that answer at once, as many routers as the case says with an equal share of the nodes each. Every node decodes
an equal part of the requests in flight; one ends, another one comes. A request has 512 tokens. `lost_ms` is the time
for which one router decides nothing else when a node is lost, `resumed_s` the time in which a router that was lost and
restarted takes its requests again.

`--sharing`: what the prefix cache costs the router. Requests name their blocks, and prefill workers tell of each that
they store, and of as many that leave; `own`: no two requests share any, `common`: they begin with 256 tokens of one of
eight instructions. Beside `none`, in turn, three times.

`--tenants`: what fair shares cost. Requests come in turn from so many tenants, or none; in turn, five times.
"""

import gc
import itertools
import multiprocessing
import time
from collections import deque
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.lifecycle import next_step
from alignedserve.core.request import Request, SamplingParams, Slo
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.gateways import RequestInterrupted, ResumeRequest, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import BatchFormed, BatchReceived, FormBatch, PoolRegistered, RequestPooled
from alignedserve.messages.prefixes import PrefixBlocksChanged, names_told
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    WorkerLoad,
    WorkerRegistered,
)
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from lab.sim.routers import RouterChoice
from router.factory import make_logic
from router.logic import RouterLogic

PROMPT_LEN, OUTPUT_LEN, NUM_BLOCKS, MAX_RUNNING = 512, 128, 65_536, 256
GATEWAY = "gateway-0"


class Case(NamedTuple):
    """Sizes of one measurement."""

    nodes: int
    in_flight: int
    routers: int = 1
    sharing: str = "none"  # or own, common: of prompts
    tenants: int = 0  # 0: requests name none


CASES = (
    *(Case(nodes, 10_000) for nodes in (8, 32, 128, 1000)),
    *(Case(1000, 100_000, routers) for routers in (1, 4)),
)
SHARING_CASES = tuple(
    Case(nodes, 10_000, sharing=sharing)
    for _ in range(3)
    for nodes in (8, 128)
    for sharing in ("none", "own", "common")
)
TENANT_CASES = tuple(Case(8, 10_000, tenants=tenants) for _ in range(5) for tenants in (0, 1, 2, 100))
BLOCK_SIZE, NUM_CACHED, NUM_INSTRUCTIONS = 16, 4096, 8  # blocks cached in each prefill worker


class Decoding(NamedTuple):
    """A request at a decode worker."""

    request: Request
    attempt: int
    node: str


class RouterNodes:
    """One router and its nodes, which answer at once; the time of the router's decisions is measured."""

    def __init__(self, names: list[str], sharing: str) -> None:
        self._names = names
        self._sharing = sharing
        self._cached: dict[str, dict[bytes, None]] = {name: {} for name in names}  # the oldest first
        self._now = 1.0
        self.decided_s = 0.0
        self.num_events = 0
        self.decoding: deque[Decoding] = deque()
        self._requests: dict[RequestId, Request] = {}
        self._pooled: dict[str, deque[tuple[RequestId, int]]] = {name: deque() for name in names}
        self._running = dict.fromkeys(names, 0)
        self._events: deque[CommonEvent] = deque()
        self.logic = self.start()

    def start(self) -> RouterLogic:
        config = RouterConfig(max_queued_requests=1 << 20, max_queued_tokens=1 << 40)
        self.logic = make_logic(config=config, batching=BatchingConfig())
        self._events.append(PeerConnected(Role.GATEWAY, GATEWAY))
        for name in self._names:
            self._running[name] = 0
            self.hear(f"pool-{name}", PoolRegistered(NUM_BLOCKS))
            for role in ("prefill", "decode"):
                self.hear(f"{role}-{name}", _registered(name, is_decoder=role == "decode"))
            self._load(name)
        return self.logic

    def hear(self, peer: str, message: Message) -> None:
        self._events.append(Received(peer, message))

    def submit(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.hear(GATEWAY, SubmitRequest(request, b"".join(self._block_names(request))))

    def finish(self) -> None:
        request, attempt, node = self.decoding.popleft()
        del self._requests[request.request_id]
        self.hear(f"decode-{node}", RequestFinished(request.request_id, attempt, OUTPUT_LEN))
        self._running[node] -= 1
        self._load(node)

    def settle(self) -> None:
        while self._events:
            self._now += 1e-5
            event = self._events.popleft()
            began_s = time.thread_time()
            commands = self.logic.on_event(event, self._now)
            self.decided_s += time.thread_time() - began_s
            self.num_events += 1
            for command in commands:
                self._answer(command)

    def lose_node(self) -> float:
        """Lose the processes of one node; return the longest time of a decision about that."""
        name, longest_s = self._names[0], 0.0
        for role, kind in (("decode", Role.DECODE_WORKER), ("prefill", Role.PREFILL_WORKER), ("pool", Role.KV_POOL)):
            began_s = time.thread_time()
            commands = self.logic.on_event(PeerDisconnected(kind, f"{role}-{name}"), self._now)
            longest_s = max(longest_s, time.thread_time() - began_s)
            for command in commands:
                self._answer(command)
        self.decoding = deque(one for one in self.decoding if one.node != name)
        self.settle()
        return longest_s

    def restart(self) -> float:
        """Lose the router, start another, and let it take all requests again; return its time for that."""
        self.decoding.clear()
        self.start()
        for request in self._requests.values():
            self.hear(GATEWAY, ResumeRequest(request, (7,) * 16))
        before_s = self.decided_s
        self.settle()
        return self.decided_s - before_s

    def _block_names(self, request: Request) -> list[bytes]:
        if self._sharing == "none":
            return []
        number, num_blocks = int(request.request_id.rpartition("-")[2]), PROMPT_LEN // BLOCK_SIZE
        num_common = num_blocks // 2 if self._sharing == "common" else 0
        common = 1 << 40 | number % NUM_INSTRUCTIONS
        firsts = [common] * num_common + [number] * (num_blocks - num_common)
        hashes = (blake2b((first << 8 | place).to_bytes(8, "big"), digest_size=8) for place, first in enumerate(firsts))
        return [one.digest() for one in hashes]

    def _store(self, node: str, request: Request) -> None:
        cached, names = self._cached[node], self._block_names(request)
        stored = [name for name in names if name not in cached]
        for name in names:
            cached.pop(name, None)
        cached.update(dict.fromkeys(names))
        removed = list(itertools.islice(cached, max(0, len(cached) - NUM_CACHED)))
        for name in removed:
            del cached[name]
        if stored or removed:
            self.hear(f"prefill-{node}", PrefixBlocksChanged(names_told(stored), names_told(removed)))

    def _load(self, node: str) -> None:
        free = NUM_BLOCKS - self._running[node] * PROMPT_LEN // 16
        self.hear(f"decode-{node}", WorkerLoad(num_running=self._running[node], num_free_blocks=free))

    def _answer(self, command: Send) -> None:
        node = command.peer.partition("-")[2]
        match command.message:
            case PrefillRequest(request, attempt):
                self._store(node, request)
                self.hear(command.peer, PrefillCompleted(request.request_id, attempt, PROMPT_LEN))
                step = next_step(attempt)
                self._pooled[node].append((request.request_id, step))
                self.hear(f"pool-{node}", RequestPooled(request.request_id, step, PROMPT_LEN, PROMPT_LEN // 16))
            case FormBatch(batch_id, worker, max_requests=max_requests):
                self._form(node, worker, batch_id, max_requests)
            case RequestInterrupted(request_id):
                self.hear(GATEWAY, ResumeRequest(self._requests[request_id], (7,) * 16))

    def _form(self, node: str, worker: str, batch_id: BatchId, max_requests: int) -> None:
        pooled, target = self._pooled[node], worker.partition("-")[2]
        members = [pooled.popleft() for _ in range(min(max_requests, len(pooled)))]
        granted = tuple((request_id, next_step(attempt)) for request_id, attempt in members)
        self.hear(f"pool-{node}", BatchFormed(batch_id, WorkerName(worker), granted))
        if granted:
            self.hear(worker, BatchReceived(batch_id, granted))
            self._running[target] += len(granted)
            self.decoding += [Decoding(self._requests[one], attempt, target) for one, attempt in granted]
            self._load(target)


def _registered(node: str, *, is_decoder: bool) -> WorkerRegistered:
    return WorkerRegistered(
        NUM_BLOCKS, 16, MAX_RUNNING, f"pool-{node}", can_prefill=not is_decoder, can_decode=is_decoder
    )


def request_of(number: int, tenants: int = 0) -> Request:
    """Build a request with a prompt of its own, as a decoded message has it; of one of so many tenants."""
    return Request(
        request_id=RequestId(f"request-{number}"),
        prompt_token_ids=tuple(1000 + (number * 31 + i * i) % 30_000 for i in range(PROMPT_LEN)),
        sampling=SamplingParams(max_tokens=OUTPUT_LEN),
        reply_to=GATEWAY,
        arrival_s=float(number) * 1e-6,
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        tenant=f"key.{number % tenants}" if tenants else "",
    )


def measure(case: Case, num_requests: int) -> dict[str, Any]:
    names = [f"router-{number}" for number in range(case.routers)]
    nodes = [f"{number:04d}" for number in range(case.nodes)]
    shards = {name: RouterNodes(nodes[number :: case.routers], case.sharing) for number, name in enumerate(names)}
    choice, numbers, before_bytes = RouterChoice(names), itertools.count(), _rss_bytes()
    began_s = time.thread_time()

    def submit() -> RouterNodes:
        request = request_of(next(numbers), case.tenants)
        shard = shards[choice.choose(request.request_id)]
        shard.submit(request)
        return shard

    for _ in range(case.in_flight):
        submit().settle()
    filled = {name: len(shard.decoding) for name, shard in shards.items()}
    used_bytes = _rss_bytes() - before_bytes
    for shard in shards.values():
        shard.decided_s, shard.num_events = 0.0, 0
    for number in range(num_requests):
        shard = list(shards.values())[number % case.routers]
        shard.finish()
        shard.settle()
        submit().settle()
    decided_s = sum(shard.decided_s for shard in shards.values())
    first = shards[names[0]]
    row = case._asdict() | {
        "decoding": sum(filled.values()),
        "us_per_request": round(decided_s / num_requests * 1e6, 1),
        "events_per_request": round(sum(shard.num_events for shard in shards.values()) / num_requests, 1),
        "requests_per_s_and_router": round(num_requests / decided_s),
        "kib_per_request": round(used_bytes / case.in_flight / 1024, 1),
        "mib_of_a_router": round(used_bytes / case.routers / 2**20),
        "fullest_over_mean": round(max(filled.values()) * case.routers / sum(filled.values()), 3),
        "node_lost_ms": round(first.lose_node() * 1e3, 1),
        "router_resumed_s": round(first.restart(), 2),
    }
    return row | {"cpu_s": round(time.thread_time() - began_s, 1)}


def _rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Measure, print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=4000, help="that end and come while it is measured")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--sharing", action="store_true", help="with prompts that share blocks, and without")
    group.add_argument("--tenants", action="store_true", help="with requests of several tenants, and without")
    arguments = parser.parse_args()
    cases, name = CASES, "router_decisions"
    if arguments.sharing or arguments.tenants:
        cases, name = (SHARING_CASES, f"{name}_sharing") if arguments.sharing else (TENANT_CASES, f"{name}_tenants")
    rows = []
    for case in cases:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (case, arguments.requests)))
        print(rows[-1], flush=True)
    write_result(f"scheduling/{name}", rows)


if __name__ == "__main__":
    main()
