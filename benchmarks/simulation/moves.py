"""Gain by moves of decodes under load: four A100 with Llama-2-13B, the default policy.

    python -m benchmarks.simulation.moves [--runs 2] [--only documents]

Every column has the same requests: no moves; moves to workers without prompts alone, as they were; and all, to workers
with prompts as well, and for memory. Loads where workers drift apart:

- growing: short prompts with long answers; for the first 12 s there is one worker, then there are four.
- documents: long prompts with long answers come beside conversations, and clump on workers by chance.
- Mooncake: recorded prompts of up to 16 000 tokens, of which a worker's memory holds three or four.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import Topology
from alignedserve.sim.config import SimConfig, SimWorkerLoss
from alignedserve.sim.result import ALL, SimulationResult
from alignedserve.sim.sweep import WorkloadLine
from alignedserve.workload.requests import Workload
from benchmarks.simulation.trial_routers import ROUTERS, RoutedSimulation
from benchmarks.support.recording import write_result
from benchmarks.support.server_cluster import server_cluster

_COLUMNS = ("no moves", "moves to idle workers", "as it is")
_NUM_WORKERS = 4
_COME = tuple(SimWorkerLoss(f"decode-{number}", 0.5, 11.5) for number in range(1, _NUM_WORKERS))
_ANSWERS = "answers: prompt=uniform(50,250), output=uniform(300,900), rate=9, ttft=1, tpot=0.04"
_CHAT = "chat: azure_conv, arrivals=recorded, start={}, rate=6, ttft=1, tpot=0.06"
_DOCUMENTS = "documents: prompt=uniform(6000,14000), output=uniform(300,900), rate=0.6, ttft=6, tpot=0.1"
_MOONCAKE = "mooncake, arrivals=recorded, start={}, rate=1.2, ttft=5, tpot=0.1, max_prompt=16000"
_APART_S = 300  # beginnings of the runs, in a recording


class Load(NamedTuple):
    """Requests, and perhaps the loss of a worker."""

    name: str
    line: str  # {}: seconds into the recording
    duration_s: float
    losses: tuple[SimWorkerLoss, ...] = ()

    def workload(self, run: int) -> Workload:
        """Return the requests of one run."""
        line = self.line.format(_APART_S * run)
        return WorkloadLine(line, run, duration_s=self.duration_s, data_dir=data_dir()).build()


LOADS = (
    Load("growing", _ANSWERS, 25.0, _COME),
    Load("documents", f"{_CHAT}; {_DOCUMENTS}", 24.0),
    Load("Mooncake", _MOONCAKE, 60.0),
)


def figures_of(result: SimulationResult) -> dict[str, Any]:
    """Return what counts of a run."""
    everything = result.classes[ALL]
    tbt = everything.tbt_s
    return {
        "percent_attained": _percent(everything.attainment),
        "by_class": {name: _percent(one.attainment) for name, one in result.classes.items() if name != ALL},
        "percent_ttft": _percent(everything.ttft_attainment),
        "percent_tpot": _percent(everything.tpot_attainment),
        "goodput_per_s": round(everything.goodput_per_s, 2),
        "tbt_p99_ms": round(1000 * tbt.distribution.p99, 1) if tbt is not None else None,
        "num_requests": everything.num_sent,
        "num_moved": result.num_handoffs_verified,
        "num_evictions": result.num_evictions,
    }


def rows_of(load: Load, run: int, columns: Sequence[str] = _COLUMNS) -> Iterator[dict[str, Any]]:
    """Simulate every column with the requests of one run."""
    config: SimConfig = server_cluster("aligned_slo", Topology.ELASTIC, _NUM_WORKERS)
    config, workload = replace(config, losses=load.losses), load.workload(run)
    for column in columns:
        result = RoutedSimulation(config, workload, ROUTERS[column]).run()
        yield {"load": load.name, "run": run, "column": column, **figures_of(result)}


def _percent(share: float | None) -> float:
    return round(100 * (share or 0.0), 1)


def main() -> None:
    """Simulate, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a load's name")
    parser.add_argument("--columns", nargs="+", choices=list(ROUTERS), default=list(_COLUMNS))
    parser.add_argument("--name", default="moves", help="of the record")
    arguments = parser.parse_args()
    rows = []
    for load in LOADS:
        for run in range(arguments.runs if arguments.only in load.name else 0):
            for row in rows_of(load, run, arguments.columns):
                rows.append(row)
                print(row, flush=True)
    means = {
        f"{load.name}: {column}": {
            name: round(sum(row[name] for row in chosen) / len(chosen), 1)
            for name in ("percent_attained", "percent_tpot", "tbt_p99_ms", "num_moved", "num_evictions")
        }
        for load in LOADS
        for column in arguments.columns
        if (chosen := [row for row in rows if (row["load"], row["column"]) == (load.name, column)])
    }
    print(means, write_result(arguments.name, {"means": means, "rows": rows}))


if __name__ == "__main__":
    main()
