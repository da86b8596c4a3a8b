"""One part of benchmarks.gpu in a process of its own, which may end in any way without costing the others.

    python -m benchmarks.gpu.parts kernels --device cuda
    python -m benchmarks.gpu.parts --list                           # every part, with its minutes

Writes gpu_<part>.json again whenever something more was measured, so that a crash leaves what came before it.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from alignedserve.runtime.device.devices import CUDA
from benchmarks.engine.iterations import TOY, IterationSpec, run_iteration_benchmark
from benchmarks.gpu.generation import compare_generation
from benchmarks.gpu.kernel_tests import run_tests
from benchmarks.gpu.logits import compare_logits
from benchmarks.gpu.part_list import DEFAULT_POLICIES, PART_LIST, print_parts
from benchmarks.gpu.sanitizer import sanitize_self_check
from benchmarks.kernels.benchmark import Groups, KernelBenchmarkSpec, all_groups, run_kernel_benchmark
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.device_choice import chosen_device
from benchmarks.measuring.recording import RESULTS, write_result
from benchmarks.measuring.results import IterationReport, KernelReport, TransferReport
from benchmarks.transfer.benchmark import measure_device_transfers
from benchmarks.transfer.device_transfers import pinned_rows
from benchmarks.transfer.spec import DEVICE_SPEC, TransferBenchmarkSpec
from kernels.gpu_dispatch import launch_failures

SANITIZER, TESTS, LOGITS, KERNELS = "sanitizer", "tests", "logits", "kernels"
ITERATIONS, TRANSFERS, GENERATION = "iterations", "transfers", "generation"
_SLICES = "benchmarks.gpu.slices"

_TOY_TRANSFERS = TransferBenchmarkSpec(("toy",), (1,), num_rounds=1)
_SWEEP_ROUNDS, _BEST = 5, 3  # of each case
_OWN_END_S = 5.0  # what a part needs to write what it knows when it ends what it has started

Report = KernelReport | IterationReport | TransferReport


@dataclass(frozen=True, slots=True)
class Part:
    """Task of one part."""

    name: str
    device: torch.device
    is_toy: bool
    folder: Path
    limit_s: float
    is_compiled: bool  # generation: transformers compiled as well
    policies: tuple[str, ...]  # promise: in turn

    def record(self, figures: dict[str, Any]) -> None:
        options = f"{' --toy' if self.is_toy else ''}{' --compiled' if self.is_compiled else ''}"
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
    parser.add_argument("--compiled", action="store_true", help="generation: transformers compiled as well (minutes)")
    policies = ",".join(DEFAULT_POLICIES)
    own_help = "promise: the first in all phases, others in the last; NAME+stops: its passes stop between layers"
    parser.add_argument("--policies", default=policies, help=own_help)
    arguments = parser.parse_args()
    if arguments.list:
        print_parts()
        return
    if arguments.part is None:
        parser.error("which part? --list shows all")
    if arguments.toy and arguments.output is None:
        parser.error("--toy needs --output: a toy is no result")
    device = chosen_device(arguments.device)
    folder = arguments.output or RESULTS / "gpu"
    chosen = tuple(arguments.policies.split(","))
    part = Part(arguments.part, device, arguments.toy, folder, arguments.limit, arguments.compiled, chosen)
    try:
        figures = PARTS[part.name](part)
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "transformers"):
            raise
        figures = {"left_out": [f"{error.name} is not installed"]}
    failed = "left_out" if figures.pop("may_fail", False) else "failures"
    figures.setdefault("failures", [])
    figures[failed] = [*figures.get(failed, ()), *(f"{name}: {why}" for name, why in launch_failures().items())]
    part.record({"is_complete": True, "left_out": [], **figures})


# --- correctness ------------------------------------------------------------------------------------------------------


def sanitize(part: Part) -> dict[str, Any]:
    deadline_s = time.monotonic() + part.limit_s - _OWN_END_S
    return sanitize_self_check(part.device, deadline_s, part.record_some, is_toy=part.is_toy)


def _tests(part: Part) -> dict[str, Any]:
    return run_tests(max(1.0, part.limit_s - _OWN_END_S))


def _logits(part: Part) -> dict[str, Any]:
    return compare_logits(part.device, is_toy=part.is_toy)


# --- speed ------------------------------------------------------------------------------------------------------------


def _kernels(part: Part, groups: Groups = all_groups) -> dict[str, Any]:
    shape, dtype = ("toy", "float32") if part.is_toy else ("llama-3-8b", "bfloat16")
    spec = KernelBenchmarkSpec(part.device.type, shape, dtype, part.is_toy)
    report = run_kernel_benchmark(spec, part.record_report, groups)
    return {**asdict(report), "left_out": []}  # what is left out has failed, and is known as such


def _groups_of(module: str, name: str) -> Callable[[Part], dict[str, Any]]:
    return lambda part: _kernels(part, getattr(importlib.import_module(f"{_SLICES}.{module}"), name))


def _sweep_of(module: str, name: str) -> Callable[[Part], dict[str, Any]]:
    def run(part: Part) -> dict[str, Any]:
        groups = getattr(importlib.import_module(f"{_SLICES}.{module}"), name)
        shape, dtype = ("toy", "float32") if part.is_toy else ("llama-3-8b", "bfloat16")
        spec = KernelBenchmarkSpec(part.device.type, shape, dtype, part.is_toy, num_rounds=_SWEEP_ROUNDS)
        report = run_kernel_benchmark(spec, part.record_report, groups)
        of_case: dict[tuple[str, str], list[Any]] = {}
        for row in sorted(report.rows, key=lambda row: row.microseconds):
            of_case.setdefault((row.kernel, row.case), []).append(asdict(row))
        best = [row for rows in of_case.values() for row in rows[:_BEST]]
        return {**asdict(report), "best": best, "may_fail": True}

    return run


def _measured_by(module: str, name: str) -> Callable[[Part], dict[str, Any]]:
    def run(part: Part) -> dict[str, Any]:
        measure = getattr(importlib.import_module(f"{_SLICES}.{module}"), name)
        figures: dict[str, Any] = measure(part.device, is_toy=part.is_toy, on_measured=part.record_some)
        return figures

    return run


def _iterations(part: Part) -> dict[str, Any]:
    spec = TOY if part.is_toy else IterationSpec("llama-3-8b", device=part.device.type)
    return asdict(run_iteration_benchmark(spec, part.record_report))


def _transfers(part: Part) -> dict[str, Any]:
    report = TransferReport()
    spec = _TOY_TRANSFERS if part.is_toy else DEVICE_SPEC
    if part.device.type == CUDA:
        measure_device_transfers(spec, part.device, report, part.record_report)
    else:
        report.rows += pinned_rows(spec, part.device)
    return asdict(report)


def _generation(part: Part) -> dict[str, Any]:
    return compare_generation(
        part.device, is_toy=part.is_toy, is_compiled=part.is_compiled, on_measured=part.record_some
    )


def _promise(part: Part) -> dict[str, Any]:
    measure = importlib.import_module("benchmarks.gpu.chat_beside_documents").measure_promise
    figures: dict[str, Any] = measure(
        part.device,
        is_toy=part.is_toy,
        on_measured=part.record_some,
        limit_s=part.limit_s,
        policies=part.policies,
    )
    return figures


PARTS: dict[str, Callable[[Part], dict[str, Any]]] = {
    SANITIZER: sanitize,
    TESTS: _tests,
    LOGITS: _logits,
    KERNELS: _kernels,
    ITERATIONS: _iterations,
    TRANSFERS: _transfers,
    GENERATION: _generation,
    "attention-sweep": _sweep_of("attention_sweep", "sweep_cases"),
    "fp8-cache": _groups_of("attention_sweep", "cache_cases"),
    "products": _groups_of("narrow_products", "product_cases"),
    "products-sweep": _sweep_of("products_sweep", "tiling_cases"),
    "narrow-iterations": _measured_by("narrow_iterations", "compare_iterations"),
    "prompts": _groups_of("prompts", "prompt_cases"),
    "list-copies": _measured_by("list_copies", "measure_lists"),
    "promise": _promise,
    "mixed": _measured_by("mixed_iterations", "measure_mixed"),
    "kinds": _measured_by("kind_models", "measure_kinds"),
    "latents-sweep": _sweep_of("kind_kernels", "latent_sweep"),
    "states-sweep": _sweep_of("kind_kernels", "state_sweep"),
    "scores": _groups_of("kind_kernels", "score_cases"),
    "profile": _measured_by("step_profile", "profile_steps"),
}
assert list(PARTS) == [part.name for part in PART_LIST], "every part is listed"


if __name__ == "__main__":
    main()
