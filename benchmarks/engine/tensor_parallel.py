"""Two ranks beside one process with as many threads: W1, in turns, by shared memory and by torch.distributed.

python -m benchmarks.engine.tensor_parallel           # OPT of 125M in float32, W1: ranks at most 10 % slower
python -m benchmarks.engine.tensor_parallel --toy     # whether everything runs
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from alignedserve.microbench.engine.ranked import rank_spec, started_ranks
from alignedserve.microbench.engine.throughput import (
    EngineBenchmarkSpec,
    WorkloadRun,
    load_decoder,
    make_engine,
    parse_workload,
)
from alignedserve.microbench.shapes import SHAPES
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.engine.engine import Engine
from benchmarks.support.recording import write_result

MODEL, NUM_RANKS = "opt-125m", 2
ONE, SHARED, GROUP = "one process", "ranks, shared memory", "ranks, gloo"


@contextmanager
def engines(spec: EngineBenchmarkSpec, num_threads: int) -> Iterator[dict[str, tuple[Engine, int]]]:
    """Give an engine of each kind, with the threads of this process while it runs."""
    torch.set_num_threads(num_threads)
    one = make_engine(load_decoder(spec.model, spec.dtype), spec)
    per_rank = max(num_threads // NUM_RANKS, 1)
    torch.set_num_threads(per_rank)
    ranks = rank_spec(replace(spec, tensor_parallel=NUM_RANKS), SHAPES[spec.model])
    with started_ranks(ranks) as shared, started_ranks(ranks, uses_process_group=True) as group:
        yield {ONE: (one, num_threads), SHARED: (shared, per_rank), GROUP: (group, per_rank)}


def timed(engine: Engine, num_threads: int, spec: EngineBenchmarkSpec) -> dict[str, float]:
    """Run the workload once and return its times in seconds."""
    torch.set_num_threads(num_threads)
    run = WorkloadRun(engine, spec, spec.groups)
    began_s = time.perf_counter()
    run.run()
    wall_s = time.perf_counter() - began_s
    return {"wall_s": wall_s, "prefill_s": run.times.prefill_s, "decode_s": run.times.decode_s}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", default="w1")
    options = parser.parse_args()
    workload = "2x8:2" if options.toy else options.workload
    spec = EngineBenchmarkSpec(MODEL, parse_workload(workload, 0))
    times: dict[str, list[dict[str, float]]] = {}
    with engines(spec, num_cores()) as by_kind:
        for turn in range(options.rounds + 1):
            for kind in list(by_kind)[:: 1 if turn % 2 else -1]:  # none always comes after the same one
                engine, num_threads = by_kind[kind]
                found = timed(engine, num_threads, spec)
                print(kind, found, flush=True)
                if turn:  # the first warms up
                    times.setdefault(kind, []).append(found)
    medians = {
        kind: {name: statistics.median(one[name] for one in own) for name in own[0]} for kind, own in times.items()
    }
    ratios = {kind: statistics.median(_ratios(times[kind], times[ONE])) for kind in (SHARED, GROUP)}
    print(medians, ratios)
    if not options.toy:
        result = {"model": MODEL, "workload": workload, "threads": num_cores(), "ranks": NUM_RANKS}
        write_result("tensor_parallel", {**result, "medians": medians, "wall_by_one_process": ratios, "turns": times})


def _ratios(ranks: list[dict[str, float]], one: list[dict[str, float]]) -> list[float]:
    """Return the ratio of the times of each turn."""
    return [own["wall_s"] / other["wall_s"] for own, other in zip(ranks, one, strict=True)]


if __name__ == "__main__":
    main()
