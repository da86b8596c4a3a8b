"""Speed of simulating policies that decide every iteration: processor time of one iteration of one worker.

    python -m benchmarks.simulation.policies    # --name policies_before: the record of an earlier commit

Recorded arrivals of the Azure conversations on four A100 with Llama-2-13B, best-effort work beside them; all of it is
counted: deciding, the workers' and the router's logics, costs, clients. The best of `--rounds`, as on a machine that
does other work everything takes longer.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import (
    ClusterConfig,
    DecodeWorkerConfig,
    PoolConfig,
    PrefillWorkerConfig,
    Topology,
)
from alignedserve.costmodel.choice import WorkerSpec
from alignedserve.sim.cluster_hardware import ClusterHardware
from alignedserve.sim.policies import simulated_policy, with_policy
from alignedserve.sim.result import ALL
from alignedserve.sim.simulation import Simulation
from alignedserve.sim.sweep import WorkloadLine
from benchmarks.support.recording import write_result

_GIB = 1 << 30
_WORKERS = 4
_LINE = (
    "rt: azure_conv, arrivals=recorded, start=300, rate=9, ttft=choice(1,4), tpot=choice(0.05,0.2); "
    "be: arxiv, max_total=16000, outstanding=32"
)


class Setting(NamedTuple):
    """A policy and the roles of the workers."""

    policy: str
    topology: Topology


SETTINGS = (
    Setting("aligned_slo", Topology.ELASTIC),
    Setting("aligned_slo", Topology.COLOCATED),
    Setting("aligned_slo", Topology.DISAGGREGATED),
    *(Setting(name, Topology.COLOCATED) for name in ("alise", "bros", "apt_serve", "accelgen", "sarathi", "fcfs")),
)


def measure(setting: Setting, line: WorkloadLine, rounds: int) -> dict[str, Any]:
    """Measure one policy."""
    is_separate = setting.topology.is_separate
    cluster = ClusterConfig(
        pool=PoolConfig(memory_bytes=64 * _GIB),
        prefill=PrefillWorkerConfig(count=_WORKERS // 2, max_running_requests=64, max_num_batched_tokens=2048),
        decode=DecodeWorkerConfig(
            count=_WORKERS // 2 if is_separate else _WORKERS,
            max_running_requests=256,
            max_num_batched_tokens=2048,
            swap_space_bytes=16 * _GIB,
        ),
    )
    machines = ClusterHardware(WorkerSpec("llama-2-13b", "a100-80g"))
    config = simulated_policy(machines, with_policy(cluster, setting.policy, topology=setting.topology))
    workload, cpu_s = line.build(), []
    for _ in range(rounds):
        simulation = Simulation(config, workload)
        began_s = time.process_time()
        result = simulation.run()
        cpu_s.append(time.process_time() - began_s)
    num_iterations = sum(worker.num_iterations for worker in result.workers)
    return {
        "policy": setting.policy,
        "topology": setting.topology.value,
        "num_iterations": num_iterations,
        "num_requests": result.classes[ALL].num_sent,
        "attainment": result.classes[ALL].attainment,
        "cpu_s": round(min(cpu_s), 3),
        "iteration_us": round(1e6 * min(cpu_s) / num_iterations, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration-s", type=float, default=6.0, help="of arrivals")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="policies", help="of the record")
    arguments = parser.parse_args(argv)
    line = WorkloadLine(_LINE, 0, duration_s=arguments.duration_s, data_dir=data_dir())
    rows = []
    for setting in SETTINGS:
        rows.append(measure(setting, line, arguments.rounds))
        print(rows[-1], flush=True)
    figures = {"workload": _LINE, "duration_s": arguments.duration_s, "rounds": arguments.rounds, "rows": rows}
    print(write_result(arguments.name, figures))


if __name__ == "__main__":
    main()
