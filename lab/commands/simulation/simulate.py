"""`alignedserve simulate`: what would happen if. Policies and rates, simulated side by side."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from alignedserve.cli.console import FAILURE, INTERRUPTED, notes, print_table, printable, progress, to_json, write_json
from alignedserve.core.metrics import in_percent
from alignedserve.runtime.device.cores import num_cores
from alignedserve.scheduling.policies import policy_config
from lab.commands.machine import describe_machine
from lab.commands.output_folder import command_line, make_folder, write_file
from lab.commands.simulation.options import SimulateOptions
from lab.commands.simulation.simulate_cases import (
    DEFAULT_DURATION_S,
    DEFAULT_HARDWARE,
    DEFAULT_MODEL,
    DEFAULT_WORKLOAD,
    PlannedCase,
    plan_cases,
)
from lab.costmodel.choice import FITTED
from lab.sim.report.page import report_page
from lab.sim.report.tables import Report, ReportedRun, headlines, steadiness, window_of
from lab.sim.report.tables import Table as FigureTable
from lab.sim.sweep import CaseProgress, CaseResult, WorkloadLine, run_cases


class _Done(NamedTuple):
    planned: PlannedCase
    outcome: CaseResult


def simulate(options: SimulateOptions) -> int:
    """Run the command and return its exit code: 1 when a simulation failed, 130 when Ctrl-C ended it early."""
    planned = plan_cases(options)
    make_folder(options.output)
    done = _run(planned, options)
    report = Report("AlignedServe: simulated", tuple(_about(options, done).items()), [_reported(case) for case in done])
    document = to_json(_as_json(options, done))
    write_file(options.output / "simulation.json", document)
    page = options.output / "report.html"
    write_file(page, report_page(report).encode())
    if options.json_output:
        write_json(document, "-")
    else:
        _print_table(report)
    notes().print(f"{page} has the plots, simulation.json beside it every figure", markup=False, soft_wrap=True)
    if len(done) < len(planned):
        notes().print(f"interrupted: {len(done)} of {len(planned)} simulations are over")
        return INTERRUPTED
    return FAILURE if any(outcome.error is not None for _, outcome in done) else 0


# --- running it


def _run(planned: Sequence[PlannedCase], options: SimulateOptions) -> list[_Done]:
    over: dict[str, CaseResult] = {}
    with progress() as bar:
        shown = _Bar(bar, planned)
        processes = options.processes or num_cores()
        try:
            run_cases(
                [case.case for case in planned],
                processes=processes,
                progress=shown.update,
                over=lambda result: over.update({result.case.name: result}),
            )
        except KeyboardInterrupt:
            if not over:
                raise
    return [_Done(case, over[case.case.name]) for case in planned if case.case.name in over]


class _Bar:
    def __init__(self, bar: Progress, planned: Sequence[PlannedCase]) -> None:
        self._bar = bar
        self._ends_s = {case.case.name: case.ends_s for case in planned}
        self._steps: dict[str, int] = {}
        self._over: set[str] = set()
        self._task = bar.add_task("simulating", total=100 * len(planned), status="")

    def update(self, case: CaseProgress) -> None:
        ends_s = self._ends_s[case.name]
        so_far = int(100 * min(case.simulated_s / ends_s, 1.0)) if ends_s > 0 else 0
        self._steps[case.name] = 100 if case.is_done else so_far
        if case.is_done:
            self._over.add(case.name)
        status = f"{len(self._over)} of {len(self._ends_s)} simulations"
        self._bar.update(self._task, completed=sum(self._steps.values()), status=status)


# --- what comes of it


def _reported(done: _Done) -> ReportedRun:
    planned, outcome = done
    config = planned.case.config
    num_blocks = config.layout.blocks_in(config.cluster.decode.kv_cache_bytes)
    return ReportedRun(planned.policy, planned.rate, num_blocks, outcome.result, outcome.error)


def _about(options: SimulateOptions, done: Sequence[_Done]) -> dict[str, str]:
    machine = describe_machine()
    duration_s = options.duration_s or (DEFAULT_DURATION_S if options.workload is None else None)
    duration = "to its end" if duration_s is None else f"{duration_s:g} s of arrivals"
    model = "as profiled" if options.costs.startswith(FITTED) else options.model or DEFAULT_MODEL
    degree = done[0].planned.case.config.cluster.engine.tensor_parallel
    hardware = f"{degree} x {options.hardware or DEFAULT_HARDWARE} a worker"
    return {
        "workload": f"{options.workload or DEFAULT_WORKLOAD} ({duration}, seed {options.seed})",
        "model": model if options.costs.startswith(FITTED) else f"{model}, {hardware}",
        "costs": options.costs if options.costs.startswith(FITTED) else f"{options.costs}, {options.kernel} attention",
        "command": command_line(),
        "version": f"alignedserve {version('alignedserve')}, Python {machine['python']}",
    }


def _as_json(options: SimulateOptions, done: Sequence[_Done]) -> dict[str, Any]:
    return {
        "about": _about(options, done),
        "machine": describe_machine(),
        "cases": [_case_as_json(case) for case in done],
    }


def _case_as_json(done: _Done) -> dict[str, Any]:
    outcome, case = done.outcome, done.planned.case
    config, result = case.config, outcome.result
    assert isinstance(case.workload, WorkloadLine)
    scheduling = config.cluster.scheduling
    plain = None
    if result is not None:
        plain = replace(result, timeline=tuple(window_of(result.timeline))).to_builtins()
    return {
        "name": case.name,
        "rate": done.planned.rate,
        "policy": scheduling.policy,
        "policy_settings": msgspec.to_builtins(policy_config(scheduling.policy, scheduling.policy_params)),
        "workload": case.workload.line,
        "seed": config.seed,
        "cluster": msgspec.to_builtins(config.cluster),
        "mechanisms": asdict(config.mechanisms),
        "context_len": config.max_context_len,
        "learns_costs": config.learns_costs,
        "links": asdict(config.links),
        "num_pools": config.num_pools,
        "routers": asdict(config.routers),
        "error": outcome.error,
        "traceback": outcome.traceback,
        "result": plain,
    }


def _print_table(report: Report) -> None:
    for title, figures in ((report.title, headlines(report)), ("", steadiness(report))):
        _print_figures(figures, title)
    for run in report.runs:
        for router in run.result.routers if run.result is not None else ():
            if router.utilisation:
                behind = f"{in_percent(router.utilisation, 0)} busy, at most {router.max_behind_s:.3f} s behind"
                notes().print(f"{run.policy} at {run.rate:g}/s: {router.name} {behind}", markup=False, soft_wrap=True)
    for run in report.runs:
        if run.error is not None:
            notes().print(f"{run.policy} at {run.rate:g}/s: {run.error}", markup=False, soft_wrap=True)


def _print_figures(figures: FigureTable, title: str) -> None:
    box, padding = SIMPLE_HEAD, (0, 1, 0, 0)
    table = Table(header_style="bold", title=title or None, title_justify="left", box=box, padding=padding)
    for column, heading in enumerate(figures.headings):
        table.add_column(heading, justify="left" if column < figures.num_names else "right")
    for row in figures.rows:
        table.add_row(*map(printable, row))
    print_table(table)
