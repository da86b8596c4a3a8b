"""Apt-Serve (Gao et al., SIGMOD 2025), Figures 8 and 9, Tables 4 and 5: effective throughput and bursts on one worker.

    python -m experiments.apt_serve [--quick] [--processes 2] [--policies NAME ...] [--parts NAME ...]

A request counts when its first token and the 99th percentile of its own gaps hold their objectives; effective
throughput is the highest rate at which so large a share of the requests counts. docs/experiments/apt_serve.md has the
paper's numbers, ours, and why they differ. Table 6 is `python -m benchmarks.scheduling.decisions --policy apt_serve`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import msgspec

from experiments.common import (
    STEADY_FIGURES,
    ColocatedWorkerSpec,
    LabelledCase,
    Options,
    Row,
    chosen,
    colocated_case,
    line,
    pick,
    print_parts,
    print_table,
    read_options,
    run,
    source_or,
    with_recorded,
    write_record,
)
from experiments.steady import LEAST_S, LEAST_SEEDS
from lab.costmodel.choice import WorkerSpec

WORKERS: Mapping[str, ColocatedWorkerSpec] = {  # Table 2
    "opt-13b": ColocatedWorkerSpec(WorkerSpec("opt-13b", "a100-40g", 1)),
    "opt-30b": ColocatedWorkerSpec(WorkerSpec("opt-30b", "a100-40g", 2)),
    "opt-66b": ColocatedWorkerSpec(WorkerSpec("opt-66b", "a100-40g", 4)),
}
TTFT_S: Mapping[str, tuple[float, ...]] = {  # Table 3, in the order of the workers
    "sharegpt": (1.0, 1.5, 2.0),
    "humaneval": (0.5, 1.0, 1.5),
    "longbench": (4.0, 4.5, 5.0),
}
TBT_S: Mapping[str, float] = {"sharegpt": 1.0, "humaneval": 0.5, "longbench": 1.0}
LENGTHS: Mapping[str, tuple[str, str]] = {  # where they come from, and what has about the same percentiles
    "sharegpt": ("sharegpt_text", "prompt=lognormal(30,528), output=lognormal(295,804)"),
    "humaneval": ("humaneval", "prompt=lognormal(132,301), output=lognormal(51,138)"),
    "longbench": ("longbench_summaries", "prompt=uniform(870,1880), output=uniform(20,480)"),
}
POLICIES = ("fcfs", "sarathi", "fastgen", "apt_serve", "aligned_slo")
OURS = ("apt_serve", "aligned_slo")
KV_ONLY = "apt_serve, keys and values"  # the ablation of Table 4
LEVELS = (0.9, 0.6)
BURSTS = (1.0, 5.0, 10.0)  # coefficients of variation
HELD = "all.p99_attainment"
FIGURE_8 = "figure 8"
STEADY = "steady"  # ten minutes, five seeds: rates; all other parts are bursts of 300 requests
STEADY_RATES = (2.5, 3.0, 3.5, 4.0)  # ShareGPT on OPT-13B
_LOWEST_RATES: Mapping[str, float] = {"sharegpt": 0.8, "humaneval": 4.0, "longbench": 0.15}
_STEP, _NUM_RATES = 1.25, 20
_CONTEXT = 2048

COLUMNS: Mapping[str, str] = {
    "dataset": "lengths",
    "model": "model",
    "rate": "requests/s",
    "cv": "CV",
    "costs": "costs",
    "policy": "policy",
    HELD: "held",
    "all.ttft_attainment": "TTFT held",
    "all.ttft_s.p50": "p50 TTFT",
    "all.p99_tbt_s.p90": "p90 of p99 TBT",
    "all.requests_per_s": "completed/s",
}
_RECORDED = (
    "part",
    *COLUMNS,
    "code",
    "seed",
    "utilisation",
    "duration_s",
    "num_iterations",
    "num_preemptions",
    "workload",
    *STEADY_FIGURES,
)


@dataclass(frozen=True, slots=True)
class AptServeLoad:
    """One trace of a number of requests, on one worker."""

    dataset: str
    rate: float
    num_requests: int
    cv: float = 1.0
    model: str = "opt-13b"
    costs: str = "roofline"
    sent_s: float | None = None  # for so long, in place of a number of requests

    def line(self) -> str:
        ttft_s = TTFT_S[self.dataset][list(WORKERS).index(self.model)]
        objectives = f"ttft={ttft_s}, tpot={TBT_S[self.dataset]}"
        lengths = source_or(*LENGTHS[self.dataset])
        return f"{lengths}, max_total={_CONTEXT}, rate={self.rate:.4g}, cv={self.cv:g}, {objectives}"

    def case(self, part: str, policy: str, seed: int) -> LabelledCase:
        labels: dict[str, str | float] = {
            "part": part,
            "dataset": self.dataset,
            "model": self.model,
            "rate": float(f"{self.rate:.4g}"),
            "cv": self.cv,
            "costs": self.costs,
            "policy": policy,
        }
        num_requests = self.num_requests if self.sent_s is None else None
        workload = line(self.line(), seed, num_requests=num_requests, duration_s=self.sent_s)
        on, settings = WORKERS[self.model], None
        if policy == KV_ONLY:
            policy, settings = "apt_serve", {"hybrid_cache": False}
        labelled = colocated_case(labels, policy, on, workload, settings)
        if self.costs == "roofline":
            return labelled
        measured = replace(on, source=self.costs, worker=replace(on.worker, hardware="a100-80g"))
        return _with_memory_of(labelled, colocated_case(labels, policy, measured, workload, settings))


def _with_memory_of(smaller: LabelledCase, larger: LabelledCase) -> LabelledCase:
    kv_cache_bytes = smaller.case.config.cluster.decode.kv_cache_bytes
    cluster = larger.case.config.cluster
    cluster = msgspec.structs.replace(
        cluster, decode=msgspec.structs.replace(cluster.decode, kv_cache_bytes=kv_cache_bytes)
    )
    return larger._replace(case=replace(larger.case, config=replace(larger.case.config, cluster=cluster)))


# --- figure 8: the highest rate at a level, by bisection of a geometric grid


@dataclass(slots=True)
class AttainmentCurve:
    """Attainment against rate of one policy, as far as it has been asked for."""

    dataset: str
    model: str
    policy: str
    held: dict[int, float] = field(default_factory=dict)  # by number of the rate

    def rate(self, number: int) -> float:
        return _LOWEST_RATES[self.dataset] * _STEP**number

    def bracket(self, level: float) -> tuple[int, int]:
        """Return the highest rate known to hold the level (-1: none), and the lowest that does not."""
        above = min((number for number, held in self.held.items() if held < level), default=_NUM_RATES)
        return max((number for number in self.held if number < above), default=-1), above

    def wanted(self) -> list[int]:
        """Return the next rate to try for each level; none when all are found."""
        brackets = map(self.bracket, LEVELS)
        return sorted({(below + above) // 2 for below, above in brackets if above - below > 1})

    def throughput(self, level: float) -> float | None:
        """Interpolate between the two rates about the level (in the logarithm); None beyond the grid."""
        below, above = self.bracket(level)
        if below < 0 or above == _NUM_RATES:
            return None
        share = (self.held[below] - level) / (self.held[below] - self.held[above])
        return math.exp(math.log(self.rate(below)) + share * math.log(_STEP))


class WorkerSizes(NamedTuple):
    """Length of an experiment."""

    num_requests: int
    seeds: Sequence[int]
    processes: int


def find_throughputs(curves: Sequence[AttainmentCurve], sizes: WorkerSizes) -> list[Row]:
    """Fill the curves by one round of simulations after the other; return the rows of all rounds."""
    rows: list[Row] = []
    while asked := [(curve, number) for curve in curves for number in curve.wanted()]:
        cases = [
            AptServeLoad(curve.dataset, curve.rate(number), sizes.num_requests, model=curve.model).case(
                FIGURE_8, curve.policy, sizes.seeds[0]
            )
            for curve, number in asked
        ]
        found = run(cases, processes=sizes.processes)
        for (curve, number), row in zip(asked, found, strict=True):
            curve.held[number] = row[HELD]
        rows += found
    return rows


def curves_in(rows: Iterable[Row]) -> list[AttainmentCurve]:
    curves: dict[tuple[str, str, str], AttainmentCurve] = {}
    for row in pick(rows, part=FIGURE_8):
        key = (row["dataset"], row["model"], row["policy"])
        curve = curves.setdefault(key, AttainmentCurve(*key))
        curve.held[round(math.log(row["rate"] / curve.rate(0), _STEP))] = row[HELD]
    return list(curves.values())


def throughput_rows(curves: Iterable[AttainmentCurve]) -> list[Row]:
    return [
        {"dataset": curve.dataset, "model": curve.model, "policy": curve.policy}
        | {_at(level): curve.throughput(level) for level in LEVELS}
        for curve in curves
    ]


def _at(level: float) -> str:
    return f"rate at {level:.0%}"


_THROUGHPUT = ("dataset", "model", "policy", *map(_at, LEVELS))


def advantages(rows: Sequence[Row]) -> list[Row]:
    """Return the rate of ours by that of each baseline: the mean over the models, and the highest.

    By lengths and overall.
    """
    pairs = [*product(OURS, POLICIES[:3]), ("aligned_slo", "apt_serve")]
    groups = [[name] for name in dict.fromkeys(row["dataset"] for row in rows)]
    groups = [*groups, [name for group in groups for name in group]] if len(groups) > 1 else groups
    return [_advantage(rows, *pair, datasets) for datasets in groups for pair in pairs]


def _advantage(rows: Sequence[Row], policy: str, baseline: str, datasets: Sequence[str]) -> Row:
    found: Row = {"dataset": ", ".join(datasets), "policy": policy, "baseline": baseline}
    for level in LEVELS:
        ratios = [
            row[_at(level)] / other[_at(level)]
            for row in pick(rows, policy=policy)
            for other in pick(rows, policy=baseline, dataset=row["dataset"], model=row["model"])
            if row["dataset"] in datasets and row[_at(level)] and other[_at(level)]
        ]
        found |= {
            f"{level:.0%}": sum(ratios) / len(ratios) if ratios else None,
            f"{level:.0%}, most": max(ratios, default=None),
            f"{level:.0%}, least": min(ratios, default=None),
        }
    return found


# --- the other parts


def figure_9(sizes: WorkerSizes) -> list[LabelledCase]:
    """Return bursts: Gamma arrivals of growing variation, at the paper's rates (of LongBench: below)."""
    rates = {"sharegpt": 3.8, "humaneval": 9.0}
    loads = [AptServeLoad(name, rate, sizes.num_requests, cv) for name, rate in rates.items() for cv in BURSTS]
    policies = ("fcfs", "sarathi", *OURS)
    return [load.case("figure 9", policy, sizes.seeds[0]) for load in loads for policy in policies]


def tables_4_and_5(sizes: WorkerSizes) -> list[LabelledCase]:
    """Return runs without hidden caches, with them, and first come, first served, with several seeds."""
    rates = [("sharegpt", 3.0), ("sharegpt", 6.0), ("longbench", 1.5)]
    loads = [AptServeLoad(*pair, sizes.num_requests, cv) for pair in rates for cv in BURSTS]
    points = list(product(loads, sizes.seeds))
    policies = ("fcfs", KV_ONLY, *OURS)
    return [load.case("tables 4, 5", policy, seed) for load, seed in points for policy in policies]


def other_costs(sizes: WorkerSizes) -> list[LabelledCase]:
    loads = [
        AptServeLoad("sharegpt", rate, sizes.num_requests, costs=costs)
        for costs in ("vllm", "distserve")
        for rate in (3.0, 6.0)
    ]
    policies = ("fcfs", KV_ONLY, *OURS)
    return [load.case("costs", policy, sizes.seeds[0]) for load in loads for policy in policies]


def steady_state() -> list[LabelledCase]:
    loads = [AptServeLoad("sharegpt", rate, 0, sent_s=LEAST_S) for rate in STEADY_RATES]
    points = [(load, policy) for load in loads for policy in ("fcfs", "sarathi", *OURS)]
    return [load.case(STEADY, policy, seed) for load, policy in points for seed in range(1, LEAST_SEEDS + 1)]


def curves_of(*, is_quick: bool) -> list[AttainmentCurve]:
    """Return figure 8 on the smallest model, of the other lengths only what counts; on the others of ShareGPT only."""
    compared = ("fcfs", *OURS)
    if is_quick:
        return [AttainmentCurve("humaneval", "opt-13b", policy) for policy in compared]
    points = [("sharegpt", "opt-13b", POLICIES), ("humaneval", "opt-13b", compared), ("longbench", "opt-13b", compared)]
    points += [("sharegpt", model, compared) for model in ("opt-30b", "opt-66b")]
    return [AttainmentCurve(dataset, model, policy) for dataset, model, policies in points for policy in policies]


def show(rows: Sequence[Row], throughputs: Sequence[Row], compared: Sequence[Row]) -> None:
    print_table(throughputs, {name: name for name in _THROUGHPUT}, title="figure 8")
    print_table(compared, {name: name for name in compared[0]}, title="figure 8: by how much higher")
    print_parts(rows, ("dataset", "model", "rate", "cv", "costs", "policy"), COLUMNS, but=(FIGURE_8,))


def main() -> None:
    """Simulate, show, record; what is done is recorded after every part."""
    options = read_options(__doc__)
    sizes = WorkerSizes(60 if options.is_quick else 300, (1, 2, 3), options.processes)
    curves = curves_of(is_quick=options.is_quick)
    curves = [one for one in curves if options.wants({"part": FIGURE_8, "policy": one.policy})]
    rows = with_recorded("apt_serve", [], options) if options.is_recorded else []
    if not options.is_quick:
        for part in (tables_4_and_5(sizes), figure_9(sizes), other_costs(sizes), steady_state()):
            rows += chosen(run(options.select(part), processes=options.processes), _RECORDED)
            _record(rows, options)
    rows += chosen(find_throughputs(curves, sizes), _RECORDED)
    throughputs, compared = _record(rows, options)
    show(rows, throughputs, compared)


def _record(rows: Sequence[Row], options: Options) -> tuple[list[Row], list[Row]]:
    throughputs = chosen(throughput_rows(curves_in(rows)), _THROUGHPUT)
    compared = advantages(throughputs)
    if options.is_recorded:
        write_record("apt_serve", {"throughputs": throughputs, "advantages": compared, "runs": rows})
    return throughputs, compared


if __name__ == "__main__":
    main()
