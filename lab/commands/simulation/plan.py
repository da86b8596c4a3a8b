"""`alignedserve plan`: which workers, topology and policy hold the objectives of a workload at the least cost."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
import yaml
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from alignedserve.cli.console import FAILURE, notes, print_table, printable, progress, results, to_json, write_json
from alignedserve.config.sections import ClusterConfig, RecordingConfig, Section
from alignedserve.core.errors import ConfigError, RecordingError
from alignedserve.runtime.device.cores import num_cores
from lab.commands.machine import describe_machine
from lab.commands.output_folder import command_line, make_folder, write_file
from lab.commands.simulation.options import PlanOptions
from lab.commands.simulation.plan_request import Asked, asked_for
from lab.planning.candidates import Candidate
from lab.planning.confidence import straggler_words
from lab.planning.experts import EXPERTS
from lab.planning.hardware_list import RECORDED
from lab.planning.plan import Plan, make_plan
from lab.planning.report import (
    PlanReport,
    candidates_table,
    plan_page,
    plan_values,
    sorted_plans,
    summary,
)
from lab.planning.trials import Machines
from lab.sim.sweep import CasePool, CaseProgress

# Where a model of that shape is found. Others are given by hand.
MODEL_PATHS = {
    "opt-125m": "facebook/opt-125m",
    "opt-2.7b": "facebook/opt-2.7b",
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-13b": "facebook/opt-13b",
    "opt-30b": "facebook/opt-30b",
    "opt-66b": "facebook/opt-66b",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "bloom-176b": "bigscience/bloom",
}
_MEMORY = {"kv_cache_bytes", "candidate_buffer_bytes"}  # of an accelerator: `serve` asks it for its own
_LIMITS = {"max_running_requests", "max_num_batched_tokens"}
# Sizes that `serve` would work out where they are unset, so that they are written even if they are the default.
_SIZES = {"pool": {"memory_bytes"}, "prefill": _LIMITS | _MEMORY, "decode": _LIMITS | {"swap_space_bytes"} | _MEMORY}


def config_file(candidate: Candidate, machines: Machines, remarks: list[str]) -> str:
    """Return the file's text, with `remarks` as comments above it. Raises ConfigError as a simulation does.

    It states what was simulated and differs from the defaults. The caches of named accelerators stay unset, so that
    `serve` works them out from the memory that is there.
    """
    config = machines.configured(candidate).cluster
    config = msgspec.structs.replace(config, recording=RecordingConfig())
    values: dict[str, Any] = {"topology": candidate.topology.value}
    values |= _model_and_engine(candidate, machines)
    for name, section in _changed_sections(config, keeps_memory=candidate.offer.is_profiled).items():
        if name in ("batching", "pool", "prefill") and not candidate.topology.is_separate:
            continue
        values[name] = {**section, **values.get(name, {})}
    values.setdefault("decode", {})["count"] = candidate.num_decode
    if candidate.topology.is_separate:
        values.setdefault("prefill", {})["count"] = candidate.num_prefill
    policy = candidate.policy
    values["scheduling"] = {"policy": policy.name}
    if policy.params:
        values["scheduling"]["policy_params"] = dict(policy.params)
    comments = "".join(f"# {' '.join(line.split())}\n" for line in remarks)
    return comments + yaml.safe_dump(values, sort_keys=False)


def _model_and_engine(candidate: Candidate, machines: Machines) -> dict[str, Any]:
    """Return the model to be served, and what its workers are: as they were measured, or GPUs.

    A recorded run's configuration says both itself. By how much workers are divided stands in what was simulated.
    """
    if candidate.offer.name == RECORDED:
        return {}
    profile = machines.profiles.get(candidate.offer.name)
    if profile is None:
        assert machines.model is not None, "named accelerators have no model of their own"
        return {"model": {"path": _model_path(machines.model)}, "engine": {"device": "cuda"}}
    section: dict[str, Any] = {"model": {"path": _model_path(profile.shape.name), "dtype": profile.shape.dtype}}
    if profile.num_threads is not None:
        section["engine"] = {"threads_per_worker": profile.num_threads * candidate.expert_parallel}
    return section


def _model_path(name: str) -> str:
    return MODEL_PATHS.get(name, name)


def _changed_sections(config: ClusterConfig, *, keeps_memory: bool) -> dict[str, dict[str, Any]]:
    defaults = ClusterConfig()
    sections: dict[str, dict[str, Any]] = {}
    for name in ClusterConfig.__struct_fields__:
        section = getattr(config, name)
        if not isinstance(section, Section):
            continue
        plain, default = msgspec.to_builtins(section), getattr(defaults, name)
        left_out = set() if keeps_memory else _MEMORY
        settings = {
            field: value
            for field, value in plain.items()
            if field not in left_out
            and (field in _SIZES.get(name, ()) or getattr(section, field) != getattr(default, field))
        }
        if settings:
            sections[name] = settings
    return sections


_RUNNING, _ATTENTION = "requests at a time", "attention"
_MAX_ROWS = 12  # of the table on the terminal; the report has all


def plan(options: PlanOptions) -> int:
    """Run the command and return its exit code: 1 when no plan holds. Raises ConfigError for what cannot be planned."""
    try:
        wanted = asked_for(options)
    except RecordingError as error:  # an exit code of 1 would say that no plan holds
        raise ConfigError(f"--from: {error}") from error
    make_folder(options.output)
    for warning in wanted.warnings:
        notes().print(warning, markup=False, soft_wrap=True)
    report = _report(options, wanted, _search(options, wanted))
    document = to_json({"machine": describe_machine(), **plan_values(report)})
    write_file(options.output / "plan.json", document)
    write_file(options.output / "report.html", plan_page(report).encode())
    if report.config_file is not None:
        write_file(options.output / "plan.yaml", report.config_file.encode())
    if options.json_output:
        write_json(document, "-")
    else:
        _print(report)
    where = f"{options.output / 'report.html'} has the frontier and all figures"
    start = f"; start it with: alignedserve serve --config {options.output / 'plan.yaml'}"
    notes().print(where + (start if report.config_file is not None else ""), markup=False, soft_wrap=True)
    return 0 if report.plan.is_held else FAILURE


def _search(options: PlanOptions, wanted: Asked) -> Plan:
    with progress() as bar, CasePool(options.processes or num_cores()) as pool:
        return make_plan(wanted.request, pool, _Bar(bar).note)


class _Bar:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("searching", total=None, status="")
        self._num_over = 0

    def note(self, words: str, case: CaseProgress | None) -> None:
        if case is not None and case.is_done:
            self._num_over += 1
        simulated = "" if case is None else f", {case.simulated_s:,.0f} s simulated"
        self._bar.update(self._task, completed=self._num_over, status=words + simulated)


def _report(options: PlanOptions, wanted: Asked, plan: Plan) -> PlanReport:
    text = None
    nearest = wanted.request.machines.configured(plan.nearest.candidate).cluster.decode
    running = f"up to {nearest.max_running_requests} by each decode worker"
    if plan.chosen is not None:
        candidate = plan.chosen.candidate
        remarks = [
            f"Made by alignedserve plan ({version('alignedserve')}).",
            *summary(plan)[:1],
            f"Workload: {wanted.about['workload']}",
        ]
        text = config_file(candidate, wanted.request.machines, remarks)
    searched = f"{plan.num_simulations} simulations, {len(plan.tried)} plans"
    about = {
        **wanted.about,
        _RUNNING: running,
        _ATTENTION: straggler_words(plan.nearest.outcome, wanted.request.machines),
        "searched": searched,
        "command": command_line(),
        "version": version("alignedserve"),
    }
    return PlanReport(tuple(about.items()), plan, text, wanted.warnings)


def _print(report: PlanReport) -> None:
    whole = candidates_table(report.plan)
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, heading in enumerate(whole.headings):
        table.add_column(heading, justify="left" if column == 0 else "right")
    for row in _shown_rows(report.plan):
        table.add_row(*map(printable, row))
    print_table(table)
    for line in summary(report.plan):
        results().print(line, markup=False, soft_wrap=True)
    for name, words in report.about:
        if name in (_RUNNING, _ATTENTION) or name.startswith(EXPERTS):
            results().print(f"{name.capitalize()}: {words}.", markup=False, soft_wrap=True)
    for variation in report.plan.variations:
        verdict = "holds" if variation.holds else "does not hold"
        results().print(f"  with {variation.words}: {verdict}", markup=False, soft_wrap=True)
    for line in report.plan.cautions:
        notes().print(line, markup=False, soft_wrap=True)


def _shown_rows(plan: Plan) -> list[Sequence[str]]:
    cost = plan.nearest.candidate.cost
    plans = sorted_plans(plan)
    rows = list(zip(plans, candidates_table(plan).rows, strict=True))
    by_use = sorted(rows, key=lambda row: (not row[0].outcome.is_representative, abs(row[0].candidate.cost - cost)))
    shown_labels = {row[0].candidate.label for row in by_use[:_MAX_ROWS]}
    return [cells for tried, cells in rows if tried.candidate.label in shown_labels]
