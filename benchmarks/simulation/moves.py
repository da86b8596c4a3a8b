"""What moves of decodes are worth under load: four A100 with Llama-2-13B, the default policy.

    python -m benchmarks.simulation.moves [--runs 3] [--only documents]

Every column has the same requests: no moves; moves to workers without prompts alone, as they were; moves for time, to
workers with prompts as well; and all, for memory too. Loads where workers drift apart:

- documents: long prompts with long answers come beside conversations, and clump on workers by chance.
- back: conversations; a worker is lost 8 s after the first, and comes back empty 6 s later.
- answers: short prompts with long answers, and a worker that is lost and comes back.
- mix: from long prompts to long answers at constant work (`shifts`), at nine tenths of what the workers hold.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import Topology
from alignedserve.sim.config import SimConfig, SimWorkerLoss
from alignedserve.sim.policies import simulated_policy
from alignedserve.sim.result import ALL, SimulationResult
from alignedserve.sim.sweep import WorkloadLine
from alignedserve.workload.requests import Workload
from benchmarks.simulation.placements import MACHINES, cluster
from benchmarks.simulation.shifts import shifting
from benchmarks.simulation.trial_routers import ROUTERS, RoutedSimulation
from benchmarks.support.recording import write_result

_COLUMNS = ("no moves", "moves to idle workers", "moves for time", "as it is")
_NUM_WORKERS = 4
_LOSS = SimWorkerLoss("decode-0", 8.0, 6.0)
_CHAT = "chat: azure_conv, arrivals=recorded, start={}, rate={}, ttft=1, tpot=0.06"
_DOCUMENTS = "documents: prompt=uniform(6000,14000), output=uniform(300,900), rate={}, ttft=6, tpot=0.1"
_ANSWERS = "answers: prompt=uniform(50,250), output=uniform(300,900), rate={}, ttft=1, tpot=0.06"


class Load(NamedTuple):
    """Requests, and perhaps the loss of a worker."""

    name: str
    line: str  # "" for the shift of the mix; {}: seconds into the recording
    duration_s: float
    losses: tuple[SimWorkerLoss, ...] = ()

    def workload(self, run: int) -> Workload:
        """Return the requests of one run."""
        if not self.line:
            return shifting(0.9, run)
        line = self.line.format(600 * run)
        return WorkloadLine(line, run, duration_s=self.duration_s, data_dir=data_dir()).build()


LOADS = (
    Load("documents", f"{_CHAT.format('{}', 5)}; {_DOCUMENTS.format(0.5)}", 40.0),
    Load("documents, more", f"{_CHAT.format('{}', 6)}; {_DOCUMENTS.format(0.7)}", 40.0),
    Load("back", _CHAT.format("{}", 11), 30.0, (_LOSS,)),
    Load("answers", _ANSWERS.format(9), 30.0, (_LOSS,)),
    Load("mix", "", 60.0),
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
    config: SimConfig = simulated_policy(MACHINES, cluster(Topology.ELASTIC, _NUM_WORKERS))
    config, workload = replace(config, losses=load.losses), load.workload(run)
    for column in columns:
        result = RoutedSimulation(config, workload, ROUTERS[column]).run()
        yield {"load": load.name, "run": run, "column": column, **figures_of(result)}


def _percent(share: float | None) -> float:
    return round(100 * (share or 0.0), 1)


def main() -> None:
    """Simulate, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
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
            for name in ("percent_attained", "tbt_p99_ms", "num_moved", "num_evictions")
        }
        for load in LOADS
        for column in arguments.columns
        if (chosen := [row for row in rows if (row["load"], row["column"]) == (load.name, column)])
    }
    print(means, write_result(arguments.name, {"means": means, "rows": rows}))


if __name__ == "__main__":
    main()
