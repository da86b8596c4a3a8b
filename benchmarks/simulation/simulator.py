"""Speed of the simulator: one hour of the Azure conversation trace on 4 prefill and 4 decode workers.

    python -m benchmarks.simulation.simulator  # target for llama-2-13b on A100: 60 s of one core, 1 GiB

Recorded arrivals and lengths, sped up to `--rate` requests per second and repeated until the hour is full. By default
those of the slice that ships with the package; `--trace` names the whole one. Times are CPU seconds of this process.
"""

import resource
import time
from collections.abc import Sequence
from pathlib import Path
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
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from lab.costmodel.choice import WorkerSpec
from lab.sim.policies import ClusterHardware, simulated_on
from lab.sim.simulation import Simulation
from lab.workload.requests import TimedRequest, Workload, WorkloadDescription
from lab.workload.traces import TraceRow, at_rate, read_trace, shipped_trace

_GIB = 1 << 30
_SLO = Slo(ttft_s=2.0, tpot_s=0.1)
WORKERS = (("llama-2-13b", "a100-80g"), ("llama-3-8b", "a100-80g"))  # the second: more and shorter iterations


def workload_of(rows: Sequence[TraceRow], rate: float, duration_s: float) -> Workload:
    """Return the rows at this rate, again and again, until the time is up."""
    requests = tuple(
        TimedRequest(row.arrival_s, row.prompt_len, max(row.output_len, 1), None, "chat", slo=_SLO)
        for row in at_rate(rows, rate, duration_s, is_repeated=True)
    )
    return Workload(WorkloadDescription("azure_conv", 0, {"rate": rate}), requests)


def measure(model: str, hardware: str, workload: Workload) -> dict[str, Any]:
    cluster = ClusterConfig(
        topology=Topology.DISAGGREGATED,
        scheduling=SchedulingConfig(policy="aligned"),
        router=RouterConfig(prefill_order="least_slack"),
        pool=PoolConfig(memory_bytes=512 * _GIB),
        prefill=PrefillWorkerConfig(count=4, max_running_requests=64, max_num_batched_tokens=2048),
        decode=DecodeWorkerConfig(count=4, max_running_requests=256),
    )
    simulation = Simulation(simulated_on(ClusterHardware(WorkerSpec(model, hardware)), cluster), workload)
    began_s = time.process_time()
    result = simulation.run()
    cpu_s = time.process_time() - began_s
    overall, workers = result.classes["all"], result.workers
    return {
        "model": model,
        "hardware": hardware,
        "simulated_s": round(result.duration_s, 1),
        "cpu_s": round(cpu_s, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "num_requests": overall.num_sent,
        "num_tokens": overall.num_sent + sum(worker.num_decodes for worker in workers),
        "num_iterations": sum(worker.num_iterations for worker in workers),
        "num_events": result.num_events,
        "decisions_per_s": round(result.num_decisions / cpu_s),
        "attainment": overall.attainment,
        "utilisation": {worker.name: round(worker.utilisation, 3) for worker in workers},
    }


def main() -> None:
    """Measure; print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--duration-s", type=float, default=3600.0)
    parser.add_argument("--trace", type=Path, help="a trace file, in place of the slice in the package")
    arguments = parser.parse_args()
    rows = read_trace(arguments.trace) if arguments.trace is not None else shipped_trace()
    workload = workload_of(rows, arguments.rate, arguments.duration_s)
    figures = []
    for model, hardware in WORKERS:
        figures.append(measure(model, hardware, workload))
        print(figures[-1], flush=True)
    name = arguments.trace.name if arguments.trace is not None else "slice"
    write_result("simulation/simulator", {"trace": name, "runs": figures})


if __name__ == "__main__":
    main()
