"""`alignedserve bench engine`: the engine alone, offline.

Loads nothing that only a server needs (Ray, msgspec, an HTTP client): it runs on a bare machine with a GPU.
"""

from dataclasses import asdict, replace
from typing import NamedTuple

from alignedserve.cli.bench.options import EngineOptions
from alignedserve.cli.console import notes, print_json, results
from alignedserve.core.errors import ConfigError
from alignedserve.microbench.device_choice import chosen_device
from alignedserve.microbench.engine.iterations import TOY, IterationSpec, run_iteration_benchmark
from alignedserve.microbench.engine.throughput import EngineBenchmarkSpec, parse_workload, run_engine_benchmark
from alignedserve.microbench.tables import print_fields, print_iterations

_ITERATIONS = "iterations"


class _Suited(NamedTuple):
    """A measurement that suits the device."""

    model: str
    workload: str
    dtype: str


_SUITS = {"cpu": _Suited("opt-125m", "w1", "float32"), "cuda": _Suited("llama-3-8b", _ITERATIONS, "bfloat16")}


def bench_engine(options: EngineOptions) -> int:
    """Run the command and return its exit code."""
    device = chosen_device(options.device).type
    suits = _SUITS[device]
    model, workload = options.model or options.shape or suits.model, options.workload or suits.workload
    dtype = options.dtype or suits.dtype
    run = _bench_iterations if workload == _ITERATIONS else _bench_workload
    return run(options, _Suited(model, workload, dtype), device)


def _bench_workload(options: EngineOptions, suited: _Suited, device: str) -> int:
    spec = EngineBenchmarkSpec(
        model=suited.model,
        groups=parse_workload(suited.workload, options.seed),
        dtype=suited.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        device=device,
        attention=options.attention_backend,
        seed=options.seed,
        tensor_parallel=options.tensor_parallel,
    )
    with notes().status(f"{spec.model}, {suited.workload}"):
        result = asdict(run_engine_benchmark(spec))
    if options.json_output:
        print_json(result)
    else:
        known = {name: value for name, value in result.items() if value is not None or name == "quantization"}
        print_fields(results(), known, title="engine")
    return 0


def _bench_iterations(options: EngineOptions, suited: _Suited, device: str) -> int:
    if options.quantization is not None:
        raise ConfigError("--quantization: single iterations are measured without; name a --workload.")
    if options.kv_cache_dtype != "auto":
        raise ConfigError("--kv-cache-dtype: single iterations are measured without; name a --workload.")
    spec = replace(
        TOY if suited.model == TOY.model else IterationSpec(suited.model),
        dtype=suited.dtype,
        device=device,
        attention=options.attention_backend,
        seed=options.seed,
    )
    with notes().status(f"{spec.model}, single iterations"):
        report = run_iteration_benchmark(spec)
    if options.json_output:
        print_json(asdict(report))
    else:
        print_iterations(results(), report)
    return 0
