"""Single steps of an 8B shape by kernel: where the time of decodes goes, and what no kernel ran of it; where the host
spends it in a short prompt, whose kernels are launched one by one; and iterations by how many tokens they compute.

The products of a pass are cut into tiles: time over tokens is a staircase.
"""

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from alignedserve.costmodel.iteration_points import Chunk, Point
from alignedserve.runtime.device.accelerator import synchronize
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.engine.measured_iterations import IterationTimer
from benchmarks.gpu.timed_iterations import MIXED_CACHED, MIXED_CONTEXTS
from benchmarks.measuring.timed_engine import TimedEngine
from lab.profiling.model_loading import load_decoder

_NUM_ROUNDS, _NUM_SHOWN = 4, 25  # rounds of three steps; rows
_PROMPT, _TOY_PROMPT = 64, 8  # tokens: an H100 would compute them in the 6 ms that reading the weights takes
_OF_A_GPU = "CUDA"  # in PyTorch's DeviceType
_BATCHES, _TOY_BATCHES = ((64, 2048), (256, 512)), ((3, 24),)
_TOY_DECODES, _TOY_CACHED = (24,) * 3, 8
_TOTALS, _TOY_TOTALS = tuple(range(512, 2112, 64)), (16, 32)  # tokens of an iteration
_PROFILED, _TOY_PROFILED = (1024, 1088), (16,)

OnMeasured = Callable[[dict[str, Any]], None]


def _model(is_toy: bool) -> tuple[str, str]:
    return ("toy", "float32") if is_toy else ("llama-3-8b", "bfloat16")


def profile_steps(device: torch.device, *, is_toy: bool, on_measured: OnMeasured) -> dict[str, Any]:
    """Return the heaviest kernels of each batch, the share of time in which none ran, and the heaviest functions of a
    short prompt; told after each batch."""
    shape, dtype = _model(is_toy)
    decoder = load_decoder(shape, dtype, device.type)
    figures: dict[str, Any] = {"shape": shape, "dtype": dtype, "batches": []}
    prompt = _prompt(_TOY_PROMPT if is_toy else _PROMPT)
    for count, length in _TOY_BATCHES if is_toy else _BATCHES:
        point = Point("decode", contexts=(length,) * count)
        timer = TimedEngine(decoder, [point, prompt]).timer
        figures["batches"].append({"batch": f"{count} x {length}", **profiled(timer, point, device)})
        if "prompt" not in figures:
            figures["prompt"] = host_calls(timer, prompt)
        on_measured(figures)
        del timer
    return figures


def measure_mixed(device: torch.device, *, is_toy: bool, on_measured: OnMeasured) -> dict[str, Any]:
    """Return milliseconds by number of tokens, alone and beside decodes, and kernels of some; told after each."""
    shape, dtype = _model(is_toy)
    contexts, cached = (_TOY_DECODES, _TOY_CACHED) if is_toy else (MIXED_CONTEXTS, MIXED_CACHED)
    totals, by_kernel = (_TOY_TOTALS, _TOY_PROFILED) if is_toy else (_TOTALS, _PROFILED)

    def mixed(total: int) -> Point:
        return Point("mixed", (Chunk(total - len(contexts), cached, is_last=False),), contexts)

    points = [mixed(totals[-1]), _prompt(totals[-1])]
    timer = TimedEngine(load_decoder(shape, dtype, device.type), points).timer
    figures: dict[str, Any] = {"shape": shape, "dtype": dtype, "num_decodes": len(contexts), "rows": [], "kernels": []}
    for total in totals:
        timer.measure(mixed(total), 1)  # compiles and warms up
        seconds = [min(timer.measure(point) for _ in range(2)) for point in (_prompt(total), mixed(total))]
        figures["rows"].append({"tokens": total, "alone_ms": seconds[0] * 1e3, "mixed_ms": seconds[1] * 1e3})
        on_measured(figures)
    for total in by_kernel:
        figures["kernels"].append({"tokens": total, **profiled(timer, mixed(total), device)})
        on_measured(figures)
    return figures


def _prompt(num_tokens: int) -> Point:
    return Point("prefill", (Chunk(num_tokens, 0, is_last=True),))


def host_calls(timer: IterationTimer, point: Point) -> dict[str, Any]:
    timer.measure(point)
    prompt_s = min(timer.measure(point) for _ in range(_NUM_ROUNDS))
    with cProfile.Profile() as profiler:
        for _ in range(_NUM_ROUNDS):
            timer.measure(point, 1)
    stats: Any = pstats.Stats(profiler)
    heaviest = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])[:_NUM_SHOWN]
    functions = [
        {
            "function": f"{Path(file).name}:{line} {name}"[:120],
            "calls": calls // _NUM_ROUNDS,
            "ms": own_s / _NUM_ROUNDS * 1e3,
        }
        for (file, line, name), (_, calls, own_s, _, _) in heaviest
    ]
    return {"tokens": point.chunks[0].num_tokens, "prompt_ms": prompt_s * 1e3, "functions": functions}


def profiled(timer: IterationTimer, point: Point, device: torch.device) -> dict[str, Any]:
    timer.measure(point)
    is_gpu = device.type == CUDA
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        median_s = statistics.median(timer.measure(point) for _ in range(_NUM_ROUNDS))
        synchronize(device)
        wall_s = time.perf_counter() - started  # without the profiler's own end, which takes seconds
    totals = _totals(profiler.key_averages(), is_gpu=is_gpu)
    heaviest = sorted(totals.items(), key=lambda entry: (-entry[1][0], entry[0]))[:_NUM_SHOWN]
    busy_s = sum(microseconds for microseconds, _ in totals.values()) / 1e6
    kernels = [{"kernel": key[:120], "microseconds": taken, "calls": calls} for key, (taken, calls) in heaviest]
    return {"step_ms": median_s * 1e3, "share_without_kernel": max(0.0, 1 - busy_s / wall_s), "kernels": kernels}


def _totals(events: Iterable[Any], *, is_gpu: bool) -> dict[str, tuple[float, int]]:
    """Return microseconds and calls by name: of a GPU's kernels and copies, or of a CPU's operations.

    What ran on the GPU is also in the sums of the operations that launched it, and in those of annotations.
    """
    if not is_gpu:
        return {event.key: (float(event.self_cpu_time_total), event.count) for event in events}
    return {
        event.key: (float(event.self_device_time_total), event.count)
        for event in events
        if event.device_type.name == _OF_A_GPU and not event.is_user_annotation
    }
