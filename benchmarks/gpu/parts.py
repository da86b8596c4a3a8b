"""One part of benchmarks.gpu in a process of its own, which may end in any way without costing the others.

    python -m benchmarks.gpu.parts kernels --device cuda
    python -m benchmarks.gpu.parts --list                           # every part, with its minutes

Writes gpu_<part>.json again whenever something more was measured, so that a crash leaves what came before it.
"""

import importlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from alignedserve.runtime.device.devices import CUDA
from benchmarks.engine.iterations import TOY, IterationSpec, run_iteration_benchmark
from benchmarks.gpu.kernel_tests import run_tests
from benchmarks.gpu.part_list import DEFAULT_POLICIES, GROUPS, MEASURE, PART, PARTS, SWEEP, print_parts
from benchmarks.gpu.sanitizer import sanitize_self_check
from benchmarks.kernels.benchmark import Groups, KernelBenchmarkSpec, run_kernel_benchmark
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.device_choice import chosen_device
from benchmarks.measuring.recording import RESULTS, write_result
from benchmarks.measuring.results import IterationReport, KernelReport, TransferReport
from benchmarks.transfer.benchmark import measure_device_transfers
from benchmarks.transfer.device_transfers import pinned_rows
from benchmarks.transfer.spec import DEVICE_SPEC, TransferBenchmarkSpec
from kernels.gpu_dispatch import launch_failures

_TOY_TRANSFERS = TransferBenchmarkSpec(("toy",), (1,), num_rounds=1)
_ROUNDS, _SWEEP_ROUNDS, _BEST = 20, 5, 3  # of each case
_RESERVE_S = 5.0  # what a part needs to write what it knows when it ends what it has started

Report = KernelReport | IterationReport | TransferReport


@dataclass(frozen=True, slots=True)
class Part:
    """Task of one part."""

    name: str
    device: torch.device
    is_toy: bool
    folder: Path
    limit_s: float
    policies: tuple[str, ...]  # promise: in turn

    def record(self, figures: dict[str, Any]) -> None:
        options = " --toy" if self.is_toy else ""
        if self.policies != DEFAULT_POLICIES:
            options += f" --policies {','.join(self.policies)}"
        command = f"python -m benchmarks.gpu.parts {self.name} --device {self.device.type}{options}"
        write_result(f"gpu_{self.name}", figures, folder=self.folder, command=command)

    def record_some(self, known: dict[str, Any]) -> None:
        self.record({"is_complete": False, **known})

    def record_report(self, report: Report) -> None:
        self.record_some(asdict(report))


def main() -> None:
    """Run the part and write its figures. What fails is among them, kernels that PyTorch stands in for as well; or it
    is the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("part", nargs="?", choices=list(PARTS))
    parser.add_argument("--list", action="store_true", help="every part, with its minutes and what it measures")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--toy", action="store_true", help="sizes that show only whether everything runs")
    parser.add_argument("--output", type=Path, help="folder for the figures in place of benchmarks/results")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds until it is ended from outside")
    policies = ",".join(DEFAULT_POLICIES)
    policies_help = "promise: the first in all phases, others in the last; NAME+stops: its passes stop between layers"
    parser.add_argument("--policies", default=policies, help=policies_help)
    arguments = parser.parse_args()
    if arguments.list:
        print_parts()
        return
    if arguments.part is None:
        parser.error("which part? --list shows all")
    if arguments.toy and arguments.output is None:
        parser.error("--toy needs --output: a toy is no result")
    folder = arguments.output or RESULTS / "gpu"
    chosen = tuple(arguments.policies.split(","))
    device = chosen_device(arguments.device)
    part = Part(arguments.part, device, arguments.toy, folder, arguments.limit, chosen)
    try:
        figures = _figures(part)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        figures = {"left_out": ["pytest is not installed"]}
    failed = "left_out" if figures.pop("may_fail", False) else "failures"
    figures.setdefault("failures", [])
    figures[failed] = [*figures.get(failed, ()), *(f"{name}: {why}" for name, why in launch_failures().items())]
    part.record({"is_complete": True, "left_out": [], **figures})


def _figures(part: Part) -> dict[str, Any]:
    listed = PARTS[part.name]
    module, _, name = listed.where.partition(":")
    run = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    figures: dict[str, Any]
    if listed.how == PART:
        figures = run(part)
    elif listed.how == MEASURE:
        figures = run(part.device, is_toy=part.is_toy, on_measured=part.record_some)
    else:
        assert listed.how in (GROUPS, SWEEP), "a way to run a part"
        figures = _kernels(part, run, is_sweep=listed.how == SWEEP)
    return figures


def _kernels(part: Part, groups: Groups, *, is_sweep: bool) -> dict[str, Any]:
    shape, dtype = ("toy", "float32") if part.is_toy else ("llama-3-8b", "bfloat16")
    num_rounds = _SWEEP_ROUNDS if is_sweep else _ROUNDS
    spec = KernelBenchmarkSpec(part.device.type, shape, dtype, part.is_toy, num_rounds=num_rounds)
    report = run_kernel_benchmark(spec, part.record_report, groups)
    if not is_sweep:
        return {**asdict(report), "left_out": []}  # what is left out has failed, and is known as such
    of_case: dict[tuple[str, str], list[Any]] = {}
    for row in sorted(report.rows, key=lambda row: row.microseconds):
        of_case.setdefault((row.kernel, row.case), []).append(asdict(row))
    best = [row for rows in of_case.values() for row in rows[:_BEST]]
    return {**asdict(report), "best": best, "may_fail": True}


def sanitize(part: Part) -> dict[str, Any]:
    deadline_s = time.monotonic() + part.limit_s - _RESERVE_S
    return sanitize_self_check(part.device, deadline_s, part.record_some, is_toy=part.is_toy)


def test(part: Part) -> dict[str, Any]:
    return run_tests(max(1.0, part.limit_s - _RESERVE_S))


def iterations(part: Part) -> dict[str, Any]:
    spec = TOY if part.is_toy else IterationSpec("llama-3-8b", device=part.device.type)
    return asdict(run_iteration_benchmark(spec, part.record_report))


def transfers(part: Part) -> dict[str, Any]:
    report = TransferReport()
    spec = _TOY_TRANSFERS if part.is_toy else DEVICE_SPEC
    if part.device.type == CUDA:
        measure_device_transfers(spec, part.device, report, part.record_report)
    else:
        report.rows += pinned_rows(spec, part.device)
    return asdict(report)


def promise(part: Part) -> dict[str, Any]:
    measure = importlib.import_module("benchmarks.gpu.chat_beside_documents").measure_promise
    figures: dict[str, Any] = measure(
        part.device, is_toy=part.is_toy, on_measured=part.record_some, limit_s=part.limit_s, policies=part.policies
    )
    return figures


if __name__ == "__main__":
    main()
