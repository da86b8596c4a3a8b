"""The engine's rate on a workload, measured in a process of its own, for scripts that compare with it."""

import multiprocessing

from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.throughput import run_engine_benchmark
from benchmarks.engine.workloads import parse_workload


def output_tokens_per_s(workload: str, shape: str = "opt-125m", dtype: str = "bfloat16") -> float:
    spec = EngineBenchmarkSpec(model=shape, groups=parse_workload(workload), dtype=dtype)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run_engine_benchmark, (spec,)).output_tokens_per_s
