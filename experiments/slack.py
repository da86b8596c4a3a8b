"""Slack packed (Kairos, arXiv 2605.02329): what separate decode workers serve within one TPOT, with a balanced kernel.

    python -m experiments.slack [--quick] [--processes 2] [--policies aligned distserve] [--parts "tpot 30 ms, 1+1" ...]

AlignedServe's load with a TPOT objective, at rates up to the highest that is served with it: `aligned` with requests of
any length packed into the slack of what runs, without, and `distserve`. docs/experiments/slack.md has what comes of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.config.sections import Topology
from experiments.alignedserve import SCHEDULED, PaperCell, synthetic
from experiments.common import (
    STEADY_FIGURES,
    LabelledCase,
    Row,
    chosen,
    cluster_case,
    line,
    over_seeds,
    pick,
    print_table,
    read_options,
    run,
    with_recorded,
    write_record,
)
from experiments.steady import LEAST_S, LEAST_SEEDS, is_long, is_served
from lab.costmodel.choice import WorkerSpec
from lab.sim.policies import ClusterHardware, with_policy
from lab.sim.result import SimulationResult

MODEL, HARDWARE = "opt-13b", "h100"
PACKED, APART, DISTSERVE = "aligned, packed", "aligned", "distserve"
SYSTEMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    PACKED: ("aligned", {"pack_share": 0.95}),
    APART: ("aligned", {"pack_share": None}),
    DISTSERVE: ("distserve", {}),
}
LEVELS = (0.99, 0.9)  # of the requests hold their TPOT: the p99 within it, the p90

COLUMNS: Mapping[str, str] = {
    "rate": "requests/s",
    "system": "system",
    "rt.tpot_attainment": "TPOT held",
    "rt.loaded_tokens_per_s": "tokens/s",
    "rt.completed_of_arrived": "completed of sent",
    "rt.tpot_s.p50": "p50 TPOT",
    "rt.tpot_s.p99": "p99 TPOT",
    "rt.tbt_s.p99": "p99 TBT",
    "rt.longest_gap_s": "longest gap",
    "rt.ttft_s.p50": "p50 TTFT",
    "rt.ttft_s.p99": "p99 TTFT",
    "ledger.batch": "batch",
    "straggler_share": "stragglers",
}
_MORE = ("tpot_s", "policy", "seed", "duration_s", "num_evictions", "num_preemptions", "rt.num_sent", "utilisation")
_RECORDED = ("part", "workers", *COLUMNS, *_MORE, "code", "workload", *STEADY_FIGURES)


@dataclass(frozen=True, slots=True)
class SlackPoint:
    """Workers, an objective, and the rates at which each system is simulated."""

    tpot_s: float
    cell: PaperCell
    rates: Mapping[str, tuple[float, ...]]

    @property
    def workers(self) -> str:
        """Return the numbers of prefill and decode workers."""
        return f"{self.cell.num_prefill}+{self.cell.num_decode}"

    @property
    def part(self) -> str:
        """Return its name."""
        return f"tpot {1e3 * self.tpot_s:.0f} ms, {self.workers}"

    def case(self, system: str, rate: float, seed: int, duration_s: float = LEAST_S) -> LabelledCase:
        """Return one simulation."""
        policy, settings = SYSTEMS[system]
        topology = Topology.DISAGGREGATED
        cluster = with_policy(self.cell.cluster(topology), policy, settings, topology=topology)
        labels: dict[str, str | float] = {
            "part": self.part,
            "workers": self.workers,
            "tpot_s": self.tpot_s,
            "rate": rate,
            "system": system,
        }
        lengths = synthetic(0.95).rpartition(",")[0]
        workload = line(f"rt: {lengths}, rate={rate:g}, tpot={self.tpot_s:g}", seed, duration_s=duration_s)
        return cluster_case(labels, ClusterHardware(WorkerSpec(MODEL, HARDWARE, 1, SCHEDULED)), cluster, workload)


POINTS = (
    SlackPoint(
        0.025, PaperCell(1, 1), {PACKED: (10.0, 11.0, 11.5), DISTSERVE: (7.0, 7.5, 9.0, 9.5, 10.0), APART: (9.0,)}
    ),
    SlackPoint(0.030, PaperCell(1, 1), {PACKED: (12.0, 12.5, 13.0), DISTSERVE: (8.5, 9.0, 10.5, 11.0), APART: (11.0,)}),
    SlackPoint(
        0.050, PaperCell(1, 1), {PACKED: (13.5, 14.0, 14.5), DISTSERVE: (12.0, 12.5, 13.0, 13.5), APART: (12.0,)}
    ),
)


def further_figures(result: SimulationResult) -> Row:
    """Return figures of the iteration logs of all decode workers."""
    log = result.iteration_log
    return {
        "ledger.batch": log.num_requests / max(log.num_iterations, 1),
        "straggler_share": log.straggler_share,
    }


# --- what comes of it


def highest(rows: Sequence[Row], system: str, level: float) -> Row | None:
    """Return the means over all seeds at the highest rate at which a system serves so many within the TPOT."""
    held = [row for row in over_seeds(pick(rows, system=system), ("rate", "system")) if _is_held(row, rows, level)]
    return max(held, key=lambda row: float(row["rate"]), default=None)


def _is_held(row: Row, rows: Sequence[Row], level: float) -> bool:
    of = pick(rows, rate=row["rate"], system=row["system"])
    completed = [float(one["rt.completed_of_arrived"]) for one in of]
    has_all = len(of) >= LEAST_SEEDS and all(map(is_long, of))
    return has_all and is_served(completed) and row["rt.tpot_attainment"] >= level


def gains(rows: Sequence[Row]) -> list[Row]:
    """Return, for each point and level, the tokens of each system at its highest rate, and ours by DistServe's."""
    found: list[Row] = []
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = pick(rows, part=part)
        for level in LEVELS:
            best = {system: highest(of_part, system, level) for system in SYSTEMS}
            tokens = {name: row and row["rt.loaded_tokens_per_s"] for name, row in best.items()}
            ours, theirs = tokens[PACKED], tokens[DISTSERVE]
            gain = ours / theirs - 1.0 if ours and theirs else None
            found.append({"part": part, "level": level, **tokens, "gain": gain})
    return found


def show(rows: Sequence[Row], compared: Sequence[Row]) -> None:
    """Print all tables."""
    for part in dict.fromkeys(row["part"] for row in rows):
        means = over_seeds(pick(rows, part=part), ("rate", "system"))
        print_table(means, {**COLUMNS, "num_runs": "runs"}, title=part)
    headings = {"part": "part", "level": "held by", **{name: f"tokens/s, {name}" for name in SYSTEMS}}
    print_table(compared, {**headings, "gain": f"{PACKED} by {DISTSERVE}"}, title="at the highest rate that is served")


def parts_of(*, is_quick: bool) -> list[list[LabelledCase]]:
    """Return the experiment, point by point and seed by seed; or one point in little."""
    if is_quick:
        return [[POINTS[0].case(system, 10.0, 1, 40.0) for system in SYSTEMS]]
    return [
        [point.case(system, rate, seed) for system, rates in point.rates.items() for rate in rates]
        for point in POINTS
        for seed in range(1, LEAST_SEEDS + 1)
    ]


def main() -> None:
    """Simulate, show, record; what is done is recorded after every part."""
    options = read_options(__doc__)
    rows = with_recorded("slack", [], options) if options.is_recorded else []
    for cases in parts_of(is_quick=options.is_quick):
        rows += chosen(run(options.select(cases), processes=options.processes, also=further_figures), _RECORDED)
        if options.is_recorded:
            write_record("slack", {"gains": chosen(gains(rows), ("part", "level", *SYSTEMS, "gain")), "runs": rows})
    show(rows, gains(rows))


if __name__ == "__main__":
    main()
