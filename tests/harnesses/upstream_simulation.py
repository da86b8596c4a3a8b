"""The logic of a door before a simulated server, on a virtual clock: chat that comes by chance, documents that wait."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from alignedserve.core.request import Slo
from alignedserve.upstream.logic import CHAT, DOCUMENT, TICK_S, Fingerprint, UpstreamLogic, WaitingCall


@dataclass
class SimulatedServer:
    """Continuous batching: a step takes some time, more with more tokens; prompts come in chunks, by arrival."""

    step_s: float = 0.015
    token_s: float = 0.0009
    chunk: int = 512
    max_seqs: int = 256
    waiting: deque["Work"] = field(default_factory=deque)
    running: list["Work"] = field(default_factory=list)

    def step(self) -> tuple[float, list["Work"]]:
        """Return how long a step takes, and who has a token after it."""
        self.waiting = deque(work for work in self.waiting if not work.is_gone)
        self.running = [work for work in self.running if not work.is_gone]
        while self.waiting and len(self.running) < self.max_seqs:
            self.running.append(self.waiting.popleft())
        ready = [work for work in self.running if not work.num_left]
        budget = self.chunk - len(ready)
        for work in self.running:
            taken = min(max(budget, 0), work.num_left)
            work.num_left, budget = work.num_left - taken, budget - taken
            if taken and not work.num_left:
                ready.append(work)
        return self.step_s + self.token_s * (self.chunk - budget), ready


@dataclass(eq=False)
class Work:
    """One call at the server."""

    call: WaitingCall
    num_left: int
    num_out: int
    num_made: int = 0
    is_gone: bool = False


class Outcome(NamedTuple):
    """What came of a simulation."""

    held: float  # share of chats that held both objectives
    documents_per_s: float
    most_documents: int
    ttfts_s: list[float]


@dataclass(eq=False)
class DoorSimulation:
    """Run it once."""

    seed: int = 1
    rate: float = 0.8
    num_documents: int = 64
    slo: Slo = field(default_factory=lambda: Slo(1.0, 0.3))
    servers: list[SimulatedServer] = field(default_factory=lambda: [SimulatedServer()])
    chats_at_once: bool = False  # documents are not held back: what the server does by itself
    on_started: Callable[[WaitingCall], None] = lambda _: None

    def run(self, seconds: float, warm_s: float = 30.0) -> Outcome:
        self.rng, self.numbers = random.Random(self.seed), itertools.count()
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.logic = UpstreamLogic([f"http://{index}" for index in range(len(self.servers))])
        for server in self.servers:
            server.waiting.clear()
            server.running.clear()
        self.works: dict[str, Work] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.calls: dict[str, WaitingCall] = {}
        self.idle = set(self.logic.upstreams)
        self.held: list[bool] = []
        self.ttfts: list[float] = []
        self.arrived: dict[str, float] = {}
        self.ended_s: list[float] = []
        self.most = 0
        for url in self.logic.upstreams:
            self.logic.on_listed(url, {"m": Fingerprint()})
        for _ in range(self.num_documents):
            self._arrive(DOCUMENT, 0.0)
        self._at(warm_s, lambda now: self._next_chat(now, warm_s + seconds))
        self._at(0.0, self._tick)
        now = 0.0
        while self.events and now < warm_s + seconds + 60.0:
            now, _, act = heapq.heappop(self.events)
            act(now)
            self._start_all(now)
            if now > warm_s + seconds and not any(call.request_class is CHAT for call in self.calls.values()):
                break
        num_ended = sum(warm_s <= ended_s <= warm_s + seconds for ended_s in self.ended_s)
        return Outcome(sum(self.held) / max(len(self.held), 1), num_ended / seconds, self.most, self.ttfts)

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when_s, next(self.numbers), act))

    def _arrive(self, kind: object, now: float) -> None:
        name = f"{'chat' if kind is CHAT else 'document'}-{next(self.numbers)}"
        if kind is CHAT:
            size = (
                min(1000, max(8, int(self.rng.lognormvariate(4.6, 0.9)))),
                min(256, max(8, int(self.rng.lognormvariate(4.1, 0.7)))),
            )
        else:
            size = self.rng.randint(512, 1024), self.rng.randint(32, 128)
        slo = self.slo if kind is CHAT else Slo()
        call = WaitingCall(name, "m", CHAT if kind is CHAT else DOCUMENT, "a", 1.0, size[0], slo, may_be_shed=True)
        self.calls[name], self.sizes[name], self.arrived[name] = call, size, now
        self.logic.arrive(call, now)

    def _next_chat(self, now: float, until_s: float) -> None:
        if now < until_s:
            self._arrive(CHAT, now)
            self._at(now + self.rng.expovariate(self.rate), lambda then: self._next_chat(then, until_s))

    def _start_all(self, now: float) -> None:
        if self.chats_at_once:
            for upstream in self.logic.upstreams.values():
                upstream.documents.limit = upstream.credit = 1e6
        for started in self.logic.starts(now):
            work = self.works[started.call_id] = Work(self.calls[started.call_id], *self.sizes[started.call_id])
            server = self.servers[list(self.logic.upstreams).index(started.url)]
            server.waiting.append(work)
            self.on_started(work.call)
            if started.url in self.idle:
                self.idle.discard(started.url)
                self._at(now, partial(self._step, started.url))
        self.most = max(self.most, *(item.num_open(DOCUMENT) for item in self.logic.upstreams.values()))

    def _step(self, url: str, now: float) -> None:
        server = self.servers[list(self.logic.upstreams).index(url)]
        if not (server.waiting or server.running):
            self.idle.add(url)
            return
        seconds, ready = server.step()
        self._at(now + seconds, lambda then: self._after(url, ready, then))

    def _after(self, url: str, ready: list[Work], now: float) -> None:
        for work in ready:
            if work.is_gone:
                continue
            work.num_made += 1
            self.logic.on_token(work.call, 1, now)
            if work.num_made >= work.num_out:
                self._finish(work, now)
        self._step(url, now)

    def _finish(self, work: Work, now: float) -> None:
        call, name = work.call, work.call.call_id
        work.is_gone = True
        first_s = call.first_s or now
        self.logic.end(call, is_answered=True)
        del self.calls[name]
        if call.request_class is DOCUMENT:
            self.ended_s.append(now)
            self._arrive(DOCUMENT, now)
        elif call.tenant == "a":
            ttft_s, tpot_s = first_s - self.arrived[name], (now - first_s) / max(work.num_made - 1, 1)
            self.held.append(ttft_s <= (self.slo.ttft_s or 9e9) and tpot_s <= (self.slo.tpot_s or 9e9))
            self.ttfts.append(ttft_s)

    def _tick(self, now: float) -> None:
        for call in self.logic.tick(now):
            self.works[call.call_id].is_gone = True
            self.logic.end(call, is_answered=False)
            call.num_shed += 1
            self.logic.arrive(call, now)
        for url in self.logic.wants_canary(now):
            if f"canary-{url}" not in self.works or self.works[f"canary-{url}"].is_gone:
                self._canary(url, now)
        self._at(now + TICK_S, self._tick)

    def _canary(self, url: str, now: float) -> None:
        call = WaitingCall(f"canary-{url}", "m", CHAT, "", 1.0, 4, self.slo, url=url, started_s=now)
        self.logic.upstreams[url].calls[call.call_id] = call
        work = self.works[call.call_id] = Work(call, 4, 8)
        self.calls[call.call_id], self.arrived[call.call_id] = call, now
        self.servers[list(self.logic.upstreams).index(url)].waiting.append(work)
