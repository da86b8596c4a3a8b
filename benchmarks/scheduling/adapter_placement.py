"""Adapters loaded per request, and waits, where requests go rather to workers that have their adapter, and where not.

The live router's decisions; workers are a queue of prompts, each of which first loads its adapter if the worker's
memory, of those used last, lacks it. Popularity of adapters falls as 1 / rank.

    python -m benchmarks.scheduling.adapter_placement
"""

import argparse
import heapq
import random
import statistics
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from alignedserve.config.sections import BatchingConfig, RouterConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import ADAPTER_DIGEST_BYTES, LoraAdapter, Request, SamplingParams
from alignedserve.messages.events import PeerConnected, Received, Send
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    WorkerLoad,
    WorkerRegistered,
)
from benchmarks.support.recording import write_result
from router.factory import make_logic

GATEWAY, NUM_WORKERS, SLOTS, NUM_ADAPTERS = "gateway-0", 4, 8, 48
PROMPT_LEN, TOKENS_PER_S, LOADING_S, DECODING_S = 200, 5000, 0.1, 1.0


class Later(NamedTuple):
    """A message of a worker."""

    at_s: float
    number: int
    worker: str
    message: Message


@dataclass(slots=True)
class Worker:
    """A worker that computes one prompt at a time."""

    loaded: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the most recently used last
    free_at_s: float = 0.0
    num_loads: int = 0

    def compute(self, adapter: LoraAdapter, now: float) -> float:
        """Return when the prompt is computed."""
        begin = max(now, self.free_at_s)
        if adapter.digest not in self.loaded:
            begin += LOADING_S
            self.num_loads += 1
        self.loaded[adapter.digest] = None
        self.loaded.move_to_end(adapter.digest)
        if len(self.loaded) > SLOTS:
            self.loaded.popitem(last=False)
        self.free_at_s = begin + PROMPT_LEN / TOKENS_PER_S
        return self.free_at_s


class Cluster:
    """A router and its workers on one clock."""

    def __init__(self, *, knows_adapters: bool) -> None:
        self.logic = make_logic(config=RouterConfig(), batching=BatchingConfig())
        self.logic.on_event(PeerConnected(Role.GATEWAY, GATEWAY), 0.0)
        self.workers = {f"worker-{number}": Worker() for number in range(NUM_WORKERS)}
        self.later: list[Later] = []
        self.waits: list[float] = []
        for name in self.workers:
            most = SLOTS if knows_adapters else 0
            registered = WorkerRegistered(
                100_000, 16, 256, "", can_prefill=True, can_decode=True, can_move=True, max_adapters=most
            )
            self.hear(name, registered, 0.0)
            self.hear(name, WorkerLoad(prompt_tokens_per_s=TOKENS_PER_S), 0.0)

    def hear(self, peer: str, message: Message, now: float) -> None:
        """Tell the router, and let workers do as it says."""
        for send in self.logic.on_event(Received(peer, message), now):
            self._do(send, now)

    def _do(self, send: Send, now: float) -> None:
        if not isinstance(send.message, PrefillRequest):
            return
        request, attempt = send.message.request, send.message.attempt
        assert request.adapter is not None, "every request has one"
        done = self.workers[send.peer].compute(request.adapter, now)
        self.waits.append(done - request.arrival_s)
        computed = PrefillCompleted(request.request_id, attempt, PROMPT_LEN)
        finished = RequestFinished(request.request_id, attempt, 10)
        for at_s, message in ((done, computed), (done + DECODING_S, finished)):
            heapq.heappush(self.later, Later(at_s, len(self.waits) * 2 + (message is finished), send.peer, message))

    def pass_until(self, now: float) -> None:
        """Tell the router what happens until then."""
        while self.later and self.later[0].at_s <= now:
            later = heapq.heappop(self.later)
            self.hear(later.worker, later.message, later.at_s)


def run(share: float, num_requests: int, *, knows_adapters: bool) -> dict[str, float]:
    """Return the loads per request and the waits for first tokens, at this share of what four workers compute."""
    rng = random.Random(0)
    cluster, now = Cluster(knows_adapters=knows_adapters), 0.0
    rate = share * NUM_WORKERS * TOKENS_PER_S / PROMPT_LEN
    adapters = [
        LoraAdapter(f"a{i}", f"/a/{i}", i.to_bytes(ADAPTER_DIGEST_BYTES, "little")) for i in range(NUM_ADAPTERS)
    ]
    weights = [1 / (rank + 1) for rank in range(NUM_ADAPTERS)]
    for number in range(num_requests):
        now += rng.expovariate(rate)
        cluster.pass_until(now)
        (adapter,) = rng.choices(adapters, weights)
        request = Request(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=tuple(range(PROMPT_LEN)),
            sampling=SamplingParams(max_tokens=10),
            reply_to=GATEWAY,
            arrival_s=now,
            adapter=adapter,
        )
        cluster.hear(GATEWAY, SubmitRequest(request), now)
    loads = sum(worker.num_loads for worker in cluster.workers.values())
    waits = sorted(cluster.waits)
    return {
        "loads_per_request": loads / num_requests,
        "ttft_median_s": statistics.median(waits),
        "ttft_p99_s": waits[int(len(waits) * 0.99)],
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=4000)
    options = parser.parse_args()
    rows = []
    for share in (0.1, 0.2, 0.3, 0.5):
        for knows in (False, True):
            result = run(share, options.requests, knows_adapters=knows)
            rows.append({"share_of_capacity": share, "placed_by_adapters": knows, **result})
            shown = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
            print(f"load {share:.1f}, {'by adapters' if knows else 'by load alone':13}: {shown}")
    fixed = {"workers": NUM_WORKERS, "slots": SLOTS, "adapters": NUM_ADAPTERS, "loading_s": LOADING_S}
    write_result("adapter_placement", {**fixed, "rows": rows})


if __name__ == "__main__":
    main()
