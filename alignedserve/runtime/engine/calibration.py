"""Calibration: measures iterations for a second or two before a worker serves, for its policy's initial costs."""

import time
from collections.abc import Callable

import numpy as np

from alignedserve.costmodel.linear import Sample
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.iteration_timing import Chunk, IterationTimer, Point

# Every part of the cost occurs in several points, so that it can be told from the others; short ones come first, for
# slow models that do not get to all.
POINTS = (
    Point("prefill", (Chunk(16, 0, is_last=True),)),
    Point("decode", contexts=(64,)),
    Point("decode", contexts=(64,) * 8),
    Point("prefill", (Chunk(64, 0, is_last=True),)),
    Point("decode", contexts=(512,) * 8),
    Point("mixed", (Chunk(64, 0, is_last=True),), (256,) * 8),
    Point("prefill", (Chunk(64, 512, is_last=False),)),
    Point("decode", contexts=(64,) * 32),
    Point("prefill", (Chunk(256, 0, is_last=True),)),
    Point("decode", contexts=(512,) * 32),
    Point("prefill", (Chunk(64, 0, is_last=True),) * 4),
)
# For engines with hidden caches.
HIDDEN_POINTS = (
    Point("hidden", hidden_contexts=(128,)),
    Point("hidden", (Chunk(64, 0, is_last=True),), (128,) * 4, (128,) * 4),
    Point("hidden", hidden_contexts=(512,) * 8),
)
_MAX_BLOCKS = 4096  # that are used; zeroed first, as attention reads them


def measure_iterations(
    engine: Engine,
    *,
    max_sequences: int,
    max_context_len: int,
    duration_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Sample, ...]:
    """Measure iterations of an empty engine for about `duration_s`; 0: none.

    Runs at least two, the first of which is slow and not counted. The content of the blocks is lost.
    """
    if duration_s <= 0.0:
        return ()
    blocks = np.arange(min(engine.storage.num_blocks, _MAX_BLOCKS))
    engine.storage.zero_blocks(blocks)
    timer = IterationTimer(engine, block_ids=blocks.tolist(), clock=clock)
    # Early on: the cost of a hidden cache decides whether it is used.
    known = POINTS if engine.hidden_block_tokens is None else (*POINTS[:2], *HIDDEN_POINTS, *POINTS[2:])
    points = [point for point in timer.feasible(known, max_context_len) if point.num_requests <= max_sequences]
    if not points:
        return ()
    ends_s = clock() + duration_s
    timer.measure(points[0], 1)
    samples: list[Sample] = []
    while True:
        for point in points:
            samples.append(Sample(point.work, timer.measure(point, 1)))
            if clock() > ends_s:
                return tuple(samples)
