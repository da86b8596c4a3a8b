"""Correctness and speed of the GPU path, on one GPU: every target of docs/gpu.md in nine minutes.

    python -m benchmarks.gpu                        # figures in benchmarks/results/gpu/gpu_<part>.json
    python -m benchmarks.gpu --toy --device cpu     # shows without a GPU whether everything runs; records nothing
    python -m benchmarks.gpu --list                 # every part, those that no target needs as well
    python -m benchmarks.gpu --parts products,prompts           # these alone

Needs PyTorch, numpy and what the model and its files need, no Ray. Every part is a process of its own with a share of
the time: one that crashes or hangs is reported at the end (exit code 1), and the others go on.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.devices import CPU, cuda_obstacle
from benchmarks.gpu.part_list import PARTS, WITH_TARGETS, ListedPart, print_parts
from benchmarks.gpu.targets import TargetOutcome, outcomes
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.device_choice import chosen_device
from benchmarks.measuring.recording import RESULTS, write_result
from lab.gpu_check.processes import run_part

TOTAL_S = 540.0
PART_COMMAND = (sys.executable, "-m", "benchmarks.gpu.parts")
_WIDTH = 160  # of the table where there is no terminal
_SHOWN_LINES = 30  # of what a part printed that did not end well


@dataclass(slots=True)
class Ended:
    """Ending of one part. Every field is plain JSON."""

    part: str
    seconds: float
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # its last lines, where something failed


class Runner:
    """Runs parts one after the other and keeps what they found."""

    def __init__(self, arguments: Sequence[str], output: Path | None, total_s: float) -> None:
        """`arguments`: for every part. `output`: where their figures go as soon as each ends."""
        self.ended: list[Ended] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self._arguments = arguments
        self._output = output
        self._deadline_s = time.monotonic() + total_s

    def run(self, parts: Sequence[ListedPart]) -> None:
        """Run each in its share of the time; what a part does not need, the next ones have."""
        for index, part in enumerate(parts):
            left_s = self._deadline_s - time.monotonic()
            limit_s = max(1.0, left_s * part.minutes / sum(later.minutes for later in parts[index:]))
            self._run_part(part.name, limit_s)

    def _run_part(self, part: str, limit_s: float) -> None:
        print(f"== {part} (at most {limit_s:.0f} s)", flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command = [*PART_COMMAND, part, "--output", str(folder), *self._arguments, "--limit", f"{limit_s:.0f}"]
            problem, log = run_part(command, limit_s, folder / "log")
            figures = self._figures_of(part, folder)
        seconds = round(time.monotonic() - started, 1)
        ended = Ended(part, seconds, list(figures.get("failures", ())), list(figures.get("left_out", ())))
        if problem is not None:
            ended.failures.append(problem)
        self.ended.append(ended)
        self.figures[part] = figures
        if ended.failures:
            ended.log = log.splitlines()[-_SHOWN_LINES:]
            print("\n".join(ended.log))
        print(f"   {seconds:.0f} s, {'; '.join((*ended.failures, *ended.left_out)) or 'went through'}", flush=True)

    def _figures_of(self, part: str, folder: Path) -> dict[str, Any]:
        record = folder / f"gpu_{part}.json"
        try:
            figures: dict[str, Any] = json.loads(record.read_text())["figures"]
        except (OSError, ValueError):  # ended before it wrote, or while it did
            return {}
        if self._output is not None:
            self._output.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(record, self._output / record.name)
        return figures


def main() -> int:
    """Run everything; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--toy", action="store_true", help="sizes that show only whether everything runs")
    parser.add_argument("--list", action="store_true", help="every part, with its minutes and what it measures")
    parser.add_argument("--parts", help="names of parts, separated by commas, in place of those with targets")
    parser.add_argument("--output", type=Path, help="folder for the figures in place of benchmarks/results")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for everything together")
    arguments = parser.parse_args()
    if arguments.list:
        print_parts()
        return 0
    chosen = _chosen_parts(arguments.parts, parser, is_toy=arguments.toy)
    try:
        device = chosen_device(arguments.device).type
    except ConfigError as error:
        parser.error(f"--{error}")
    if device == CPU and not arguments.toy:
        parser.error(f"on a CPU only --toy makes sense ({cuda_obstacle() or 'there is a GPU: leave --device out'})")
    output = arguments.output or (None if arguments.toy else RESULTS / "gpu")
    runner = Runner(["--device", device, *(["--toy"] if arguments.toy else [])], output, arguments.seconds)
    runner.run(chosen)
    return _report(runner, output, is_toy=arguments.toy)


def _chosen_parts(names: str | None, parser: argparse.ArgumentParser, *, is_toy: bool) -> Sequence[ListedPart]:
    if names is None:
        return [PARTS[name] for name in (WITH_TARGETS if is_toy else ("tests", *WITH_TARGETS))]
    chosen = list(dict.fromkeys(names.split(",")))
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--parts: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return [PARTS[name] for name in chosen]


def _report(runner: Runner, output: Path | None, *, is_toy: bool) -> int:
    targets = outcomes(runner.figures, is_toy=is_toy)
    if output is not None:
        figures = {"parts": [asdict(part) for part in runner.ended], "targets": [asdict(target) for target in targets]}
        print(write_result("gpu_targets", figures, folder=output))
    _print_targets(targets)
    failed = [f"{part.part}: {failure}" for part in runner.ended for failure in part.failures]
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


def _print_targets(targets: Sequence[TargetOutcome]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    table = Table(title="targets", title_justify="left", header_style="bold")
    for heading in ("what", "target", "seen", ""):
        table.add_column(heading)
    for target in targets:
        table.add_row(target.what, target.target, target.seen, target.verdict)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
