"""Elastic workers beside colocated ones and fixed splits: real conversation arrivals on four accelerators.

    python -m benchmarks.simulation.elastic [--duration 40] [--rates 8 12] [--row 1] [--columns "2 + 2" "1 + 3"]

Llama-2-13B on four A100, recorded arrivals of Azure's conversations scaled to the rate, three pairs of objectives.
Every column has the same requests. Arrivals end after `--duration` seconds. `--row`: one pair alone, in a record of its
own, as all take minutes; `--columns`: these alone, in a record named by `--name`.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import Topology
from alignedserve.sim.result import ALL, SimulationResult
from alignedserve.sim.sweep import Case, WorkloadLine, run_cases
from alignedserve.workload.rates import at_rate
from benchmarks.support.recording import write_result
from benchmarks.support.server_cluster import server_cluster

OBJECTIVES = ((2.0, 0.04), (1.0, 0.06), (0.5, 0.2))  # seconds to the first token, and of the mean gap


class Column(NamedTuple):
    """A policy on four workers."""

    name: str
    policy: str
    topology: Topology
    num_prefill: int = 0  # of them, where there are two kinds


COLUMNS = (
    Column("elastic", "aligned_slo", Topology.ELASTIC),
    Column("colocated", "aligned_slo", Topology.COLOCATED),
    Column("2 + 2", "aligned_slo", Topology.DISAGGREGATED, 2),
    Column("1 + 3", "aligned_slo", Topology.DISAGGREGATED, 1),
    Column("distserve 2 + 2", "distserve", Topology.DISAGGREGATED, 2),
)


def cases(
    objectives: Sequence[tuple[float, float]],
    rates: Sequence[float],
    duration_s: float,
    columns: Sequence[Column] = COLUMNS,
) -> Iterator[tuple[dict[str, Any], Case]]:
    """Return these columns at every rate and pair of objectives, with its labels."""
    for (ttft_s, tpot_s), rate, column in product(objectives, rates, columns):
        text = at_rate(f"azure_conv, arrivals=recorded, ttft={ttft_s}, tpot={tpot_s}", rate)
        line = WorkloadLine(text, 0, duration_s=duration_s, data_dir=data_dir())
        labels = {"ttft_s": ttft_s, "tpot_s": tpot_s, "rate": rate, "column": column.name}
        config = server_cluster(column.policy, column.topology, 4, column.num_prefill)
        yield labels, Case(str(labels), config, line)


def figures_of(result: SimulationResult) -> dict[str, Any]:
    """Return what counts of a run."""
    everything = result.classes[ALL]
    return {
        "percent_attained": round(100 * (everything.attainment or 0.0), 1),
        "percent_ttft": round(100 * (everything.ttft_attainment or 0.0), 1),
        "percent_tpot": round(100 * (everything.tpot_attainment or 0.0), 1),
        "goodput_per_s": round(everything.goodput_per_s, 2),
        "num_requests": everything.num_sent,
        "num_handoffs": result.num_handoffs_verified,
    }


def main() -> None:
    """Simulate, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=40.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 12.0])
    parser.add_argument("--row", type=int, choices=range(1, len(OBJECTIVES) + 1))
    parser.add_argument("--columns", nargs="+", choices=[column.name for column in COLUMNS])
    parser.add_argument("--name", help="of the record")
    arguments = parser.parse_args()
    chosen = OBJECTIVES if arguments.row is None else OBJECTIVES[arguments.row - 1 : arguments.row]
    rows = []
    columns = [column for column in COLUMNS if arguments.columns is None or column.name in arguments.columns]
    for labels, case in cases(chosen, arguments.rates, arguments.duration, columns):
        (outcome,) = run_cases([case])
        if outcome.result is None:
            raise SystemExit(f"{case.name}: {outcome.error}")
        rows.append({**labels, **figures_of(outcome.result)})
        print(msgspec.json.encode(rows[-1]).decode(), flush=True)
    name = arguments.name or ("elastic" if arguments.row is None else f"elastic_{arguments.row}")
    print(write_result(name, {"duration_s": arguments.duration, "rows": rows}))


if __name__ == "__main__":
    main()
