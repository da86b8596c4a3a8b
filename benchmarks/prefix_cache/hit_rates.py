"""Hit rates of the prefix cache in simulated clusters, beside those of ideal caches of the same memory.

    python -m benchmarks.prefix_cache.hit_rates [--seconds 1200] [--traces conversation] [--gib 60]

llama-3-8b on A100-80G, elastic workers, the default policy; Mooncake's traces as recorded (synthetic: from the folder
that ALIGNEDSERVE_DATA names). `8 workers` have `--gib` of caches each, `1 worker` has the memory of all eight and gets
the same requests at an eighth of the rate: it loses nothing by placement. `with pool` has a node's pool of as much as
the workers' memory beside it. Ideal caches (alignedserve/sim/ideal_caches.py) have all this memory as one, and
none of it goes to requests that run: `LRU` drops what was used longest ago, `Belady` what is needed last, which no
cache can know. Hit rates are shares of prompt tokens.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import (
    ClusterConfig,
    DecodeWorkerConfig,
    EngineConfig,
    PrefixCacheConfig,
    RouterConfig,
    Topology,
)
from alignedserve.costmodel.choice import WorkerSpec
from alignedserve.sim.cluster_hardware import ClusterHardware
from alignedserve.sim.config import SimConfig
from alignedserve.sim.ideal_caches import HitCount, PromptBlocks, farthest_next_use, least_recently_used, unbounded
from alignedserve.sim.policies import simulated_policy, with_policy
from alignedserve.sim.result import ALL
from alignedserve.sim.simulation import Simulation
from alignedserve.workload.build import build_workload
from alignedserve.workload.catalogue import Library
from alignedserve.workload.requests import Workload, sped_up
from benchmarks.support.recording import write_result

_GIB = 1 << 30
BLOCK_SIZE = 128  # tokens; the traces know no difference within 512
NUM_WORKERS = 8
TRACES = {"conversation": "mooncake", "synthetic": "mooncake_synthetic"}
OBJECTIVES = "ttft=5, tpot=0.1"


class Cluster(NamedTuple):
    """Workers, the memory of each for caches, and that of a pool."""

    name: str
    num_workers: int
    worker_bytes: int
    pool_bytes: int = 0
    is_enabled: bool = True


class Part(NamedTuple):
    """Part of a trace that is played."""

    seconds: float
    max_output: int  # longer answers are cut: what they cost is time to simulate, and little memory


def clusters_of(gib: float) -> list[Cluster]:
    """Return the clusters compared at one size of a worker's memory."""
    worker_bytes = int(gib * _GIB)
    whole = NUM_WORKERS * worker_bytes
    return [
        Cluster("8 workers", NUM_WORKERS, worker_bytes),
        Cluster("8 workers, with pool", NUM_WORKERS, worker_bytes, whole),
        Cluster("1 worker", 1, whole),
        Cluster("8 workers, no prefix cache", NUM_WORKERS, worker_bytes, is_enabled=False),
    ]


def config_of(cluster: Cluster) -> SimConfig:
    """Configure a cluster."""
    config = ClusterConfig(
        engine=EngineConfig(block_size=BLOCK_SIZE),
        router=RouterConfig(max_queued_requests=1 << 20, max_queued_tokens=1 << 40),
        decode=DecodeWorkerConfig(
            count=cluster.num_workers,
            max_running_requests=256,
            max_num_batched_tokens=2048,
        ),
        prefix_cache=PrefixCacheConfig(enabled=cluster.is_enabled, host_bytes=cluster.pool_bytes),
    )
    machines = ClusterHardware(WorkerSpec("llama-3-8b", "a100-80g"))
    made = simulated_policy(machines, with_policy(config, "aligned_slo", topology=Topology.ELASTIC))
    decode = msgspec.structs.replace(made.cluster.decode, kv_cache_bytes=cluster.worker_bytes)  # not the machine's own
    return replace(made, cluster=msgspec.structs.replace(made.cluster, decode=decode))


def ideals_of(workload: Workload, cluster: Cluster) -> dict[str, float]:
    """Return the hit rates of ideal caches with all the memory of a cluster."""
    blocks = PromptBlocks(BLOCK_SIZE)
    prompts = [blocks.of(one.runs, one.prompt_len) for one in workload.requests]
    num_tokens = sum(one.prompt_len for one in workload.requests)
    memory = cluster.num_workers * cluster.worker_bytes + cluster.pool_bytes
    capacity = config_of(cluster).layout.blocks_in(memory)

    def rate(count: HitCount) -> float:
        return round(count.num_hits * BLOCK_SIZE / num_tokens, 4)

    return {
        "unbounded": rate(unbounded(prompts)),
        "ideal_lru": rate(least_recently_used(prompts, capacity)),
        "belady": rate(farthest_next_use(prompts, capacity)),
    }


def measure(workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Simulate, and summarise."""
    began_s = time.process_time()
    at_pace = sped_up(workload, cluster.num_workers / NUM_WORKERS)
    config = config_of(cluster)
    result = Simulation(config, at_pace).run()
    found = result.classes[ALL]
    assert found.ttft_s is not None, "no request got a token"
    return {
        "cluster": cluster.name,
        "memory_tokens": config.memory_tokens * cluster.num_workers,
        "pool_tokens": config.layout.blocks_in(cluster.pool_bytes) * BLOCK_SIZE,
        "requests": found.num_sent,
        "completed": found.num_by_ending["completed"],
        "hit_rate": round(found.hit_rate or 0.0, 4),
        "cached_tokens": found.num_cached_tokens,
        "ttft_p50_s": round(found.ttft_s.distribution.p50, 3),
        "ttft_p90_s": round(found.ttft_s.distribution.p90, 3),
        "attainment": round(found.attainment or 0.0, 4),
        "goodput_per_s": round(found.goodput_per_s, 3),
        "utilisation": round(sum(one.utilisation for one in result.workers) / len(result.workers), 3),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def rows_of(trace: str, gib: float, names: Sequence[str], part: Part) -> Iterator[dict[str, Any]]:
    """Yield the ideal and simulated hit rates of one trace at one size."""
    line = f"{TRACES[trace]}, arrivals=recorded, max_output={part.max_output}, {OBJECTIVES}"
    workload = build_workload(line, seed=0, library=Library(data_dir()), duration_s=part.seconds)
    for cluster in clusters_of(gib):
        if names and cluster.name not in names:
            continue
        about = {"trace": trace, **part._asdict(), "worker_gib": gib}
        row = about | measure(workload, cluster) | ideals_of(workload, cluster)
        yield row | {
            "of_ideal_lru": round(row["hit_rate"] / row["ideal_lru"], 3),
            "of_belady": round(row["hit_rate"] / row["belady"], 3),
        }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0, help="of arrivals")
    parser.add_argument("--max-output", type=int, default=2_000, help="tokens of an answer")
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--gib", type=float, nargs="+", default=[30.0, 60.0, 120.0], help="of a worker's caches")
    parser.add_argument("--clusters", nargs="+", default=[], help="names; all without it")
    parser.add_argument("--name", default="prefix_hit_rates", help="of the record")
    arguments = parser.parse_args()
    part = Part(arguments.seconds, arguments.max_output)
    rows = []
    for trace in arguments.traces:
        for gib in arguments.gib:
            for row in rows_of(trace, gib, arguments.clusters, part):
                rows.append(row)
                print(msgspec.json.encode(row).decode(), flush=True)
                path = write_result(arguments.name, {"block_size": BLOCK_SIZE, "rows": rows})
    print(path)


if __name__ == "__main__":
    main()
