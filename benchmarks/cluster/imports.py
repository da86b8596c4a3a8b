"""Seconds until commands and processes have imported what they work with, and seconds to collect all tests.

python -m benchmarks.cluster.imports  # targets: help in 0.25 s, a worker in 2.5 s, collection in 5 s

CPU seconds say the same on a busy machine; the others do not.
"""

import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.server import ALIGNEDSERVE

MODULES = {
    "pool": "kvpool.service",
    "router": "router.service",
    "gateway": "alignedserve.gateway.start",
    "batches": "alignedserve.batch_worker.service",
    "worker": "decode_worker.actor, decode_worker.start",
    "of which torch": "torch",
    "driver": "alignedserve.cli.commands.serving.serve",
}
CASES = {
    "help": [ALIGNEDSERVE, "--help"],
    **{name: [sys.executable, "-c", f"import {modules}"] for name, modules in MODULES.items()},
    "collection": [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""],
}


class Taken(NamedTuple):
    """Seconds that a process took."""

    wall_s: float
    cpu_s: float


def measure(command: list[str]) -> Taken:
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return Taken(time.monotonic() - began_s, usage.ru_utime + usage.ru_stime)


def main() -> None:
    """Measure every case several times, in turns; print and record medians."""
    options = parser_of(__doc__, rounds=3, name="serving/imports").parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for command in CASES.values():  # with compiled files and a warm page cache
        measure(command)
    rounds = [{name: measure(command) for name, command in CASES.items()} for _ in range(options.rounds)]
    figures = {
        name: {
            field: round(statistics.median(getattr(taken[name], field) for taken in rounds), 2)
            for field in Taken._fields
        }
        for name in CASES
    }
    for name, taken in figures.items():
        print(f"{name:16} {taken['wall_s']:6.2f} s, {taken['cpu_s']:6.2f} s of CPU")
    write_result(options.name, figures)


if __name__ == "__main__":
    main()
