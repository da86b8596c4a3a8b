"""Prefix cache: what it costs where nothing is shared. Target: less than 1 % of a worker's throughput.

One worker, whose logic and engine take turns in this process, serves 64 requests of 128 random tokens that no other
begins with, 128 tokens each: with the cache and without, in turn. Of both: the processor time that the logic takes per
iteration, the least of all runs, with an engine that computes nothing beside it; and tokens per second with the pocket
model, whose iterations are the shortest that are served, so that the logic's share of them is the largest. The share is
that of the shortest run's iterations.

    python -m benchmarks.prefix_cache.worker_cost [--pairs 7] [--logic-runs 15]
"""

import argparse
import gc
import math
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignedserve.config.sections import DecodeWorkerConfig, PrefixCacheConfig, SchedulingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SampledToken, SamplingParams
from alignedserve.messages.events import PeerConnected, Received
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import IterationCompleted, RunIteration
from alignedserve.messages.workers import PrefillRequest, WorkerRegistered
from alignedserve.prefix_cache.block_hashes import prefix_root
from alignedserve.runtime.engine.engine_sizes import EngineSizes
from alignedserve.runtime.engine.model_executor import ModelExecutor
from alignedserve.runtime.model.hf_config import parse_model_config
from alignedserve.runtime.model.served_model import ServedModel
from alignedserve.scheduling.policy import DeviceMemory
from benchmarks.engine.iteration_gap import POCKET_SHAPE
from benchmarks.support.recording import write_result
from decode_worker.colocated.logic import ColocatedCommand, ColocatedLogic
from decode_worker.factory import make_colocated_logic

NAME = "prefix_cache_cost"
NUM_REQUESTS, PROMPT_LEN, NUM_TOKENS = 64, 128, 128
ROOT = prefix_root(b"benchmark", tenant="", salt="", form=b"")


@dataclass(frozen=True)
class Run:
    """The figures of one run."""

    tokens_per_s: float
    logic_s: float  # in all
    num_iterations: int
    num_hit_tokens: int


class StandIn:
    """An engine that computes nothing: every token is random."""

    num_blocks = 4096
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._num_left: dict[RequestId, int] = {}  # tokens to compute before the first one is sampled

    def run_iteration(self, command: RunIteration) -> IterationCompleted:
        """Perform a command as ModelExecutor does."""
        for one in command.additions:
            self._num_left[one.request.request_id] = one.request.prompt_len - one.num_cached
        sampled: list[SampledToken] = []
        for request_id, num_tokens in command.slices:
            self._num_left[request_id] -= num_tokens
            if self._num_left[request_id] <= 0:
                self._num_left[request_id] = 1
                sampled.append(SampledToken(request_id, self._rng.randrange(5, 4000)))
        return IterationCompleted(tuple(sampled))


def make_logic(executor: ModelExecutor | StandIn, *, has_cache: bool) -> ColocatedLogic:
    """Build the worker's logic over an empty memory."""
    config = DecodeWorkerConfig(max_running_requests=NUM_REQUESTS, max_num_batched_tokens=2048, swap_space_bytes=0)
    return make_colocated_logic(
        registered=WorkerRegistered(executor.num_blocks, 16, NUM_REQUESTS, "", can_prefill=True, can_decode=True),
        memory=DeviceMemory(executor.num_blocks, executor.num_blocks, 16),
        config=config,
        scheduling=SchedulingConfig(policy="aligned_slo"),
        eos_token_ids=executor.eos_token_ids,
        prefix_cache=PrefixCacheConfig(enabled=has_cache),
    )


def requests_of(rng: random.Random, run: int) -> list[Request]:
    """Draw requests that have nothing in common."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return [
        Request(
            RequestId(f"run-{run}-{number}"),
            tuple(rng.randrange(5, 4000) for _ in range(PROMPT_LEN)),
            sampling,
            "gateway",
            0.0,
            prefix_root=ROOT,
        )
        for number in range(NUM_REQUESTS)
    ]


def serve(executor: ModelExecutor | StandIn, requests: list[Request], *, has_cache: bool) -> Run:
    """Serve the requests to their ends."""
    logic = make_logic(executor, has_cache=has_cache)
    pending: list[ColocatedCommand] = logic.on_event(PeerConnected(Role.ROUTER, "router"), 0.0)
    logic_s, num_iterations = 0.0, 0
    gc.collect()
    started, began = time.perf_counter(), time.thread_time()
    for number, request in enumerate(requests):
        pending += logic.on_event(Received("router", PrefillRequest(request, number)), 0.0)
    logic_s += time.thread_time() - began
    while pending:
        command = pending.pop(0)
        if isinstance(command, RunIteration):
            completed = executor.run_iteration(command)
            now, began = time.perf_counter(), time.thread_time()
            pending += logic.on_event(completed, now)
            logic_s += time.thread_time() - began
            num_iterations += 1
    duration_s = time.perf_counter() - started
    executor.run_iteration(RunIteration(logic._requests.take_removals(), (), (), ()))
    hits = logic._prefixes.num_hit_tokens if logic._prefixes is not None else 0
    return Run(NUM_REQUESTS * NUM_TOKENS / duration_s, logic_s, num_iterations, hits)


def measure_logic(num_runs: int) -> dict[bool, float]:
    """Return the least microseconds of processor time that the logic takes per iteration, without a cache and with."""
    rng, least_us = random.Random(0), {False: math.inf, True: math.inf}
    for number in range(num_runs):
        requests = requests_of(rng, number)
        for has_cache in least_us:
            run = serve(StandIn(), requests, has_cache=has_cache)
            assert not run.num_hit_tokens, "requests that share something"
            least_us[has_cache] = min(least_us[has_cache], 1e6 * run.logic_s / run.num_iterations)
    return least_us


def measure_speed(num_pairs: int) -> list[tuple[Run, Run]]:
    """Serve with the model, without the cache and with it, in turn."""
    served = ServedModel("pocket-shape", Path(), parse_model_config(POCKET_SHAPE), "float32", 2048, True)
    executor = ModelExecutor(served, EngineSizes(256 << 20, NUM_REQUESTS, 16))
    rng = random.Random(0)
    serve(executor, requests_of(rng, 0), has_cache=True)  # warms up
    pairs: list[tuple[Run, Run]] = []
    for number in range(1, num_pairs + 1):
        requests, first = requests_of(rng, number), number % 2 == 0
        runs = {has_cache: serve(executor, requests, has_cache=has_cache) for has_cache in (first, not first)}
        pairs.append((runs[False], runs[True]))
    executor.close()
    return pairs


def measure(num_pairs: int, num_logic_runs: int) -> dict[str, Any]:
    """Measure both; the share that the logic's additional time has in the iterations of the shortest run."""
    logic_us, pairs = measure_logic(num_logic_runs), measure_speed(num_pairs)
    fastest = max(run.tokens_per_s for pair in pairs for run in pair)
    iteration_us = 1e6 * NUM_REQUESTS * NUM_TOKENS / fastest / pairs[0][0].num_iterations
    ratios = [round(with_cache.tokens_per_s / without.tokens_per_s, 4) for without, with_cache in pairs]
    best = [max(run.tokens_per_s for run in column) for column in zip(*pairs, strict=True)]
    return {
        "logic_us_per_iteration": {"without": round(logic_us[False], 1), "with": round(logic_us[True], 1)},
        "shortest_iteration_us": round(iteration_us, 1),
        "added_share_of_iteration": round((logic_us[True] - logic_us[False]) / iteration_us, 5),
        "most_tokens_per_s": {"without": round(best[0], 1), "with": round(best[1], 1)},
        "tokens_per_s_with_by_without": {"median": statistics.median(ratios), "each": ratios},
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--logic-runs", type=int, default=15)
    arguments = parser.parse_args()
    figures = measure(arguments.pairs, arguments.logic_runs)
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(write_result(NAME, figures))


if __name__ == "__main__":
    main()
