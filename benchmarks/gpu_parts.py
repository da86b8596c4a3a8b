"""One part of benchmarks.gpu in a process of its own, which may end in any way without costing the others.

    python -m benchmarks.gpu_parts kernels --device cuda

Writes gpu_<part>.json again whenever something more was measured, so that a crash leaves what came before it.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from alignedserve.bench.device_choice import chosen_device
from alignedserve.bench.device_result import IterationReport, KernelReport
from alignedserve.bench.device_transfers import pinned_rows
from alignedserve.bench.engine_iterations import TOY, IterationSpec, run_iteration_benchmark
from alignedserve.bench.kernels import KernelBenchmarkSpec, run_kernel_benchmark
from alignedserve.bench.transfer import measure_device_transfers
from alignedserve.bench.transfer_result import TransferReport
from alignedserve.bench.transfer_spec import DEVICE_SPEC, TransferBenchmarkSpec
from alignedserve.runtime.devices import CUDA
from benchmarks.gpu_generation import compare_generation
from benchmarks.gpu_logits import compare_logits
from benchmarks.recording import RESULTS, write_result
from kernels.gpu_choice import replaced

TESTS, LOGITS, KERNELS = "tests", "logits", "kernels"
ITERATIONS, TRANSFERS, GENERATION = "iterations", "transfers", "generation"

_TESTS_FOLDER = "tests/gpu_kernels"
_REPOSITORY = Path(__file__).parent.parent
_TOY_TRANSFERS = TransferBenchmarkSpec(("toy",), (1,), num_rounds=1)
_KEPT_OF_LOG = 8000  # characters from the end
_OWN_END_S = 5.0  # what a part needs to write what it knows when it ends what it has started

Report = KernelReport | IterationReport | TransferReport


@dataclass(frozen=True, slots=True)
class Part:
    """What one part is to do."""

    name: str
    device: torch.device
    is_toy: bool
    folder: Path
    limit_s: float

    def record(self, figures: dict[str, Any]) -> None:
        """Write them."""
        toy = " --toy" if self.is_toy else ""
        command = f"python -m benchmarks.gpu_parts {self.name} --device {self.device.type}{toy}"
        write_result(f"gpu_{self.name}", figures, folder=self.folder, command=command)

    def record_some(self, known: dict[str, Any]) -> None:
        """Write what is known so far."""
        self.record({"is_complete": False, **known})

    def record_report(self, report: Report) -> None:
        """Likewise."""
        self.record_some(asdict(report))


def main() -> None:
    """Run the part and write its figures. What fails is among them, kernels that PyTorch stands in for as well; or it
    is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--toy", action="store_true", help="sizes that show only whether everything runs")
    parser.add_argument("--output", type=Path, help="folder for the figures in place of benchmarks/results")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds until it is ended from outside")
    arguments = parser.parse_args()
    if arguments.toy and arguments.output is None:
        parser.error("--toy needs --output: a toy is no result")
    device = chosen_device(arguments.device)
    part = Part(arguments.part, device, arguments.toy, arguments.output or RESULTS, arguments.limit)
    try:
        figures = PARTS[part.name](part)
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "transformers"):
            raise
        figures = {"left_out": [f"{error.name} is not installed"]}
    figures.setdefault("failures", []).extend(f"{name}: {reason}" for name, reason in replaced().items())
    part.record({"is_complete": True, "left_out": [], **figures})


# --- correctness ------------------------------------------------------------------------------------------------------


def _tests(part: Part) -> dict[str, Any]:
    """The kernels' tests on the GPU, with none of this project's settings, whose plugins may not be here, and without
    those that compile for a GPU that is not here."""
    import pytest

    settings = ("-c", os.devnull, f"--rootdir={_REPOSITORY}", f"--confcutdir={_TESTS_FOLDER}", "-p", "no:cacheprovider")
    command = [
        sys.executable,
        "-m",
        "pytest",
        *settings,
        "-v",
        "--tb=short",
        _TESTS_FOLDER,
        f"--ignore={_TESTS_FOLDER}/test_compiling.py",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    log = part.folder / "gpu_tests.log"
    failures = []
    with log.open("w") as written:
        try:
            ended = subprocess.run(
                command,
                stdout=written,
                stderr=subprocess.STDOUT,
                cwd=_REPOSITORY,
                env=environment,
                timeout=max(1.0, part.limit_s - _OWN_END_S),
                check=False,
            )
        except subprocess.TimeoutExpired:
            failures.append(f"ended after {part.limit_s - _OWN_END_S:.0f} s, before the last test")
        else:
            if ended.returncode != 0:
                failures.append(f"pytest ended with {ended.returncode}")
    text = log.read_text(errors="replace")
    print(text[-_KEPT_OF_LOG:], flush=True)
    counts, failed = count_tests(text)
    kept = text[-_KEPT_OF_LOG:].splitlines() if failures else []
    return {"pytest": pytest.__version__, "counts": counts, "failed": failed, "failures": failures, "log": kept}


def count_tests(log: str) -> tuple[dict[str, int], list[str]]:
    """How many tests came to what, and which failed, of a log by `pytest -v` that may end anywhere."""
    seen = re.findall(r"^(\S+::.*) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", log, flags=re.MULTILINE)
    counts: dict[str, int] = {}
    for _, what in seen:
        counts[what.lower()] = counts.get(what.lower(), 0) + 1
    return counts, [name.strip() for name, what in seen if what in ("FAILED", "ERROR")]


def _logits(part: Part) -> dict[str, Any]:
    return compare_logits(part.device, is_toy=part.is_toy)


# --- speed ------------------------------------------------------------------------------------------------------------


def _kernels(part: Part) -> dict[str, Any]:
    shape, dtype = ("toy", "float32") if part.is_toy else ("llama-3-8b", "bfloat16")
    report = run_kernel_benchmark(KernelBenchmarkSpec(part.device.type, shape, dtype, part.is_toy), part.record_report)
    return {**asdict(report), "left_out": []}  # what is left out has failed, and is known as such


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
    return compare_generation(part.device, is_toy=part.is_toy, on_measured=part.record_some)


PARTS: dict[str, Callable[[Part], dict[str, Any]]] = {
    TESTS: _tests,
    LOGITS: _logits,
    KERNELS: _kernels,
    ITERATIONS: _iterations,
    TRANSFERS: _transfers,
    GENERATION: _generation,
}


if __name__ == "__main__":
    main()
