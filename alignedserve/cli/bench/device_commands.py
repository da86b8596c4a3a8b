"""`alignedserve bench`: kernels, the engine and block transfers alone, on the device that computes.

Loads nothing that a server needs (Ray, msgspec, an HTTP client), so that it runs on a bare machine with a GPU; what
loads PyTorch is imported inside the functions, as in main.py.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from alignedserve.cli.console import FAILURE, notes, progress, results, write_json
from alignedserve.core.errors import ConfigError
from alignedserve.microbench.tables import print_fields, print_iterations, print_kernels, print_transfers
from alignedserve.microbench.transfer.results import TransferReport

_ITERATIONS = "iterations"


def _print_json(report: object) -> None:
    write_json(json.dumps(report, indent=2).encode() + b"\n", "-")


# --- bench engine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the command line says; None: what suits the device."""

    model: str | None
    workload: str | None
    dtype: str | None
    quantization: str | None
    device: str
    attention: str
    seed: int
    json_output: bool


class _Suited(NamedTuple):
    """What is measured."""

    model: str
    workload: str
    dtype: str


_SUITS = {"cpu": _Suited("opt-125m", "w1", "float32"), "cuda": _Suited("llama-3-8b", _ITERATIONS, "bfloat16")}


def bench_engine(options: EngineOptions) -> int:
    """Run the command; returns its exit code."""
    from alignedserve.microbench.device_choice import chosen_device

    device = chosen_device(options.device).type
    suits = _SUITS[device]
    model, workload = options.model or suits.model, options.workload or suits.workload
    dtype = options.dtype or suits.dtype
    run = _bench_iterations if workload == _ITERATIONS else _bench_workload
    return run(options, _Suited(model, workload, dtype), device)


def _bench_workload(options: EngineOptions, suited: _Suited, device: str) -> int:
    from alignedserve.microbench.engine.throughput import EngineBenchmarkSpec, parse_workload, run_engine_benchmark

    spec = EngineBenchmarkSpec(
        model=suited.model,
        groups=parse_workload(suited.workload, options.seed),
        dtype=suited.dtype,
        quantization=options.quantization,
        device=device,
        attention=options.attention,
        seed=options.seed,
    )
    with notes().status(f"{spec.model}, {suited.workload}"):
        result = asdict(run_engine_benchmark(spec))
    if options.json_output:
        _print_json(result)
    else:
        known = {name: value for name, value in result.items() if value is not None or name == "quantization"}
        print_fields(results(), known, title="engine")
    return 0


def _bench_iterations(options: EngineOptions, suited: _Suited, device: str) -> int:
    from alignedserve.microbench.engine.iterations import TOY, IterationSpec, run_iteration_benchmark

    if options.quantization is not None:
        raise ConfigError("--quantization: single iterations are measured without; name a --workload.")
    spec = replace(
        TOY if suited.model == TOY.model else IterationSpec(suited.model),
        dtype=suited.dtype,
        device=device,
        attention=options.attention,
        seed=options.seed,
    )
    with notes().status(f"{spec.model}, single iterations"):
        report = run_iteration_benchmark(spec)
    if options.json_output:
        _print_json(asdict(report))
    else:
        print_iterations(results(), report)
    return 0


# --- bench kernels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What the command line says."""

    device: str
    shape: str
    dtype: str
    is_toy: bool
    json_output: bool


def bench_kernels(options: KernelOptions) -> int:
    """Run the command; returns its exit code."""
    from alignedserve.microbench.kernels.benchmark import KernelBenchmarkSpec, run_kernel_benchmark

    spec = KernelBenchmarkSpec(options.device, options.shape, options.dtype, options.is_toy)
    with progress() as bar:
        task = bar.add_task("kernels", total=None, status="")
        report = run_kernel_benchmark(spec, lambda known: bar.update(task, completed=len(known.rows)))
    if options.json_output:
        _print_json(asdict(report))
    else:
        print_kernels(results(), report)
    return 0


# --- bench transfer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What the command line says."""

    shapes: tuple[str, ...] | None
    mebibytes: tuple[int, ...] | None
    num_rounds: int
    device: str
    json_output: bool


def bench_transfer(options: TransferOptions) -> int:
    """Run the command; returns its exit code."""
    from alignedserve.microbench.device_choice import chosen_device
    from alignedserve.microbench.transfer.benchmark import measure_device_transfers, measure_host_transfers
    from alignedserve.microbench.transfer.spec import DEVICE_SPEC, TransferBenchmarkSpec

    def asked_for(spec: TransferBenchmarkSpec) -> TransferBenchmarkSpec:
        shapes, mebibytes = options.shapes or spec.shapes, options.mebibytes or spec.mebibytes
        return replace(spec, shapes=shapes, mebibytes=mebibytes, num_rounds=options.num_rounds)

    device, report = chosen_device(options.device), TransferReport()
    host, on_device = asked_for(TransferBenchmarkSpec()), asked_for(DEVICE_SPEC)
    with notes().status("moving blocks"):
        measure_device_transfers(on_device, device, report)
        measure_host_transfers(host, report)
    if options.json_output:
        _print_json(asdict(report))
    else:
        print_transfers(results(), report)
    return FAILURE if report.failures else 0
