"""Work that a step is spared, against doing it: rows of the last layer, and logits that are only compared.

Rounds alternate within one process: everything computed, the last layer for sampled tokens alone, and with that the
highest logits alone. Medians of the ratios of neighbours count.

    python -m benchmarks.engine.spared_work [--workload w1 w2 w3] [--dtype float32 bfloat16] [--rounds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import psutil

from alignedserve.microbench.engine.throughput import (
    EngineBenchmarkSpec,
    RequestGroup,
    WorkloadRun,
    load_decoder,
    make_engine,
    parse_workload,
)
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.step_batch import BatchBuilder
from benchmarks.support.recording import write_result

SHAPE = "opt-125m"
EVERYTHING, LAST_ROWS, HIGHEST = "everything", "last_rows", "last_rows_and_highest"


def main() -> None:
    """Run every workload, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["w1", "w2", "w3"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    for dtype in arguments.dtype:
        decoder = load_decoder(SHAPE, dtype)
        for workload in arguments.workload:
            spec = EngineBenchmarkSpec(SHAPE, parse_workload(workload), dtype)
            rows.append({"workload": workload, "dtype": dtype, **compare(make_engine(decoder, spec), spec, arguments)})
            print(rows[-1]["workload"], dtype, {name: round(ratio, 3) for name, ratio in rows[-1]["ratio"].items()})
            write_result("spared_work", {"shape": SHAPE, "rounds": arguments.rounds, "rows": rows})


def compare(engine: Engine, spec: EngineBenchmarkSpec, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of every way, and how many times as long computing everything took."""
    WorkloadRun(engine, spec, (RequestGroup(1, 4, 2),)).run()
    seconds: dict[str, list[float]] = {EVERYTHING: [], LAST_ROWS: [], HIGHEST: []}
    loads = []
    for _ in range(arguments.rounds):
        for way, measured in seconds.items():
            measured.append(timed(way, WorkloadRun(engine, spec, spec.groups).run))
        loads.append(psutil.getloadavg()[0])
    ratios = {
        way: statistics.median(whole / own for whole, own in zip(seconds[EVERYTHING], seconds[way], strict=True))
        for way in (LAST_ROWS, HIGHEST)
    }
    return {"ratio": ratios, "seconds": seconds, "load": loads}


def timed(way: str, run: Callable[[], None]) -> float:
    """Return the seconds of one run that spares so much."""
    with ExitStack() as patches:
        if way != HIGHEST:
            patches.enter_context(patch.object(Sampler, "wants_highest_alone", lambda *_: False))
        if way == EVERYTHING:
            patches.enter_context(patch.object(BatchBuilder, "_plan_last", lambda *_: None))
        started = time.perf_counter()
        run()
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
