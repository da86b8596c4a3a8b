"""Prompts placed by predicted wait (elastic workers) beside prompts placed by fewest tokens (colocated ones).

    python -m benchmarks.simulation.placements [--workers 2 4 8] [--requests 150] [--only code]

Llama-2-13B on A100s under the default policy, on five traces, near what the workers hold and beyond it, with and
without best-effort work beside. Workers are otherwise the same; elastic ones also hand decodes over (`num_moved`).
Both columns have the same requests, so a point's difference is that of single requests: one of 150 is 0.7 points.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import Topology
from alignedserve.sim.result import SimulationResult
from alignedserve.sim.sweep import Case, WorkloadLine, run_cases
from alignedserve.workload.rates import at_rate
from benchmarks.support.recording import write_result
from benchmarks.support.server_cluster import server_cluster

BEST_EFFORT = "be: prompt=uniform(512,1024), output=uniform(32,128), outstanding={}"
OUTSTANDING = 16  # best-effort requests per worker
_LEAST_S = 20.0  # of arrivals


class Trace(NamedTuple):
    """Traffic with its objectives, at rates per worker."""

    name: str
    line: str
    rates: tuple[float, float]  # where most hold their objectives, and beyond
    rate_beside: float  # where best-effort work is beside it


TRACES = (
    Trace("conversations, 1 s, 60 ms", "azure_conv, arrivals=recorded, ttft=1, tpot=0.06", (2.7, 3.6), 2.7),
    Trace("conversations, 2 s, 40 ms", "azure_conv, arrivals=recorded, ttft=2, tpot=0.04", (2.2, 3.0), 2.2),
    Trace("code, 1 s, 100 ms", "azure_code, arrivals=recorded, ttft=1, tpot=0.1", (1.0, 1.6), 1.0),
    Trace("Mooncake, 5 s, 100 ms", "mooncake, arrivals=recorded, ttft=5, tpot=0.1, max_prompt=16000", (0.2, 0.35), 0.2),
    Trace("ShareGPT, 0.5 s, 100 ms", "sharegpt, rate=1, ttft=0.5, tpot=0.1", (1.75, 2.5), 1.75),
    Trace("arXiv, 3 s, 100 ms", "arxiv, rate=1, ttft=3, tpot=0.1", (1.7, 2.2), 1.2),
)


class Point(NamedTuple):
    """One workload on so many workers."""

    trace: Trace
    num_workers: int
    rate: float  # of all
    is_beside: bool  # best-effort work is beside it

    def line(self, num_requests: int) -> WorkloadLine:
        """Return its requests; the real-time ones are about this many."""
        text = at_rate(f"rt: {self.trace.line}", self.rate)
        if self.is_beside:
            text += f"; {BEST_EFFORT.format(OUTSTANDING * self.num_workers)}"
        return WorkloadLine(text, duration_s=max(num_requests / self.rate, _LEAST_S), data_dir=data_dir())


def points(workers: Sequence[int], only: str, traces: Sequence[Trace] = TRACES) -> Iterator[Point]:
    """Return the points of traces whose name has `only` in it."""
    for trace in traces:
        for count in workers if only in trace.name else ():
            yield from (Point(trace, count, rate * count, is_beside=False) for rate in trace.rates)
            yield Point(trace, count, trace.rate_beside * count, is_beside=True)


def figures_of(result: SimulationResult) -> dict[str, Any]:
    """Return what counts of a run: of real-time requests, and the tokens of all."""
    chat = result.classes["rt"]
    return {
        "percent_attained": round(100 * (chat.attainment or 0.0), 1),
        "percent_ttft": round(100 * (chat.ttft_attainment or 0.0), 1),
        "num_requests": chat.num_sent,
        "tokens_per_s": round(result.classes["all"].tokens_per_s),
        "num_moved": result.num_handoffs_verified,
        "num_evictions": result.num_evictions,
    }


def row_of(point: Point, num_requests: int) -> dict[str, Any]:
    """Simulate both columns at a point."""
    row: dict[str, Any] = {
        "trace": point.trace.name,
        "workers": point.num_workers,
        "rate": round(point.rate, 2),
        "best_effort": point.is_beside,
    }
    for topology in (Topology.COLOCATED, Topology.ELASTIC):
        config = server_cluster("aligned_slo", topology, point.num_workers)
        (outcome,) = run_cases([Case(f"{point} {topology.value}", config, point.line(num_requests))])
        if outcome.result is None:
            raise SystemExit(f"{outcome.case.name}: {outcome.error}")
        row[topology.value] = figures_of(outcome.result)
    row["gained"] = round(row["elastic"]["percent_attained"] - row["colocated"]["percent_attained"], 1)
    return row


def main() -> None:
    """Simulate, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--only", default="", help="part of a trace's name")
    arguments = parser.parse_args()
    rows = []
    for point in points(arguments.workers, arguments.only):
        rows.append(row_of(point, arguments.requests))
        print(msgspec.json.encode(rows[-1]).decode(), flush=True)
    gained = [row["gained"] for row in rows]
    summary = {"mean": round(sum(gained) / len(gained), 2), "least": min(gained), "most": max(gained)}
    name = "placements" if not arguments.only else f"placements_{arguments.only}"
    print(write_result(name, {"requests": arguments.requests, "gained": summary, "rows": rows}))


if __name__ == "__main__":
    main()
