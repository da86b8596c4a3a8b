"""NVIDIA's compute-sanitizer over a tiny engine on a GPU: prompts, chunks, and decodes that replay recorded graphs."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from alignedserve.runtime.device.devices import CUDA

_WHERE = "/usr/local/cuda/bin/compute-sanitizer"
_TOOLS = ("memcheck", "racecheck", "initcheck")
_EXIT_FOUND = 86  # of the sanitizer, where it has found an error
_CHECK = (sys.executable, "-m", "alignedserve.runtime.device_check.self_check")
_KEPT_LINES = 40

OnMeasured = Callable[[dict[str, Any]], None]


def sanitize_self_check(
    device: torch.device, deadline_s: float, on_measured: OnMeasured, *, is_toy: bool = False
) -> dict[str, Any]:
    """Run the self-check alone, then under each tool; `on_measured` is told after each. What failed is in `failures`.

    Without a GPU, or without the tool, only the self-check runs, and what was left out is named.
    """
    name = f"{device.type}:0" if device.type == CUDA else device.type
    found: dict[str, Any] = {"seconds": {}, "failures": [], "left_out": []}
    tool = shutil.which("compute-sanitizer") or (_WHERE if Path(_WHERE).exists() else None)
    runs: dict[str, list[str]] = {"self-check": [*_CHECK, name]}
    if device.type != CUDA:
        found["left_out"].append("compute-sanitizer needs a GPU")
    elif tool is None:
        found["left_out"].append("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    else:
        options = ("--error-exitcode", str(_EXIT_FOUND), "--target-processes", "all")
        runs |= {kind: [tool, "--tool", kind, *options, *_CHECK, name] for kind in _TOOLS[: 1 if is_toy else None]}
    for kind, command in runs.items():
        started_s = time.monotonic()
        problem = _run(command, deadline_s)
        found["seconds"][kind] = round(time.monotonic() - started_s, 1)
        if problem is not None:
            found["failures"].append(f"{kind}: {problem}")
        on_measured(found)
    return found


def _run(command: list[str], deadline_s: float) -> str | None:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, deadline_s - time.monotonic()), check=False
        )
    except subprocess.TimeoutExpired:
        return "was not through when its time was over"
    print("\n".join((ended.stdout + ended.stderr).splitlines()[-_KEPT_LINES:]), flush=True)
    if ended.returncode == _EXIT_FOUND:
        errors = [line for line in (ended.stdout + ended.stderr).splitlines() if line.startswith("========= ")]
        return f"{errors[1] if len(errors) > 1 else 'errors were found'}"
    if ended.returncode:
        return f"ended with {ended.returncode}"
    return None if '"ok": true' in ended.stdout else "the self-check did not pass"
