"""The worth of what simulated schedulers were told and live ones never know: lengths of answers, costs of iterations.

    python -m experiments.leak [--quick] [--processes 2] [--policies NAME ...] [--parts NAME ...]

Once a workload line without `max_tokens=` made the client's limit the length of the answer, which policies that bound
their predictions by the limit could read off, and policies knew the cost model of the machine. Here one point of each
experiment is run with both, and with what a live cluster has. docs/experiments/leak.md has the table.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from experiments.accelgen import OPT_13B, accelgen_case
from experiments.alignedserve import HEADLINE, KERNELS, STRAGGLER
from experiments.alise import SHARED_RATES, AliseLoad
from experiments.apt_serve import AptServeLoad
from experiments.bros import BrosLoad
from experiments.common import (
    STEADY_FIGURES,
    LabelledCase,
    Row,
    chosen,
    over_seeds,
    print_table,
    read_options,
    run,
    with_recorded,
    write_record,
)
from experiments.unseen import TRACES, mixed_case
from lab.commands.simulation.options import SimulateOptions
from lab.commands.simulation.simulate_cases import plan_cases
from lab.sim.sweep import Case, WorkloadLine
from lab.workload.distributions import split_outside_parentheses
from lab.workload.grammar import ClientLimit


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Knowledge that schedulers are given: the limit of clients whose line names none, and the costs of iterations."""

    name: str
    limit: ClientLimit
    knows_costs: bool

    def applied(self, labelled: LabelledCase) -> LabelledCase:
        """Return the case with this knowledge."""
        case = labelled.case
        workload = case.workload
        if isinstance(workload, WorkloadLine):
            workload = replace(workload, line=with_limits(workload.line, self.limit))
        labels = {**labelled.labels, "knows": self.name}
        config = replace(case.config, learns_costs=not self.knows_costs)
        return LabelledCase(labels, Case(f"{case.name} knows={self.name}", config, workload))


BOTH = Knowledge("lengths and costs", ClientLimit.EXACT, knows_costs=True)
COSTS = Knowledge("costs", ClientLimit.CONTEXT, knows_costs=True)
POWERS = Knowledge("lengths within a factor of two", ClientLimit.POWER_OF_TWO, knows_costs=False)
NEITHER = Knowledge("neither", ClientLimit.CONTEXT, knows_costs=False)
LENGTHS_WERE_TOLD = (BOTH, COSTS, POWERS, NEITHER)
COSTS_WERE_TOLD = (COSTS, NEITHER)  # where the lines named a limit already

SEEDS = (1, 2)
MEASURES: Mapping[str, tuple[str, str]] = {  # by part: the figure that its page is about, and its name
    "alignedserve": ("all.tokens_per_s", "tokens/s"),
    "apt_serve": ("all.p99_attainment", "held"),
    "unseen": ("rt.attainment", "held"),
    "bros": ("rt.attainment", "held"),
    "accelgen": ("all.goodput_per_s", "goodput, requests/s"),
    "alise": ("all.normalized_s.mean", "s/token"),
    "simulate": ("all.attainment", "held"),
}
COLUMNS: Mapping[str, str] = {
    "part": "experiment",
    "point": "point",
    "policy": "policy",
    "measure": "figure",
    **{one.name: one.name for one in LENGTHS_WERE_TOLD},
}
_FIGURES = ("all.tokens_per_s", "all.attainment", "all.tbt_s.p99", "rt.ttft_attainment", "rt.tpot_attainment")
_RECORDED = (
    "part",
    "point",
    "policy",
    "knows",
    "seed",
    "code",
    "value",
    *_FIGURES,
    "be.tokens_per_s",
    "workload",
    *STEADY_FIGURES,
)


def with_limits(line: str, limit: ClientLimit) -> str:
    """Return the line with this limit in every class that names none."""
    parts = split_outside_parentheses(line, ";")
    return ";".join(part if "max_tokens=" in part else f"{part}, max_tokens={limit.value}" for part in parts)


# --- one point of each experiment


def alignedserve_cases() -> list[LabelledCase]:
    """Return AlignedServe's headline, with both kinds of decode attention."""
    loads = {
        "one block per sequence" if kernel is STRAGGLER else "load-balanced": replace(HEADLINE, kernel=kernel)
        for kernel in KERNELS
    }
    return [
        _told(load.case("leak", system, 1), point, told)
        for (point, load), system, told in product(loads.items(), ("aligned", "aligned_slo"), LENGTHS_WERE_TOLD)
    ]


def apt_serve_cases() -> list[LabelledCase]:
    """Return ShareGPT and LongBench at the rates of Apt-Serve's Table 4."""
    points = [("sharegpt", 6.0), ("longbench", 1.5)]
    return [
        _told(AptServeLoad(*point, 300).case("leak", policy, seed), f"{point[0]} {point[1]:g}/s", told)
        for point, policy, told, seed in product(points, ("apt_serve", "aligned_slo"), LENGTHS_WERE_TOLD, SEEDS)
    ]


def unseen_cases() -> list[LabelledCase]:
    """Return the busier of both rates of code completion and of arXiv."""
    return [
        _told(
            mixed_case(trace, TRACES[trace].rates[1], policy, seed, TRACES[trace].window_s),
            f"{trace} {TRACES[trace].rates[1]:g}/s",
            told,
        )
        for trace, policy, told, seed in product(
            ("azure_code", "arxiv"), ("bros", "aligned_slo"), LENGTHS_WERE_TOLD, SEEDS
        )
    ]


def bros_cases() -> list[LabelledCase]:
    """Return the headline of BROS."""
    load = BrosLoad("opt-13b", 10.0)
    return [
        _told(load.case("leak", policy, seed, 60.0), "10/s", told)
        for policy, told, seed in product(("bros", "aligned_slo"), COSTS_WERE_TOLD, SEEDS)
    ]


def accelgen_cases() -> list[LabelledCase]:
    """Return AccelGen's own load."""
    return [
        _told(accelgen_case(OPT_13B, policy, seed, {}), "8/s", told)
        for policy, told, seed in product(("accelgen", "aligned_slo"), COSTS_WERE_TOLD, SEEDS)
    ]


def alise_cases() -> list[LabelledCase]:
    """Return both kinds of lengths at the rates that all of ALISE's systems are run at."""
    return [
        _told(AliseLoad("opt-13b", *point).case("leak", policy, 1), f"{point[0]} {point[1]:g}/s", told)
        for point, policy, told in product(SHARED_RATES.items(), ("ALISE", "aligned_slo"), COSTS_WERE_TOLD)
    ]


def simulate_cases() -> list[LabelledCase]:
    """Return the sweep that `alignedserve simulate` runs by itself, at one rate."""
    planned = plan_cases(SimulateOptions(rates=("4",)))
    return [
        _told(LabelledCase({"policy": one.policy, "seed": 0}, one.case), "4/s", told)
        for one, told in product(planned, LENGTHS_WERE_TOLD)
    ]


def _told(labelled: LabelledCase, point: str, told: Knowledge) -> LabelledCase:
    return told.applied(labelled._replace(labels={**labelled.labels, "point": point}))


PARTS = {
    "unseen": unseen_cases,
    "apt_serve": apt_serve_cases,
    "alignedserve": alignedserve_cases,
    "simulate": simulate_cases,
    "accelgen": accelgen_cases,
    "bros": bros_cases,
    "alise": alise_cases,
}


# --- what comes of it


def table(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each policy at each point: its figure by what schedulers are told, means over seeds."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in over_seeds(rows, ("part", "point", "policy", "knows")):
        key = (row["part"], row["point"], row["policy"])
        names = dict(zip(("part", "point", "policy"), key, strict=True))
        found.setdefault(key, {**names, "measure": MEASURES[row["part"]][1]})[row["knows"]] = row["value"]
    return list(found.values())


def run_part(name: str, cases: Sequence[LabelledCase], *, processes: int) -> list[Row]:
    """Return the rows of one part."""
    labelled = [case._replace(labels={**case.labels, "part": name}) for case in cases]
    rows = run(labelled, processes=processes)
    return chosen([{**row, "value": row[MEASURES[name][0]]} for row in rows], _RECORDED)


def main() -> None:
    """Simulate, show, record; what is done is recorded after every part."""
    options = read_options(__doc__)
    rows = with_recorded("leak", [], options) if options.is_recorded else []
    for name in ("simulate",) if options.is_quick else PARTS:
        cases = [case for case in PARTS[name]() if options.wants({**case.labels, "part": name})]
        rows += run_part(name, cases, processes=options.processes)
        if options.is_recorded:
            write_record("leak", {"table": chosen(table(rows), COLUMNS), "runs": rows})
    print_table(table(rows), COLUMNS, title="by what schedulers are told")


if __name__ == "__main__":
    main()
