"""Real-time chat beside best-effort documents, live, under each policy: BROS's headline (section 7) on this machine.

    python -m benchmarks.live_policies                      # 60 s each: about 20 minutes
    python -m benchmarks.live_policies --policy aligned_slo --topology colocated --duration 30

A model of 125M OPT's shape with random weights in bfloat16. Real-time: Poisson, 2 requests/s, prompts log-normal around
100 tokens, answers around 60; TTFT 0.4 s, TPOT 0.2 s. Best-effort: 64 requests outstanding, prompts 512 to 1 024,
answers 32 to 128. Per topology first each kind alone, under `aligned_slo`: best-effort alone gives its throughput,
real-time alone the share of the workers' time that it takes. Target for `aligned_slo`: both objectives held by 98 %,
best-effort at 85 % or more of what real-time leaves free. Beside each run stands what the simulator makes of the same
traffic (other draws from the same distributions), with costs fitted to the recording of the two runs alone.
"""

import re
import statistics
import tempfile
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignedserve.cli.commands.replay import replay_folder
from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.replay.fitting import MachineFit, fit_machine
from alignedserve.replay.run_file import read_run_metadata
from alignedserve.replay.simulated import SimulatedMachine, fitted_machine, simulate
from alignedserve.sim.policies import with_policy
from alignedserve.sim.result import ALL, ClassResult
from alignedserve.workload.build import build_workload
from alignedserve.workload.catalogue import Library
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.models import make_opt_125m
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import TOPOLOGIES, load_report, served, settings_of

POLICIES = ("fcfs", "round_robin", "bros", "accelgen", "aligned_slo")
NUM_SIMULATED = 5  # runs of the simulator, whose means are taken
REAL_TIME = "rt: prompt=lognormal(100,300), output=lognormal(60,120), rate=2, ttft=0.4, tpot=0.2"
BEST_EFFORT = "be: prompt=uniform(512,1024), output=uniform(32,128), outstanding=64, tier=flex"
_BUBBLE = re.compile(r'^alignedserve_bubble_seconds_total\{[^}]*cause="nothing_to_do"[^}]*\} (\S+)', re.MULTILINE)


def served_under(policy: str, folder: Path, topology: str, *options: str) -> AbstractContextManager[int]:
    """Serve the model under this policy."""
    return served(folder, settings_of(topology), "--policy", policy, *options)


def load(port: int, folder: Path, traffic: list[str], duration_s: float) -> dict[str, Any]:
    """Return what `bench serve` saw of this traffic, and the share of time in which decode workers were idle."""
    idle_before = idle_s(port)
    cut_off = ("--cut-off", "--duration", str(duration_s), "--tokenizer", str(folder))
    report = load_report(port, *cut_off, "--synthetic", "; ".join(traffic))
    report["idle_s"] = idle_s(port) - idle_before
    return report


def idle_s(port: int) -> float:
    """Return the seconds in which workers had nothing to do, since they started."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return sum(float(value) for value in _BUBBLE.findall(answer.read().decode()))


def main() -> None:
    """Measure and record."""
    parser = parser_of(__doc__)
    parser.add_argument("--policy", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, choices=TOPOLOGIES)
    parser.add_argument("--duration", type=float, default=60.0)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"duration_s": arguments.duration, "real_time": REAL_TIME, "best_effort": BEST_EFFORT}
    with tempfile.TemporaryDirectory() as name:
        folder = make_opt_125m(Path(name) / "opt-125m")
        for topology in arguments.topology:
            figures[topology] = measure(folder, topology, arguments.policy, arguments.duration)
    print(f"written to {write_result('serving/live_policies', figures)}")


def measure(folder: Path, topology: str, policies: list[str], duration_s: float) -> dict[str, Any]:
    """Measure each kind alone, then both under every policy, beside the simulator's prediction."""
    recording = folder.parent / f"{topology}-alone"
    with served_under("aligned_slo", folder, topology, "--record", str(recording)) as port:
        load(port, folder, [REAL_TIME], 10.0)  # so that the workers have learned what iterations cost
        alone = {"rt": load(port, folder, [REAL_TIME], duration_s), "be": load(port, folder, [BEST_EFFORT], duration_s)}
    print(topology, "alone:", {kind: short(report) for kind, report in alone.items()}, flush=True)
    machine = fitted_machine(read_run_metadata(recording), fit_to(recording))
    both: dict[str, Any] = {}
    simulated: dict[str, Any] = {}
    for policy in policies:
        with served_under(policy, folder, topology) as port:
            load(port, folder, [REAL_TIME], 10.0)
            both[policy] = load(port, folder, [REAL_TIME, BEST_EFFORT], duration_s)
        print(topology, policy, short(both[policy]), flush=True)
        simulated[policy] = predicted(machine, policy, topology, duration_s)
        print(topology, policy, "simulated:", simulated[policy], flush=True)
    return {"alone": alone, "both": both, "simulated": simulated}


def fit_to(recording: Path) -> MachineFit:
    """Fit the costs of iterations and copies of this run."""
    return fit_machine(replay_folder(recording)[1], read_run_metadata(recording).layout.block_bytes)


def predicted(machine: SimulatedMachine, policy: str, topology: str, duration_s: float) -> dict[str, Any]:
    """Return what the simulator predicts for both kinds under a policy: means over draws of the traffic, as `short`
    has them. Best-effort requests that end after the last arrival do not count, as live, where they are cut off.
    """
    cluster = load_config(None, settings_of(topology))
    machine = replace(machine, cluster=with_policy(cluster, policy, topology=Topology(topology)))
    runs = []
    for seed in range(NUM_SIMULATED):
        traffic = "; ".join((REAL_TIME, BEST_EFFORT))
        workload = build_workload(traffic, seed=seed, library=Library(), duration_s=duration_s)
        runs.append(simulate(workload, machine, seed))
    return {
        name: {
            "completed": round(statistics.fmean(_num_completed(name, run[name], duration_s) for run in runs), 1),
            "held": _mean([run[name].attainment for run in runs]),
            "ttft_p50": _mean([one.distribution.p50 for run in runs if (one := run[name].ttft_s)]),
            "tpot_p50": _mean([one.distribution.p50 for run in runs if (one := run[name].tpot_s)]),
        }
        for name in runs[0]
        if name != ALL
    }


def _num_completed(name: str, of_class: ClassResult, duration_s: float) -> float:
    is_cut_off = name == "be"
    return of_class.loaded_requests_per_s * duration_s if is_cut_off else of_class.num_by_ending["completed"]


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return round(statistics.fmean(present), 3) if present else None


def short(report: dict[str, Any]) -> dict[str, Any]:
    """Return what matters of a report, for the screen: requests completed, their medians, and the share that held."""
    return {
        one["name"]: {
            "completed": one["num_completed"],
            "held": one["slo_attainment"],
            "ttft_p50": one["ttft_s"] and round(one["ttft_s"]["p50"], 3),
            "tpot_p50": one["tpot_s"] and round(one["tpot_s"]["p50"], 3),
        }
        for one in report["classes"]
    }


if __name__ == "__main__":
    main()
