"""Simulated clusters of 10, 100 and 1 000 nodes: the load that one router carries, and several.

    python -m benchmarks.simulation.scale [PART ...]     # parts: nodes, saturation, loss

Each node has one prefill and one decode worker (llama-3-8b on A100-80G) and a pool. Decisions are the live ones; the
routers' own time for each event is `--event-us`, as `benchmarks.serving.router_capacity` measures it on this machine.
`nodes`: the same load per node with 10, 100 and 1 000 nodes. `saturation`: one router at rising rates, and four.
`loss`: one is killed, and back after 2 s. Processor times are of this process alone. That several hold 100 000
requests: `benchmarks.scheduling.router_decisions`.
"""

import argparse
import random
import resource
import time
from collections.abc import Iterator
from typing import Any

from alignedserve.config.sections import (
    ClusterConfig,
    DecodeWorkerConfig,
    PoolConfig,
    PrefillWorkerConfig,
    RouterConfig,
    SchedulingConfig,
    Topology,
)
from alignedserve.core.request import Slo
from alignedserve.costmodel.choice import WorkerSpec
from alignedserve.sim.cluster_hardware import ClusterHardware, simulated_on
from alignedserve.sim.config import SimConfig, SimRouters
from alignedserve.sim.result import SimulationResult
from alignedserve.sim.simulation import Simulation
from alignedserve.workload.requests import TimedRequest, Workload, WorkloadDescription
from benchmarks.support.recording import write_result

_GIB = 1 << 30
_SLO = Slo(ttft_s=2.0, tpot_s=0.1)
_WORKER = WorkerSpec("llama-3-8b", "a100-80g")


def cluster_of(num_nodes: int, routers: SimRouters) -> SimConfig:
    """Configure so many nodes."""
    cluster = ClusterConfig(
        topology=Topology.DISAGGREGATED,
        scheduling=SchedulingConfig(policy="aligned"),
        router=RouterConfig(max_queued_requests=1 << 20, max_queued_tokens=1 << 40),
        pool=PoolConfig(memory_bytes=64 * _GIB),
        prefill=PrefillWorkerConfig(count=num_nodes, max_running_requests=64, max_num_batched_tokens=2048),
        decode=DecodeWorkerConfig(count=num_nodes, max_running_requests=256),
    )
    config = simulated_on(ClusterHardware(_WORKER), cluster)
    return SimConfig(
        config.cluster,
        config.layout,
        config.links,
        config.decode_costs,
        config.prefill_costs,
        num_pools=num_nodes,
        routers=routers,
    )


def workload_of(rate: float, duration_s: float, prompt_len: int, output_len: int) -> Workload:
    """Return requests at this rate as a Poisson process, with lengths around these."""
    rng = random.Random(1)
    requests, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < duration_s:
        prompt, output = (rng.randint(length // 2, length * 3 // 2) for length in (prompt_len, output_len))
        requests.append(TimedRequest(now, prompt, output, None, "chat", slo=_SLO))
    return Workload(WorkloadDescription("scale", 1, {"rate": rate}), tuple(requests))


def measure(config: SimConfig, workload: Workload, **about: Any) -> dict[str, Any]:
    """Simulate, and summarise what concerns the routers."""
    began_s = time.process_time()
    result = Simulation(config, workload).run()
    cpu_s = time.process_time() - began_s
    return about | {
        "nodes": config.num_pools,
        "routers": config.routers.count,
        "requests": len(workload.requests),
        "simulated_s": round(result.duration_s, 1),
        "cpu_s": round(cpu_s, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        **_outcome(result),
    }


def _outcome(result: SimulationResult) -> dict[str, Any]:
    whole = result.classes["all"]
    num_events = [router.num_events for router in result.routers]
    mean_events = sum(num_events) / len(num_events)
    return {
        "completed": whole.num_by_ending["completed"],
        "completed_per_s": round(whole.loaded_requests_per_s),
        "max_in_flight": result.max_in_flight,
        "ttft_p50_s": round(whole.ttft_s.distribution.p50, 3) if whole.ttft_s else None,
        "ttft_p99_s": round(whole.ttft_s.distribution.p99, 3) if whole.ttft_s else None,
        "longest_gap_s": round(whole.tbt_s.distribution.max, 3) if whole.tbt_s else None,
        "recomputed_tokens": result.num_recomputed_tokens,
        "router_events_per_request": round(sum(num_events) / whole.num_sent, 1),
        "busiest_router": round(max(router.utilisation for router in result.routers), 3),
        "busiest_over_mean": round(max(num_events) / mean_events, 3),
        "max_behind_s": round(max(router.max_behind_s for router in result.routers), 3),
    }


def nodes(event_s: float) -> Iterator[dict[str, Any]]:
    """Yield the same load per node, with more and more nodes."""
    for num_nodes in (10, 100, 1000):
        workload = workload_of(1.5 * num_nodes, 4.0, 500, 50)
        yield measure(cluster_of(num_nodes, SimRouters(event_s=event_s)), workload, part="nodes", rate=1.5 * num_nodes)


def saturation(event_s: float) -> Iterator[dict[str, Any]]:
    """Yield a model at a tenth of 1 000 nodes and of a router's speed: one router at rising rates, and four."""
    for rate, count in ((150, 1), (200, 1), (250, 1), (250, 4)):
        workload = workload_of(rate, 4.0, 500, 50)
        yield measure(cluster_of(100, SimRouters(count, 10 * event_s)), workload, part="saturation", rate=rate)


def loss(event_s: float) -> Iterator[dict[str, Any]]:
    """Yield what the loss of one router costs, by their number."""
    for count in (1, 4):
        workload = workload_of(60, 12.0, 500, 200)
        lost = SimRouters(count, event_s, lost_at_s=6.0)
        yield measure(cluster_of(40, lost), workload, part="loss", rate=60)


PARTS = {"nodes": nodes, "saturation": saturation, "loss": loss}


def main() -> None:
    """Measure, print and record, each part by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--event-us", type=float, default=50.0, help="a router's own time for an event")
    arguments = parser.parse_args()
    for part in arguments.parts:
        rows = []
        for row in PARTS[part](arguments.event_us * 1e-6):
            rows.append(row)
            print(row, flush=True)
        write_result(f"scale_{part}", {"event_us": arguments.event_us, "runs": rows})


if __name__ == "__main__":
    main()
