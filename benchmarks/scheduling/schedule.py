"""The KV pool's index and its batch formers: what scheduling costs, and how narrow the batches are.

    python -m benchmarks.scheduling.schedule  # targets at 100 000: 5 us a change, 1 ms a batch (p99), 1 KiB a request

Every distribution of lengths is measured `--rounds` times, and of each figure the median of the rounds is recorded:
on a machine that does other work as well, one round says little.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from alignedserve.microbench.scheduling.benchmark import ScheduleBenchmarkSpec, run_schedule_benchmark
from alignedserve.microbench.scheduling.pool_arrivals import LENGTHS
from benchmarks.support.recording import write_result


def measure(lengths: str, rounds: int) -> dict[str, Any]:
    """Return medians over the rounds for one distribution of lengths."""
    results = [run_schedule_benchmark(ScheduleBenchmarkSpec(lengths=lengths)) for _ in range(rounds)]
    limits = {name: getattr(results[0], name) for name in ("max_blocks", "max_requests", "min_requests")}
    return {
        "lengths": lengths,
        **limits,
        "forming": _medians([[asdict(row) for row in result.forming] for result in results]),
        "iterations": _medians([[asdict(row) for row in result.iterations] for result in results]),
    }


def _medians(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the same table of every round as one of medians."""
    return [{name: _median([row[name] for row in rows]) for name in rows[0]} for rows in zip(*rounds, strict=True)]


def _median(values: list[Any]) -> Any:
    return round(statistics.median(values), 3) if isinstance(values[0], float) else values[len(values) // 2]


def main() -> None:
    """Measure; print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    figures = []
    for lengths in LENGTHS:
        figures.append(measure(lengths, rounds))
        for row in [row for table in ("forming", "iterations") for row in figures[-1][table]]:
            print(lengths, row)
    write_result("schedule", figures)


if __name__ == "__main__":
    main()
