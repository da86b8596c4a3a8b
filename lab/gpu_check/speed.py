"""Milliseconds of iterations of a Llama with random weights: prompts, and decodes that replay recorded graphs."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from alignedserve.costmodel.iteration_points import Chunk, Point
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.measured_iterations import IterationTimer
from alignedserve.runtime.kv.block_storage import BlockStorage
from lab.profiling.model_loading import load_decoder

_GIB = 1 << 30
_BLOCK_SIZE, _SPARE, _NUM_ROUNDS = 16, 8, 3
_LARGE_BYTES = 40 * _GIB  # free, for 8B in bfloat16 and 64 contexts of 2 048


class Sizes(NamedTuple):
    """Model, prompts, and decodes by number and context."""

    model: str
    dtype: str
    prompts: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]


_LARGE = Sizes("llama-3-8b", "bfloat16", (512, 4096), ((1, 2048), (16, 2048), (64, 2048), (128, 1024)))
_SMALL = Sizes("llama-3-1b", "bfloat16", (512, 2048), ((1, 1024), (16, 1024), (64, 512)))
_TOY = Sizes("toy", "float32", (16,), ((2, 16),))


def measure_speed(
    device: torch.device, note: Callable[[dict[str, Any]], None], *, is_toy: bool = False
) -> dict[str, Any]:
    """Return a row of each kind of iteration, those with most tokens last; `note` is told after each."""
    sizes = _TOY if is_toy else _LARGE if _free_bytes(device) >= _LARGE_BYTES else _SMALL
    points = {f"decode {count} x {length}": Point("d", contexts=(length,) * count) for count, length in sizes.decodes}
    points |= {f"prompt of {length}": Point("p", chunks=(Chunk(length, 0, True),)) for length in sizes.prompts}
    timer = _timer(sizes, points, device)
    rows: list[dict[str, Any]] = []
    figures = {"model": sizes.model, "dtype": sizes.dtype, "rows": rows}
    for what, point in points.items():
        timer.measure(point)  # compiles and warms up
        seconds = statistics.median(timer.measure(point) for _ in range(_NUM_ROUNDS))
        per_s = round(point.num_tokens / seconds, 1)
        rows.append({"what": what, "milliseconds": round(seconds * 1e3, 3), "tokens_per_s": per_s})
        note(figures)
    return figures


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == CUDA else 0


def _timer(sizes: Sizes, points: dict[str, Point], device: torch.device) -> IterationTimer:
    decoder = load_decoder(sizes.model, sizes.dtype, str(device))
    num_blocks = max(point.num_blocks(_BLOCK_SIZE, _SPARE) for point in points.values())
    storage = BlockStorage(decoder.config.block_layout(_BLOCK_SIZE, sizes.dtype), num_blocks, device)
    storage.blocks.normal_()
    longest = max(*sizes.prompts, *(length for _, length in sizes.decodes)) + _SPARE
    most = max(count for count, _ in sizes.decodes)
    engine = Engine(model=decoder, storage=storage, options=EngineOptions(max_sequences=most, max_context_len=longest))
    engine.record_graphs()
    block_ids = np.random.default_rng(0).permutation(num_blocks).tolist()
    return IterationTimer(engine, block_ids=block_ids, clock=time.perf_counter)
