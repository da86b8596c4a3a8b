"""Random histories of cached blocks: placement by the index is that of a plain look at all workers; nothing is left.

Contexts are paths in a small tree of blocks, so that they share beginnings; workers tell of blocks that come and go,
with lies and gaps, compute, die and return, and requests are aborted and resumed meanwhile.
"""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams
from alignedserve.messages.events import CommonEvent, PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.gateways import AbortRequest, ResumeRequest, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import PoolRegistered
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest, RequestFinished, WorkerLoad
from router.leans import Leans
from router.logic import RouterLogic
from router.placement import Placement
from router.policies.bypass import UrgentBypass
from router.policies.prefill_order import LeastSlackOrder
from tests.harnesses.plain_placement import PlainPlacement
from tests.support.samples import GATEWAY, POOL, worker

BLOCK_SIZE = 4
WORKERS = tuple(f"decode-{number}" for number in range(5))
PREFILLERS = ("prefill-0", "prefill-1")


def name_of(*path: int) -> bytes:
    """Return the name of a path's last block; of two paths in three the router is told."""
    return bytes(path).ljust(7, b"\xff") + bytes([sum(path) % 3 * 32])


def names_of(path: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(name_of(*path[: length + 1]) for length in range(len(path)))


class History:
    """Two routers that hear the same; the commands of one are performed."""

    def __init__(self, seed: int, *, are_separate: bool) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.names = PREFILLERS if are_separate else WORKERS
        self.are_separate = are_separate
        self.placements = [
            kind(max_candidate_requests=4, batching=BatchingConfig()) for kind in (Placement, PlainPlacement)
        ]
        self.routers = [
            RouterLogic(
                config=RouterConfig(max_prefill_tokens_per_worker=60),
                placement=placement,
                order=LeastSlackOrder(),
                bypass=UrgentBypass(),
                leans=Leans(),
            )
            for placement in self.placements
        ]
        self.prefilling: dict[RequestId, tuple[str, int]] = {}
        self.decoding: dict[RequestId, tuple[str, int]] = {}
        self.requests: dict[RequestId, Request] = {}
        self.tell(PeerConnected(Role.GATEWAY, GATEWAY))
        self.hear(POOL, PoolRegistered(1000))
        for name in self.names:
            self.register(name)

    def tell(self, event: CommonEvent) -> None:
        self.now += 0.01
        indexed, plain = (router.on_event(event, self.now) for router in self.routers)
        assert indexed == plain, event
        for command in indexed:
            self.perform(command)

    def hear(self, peer: str, message: object) -> None:
        self.tell(Received(peer, message))  # type: ignore[arg-type]

    def perform(self, command: Send) -> None:
        if isinstance(command.message, PrefillRequest):
            request_id = command.message.request.request_id
            assert request_id not in self.prefilling
            self.prefilling[request_id] = (command.peer, command.message.attempt)

    def register(self, name: str) -> None:
        able = {"can_prefill": True, "can_decode": not self.are_separate}
        self.hear(name, worker(**able, num_blocks=1000, block_size=BLOCK_SIZE, max_running_requests=6))
        self.hear(name, WorkerLoad(prompt_tokens_per_s=self.rng.choice((0, 1000, 5000))))

    def path(self) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 7))]

    def step(self) -> None:
        act = self.rng.choice((self.submit, self.submit, self.report, self.report, self.complete, self.end, self.abort))
        (self.lose if self.rng.random() < 0.03 else act)()

    def submit(self) -> None:
        request_id, path = RequestId(f"r{len(self.requests)}"), self.path()
        request = self.requests[request_id] = Request(
            request_id,
            (1,) * (BLOCK_SIZE * len(path) + self.rng.randrange(BLOCK_SIZE)),
            SamplingParams(max_tokens=self.rng.randrange(1, 20)),
            GATEWAY,
            self.now,
            self.rng.choice(list(RequestClass)),
        )
        names = b"".join(names_of(path)) if self.rng.random() < 0.9 else b""
        self.hear(GATEWAY, SubmitRequest(request, names))

    def report(self) -> None:
        some = [name for _ in range(3) for name in names_of(self.path())]
        stored, removed = (tuple(self.rng.sample(some, self.rng.randrange(len(some)))) for _ in range(2))
        is_complete = self.rng.random() < 0.1
        self.hear(self.rng.choice((*self.names, POOL)), PrefixBlocksChanged(stored, removed, is_complete))

    def complete(self) -> None:
        if not self.prefilling:
            return
        request_id = self.rng.choice(list(self.prefilling))
        name, attempt = self.prefilling.pop(request_id)
        self.hear(name, PrefillCompleted(request_id, attempt, 4))
        self.decoding[request_id] = (name, attempt)

    def end(self) -> None:
        if self.decoding:
            request_id = self.rng.choice(list(self.decoding))
            name, attempt = self.decoding.pop(request_id)
            self.hear(name, RequestFinished(request_id, attempt, 1))

    def abort(self) -> None:
        if self.prefilling and self.rng.random() < 0.3:
            request_id = self.rng.choice(list(self.prefilling))
            del self.prefilling[request_id]
            self.hear(GATEWAY, AbortRequest(request_id))

    def lose(self) -> None:
        """Lose a worker; its requests are resumed by the gateway, the worker comes back with an empty cache."""
        name = self.rng.choice(self.names)
        lost = [one for held in (self.prefilling, self.decoding) for one, at in held.items() if at[0] == name]
        for held in (self.prefilling, self.decoding):
            for request_id in lost:
                held.pop(request_id, None)
        self.tell(PeerDisconnected(Role.DECODE_WORKER, name))
        for request_id in lost:
            names = b"".join(names_of(self.path()))
            self.hear(GATEWAY, ResumeRequest(self.requests[request_id], (5,), 0, names))
        self.register(name)

    def finish(self) -> None:
        while self.prefilling or self.decoding:
            self.complete()
            self.end()


@settings(max_examples=12)
@given(seed=st.integers(0, 10**9), are_separate=st.booleans())
def test_decisions_are_those_of_a_plain_look(seed: int, are_separate: bool) -> None:
    history = History(seed, are_separate=are_separate)
    for _ in range(150):
        history.step()
    history.finish()
    index = history.placements[0].prefixes
    assert not index._expected
    assert len(index) == sum(having.bit_count() for having in index._holders.values())
    assert all(index._holders.values())
    for name in (*history.names, POOL):
        history.tell(PeerDisconnected(Role.DECODE_WORKER, name))
    assert not any((index._holders, index._bits, index._workers, len(index)))
