"""Tensor parallelism as far as one GPU shows it: two ranks are refused by name, one rank computes through its code.

Blocks go between the ranks of two workers, all on that GPU (rank_pairs.py).
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from alignedserve.core.errors import AlignedServeError, ConfigError
from alignedserve.profiling.model_loading import load_decoder
from alignedserve.profiling.shapes import SHAPES
from alignedserve.runtime.device.devices import CUDA, check_ranks
from alignedserve.runtime.device.timing import synchronize
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.ranked import rank_spec, started_ranks
from benchmarks.engine.throughput import WorkloadRun, make_engine
from benchmarks.engine.workloads import parse_workload
from benchmarks.gpu.slices.rank_pairs import measure_pairs


def measure_ranks(
    device: torch.device, *, is_toy: bool, on_measured: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the refusal of more ranks than GPUs, and seconds of a workload by one rank and without ranks.

    Also seconds of blocks that go between the ranks of two workers.
    """
    shape, dtype, workload = ("toy", "float32", "3x5:4") if is_toy else ("llama-3-1b", "bfloat16", "64x512:64")
    spec = EngineBenchmarkSpec(
        shape, parse_workload(workload), dtype, device=device.type, max_sequences=64, tensor_parallel=1
    )
    plain = make_engine(load_decoder(shape, dtype, device.type), spec)
    seconds = {"without ranks": _seconds(plain, spec, device)}
    on_measured({"seconds": seconds})
    del plain
    with started_ranks(rank_spec(spec, SHAPES[shape])) as engine:
        seconds["one rank"] = _seconds(engine, spec, device)
    refusal = _refusal(device)
    failures = [] if device.type != CUDA or refusal is not None else ["more ranks than GPUs were not refused"]
    moves: dict[str, dict[str, float]] = {}
    try:
        moves = measure_pairs(device, is_toy=is_toy)
    except (AssertionError, AlignedServeError) as error:
        failures.append(f"blocks between pairs of ranks: {error}")
    return {"seconds": seconds, "moves": moves, "refusal": refusal, "failures": failures, "left_out": []}


def _refusal(device: torch.device) -> str | None:
    """Return how one rank more than there are GPUs (or cores) is refused."""
    most = torch.cuda.device_count() if device.type == CUDA else 10**6
    try:
        check_ranks(device.type, most + 1)
    except ConfigError as error:
        return str(error)
    return None


def _seconds(engine: Any, spec: EngineBenchmarkSpec, device: torch.device) -> float:
    WorkloadRun(engine, spec, spec.groups).run()
    synchronize(device)
    started = time.perf_counter()
    WorkloadRun(engine, spec, spec.groups).run()
    synchronize(device)
    return time.perf_counter() - started
