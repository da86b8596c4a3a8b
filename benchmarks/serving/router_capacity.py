"""The load that one router carries: requests per second and core, from admission to end, with 10 000 in its queue.

    python -m benchmarks.serving.router_capacity [--nodes 8,128] [--queued 10000] [--seconds 10]

The target is 2 000 requests/s and core, with any number of nodes.

The router runs as in a cluster (links, logic, length predictor), alone in its process, whose processor time counts. A
second process speaks for all the others: a gateway that keeps the queue full, and on each node a pool, a prefill worker
and a decode worker, which answer at once what real ones answer. Requests have 512 tokens. Measured over Unix sockets,
and over TLS as between hosts; `saturated_at` is the inverse of the processor time per request. The predictor leaves out
what it has no time for: `predicted_share` of the requests had a prediction.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from typing_extensions import override

from alignedserve.config.sections import BatchingConfig, ModelSectionConfig, RouterConfig
from alignedserve.core.attempts import next_step
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    DecodeWorkerInbound,
    GatewayInbound,
    PoolInbound,
    PrefillWorkerInbound,
    RouterInbound,
)
from alignedserve.messages.pools import BatchFormed, BatchReceived, FormBatch, PoolRegistered, RequestPooled
from alignedserve.messages.wire import Codec, Message
from alignedserve.messages.workers import (
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    WorkerLoad,
    WorkerRegistered,
)
from alignedserve.process.addresses import AddressBook
from alignedserve.process.heap import settle_heap
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer
from alignedserve.process.logic_driver import LogicDriver
from alignedserve.process.process_spec import ProcessSpec
from alignedserve.process.tls import CertificateAuthority
from alignedserve.runtime.model.built_in import pocket_folder
from alignedserve.runtime.model.served_model import resolve_model
from benchmarks.support.recording import write_result
from router.async_predictor import AsyncLengthPredictor, PredictingLogic
from router.factory import make_logic
from router.prediction import make_length_predictor
from router.state import LengthPredicted

PROMPT_LEN, OUTPUT_LEN = 512, 128
SECRET = bytes(32)
ROUTER = "router"
WARM_S = 2.0
MAX_RUNNING, NUM_BLOCKS = 64, 8192  # of a decode worker


class Transport(NamedTuple):
    """A kind of links to the router, its address and its certificates."""

    kind: str  # unix or tls
    address: str
    authority: CertificateAuthority

    def identity(self, role: Role, name: str) -> Identity:
        """Return the identity of one process."""
        return Identity(role, name, SECRET, 30.0, self.authority.issue(name))


# --- the router's process


def run_router(connection: Connection, identity: Identity, address: str, num_queued: int) -> None:
    """Serve until told to end; answer every word with the processor time used and the lengths predicted so far."""
    num_predicted = 0

    async def serve() -> None:
        def predicted(event: LengthPredicted) -> None:
            nonlocal num_predicted
            num_predicted += 1
            driver.dispatch(event)

        config = RouterConfig(max_queued_requests=4 * num_queued, max_queued_tokens=1 << 40)
        logic = make_logic(config=config, batching=BatchingConfig())
        predictor = make_length_predictor(config, resolve_model(ModelSectionConfig(path=str(pocket_folder()))))
        assert predictor is not None, "the default predicts"
        lengths = AsyncLengthPredictor(predictor, predicted)
        driver: LogicDriver[Any, Any] = LogicDriver(
            PredictingLogic(logic, lengths), _process_spec(identity), Codec(RouterInbound), lambda command: None
        )
        await driver.links.listen(address)
        settle_heap()
        connection.send("ready")
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, connection.recv) != "end":
            used = resource.getrusage(resource.RUSAGE_SELF)
            connection.send((used.ru_utime + used.ru_stime, num_predicted))
        await driver.close()
        lengths.close()

    uvloop.run(serve())


def _process_spec(identity: Identity) -> ProcessSpec:
    """Return the specification of the router's process, which listens at addresses alone and writes no log."""
    return ProcessSpec(
        role=identity.role,
        name=identity.name,
        cluster_id="benchmark",
        secret=identity.secret,
        peer_timeout_s=identity.peer_timeout_s,
        addresses=AddressBook(Path()),
        log_folder=Path(),
        credentials=identity.credentials,
    )


# --- all other processes


class Fleet:
    """Counts what the others have finished, and tells the gateway."""

    def __init__(self) -> None:
        self.num_finished = 0
        self.on_finished: Callable[[], None] = lambda: None
        self.decoders: dict[str, Decoder] = {}

    def finished(self) -> None:
        """Count a request."""
        self.num_finished += 1
        self.on_finished()


class Peers:
    """A process of the fleet: links to the router, and what it answers."""

    def __init__(self, transport: Transport, role: Role, name: str, inbound: Any) -> None:
        self.name = name
        self.is_linked = asyncio.Event()
        self._links = LinkManager(transport.identity(role, name), Codec(inbound), self)
        self._links.dial(transport.address)

    def send(self, message: Message) -> None:
        """Send to the router."""
        self._links.send(ROUTER, message)

    def on_linked(self, peer: Peer) -> None:
        """See LinkHandler."""
        self.is_linked.set()

    def on_message(self, peer: Peer, message: Message) -> None:
        """See LinkHandler. Overridden by who answers."""

    def on_lost(self, peer: Peer) -> None:
        """See LinkHandler."""

    async def close(self) -> None:
        """Drop the link."""
        await self._links.close()


class Gateway(Peers):
    """Keeps the router's queue full."""

    def __init__(self, transport: Transport, fleet: Fleet) -> None:
        super().__init__(transport, Role.GATEWAY, "gateway-0", GatewayInbound)
        fleet.on_finished = self.submit
        self._num_submitted = 0

    def submit(self) -> None:
        """Submit one more request, every second one a document."""
        self._num_submitted += 1
        is_document = self._num_submitted % 2 == 0
        self.send(
            SubmitRequest(
                Request(
                    request_id=RequestId(f"request-{self._num_submitted}"),
                    prompt_token_ids=tuple((self._num_submitted * 31 + i * i) % 1000 for i in range(PROMPT_LEN)),
                    sampling=SamplingParams(max_tokens=OUTPUT_LEN),
                    reply_to=self.name,
                    request_class=RequestClass.BEST_EFFORT if is_document else RequestClass.REAL_TIME,
                    slo=Slo() if is_document else Slo(ttft_s=1.0, tpot_s=0.1),
                    arrival_s=time.monotonic(),
                )
            )
        )


class Pool(Peers):
    """Has every request that its prefill worker has computed, until a batch is formed."""

    def __init__(self, transport: Transport, index: int, fleet: Fleet) -> None:
        super().__init__(transport, Role.KV_POOL, f"pool-{index}", PoolInbound)
        self._fleet = fleet
        self._pooled: deque[tuple[RequestId, int]] = deque()

    @override
    def on_linked(self, peer: Peer) -> None:
        """See LinkHandler."""
        self.send(PoolRegistered(NUM_BLOCKS))
        super().on_linked(peer)

    def take(self, request_id: RequestId, attempt: int) -> None:
        """Take a request from the prefill worker."""
        self._pooled.append((request_id, next_step(attempt)))
        self.send(RequestPooled(request_id, next_step(attempt), PROMPT_LEN, PROMPT_LEN // 16))

    @override
    def on_message(self, peer: Peer, message: Message) -> None:
        """See LinkHandler."""
        if isinstance(message, FormBatch):
            count = min(message.max_requests, len(self._pooled))
            members = tuple((name, next_step(at)) for name, at in (self._pooled.popleft() for _ in range(count)))
            self.send(BatchFormed(message.batch_id, message.worker, members))
            if members:
                self._fleet.decoders[message.worker].receive(message, members)


class Prefiller(Peers):
    """Has computed every prompt as soon as it comes."""

    def __init__(self, transport: Transport, index: int, pool: Pool) -> None:
        super().__init__(transport, Role.PREFILL_WORKER, f"prefill-{index}", PrefillWorkerInbound)
        self._pool = pool

    @override
    def on_linked(self, peer: Peer) -> None:
        """See LinkHandler."""
        self.send(WorkerRegistered(NUM_BLOCKS, 16, 16, self._pool.name, can_prefill=True, can_decode=False))
        super().on_linked(peer)

    @override
    def on_message(self, peer: Peer, message: Message) -> None:
        """See LinkHandler."""
        if isinstance(message, PrefillRequest):
            request_id = message.request.request_id
            self.send(PrefillCompleted(request_id, message.attempt, PROMPT_LEN))
            self._pool.take(request_id, message.attempt)


class Decoder(Peers):
    """Has generated everything as soon as a batch comes."""

    def __init__(self, transport: Transport, index: int, pool: Pool, fleet: Fleet) -> None:
        super().__init__(transport, Role.DECODE_WORKER, f"decode-{index}", DecodeWorkerInbound)
        self._pool, self._fleet = pool, fleet
        fleet.decoders[self.name] = self

    @override
    def on_linked(self, peer: Peer) -> None:
        """See LinkHandler."""
        registered = WorkerRegistered(NUM_BLOCKS, 16, MAX_RUNNING, self._pool.name, can_prefill=False, can_decode=True)
        self.send(registered)
        self.send(WorkerLoad(num_free_blocks=NUM_BLOCKS))
        super().on_linked(peer)

    def receive(self, form: FormBatch, members: tuple[tuple[RequestId, int], ...]) -> None:
        """Report the batch, then the end of each of its requests, then that there is room."""
        self.send(BatchReceived(form.batch_id, members))
        for request_id, attempt in members:
            self.send(RequestFinished(request_id, attempt, OUTPUT_LEN))
            self._fleet.finished()
        self.send(WorkerLoad(num_free_blocks=NUM_BLOCKS, num_handoffs_verified=self._fleet.num_finished))


async def drive(
    connection: Connection, transport: Transport, num_nodes: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Fill the queue, let it run, and measure."""
    fleet = Fleet()
    gateway = Gateway(transport, fleet)
    await gateway.is_linked.wait()
    peers: list[Peers] = [gateway]
    for index in range(num_nodes):
        pool = Pool(transport, index, fleet)
        peers += [pool, Prefiller(transport, index, pool), Decoder(transport, index, pool, fleet)]
        await asyncio.gather(*(peer.is_linked.wait() for peer in peers[-3:]))
    for _ in range(arguments.queued):
        gateway.submit()
    await asyncio.sleep(WARM_S)
    (before_s, predicted_before), before, started_s = await used(connection), fleet.num_finished, time.perf_counter()
    await asyncio.sleep(arguments.seconds)
    (after_s, predicted_after), num_finished = await used(connection), fleet.num_finished - before
    elapsed_s = time.perf_counter() - started_s
    for peer in peers:
        await peer.close()
    return {
        "transport": transport.kind,
        "nodes": num_nodes,
        "queued": arguments.queued,
        "requests_per_s": round(num_finished / elapsed_s),
        "router_share_of_a_core": round((after_s - before_s) / elapsed_s, 3),
        "us_per_request": round((after_s - before_s) / max(num_finished, 1) * 1e6, 1),
        "predicted_share": round((predicted_after - predicted_before) / max(num_finished, 1), 3),
        "saturated_at": round(num_finished / (after_s - before_s)),
    }


async def used(connection: Connection) -> tuple[float, int]:
    """Return the processor time of the router's process, and how many lengths it has predicted."""
    connection.send("used")
    answer: tuple[float, int] = await asyncio.get_running_loop().run_in_executor(None, connection.recv)
    return answer


def measure(kind: str, num_nodes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure with links of this kind."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder)}/r.sock" if kind == "unix" else f"tls:127.0.0.1:{arguments.port}"
        transport = Transport(kind, address, CertificateAuthority.new("benchmark"))
        here, there = multiprocessing.get_context("spawn").Pipe()
        identity = transport.identity(Role.ROUTER, ROUTER)
        process = multiprocessing.get_context("spawn").Process(
            target=run_router, args=(there, identity, address, arguments.queued), daemon=True
        )
        process.start()
        here.recv()
        row = uvloop.run(drive(here, transport, num_nodes, arguments))
        here.send("end")
        process.join(10)
        process.kill()
        return row


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=_counts, default=[8, 32, 128, 1000])
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", default="unix,tls", help="of links")
    parser.add_argument("--port", type=int, default=29471)
    arguments = parser.parse_args()
    rows = []
    for _ in range(arguments.rounds):
        for num_nodes, kind in itertools.product(arguments.nodes, arguments.kinds.split(",")):
            rows.append(measure(kind, num_nodes, arguments))
            print(rows[-1], flush=True)
    write_result("router_capacity", rows)


if __name__ == "__main__":
    main()
