"""Where some ten decode steps of a model spend their time, by kernel, and what of it no kernel ran; and where the host
spends it in a short prompt, whose kernels are launched one by one."""

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
from alignedserve.runtime.device.device_work import synchronize
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.measured_iterations import IterationTimer
from alignedserve.runtime.kv.block_storage import BlockStorage
from lab.profiling.model_loading import load_decoder

_NUM_ROUNDS, _BLOCK_SIZE, _SPARE, _KEPT = 4, 16, 16, 25  # rounds of three steps
_PROMPT, _TOY_PROMPT = 64, 8  # tokens: an H100 would compute them in the 6 ms that reading the weights takes
_OF_A_GPU = "CUDA"  # in PyTorch's DeviceType
_BATCHES, _TOY_BATCHES = ((64, 2048), (256, 512)), ((3, 24),)


def profile_steps(
    device: torch.device, *, is_toy: bool, on_measured: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the heaviest kernels of each batch, the share of time in which none ran, and the heaviest functions of a
    short prompt; told after each batch."""
    shape, dtype = ("toy", "float32") if is_toy else ("llama-3-8b", "bfloat16")
    decoder = load_decoder(shape, dtype, device.type)
    figures: dict[str, Any] = {"shape": shape, "dtype": dtype, "batches": []}
    for count, length in _TOY_BATCHES if is_toy else _BATCHES:
        point = Point("decode", contexts=(length,) * count)
        num_blocks = point.num_blocks(_BLOCK_SIZE, _SPARE)
        storage = BlockStorage(decoder.config.block_layout(_BLOCK_SIZE, dtype), num_blocks, device)
        storage.blocks.normal_()
        engine = Engine(
            model=decoder, storage=storage, options=EngineOptions(max_sequences=count, max_context_len=length + _SPARE)
        )
        engine.record_graphs()
        timer = IterationTimer(engine, block_ids=list(range(num_blocks)), clock=time.perf_counter)
        figures["batches"].append({"batch": f"{count} x {length}", **profiled(timer, point, device)})
        if "prompt" not in figures:
            figures["prompt"] = host_calls(timer, _TOY_PROMPT if is_toy else _PROMPT)
        on_measured(figures)
        del engine, storage, timer
    return figures


def host_calls(timer: IterationTimer, num_tokens: int) -> dict[str, Any]:
    point = Point("prefill", (Chunk(num_tokens, 0, is_last=True),))
    timer.measure(point)
    prompt_s = min(timer.measure(point) for _ in range(_NUM_ROUNDS))
    with cProfile.Profile() as profiler:
        for _ in range(_NUM_ROUNDS):
            timer.measure(point, 1)
    stats: Any = pstats.Stats(profiler)
    own = sorted(stats.stats.items(), key=lambda one: -one[1][2])[:_KEPT]
    functions = [
        {
            "function": f"{Path(file).name}:{line} {name}"[:120],
            "calls": calls // _NUM_ROUNDS,
            "ms": own_s / _NUM_ROUNDS * 1e3,
        }
        for (file, line, name), (_, calls, own_s, _, _) in own
    ]
    return {"tokens": num_tokens, "prompt_ms": prompt_s * 1e3, "functions": functions}


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
    heaviest = sorted(totals.items(), key=lambda one: (-one[1][0], one[0]))[:_KEPT]
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
