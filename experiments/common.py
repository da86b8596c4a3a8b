"""Shared by the experiments: simulations described by names, their figures in rows, tables and a record.

cases = [
    colocated_case({"rate": rate, "seed": seed}, "bros", worker, WorkloadLine(line(rate), seed, duration_s=600))
    for rate in (5, 10) for seed in (1, 2, 3)
]
rows = over_seeds(run(cases, processes=2), by=("policy", "rate"))
print_table(rows, {"policy": "policy", "rate": "requests/s", "rt.ttft_attainment": "TTFT held"})
write_record("bros", rows)
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from alignedserve.config.environment import data_dir
from alignedserve.config.sections import ClusterConfig, DecodeWorkerConfig, ModelSectionConfig, RouterConfig, Topology
from alignedserve.core.errors import ConfigError
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from experiments.validity.decision_code import digests
from lab.costmodel.choice import WorkerSpec
from lab.sim.policies import ClusterHardware, simulated_policy, with_policy
from lab.sim.result import ClassResult, Measure, SimulationResult
from lab.sim.sweep import Case, CaseProgress, CaseResult, WorkloadLine, run_cases
from lab.workload.catalogue import Library

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30
MANY = 1 << 40  # limits of queues: no paper refuses a request

Labels = Mapping[str, str | float]
"""What tells a case from the others of its experiment: `policy` and `seed` always, then model, rate, and so on."""
Row = dict[str, Any]
"""The labels of a case and its figures; those of a class of traffic under its name: `rt.ttft_s.p99`."""


class LabelledCase(NamedTuple):
    """One simulation of an experiment."""

    labels: Labels
    case: Case


# --- cases


@dataclass(frozen=True, slots=True)
class ColocatedWorkerSpec:
    """One worker that computes prompts and decodes. The limits are vLLM's defaults at the time of the papers."""

    worker: WorkerSpec
    source: str = "roofline"  # of the cost model
    max_running_requests: int = 256
    max_tokens: int = 2048  # of an iteration
    swap_space_bytes: int = 64 * GIB  # host memory for caches, where the policy swaps
    context_len: int = 2048  # OPT's: the limit of a request whose client sets none


def colocated_case(
    labels: Labels,
    policy: str,
    on: ColocatedWorkerSpec,
    workload: WorkloadLine,
    settings: Mapping[str, Any] | None = None,
) -> LabelledCase:
    """Return this policy on one such worker, with the mechanisms that it wants.

    Raises ConfigError for unknown names.
    """
    cluster = ClusterConfig(
        model=ModelSectionConfig(max_context_len=on.context_len),
        router=RouterConfig(max_queued_requests=MANY, max_queued_tokens=MANY),
        decode=DecodeWorkerConfig(
            max_running_requests=on.max_running_requests,
            max_num_batched_tokens=on.max_tokens,
            max_waiting_requests=MANY,
            swap_space_bytes=on.swap_space_bytes,
        ),
    )
    under_policy = with_policy(cluster, policy, settings, topology=Topology.COLOCATED)
    return cluster_case(labels, ClusterHardware(on.worker, source=on.source), under_policy, workload)


def cluster_case(
    labels: Labels, machines: ClusterHardware, cluster: ClusterConfig, workload: WorkloadLine
) -> LabelledCase:
    """Return the case of any cluster (sim.policies.with_policy makes one for a policy).

    `policy` and `seed` join the labels.
    """
    labelled = {"policy": cluster.scheduling.policy, **labels, "seed": workload.seed}
    name = " ".join(f"{key}={value}" for key, value in labelled.items())
    return LabelledCase(labelled, Case(name, simulated_policy(machines, cluster), workload))


@cache
def source_or(preferred: str, stand_in: str) -> str:
    """Return the first of two sources of lengths that there is. Says so where it is the second."""
    try:
        _library().source(preferred)
    except ConfigError as error:
        print(f"{error}. In its place: {stand_in}.")
        return stand_in
    return preferred


@cache
def _library() -> Library:
    return Library(data_dir())


def line(text: str, seed: int, *, duration_s: float | None = None, num_requests: int | None = None) -> WorkloadLine:
    """Return a workload (docs/workloads.md), with the folder that ALIGNEDSERVE_DATA names."""
    return WorkloadLine(text, seed, num_requests, duration_s, data_dir())


# --- runs


def run(
    cases: Sequence[LabelledCase], *, processes: int, also: Callable[[SimulationResult], Row] = lambda _: {}
) -> list[Row]:
    """Return one row for each, in their order. `also`: further figures of a result.

    Raises RuntimeError with what went wrong in the first that failed.
    """
    with Progress(transient=True) as bar:
        task = bar.add_task("simulating", total=len(cases))

        def report(progress: CaseProgress) -> None:
            bar.advance(task, 1 if progress.is_done else 0)

        results = run_cases([case for _, case in cases], processes=processes, progress=report)
    return [
        {**labels, "code": code_of(case), **_figures(result, also)}
        for (labels, case), result in zip(cases, results, strict=True)
    ]


def code_of(case: Case) -> str:
    return digests()[case.config.cluster.scheduling.policy]


def _figures(outcome: CaseResult, also: Callable[[SimulationResult], Row]) -> Row:
    if outcome.result is None:
        raise RuntimeError(f"{outcome.case.name}: {outcome.traceback or outcome.error}")
    workload = outcome.case.workload
    said: Row = {}
    if isinstance(workload, WorkloadLine):
        said = {"workload": workload.line, "sent_s": workload.duration_s}
    return said | figures_of(outcome.result) | also(outcome.result)


def figures_of(result: SimulationResult) -> Row:
    row: Row = {
        "duration_s": result.duration_s,
        "utilisation": max(worker.utilisation for worker in result.workers),
        "num_iterations": sum(worker.num_iterations for worker in result.workers),
        "num_preemptions": result.num_preemptions,
        "num_prompt_tokens": sum(worker.num_prompt_tokens for worker in result.workers),
        "num_decodes": sum(worker.num_decodes for worker in result.workers),
        "mean_blocks": sum(worker.mean_blocks for worker in result.workers),
        "num_evictions": result.num_evictions,
        "num_recomputed_tokens": result.num_recomputed_tokens,
    }
    for name, of_class in result.classes.items():
        row |= {f"{name}.{key}": value for key, value in _figures_of_class(of_class)}
    return row


def _figures_of_class(of_class: ClassResult) -> Iterable[tuple[str, float | None]]:
    for field in fields(of_class):
        value = getattr(of_class, field.name)
        if isinstance(value, Measure):
            yield from (
                (f"{field.name}.{one}", getattr(value.distribution, one))
                for one in ("mean", "p50", "p90", "p99", "max")
            )
        elif not isinstance(value, dict):
            yield field.name, value


# --- rows


def over_seeds(rows: Iterable[Row], by: Sequence[str]) -> list[Row]:
    """Return the mean of every figure over the rows that have these labels in common, in the order of their coming.

    `num_runs` says of how many; `NAME.spread` is the largest less the smallest. A figure that one of them lacks is out.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [{**dict(zip(by, key, strict=True)), **_mean(group, by)} for key, group in groups.items()]


def _mean(rows: Sequence[Row], but: Sequence[str]) -> Row:
    mean: Row = {"num_runs": len(rows)}
    codes = {row.get("code") for row in rows}
    if len(codes) == 1 and None not in codes:
        mean["code"] = codes.pop()
    for name in rows[0]:
        values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
        if name not in but and name != "seed" and len(values) == len(rows):
            mean[name] = sum(values) / len(values)
            mean[f"{name}.spread"] = max(values) - min(values)
    return mean


def pick(rows: Iterable[Row], **labels: str | float) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in labels.items())]


def print_parts(rows: Sequence[Row], by: Sequence[str], columns: Mapping[str, str], but: Iterable[str] = ()) -> None:
    """Print the means of each part over its seeds."""
    left_out = tuple(but)
    for part in dict.fromkeys(row["part"] for row in rows if row["part"] not in left_out):
        print_table(over_seeds(pick(rows, part=part), by), {**columns, "num_runs": "runs"}, title=part)


def print_table(rows: Sequence[Row], columns: Mapping[str, str], *, title: str = "") -> None:
    table = Table(title=title or None, title_justify="left")
    for heading in columns.values():
        table.add_column(heading)
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in columns))
    Console(width=160).print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


STEADY_FIGURES = (
    "sent_s",
    "be.loaded_tokens_per_s",
    *(
        f"{name}.{figure}"
        for name in ("all", "rt", "be")
        for figure in ("completed_of_arrived", "longest_gap_s", "fluidity")
    ),
)
"""What every record has of its rows, so that a page can say whether they are rates and what stalled."""


def chosen(rows: Iterable[Row], names: Iterable[str]) -> list[Row]:
    return [{name: _rounded(row[name]) for name in names if name in row} for row in rows]


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def with_recorded(name: str, rows: Sequence[Row], options: "Options") -> list[Row]:
    """Return these rows (as `chosen`) and, of policies or parts that were not run, those of results/NAME.json.

    The record's figures are to have the rows under "runs". Each has the digest of the code that decided.
    """
    path = RESULTS / f"{name}.json"
    if not (options.policies or options.parts) or not path.exists():
        return list(rows)
    recorded: list[Row] = json.loads(path.read_text())["figures"]["runs"]
    return [*rows, *(row for row in recorded if not options.wants(row))]


def perform(
    name: str,
    options: "Options",
    parts: Iterable[Sequence[LabelledCase]],
    recorded: Iterable[str],
    figures: Callable[[Sequence[Row]], Row],
    also: Callable[[SimulationResult], Row] = lambda _: {},
) -> list[Row]:
    """Simulate part after part and return all rows; after each, results/NAME.json has `figures` of what is done."""
    names = tuple(recorded)
    rows = with_recorded(name, [], options) if options.is_recorded else []
    for cases in parts:
        rows += chosen(run(options.select(cases), processes=options.processes, also=also), names)
        if options.is_recorded:
            write_record(name, {**figures(rows), "runs": rows})
    return rows


def write_record(name: str, figures: Any) -> Path:
    """Write results/NAME.json with machine, versions and command; its path."""
    return write_result(name, figures, folder=RESULTS)


# --- the command


class Options(NamedTuple):
    """Options of every experiment's command line."""

    is_quick: bool
    processes: int
    is_recorded: bool
    policies: tuple[str, ...]  # to run; none: all
    parts: tuple[str, ...] = ()  # likewise, where cases have that label

    def wants(self, labels: Mapping[str, Any]) -> bool:
        is_wanted = not self.policies or labels["policy"] in self.policies
        return is_wanted and (not self.parts or labels.get("part") in self.parts)

    def select(self, cases: Iterable[LabelledCase]) -> list[LabelledCase]:
        return [case for case in cases if self.wants(case.labels)]


def read_options(description: str | None) -> Options:
    """Read `--quick` (not recorded), `--processes N`, `--policies NAME ...`, `--parts NAME ...`."""
    parser = parser_of(description)
    parser.add_argument("--quick", action="store_true", help="few and short runs, under a minute; nothing is recorded")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time")
    parser.add_argument("--policies", nargs="+", default=(), help="only these; what is recorded of others stays")
    parser.add_argument("--parts", nargs="+", default=(), help="only these ('figure 8'); likewise")
    given = parser.parse_args()
    return Options(given.quick, given.processes, not given.quick, tuple(given.policies), tuple(given.parts))
