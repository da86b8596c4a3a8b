"""Small simulated clusters, and small workloads to put on them."""

import random
from typing import Any

from alignedserve.config.sections import (
    BatchingConfig,
    ClusterConfig,
    DecodeWorkerConfig,
    PoolConfig,
    PrefillWorkerConfig,
    RouterConfig,
    SchedulingConfig,
    Topology,
)
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.request import RequestClass, Slo
from alignedserve.costmodel.hardware import LinkModel
from lab.sim.config import SimConfig, SimLinks
from lab.workload.requests import TimedRequest, Workload, WorkloadDescription
from tests.harnesses.scheduling import EasyCosts

LAYOUT = BlockLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=4, dtype="float16")
BLOCK_BYTES = LAYOUT.block_bytes  # 256
MESSAGE_S = 0.0001
LINKS = SimLinks(LinkModel(0.001, 256_000.0), LinkModel(0.0005, 2_560_000.0), MESSAGE_S)
"""A block takes 1 ms to or from the pool and 0.1 ms between workers, beside the latency."""


def disaggregated(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    worker_blocks: int = 400,
    pool_blocks: int = 2000,
    buffer_blocks: int = 100,
    max_running_requests: int = 32,
    policy: str = "density_first",
    **changes: Any,
) -> SimConfig:
    """Configure prefill and decode workers of so many blocks each; buffers of so many blocks for each pair."""
    cluster = ClusterConfig(
        topology=Topology.DISAGGREGATED,
        scheduling=SchedulingConfig(policy="aligned", policy_params={"pack_share": None}),
        router=RouterConfig(prefill_order="least_slack"),
        batching=BatchingConfig(policy=policy, min_requests=8),
        pool=PoolConfig(memory_bytes=pool_blocks * BLOCK_BYTES),
        prefill=PrefillWorkerConfig(
            count=num_prefill,
            kv_cache_bytes=400 * BLOCK_BYTES,
            candidate_buffer_bytes=buffer_blocks * num_decode * BLOCK_BYTES,
        ),
        decode=DecodeWorkerConfig(
            count=num_decode, kv_cache_bytes=worker_blocks * BLOCK_BYTES, max_running_requests=max_running_requests
        ),
    )
    return SimConfig(cluster, LAYOUT, LINKS, EasyCosts(), **changes)


def colocated(
    num_workers: int = 1,
    *,
    worker_blocks: int = 400,
    max_running_requests: int = 32,
    policy: str = "fcfs",
    topology: Topology = Topology.COLOCATED,
    pool_blocks: int = 0,
    **changes: Any,
) -> SimConfig:
    """Configure colocated workers of so many blocks each, or elastic ones. `pool_blocks`: for decodes of a node."""
    cluster = ClusterConfig(
        topology=topology,
        scheduling=SchedulingConfig(policy=policy),
        decode=DecodeWorkerConfig(
            count=num_workers,
            kv_cache_bytes=worker_blocks * BLOCK_BYTES,
            max_running_requests=max_running_requests,
            pool_bytes=pool_blocks * BLOCK_BYTES,
        ),
    )
    return SimConfig(cluster, LAYOUT, LINKS, EasyCosts(), **changes)


def timed(arrival_s: float = 0.0, prompt_len: int = 40, output_len: int = 3, **changes: Any) -> TimedRequest:
    """Build a chat request."""
    fields: dict[str, Any] = {"max_tokens": output_len, "class_name": "chat", "slo": Slo(ttft_s=1.0, tpot_s=0.2)}
    return TimedRequest(arrival_s, prompt_len, output_len, **(fields | changes))


def workload_of(*requests: TimedRequest, **changes: Any) -> Workload:
    """Return a workload of these requests, in this order."""
    return Workload(WorkloadDescription("by hand", 0), requests, **changes)


def mixed_workload(
    num_requests: int, rate: float, seed: int = 1, *, longest: int = 400, longest_answer: int = 60
) -> Workload:
    """Draw chat and documents at random lengths, in equal parts, as a Poisson process."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for number in range(num_requests):
        now += rng.expovariate(rate)
        lengths = (rng.randrange(1, longest), rng.randrange(1, longest_answer))
        if number % 2:
            requests.append(timed(now, *lengths, max_tokens=longest_answer))
        else:
            documents: dict[str, Any] = {
                "class_name": "documents",
                "request_class": RequestClass.BEST_EFFORT,
                "slo": Slo(deadline_s=60.0),
            }
            requests.append(timed(now, *lengths, max_tokens=longest_answer, **documents))
    return workload_of(*requests)
