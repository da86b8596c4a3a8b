"""AlignedServe on one screen: a router, one elastic worker, a policy and a modelled engine, on one loop.

    python examples/tiny.py [POLICY]        # aligned_slo unless another is named: sarathi, fcfs, bros ...

Everything that decides is the live system's own code. A logic takes events and returns commands; here a command
becomes a later event. Live, actors perform the same commands with sockets and a real engine.
"""

import heapq
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import quantiles
from typing import Any

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig, RouterConfig, SchedulingConfig
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.messages.events import TICK_S, PeerConnected, Received, Send, SendTo, Ticked
from alignedserve.messages.gateways import GatewayRegistered, RequestRejected, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted, IterationTimes, RunIteration
from alignedserve.worker_core import factory as worker_factory
from lab.sim.engine import EOS, SimulatedAnswer, SimulatedEngine
from router import logic as router_logic

MESSAGE_S = 0.0002
SECONDS = 30.0
CHATS_PER_S, DOCUMENTS = 6.0, 100
OBJECTIVES = Slo(ttft_s=1.0, tpot_s=0.1)
# An accelerator: 15 ms to read the weights, then 60 us for each token of a prompt and 50 ns for each key of a decode.
_UNITS = LinearCoefficients(base_s=0.015, prompt_token_s=60e-6, decode_s=30e-6, context_token_s=5e-8)
COSTS = LinearIterationModel(_UNITS)
LAYOUT = BlockLayout(block_size=16, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
WORKER = DecodeWorkerConfig(
    kv_cache_bytes=LAYOUT.block_bytes * 8000, max_num_batched_tokens=2048, swap_space_bytes=0, max_waiting_requests=1024
)


class Loop:
    """Events in order of time; the only clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._entries, (self.now + delay_s, next(self._order), action))

    def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.now, _, action = heapq.heappop(self._entries)
            action()


@dataclass
class Client:
    """What a client saw of one request."""

    request: Request
    token_times_s: list[float] = field(default_factory=list)
    is_over: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.request.arrival_s

    @property
    def holds(self) -> bool:
        """Whether a chat had its first token in time, and the others fast enough in the mean."""
        num_gaps = max(len(self.token_times_s) - 1, 1)
        tpot_s = (self.token_times_s[-1] - self.token_times_s[0]) / num_gaps
        return self.ttft_s <= (OBJECTIVES.ttft_s or 0.0) and tpot_s <= (OBJECTIVES.tpot_s or 0.0)


class TinyCluster:
    """One router and one elastic worker, linked, with a gateway that counts tokens."""

    def __init__(self, policy: str) -> None:
        self.loop = Loop()
        self.clients: dict[RequestId, Client] = {}
        self._answers: dict[RequestId, SimulatedAnswer] = {}
        num_blocks = LAYOUT.blocks_in(WORKER.kv_cache_bytes)
        memory = worker_factory.memory_of(WORKER, LAYOUT, num_blocks=num_blocks)
        self._engine = SimulatedEngine(COSTS, self._answers, memory, keeps_timeline=False)
        self._logics: dict[str, Any] = {
            "router": router_logic.make_logic(config=RouterConfig(), batching=BatchingConfig()),
            "worker": worker_factory.make_colocated_logic(
                registered=worker_factory.colocated_registration(LAYOUT, num_blocks, WORKER, can_move=True),
                memory=memory,
                config=WORKER,
                scheduling=SchedulingConfig(policy=policy),
                eos_token_ids=frozenset({EOS}),
                costs=COSTS,
                num_layers=LAYOUT.num_layers,
            ),
        }
        self._tell("router", PeerConnected(Role.DECODE_WORKER, "worker"))
        self._tell("worker", PeerConnected(Role.ROUTER, "router"))
        self._tell("router", PeerConnected(Role.GATEWAY, "gateway"))
        self._tell("router", Received("gateway", GatewayRegistered("")))
        for name in self._logics:
            self._tick(name)

    def submit_at(self, request: Request, answer_len: int) -> None:
        """Send a request when it arrives."""
        self.clients[request.request_id] = Client(request)
        self._answers[request.request_id] = SimulatedAnswer(answer_len)
        submit = Received("gateway", SubmitRequest(request))
        self.loop.after(request.arrival_s - self.loop.now, lambda: self._tell("router", submit))

    def _tell(self, name: str, event: Any) -> None:
        """Pass an event to a logic, and make later events of its commands."""
        for command in self._logics[name].on_event(event, self.loop.now):
            match command:
                case Send(peer="gateway", message=message):
                    assert not isinstance(message, RequestRejected), "the router's queue is full"
                case Send(peer=peer, message=message):
                    self._tell_later(MESSAGE_S, peer, Received(name, message))
                case SendTo(message=message):
                    self._count_tokens(message)
                case RunIteration():
                    self._run(name, command)
                case _:
                    raise AssertionError(f"a topology of one worker has no {type(command).__name__}")

    def _tell_later(self, delay_s: float, name: str, event: Any) -> None:
        self.loop.after(delay_s, lambda: self._tell(name, event))

    def _run(self, name: str, command: RunIteration) -> None:
        now = self.loop.now
        iteration = self._engine.begin(command, now)
        times = IterationTimes(now, now + iteration.duration_s, 0.0, iteration.duration_s, 0.0)
        ended = IterationCompleted(iteration.sampled, times=times, is_urgent=command.is_urgent)
        self._tell_later(iteration.duration_s, name, ended)

    def _tick(self, name: str) -> None:
        self._tell(name, Ticked())
        self.loop.after(TICK_S, lambda: self._tick(name))

    def _count_tokens(self, message: Any) -> None:
        for delta in message.deltas:
            client = self.clients[delta.request_id]
            client.token_times_s += [self.loop.now] * len(delta.token_ids)
            client.is_over |= delta.finish_reason is not None


def chat(number: int, arrival_s: float, rng: random.Random) -> Request:
    """Return a chat of some hundred tokens."""
    prompt = (1,) * rng.randint(50, 600)
    name = RequestId(f"chat-{number}")
    return Request(name, prompt, SamplingParams(max_tokens=1000), "gateway", arrival_s, slo=OBJECTIVES)


def document(number: int, rng: random.Random) -> Request:
    """Return a document of some thousand tokens, there from the beginning."""
    prompt, name = (1,) * rng.randint(1000, 6000), RequestId(f"document-{number}")
    deadline, kind = Slo(deadline_s=3600.0), RequestClass.BEST_EFFORT
    return Request(name, prompt, SamplingParams(max_tokens=1000), "gateway", 0.01, kind, deadline)


def main(arguments: Sequence[str]) -> None:
    """Send chats beside a backlog of documents, and say what each class got."""
    policy = arguments[0] if arguments else "aligned_slo"
    rng = random.Random(0)
    cluster = TinyCluster(policy)
    for number in range(DOCUMENTS):
        cluster.submit_at(document(number, rng), answer_len=rng.randint(100, 300))
    arrival_s, num_chats = 1.0, 0
    while arrival_s < SECONDS:
        cluster.submit_at(chat(num_chats, arrival_s, rng), answer_len=rng.randint(50, 250))
        num_chats += 1
        arrival_s += rng.expovariate(CHATS_PER_S)
    chats = [client for client in cluster.clients.values() if client.request.is_real_time]
    documents = [client for client in cluster.clients.values() if not client.request.is_real_time]
    cluster.loop.run(lambda: all(client.is_over for client in chats))
    share, p99_s = sum(client.holds for client in chats) / num_chats, quantiles([c.ttft_s for c in chats], n=100)[-1]
    num_done = sum(client.is_over for client in documents)
    print(f"{policy}: {num_chats} chats, {share:.0%} hold their objectives, TTFT p99 {p99_s * 1000:.0f} ms; ", end="")
    print(f"{num_done} of {DOCUMENTS} documents are done after {cluster.loop.now:.0f} s")
    cluster.loop.run(lambda: all(client.is_over for client in documents))
    print(f"the last document ends after {cluster.loop.now:.0f} s; none is lost")


if __name__ == "__main__":
    main(sys.argv[1:])
