"""Ways to place prompts that were tried, beside the router's own: points of attainment gained and lost.

    python -m benchmarks.simulation.placement_trials [--workers 4 8] [--requests 250] [--runs 2] [--only code]

The points of `benchmarks.simulation.placements`, and of long prompts with tight gaps, on elastic workers; every router
has the same requests. A further run of a point is of other requests of its trace.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import Topology
from alignedserve.sim.sweep import WorkloadLine
from alignedserve.workload.rates import at_rate
from benchmarks.simulation.placements import BEST_EFFORT, OUTSTANDING, TRACES, Point, Trace, figures_of, points
from benchmarks.simulation.trial_routers import ROUTERS, RoutedSimulation
from benchmarks.support.recording import write_result
from benchmarks.support.server_cluster import server_cluster

# Long prompts beside tight gaps: where workers of one phase alone might gain.
_TIGHT = Trace("arXiv, 4 s, 30 ms", "arxiv, rate=1, ttft=4, tpot=0.03", (1.0, 1.6), 0.8)
_BASE = "as it is"
_LEAST_S = 20.0  # of arrivals
_APART_S = 600.0  # beginnings of the runs, in a recording


class Run(NamedTuple):
    """One of the runs of a point."""

    point: Point
    number: int

    def line(self, num_requests: int) -> WorkloadLine:
        """Return its requests."""
        point, text = self.point, f"rt: {self.point.trace.line}"
        if self.number and "recorded" in text:
            text += f", start={self.number * _APART_S:g}"
        text = at_rate(text, point.rate)
        if point.is_beside:
            text += f"; {BEST_EFFORT.format(OUTSTANDING * point.num_workers)}"
        duration_s = max(num_requests / point.rate, _LEAST_S)
        return WorkloadLine(text, self.number, duration_s=duration_s, data_dir=data_dir())


def rows_of(run: Run, routers: Sequence[str], num_requests: int) -> Iterator[dict[str, Any]]:
    """Simulate every router with the requests of a run."""
    config = server_cluster("aligned_slo", Topology.ELASTIC, run.point.num_workers)
    workload = run.line(num_requests).build()
    base: dict[str, Any] | None = None
    for name in (_BASE, *(one for one in routers if one != _BASE)):
        figures = figures_of(RoutedSimulation(config, workload, ROUTERS[name]).run())
        base = base or figures
        yield {
            "trace": run.point.trace.name,
            "workers": run.point.num_workers,
            "rate": round(run.point.rate, 2),
            "best_effort": run.point.is_beside,
            "run": run.number,
            "router": name,
            **figures,
            "gained": round(figures["percent_attained"] - base["percent_attained"], 1),
        }


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return what each router gains over the product's own: mean, least and most, of all and by trace."""
    summary = {}
    for name in dict.fromkeys(row["router"] for row in rows if row["router"] != _BASE):
        gained = [row["gained"] for row in rows if row["router"] == name]
        by_trace = {
            trace: _mean([row["gained"] for row in rows if (row["router"], row["trace"]) == (name, trace)])
            for trace in dict.fromkeys(row["trace"] for row in rows)
        }
        summary[name] = {"mean": _mean(gained), "least": min(gained), "most": max(gained), **by_trace}
    return summary


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 2)


def main() -> None:
    """Simulate, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--requests", type=int, default=250)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--routers", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of traces' names")
    parser.add_argument("--name", default="placement_trials", help="of the record")
    arguments = parser.parse_args()
    rows = []
    for number in range(arguments.runs):
        for point in chain.from_iterable(points(arguments.workers, part, (*TRACES, _TIGHT)) for part in arguments.only):
            for row in rows_of(Run(point, number), arguments.routers, arguments.requests):
                rows.append(row)
                print(msgspec.json.encode(row).decode(), flush=True)
    figures = {"requests": arguments.requests, "gained": summary_of(rows), "rows": rows}
    print(figures["gained"], write_result(arguments.name, figures))


if __name__ == "__main__":
    main()
