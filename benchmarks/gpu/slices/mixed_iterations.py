"""Iterations of an 8B shape by how many tokens they compute: a chunk alone, and beside decodes, as where chat runs
beside documents. Two of the mixed ones by kernel.

The products of a pass are cut into tiles: time over tokens is a staircase.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from alignedserve.costmodel.iteration_points import Chunk, Point
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.measured_iterations import IterationTimer
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.gpu.slices.step_profile import profiled
from benchmarks.gpu.timed_iterations import MIXED_CACHED, MIXED_CONTEXTS
from lab.profiling.model_loading import load_decoder

_BLOCK_SIZE, _SPARE = 16, 16
_TOY_DECODES, _TOY_CACHED = (24,) * 3, 8
_TOTALS, _TOY_TOTALS = tuple(range(512, 2112, 64)), (16, 32)  # tokens of an iteration
_PROFILED, _TOY_PROFILED = (1024, 1088), (16,)


def measure_mixed(
    device: torch.device, *, is_toy: bool, on_measured: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return milliseconds by number of tokens, alone and mixed, and kernels of some; told after each."""
    shape, dtype = ("toy", "float32") if is_toy else ("llama-3-8b", "bfloat16")
    contexts, cached = (_TOY_DECODES, _TOY_CACHED) if is_toy else (MIXED_CONTEXTS, MIXED_CACHED)
    totals, by_kernel = (_TOY_TOTALS, _TOY_PROFILED) if is_toy else (_TOTALS, _PROFILED)
    decoder = load_decoder(shape, dtype, device.type)

    def mixed(total: int) -> Point:
        return Point("mixed", (Chunk(total - len(contexts), cached, is_last=False),), contexts)

    num_blocks = mixed(totals[-1]).num_blocks(_BLOCK_SIZE, _SPARE)
    storage = BlockStorage(decoder.config.block_layout(_BLOCK_SIZE, dtype), num_blocks, device)
    storage.blocks.normal_()
    longest = max(totals[-1] + cached, contexts[0]) + _SPARE
    engine = Engine(
        model=decoder, storage=storage, options=EngineOptions(max_sequences=len(contexts) + 1, max_context_len=longest)
    )
    engine.record_graphs()
    timer = IterationTimer(engine, block_ids=list(range(num_blocks)), clock=time.perf_counter)
    figures: dict[str, Any] = {"shape": shape, "dtype": dtype, "num_decodes": len(contexts), "rows": [], "kernels": []}
    for total in totals:
        alone = Point("prefill", (Chunk(total, 0, is_last=True),))
        timer.measure(mixed(total), 1)  # compiles and warms up
        seconds = [min(timer.measure(point) for _ in range(2)) for point in (alone, mixed(total))]
        figures["rows"].append({"tokens": total, "alone_ms": seconds[0] * 1e3, "mixed_ms": seconds[1] * 1e3})
        on_measured(figures)
    for total in by_kernel:
        figures["kernels"].append({"tokens": total, **profiled(timer, mixed(total), device)})
        on_measured(figures)
    return figures
