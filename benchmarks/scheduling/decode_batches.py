"""What a separate decode worker decides between two passes: with its own running batch, and with a policy's.

`RunningBatch` is what `aligned` and `distserve` run; `ScheduledBatch` has the same requests as rows of a policy's
table, here with `RunAllRequests`, which would do the same. Both get one iteration after the other in turns; what is
measured is the thread's own time from the end of an iteration to the next command.

    python -m benchmarks.scheduling.decode_batches  # the fast form stays if the other takes 0.1 ms more at 64 requests
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from alignedserve.core.ids import BatchId, LeaseId, RequestId
from alignedserve.core.request import Request, SampledToken, SamplingParams
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.messages.caches import BatchGranted, BlockCopy, BlockRun, Handoff
from alignedserve.messages.events import PeerConnected, Received
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded, IterationCompleted, LoadBlocks, RunIteration
from alignedserve.messages.workers import WorkerRegistered
from alignedserve.process.heap import settle_heap
from alignedserve.scheduling.policies.aligned import DistserveConfig, RunAllRequests
from alignedserve.scheduling.policy import CandidateChoice, DeviceMemory, IterationLimits, IterationPlan, WorkerView
from alignedserve.scheduling.scheduler import Scheduler
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from decode_worker.batching.batch_order import DecodeLimits, SwitchLimits
from decode_worker.batching.running_batch import RunningBatch
from decode_worker.batching.scheduled_batch import DecodeBatch, ScheduledBatch
from decode_worker.logic import DecodeLogic

SIZES, CONTEXT_LEN, BLOCK_SIZE = (64, 256), 1024, 16
BLOCKS_EACH = CONTEXT_LEN // BLOCK_SIZE + 64  # for a thousand tokens more
POOL, ROUTER = "pool-0", "router"


class RunAllHere(RunAllRequests):
    """The same on a worker that could evict, and need not."""

    @override
    def plan(self, view: WorkerView) -> IterationPlan:
        """See IterationPolicy."""
        return super().plan(replace(view, can_evict=False))


def batches(num_requests: int) -> dict[str, DecodeBatch]:
    """Return an empty batch of each kind."""
    num_blocks = num_requests * BLOCKS_EACH
    costs = LinearIterationModel(LinearCoefficients(0.01, 1e-4, 0.0, 0.0, 1e-4, 1e-7))
    scheduler = Scheduler(RunAllHere(DistserveConfig()), costs, IterationLimits(num_requests, 1 << 20))
    sizes: dict[str, Any] = {"max_running_requests": num_requests}
    memory = DeviceMemory(num_blocks, num_blocks, BLOCK_SIZE, 0)
    of_policy: dict[str, Any] = {"max_held": num_requests, "choice": CandidateChoice.NONE}
    return {
        "RunningBatch": RunningBatch(num_blocks=num_blocks, block_size=BLOCK_SIZE, **sizes),
        "ScheduledBatch": ScheduledBatch(memory=memory, scheduler=scheduler, **sizes, **of_policy),
    }


def decoding(batch: DecodeBatch, num_requests: int) -> tuple[DecodeLogic, RunIteration]:
    """Make a worker, and grant it requests until all of them are in an iteration."""
    registered = WorkerRegistered(
        num_requests * BLOCKS_EACH, BLOCK_SIZE, num_requests, POOL, can_prefill=False, can_decode=True
    )
    limits = DecodeLimits(num_requests, SwitchLimits())
    logic = DecodeLogic(registered=registered, limits=limits, eos_token_ids=frozenset(), batch=batch)
    for role, peer in ((Role.ROUTER, ROUTER), (Role.KV_POOL, POOL)):
        logic.on_event(PeerConnected(role, peer), 0.0)
    sampling, prompt = SamplingParams(max_tokens=1000, temperature=0.0), tuple(range(CONTEXT_LEN))
    handoffs = []
    for number in range(num_requests):
        request = Request(RequestId(f"r{number}"), prompt, sampling, "unix:/none", 0.0)
        copy = BlockCopy(number, CONTEXT_LEN, (BlockRun(0, CONTEXT_LEN // BLOCK_SIZE, 0),))
        handoffs.append(Handoff(request, 1, (7,), LeaseId(number), copy))
    commands: Sequence[Any] = logic.on_event(Received(POOL, BatchGranted(BatchId(1), tuple(handoffs))), 0.0)
    while True:
        loads = [one for one in commands if isinstance(one, LoadBlocks)]
        iterations = [one for one in commands if isinstance(one, RunIteration)]
        if iterations and len(iterations[0].slices) == num_requests:
            return logic, iterations[0]
        loaded: list[BlocksLoaded | IterationCompleted] = [
            BlocksLoaded(one.source, one.loads, frozenset()) for one in loads
        ]
        commands = [one for event in [*loaded, *map(ended, iterations)] for one in logic.on_event(event, 0.0)]


def ended(iteration: RunIteration) -> IterationCompleted:
    """Return the end of an iteration in which each request got a token."""
    return IterationCompleted(tuple(SampledToken(request_id, 7) for request_id, _ in iteration.slices))


def measure(num_requests: int, num_steps: int) -> dict[str, Any]:
    """Return the medians of both kinds, in milliseconds."""
    workers = {name: decoding(batch, num_requests) for name, batch in batches(num_requests).items()}
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    settle_heap()
    for step in range(num_steps):
        for name, (logic, iteration) in workers.items():
            event, now = ended(iteration), 0.02 * step
            started = time.thread_time()
            commands = logic.on_event(event, now)
            seconds[name].append(time.thread_time() - started)
            (following,) = [one for one in commands if isinstance(one, RunIteration)]
            workers[name] = logic, following
    row = {f"{name}_ms": round(1e3 * statistics.median(spent), 3) for name, spent in seconds.items()}
    return {"requests": num_requests, **row}


def main() -> None:
    """Measure, print and record."""
    rounds = parser_of(__doc__, rounds=3).parse_args().rounds
    rows = [measure(num_requests, 400) for num_requests in SIZES for _ in range(rounds)]
    for row in rows:
        print(row)
    write_result("engine/decode_batches", rows)


if __name__ == "__main__":
    main()
