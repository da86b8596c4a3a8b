"""One part of the check, in a process that may end in any way without costing the others.

    python -m lab.gpu_check.part kernels FILE --device cuda:0

Writes FILE, JSON, again whenever something more is known, so that a crash leaves what came before it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from alignedserve.runtime.device.accelerator import use_device
from alignedserve.runtime.device.devices import CUDA, FAILURE, OK, ask
from alignedserve.runtime.model.device_kinds import KINDS as DEVICE_KINDS
from kernels import gpu_dispatch
from lab.gpu_check.answers import compare_answers
from lab.gpu_check.kernel_errors import DTYPES, kernel_errors, replaced_kernels
from lab.gpu_check.links import measure_links
from lab.gpu_check.part_list import ANSWERS, KERNELS, KINDS, LINKS, NO_CACHING, SANITIZER, SELF_CHECK, SPEED
from lab.gpu_check.speed import measure_speed

_SELF_CHECK = "alignedserve.runtime.device_check.self_check"
_EAGER = "--eager"  # nothing is recorded: neither tool knows graphs
_VARIABLES = {SANITIZER: "TORCH_CUDA_SANITIZER", NO_CACHING: "PYTORCH_NO_CUDA_MEMORY_CACHING"}
_OWN_END_S = 3.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part's task."""

    name: str
    device: torch.device
    is_toy: bool
    file: Path
    limit_s: float

    def note(self, figures: dict[str, Any]) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(figures))
        new.replace(self.file)


def _kernels(part: Part) -> dict[str, Any]:
    rows, failures = [], []
    for kernel_error in kernel_errors(part.device, DTYPES[1:] if part.is_toy else DTYPES):
        rows.append(kernel_error._asdict())
        if not kernel_error.is_right:
            failures.append(
                f"{kernel_error.kernel}, {kernel_error.dtype}: off by {kernel_error.error:.3g}, "
                f"allowed {kernel_error.limit:.3g}"
            )
        part.note({"rows": rows, "failures": failures})
    return {"rows": rows, "failures": [*failures, *replaced_kernels()]}


def _self_check(part: Part) -> dict[str, Any]:
    variable = _VARIABLES.get(part.name)
    if part.device.type != CUDA:
        return {"left_out": ["needs a GPU"]}
    if variable is not None:
        os.environ[variable] = "1"
    started_s = time.monotonic()
    command = [sys.executable, "-m", _SELF_CHECK, str(part.device), *([_EAGER] if variable else [])]
    said = ask(command, part.limit_s - _OWN_END_S)
    seconds = round(time.monotonic() - started_s, 1)
    failure = _failure_of(said)
    return {"seconds": seconds, "failures": [] if failure is None else [failure]}


def _kinds(part: Part) -> dict[str, Any]:
    if part.device.type != CUDA:
        return {"left_out": ["needs a GPU"]}
    ends_s = time.monotonic() + part.limit_s - _OWN_END_S
    figures: dict[str, Any] = {"passed": [], "failures": [], "left_out": []}
    for kind in DEVICE_KINDS:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            figures["left_out"].append(f"{kind}: the time was over")
            continue
        said = ask([sys.executable, "-m", _SELF_CHECK, str(part.device), "--kind", kind], left_s)
        failure = _failure_of(said)
        if failure is None:
            figures["passed"].append(kind)
        else:
            figures["failures"].append(f"{kind}: {failure}")
        part.note(figures)
    return figures


def _failure_of(said: dict[str, Any] | str) -> str | None:
    if isinstance(said, str):
        return f"it {said}"
    return None if said.get(OK) is True else str(said.get(FAILURE))


def _answers(part: Part) -> dict[str, Any]:
    return compare_answers(part.device, is_toy=part.is_toy)


def _speed(part: Part) -> dict[str, Any]:
    return measure_speed(part.device, part.note, is_toy=part.is_toy)


def _links(part: Part) -> dict[str, Any]:
    return measure_links(part.device, part.note, is_toy=part.is_toy)


WORKS: dict[str, Callable[[Part], dict[str, Any]]] = {
    KERNELS: _kernels,
    SELF_CHECK: _self_check,
    SANITIZER: _self_check,
    NO_CACHING: _self_check,
    KINDS: _kinds,
    ANSWERS: _answers,
    SPEED: _speed,
    LINKS: _links,
}


def main() -> None:
    """Run the part that the command line names; what fails is among its figures, or is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(WORKS))
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--toy", action="store_true", help="sizes that show only whether everything runs")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until it is ended from outside")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    use_device(device)
    part = Part(arguments.part, device, arguments.toy, arguments.file, arguments.limit)
    # On a CPU, for a trial, in Triton's interpreter where that is asked for.
    with patch.object(gpu_dispatch, "wants_fused_kernels", gpu_dispatch.gpu_kernels_available):
        part.note({"failures": [], "left_out": [], **WORKS[part.name](part)})


if __name__ == "__main__":
    main()
