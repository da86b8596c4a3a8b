"""The engine alone, offline: no gateway, no router, no pool; how near it is to the limits of the device.

    python -m benchmarks.engine                                      # CPU: opt-125m, w1; GPU: an 8B shape's iterations
    python -m benchmarks.engine --workload w3 --dtype bfloat16 --rounds 3 --name engine/w3    # the median is recorded

A workload is REQUESTSxPROMPT:OUTPUT, a comma between groups; w1, w2, w3, w4, one; or iterations: single ones against
what the device can do. Loads nothing that only a server needs (Ray, msgspec, an HTTP client): it runs on a bare machine
with a GPU.
"""

import argparse
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from rich.console import Console

from alignedserve.core.errors import ConfigError
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.iterations import TOY, IterationSpec, run_iteration_benchmark
from benchmarks.engine.throughput import run_engine_benchmark
from benchmarks.engine.workloads import parse_workload
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.device_choice import add_device, chosen_device
from benchmarks.measuring.recording import write_result
from benchmarks.measuring.tables import print_fields, print_iterations

ITERATIONS = "iterations"


class Suited(NamedTuple):
    """A measurement that suits the device."""

    model: str
    workload: str
    dtype: str


SUITS = {"cpu": Suited("opt-125m", "w1", "float32"), "cuda": Suited("llama-3-8b", ITERATIONS, "bfloat16")}


def main() -> None:
    """Measure and print; record under a --name."""
    parser = parser_of(__doc__, rounds=1)
    parser.add_argument("--shape", help="named shape with random weights, or a model: a folder, a GGUF file, pocket")
    parser.add_argument("--workload")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16")
    parser.add_argument("--quantization", help="of linear layers: int8")
    parser.add_argument("--kv-cache-dtype", default="auto", help="keys and values: auto (dtype), int8, on GPUs fp8")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks, which share cores or have a GPU each")
    parser.add_argument("--attention-backend", default="auto", help="auto, triton, torch or a CPU's instruction set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the record, as engine/w1; none is made without")
    add_device(parser)
    options = parser.parse_args()
    device = chosen_device(options.device).type
    suits = SUITS[device]
    case = Suited(options.shape or suits.model, options.workload or suits.workload, options.dtype or suits.dtype)
    measure = measure_iterations if case.workload == ITERATIONS else measure_workload
    figures = measure(options, case, device)
    if options.name:
        print(write_result(options.name, figures))


def measure_workload(options: argparse.Namespace, case: Suited, device: str) -> dict[str, Any]:
    spec = EngineBenchmarkSpec(
        model=case.model,
        groups=parse_workload(case.workload, options.seed),
        dtype=case.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        device=device,
        attention=options.attention_backend,
        seed=options.seed,
        tensor_parallel=options.tensor_parallel,
    )
    rounds = sorted((run_engine_benchmark(spec) for _ in range(options.rounds)), key=lambda one: one.wall_s)
    result = {"workload": case.workload, **asdict(rounds[len(rounds) // 2])}
    print_fields(Console(), {name: value for name, value in result.items() if value is not None}, title="engine")
    return result


def measure_iterations(options: argparse.Namespace, case: Suited, device: str) -> dict[str, Any]:
    if options.quantization is not None or options.kv_cache_dtype != "auto" or options.tensor_parallel > 1:
        raise ConfigError("single iterations are of one rank in its own dtype; name a --workload.")
    spec = replace(
        TOY if case.model == TOY.model else IterationSpec(case.model),
        dtype=case.dtype,
        device=device,
        attention=options.attention_backend,
        seed=options.seed,
    )
    report = run_iteration_benchmark(spec)
    print_iterations(Console(), report)
    return asdict(report)


if __name__ == "__main__":
    main()
