"""The check: every part in a process of its own with a share of the time, and one file of what was found."""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from alignedserve.runtime.device.devices import cuda_obstacle, machine_gpus
from lab.gpu_check.part_list import PARTS, CheckPart
from lab.gpu_check.processes import run_part

TOTAL_S = 300.0
# Exit codes: everything right, something wrong, nothing to check here.
RIGHT, WRONG, NO_GPU = 0, 1, 3
_COMMAND = (sys.executable, "-m", "lab.gpu_check.part")
_KEPT_LINES = 60  # of what a part printed that did not end well

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """What is checked."""

    device: str = "cuda:0"
    seconds: float = TOTAL_S
    is_toy: bool = False  # sizes that show only whether everything runs
    output: Path = Path("alignedserve-gpu-check.json")


@dataclass(slots=True)
class Ended:
    """Ending of one part. Every field is plain JSON."""

    part: str
    seconds: float
    figures: dict[str, Any]
    failures: list[str]
    left_out: list[str]
    log: list[str] = field(default_factory=list)  # its last lines, where something failed


def run_check(spec: CheckSpec, show: Show, parts: tuple[CheckPart, ...] = PARTS) -> int:
    """Run the parts, write the file, return the exit code. Without a GPU it lists the checks that it would run."""
    obstacle = cuda_obstacle()
    if obstacle is not None and not spec.is_toy:
        show(f"No GPU is checked here: {obstacle}")
        show(f"With one, this would run within {spec.seconds:.0f} s, each in a process of its own:")
        for part in parts:
            show(f"  {part.name:<18}{part.what}")
        show(f"and write {spec.output.name}, one file to send back.")
        return NO_GPU
    ended = _run_all(spec, show, parts)
    failures = [f"{part.part}: {failure}" for part in ended for failure in part.failures]
    document = {
        "what": "alignedserve gpu-check",
        "is_toy": spec.is_toy,
        "checked_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_gpus(),
        "failures": failures,
        "parts": {part.part: _as_plain(part) for part in ended},
    }
    spec.output.write_text(json.dumps(document, indent=2) + "\n")
    show(f"{len(failures)} failures. Written to {spec.output}; please send this file back.")
    return WRONG if failures else RIGHT


def _as_plain(ended: Ended) -> dict[str, Any]:
    known = {"seconds": ended.seconds, "failures": ended.failures, "left_out": ended.left_out}
    return {**ended.figures, **known, **({"log": ended.log} if ended.log else {})}


def _run_all(spec: CheckSpec, show: Show, parts: tuple[CheckPart, ...]) -> list[Ended]:
    deadline_s, ended = time.monotonic() + spec.seconds, []
    for index, part in enumerate(parts):
        left_s = deadline_s - time.monotonic()
        limit_s = max(1.0, left_s * part.weight / sum(later.weight for later in parts[index:]))
        show(f"{part.name}: {part.what} (at most {limit_s:.0f} s)")
        ended.append(_run(part, spec, limit_s))
        outcome = "; ".join((*ended[-1].failures, *ended[-1].left_out)) or "right"
        show(f"  {ended[-1].seconds:.0f} s: {outcome}")
    return ended


def _run(part: CheckPart, spec: CheckSpec, limit_s: float) -> Ended:
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "figures.json"
        options = ["--device", spec.device, "--limit", f"{limit_s:.0f}", *(["--toy"] if spec.is_toy else [])]
        problem, log = run_part([*_COMMAND, part.name, str(file), *options], limit_s, Path(name) / "log")
        figures = _read(file)
    failures, left_out = figures.pop("failures", []), figures.pop("left_out", [])
    if problem is not None:
        lines = [line for line in log.splitlines() if line.strip()]
        failures.append(f"{problem}: {lines[-1].strip()[:300]}" if lines else problem)
    last_lines = log.splitlines()[-_KEPT_LINES:] if failures else []
    return Ended(part.name, round(time.monotonic() - started_s, 1), figures, failures, left_out, last_lines)


def _read(file: Path) -> dict[str, Any]:
    try:
        figures: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):  # ended before it wrote
        return {}
    return figures
