"""What iterations cost on a worker, measured for a second or two before it serves: what its policy begins with."""

import time
from collections.abc import Callable

import numpy as np

from alignedserve.costmodel.linear import Sample
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.iteration_timing import Chunk, IterationTimer, Point

# What any of them says is said again by another one, so that each part of the cost can be told from the others; the
# short ones first, for models that have no time for all.
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
# Of an engine that has hidden caches.
HIDDEN_POINTS = (
    Point("hidden", hidden_contexts=(128,)),
    Point("hidden", (Chunk(64, 0, is_last=True),), (128,) * 4, (128,) * 4),
    Point("hidden", hidden_contexts=(512,) * 8),
)
_MAX_BLOCKS = 4096  # that are used, and written to first: attention reads them


def measure_iterations(
    engine: Engine,
    *,
    max_sequences: int,
    max_context_len: int,
    duration_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Sample, ...]:
    """Iterations of an engine that holds nothing, for about so long; nothing where that is 0.

    At least two are made, the first of which is slow and does not count. What the blocks held is lost.
    """
    if duration_s <= 0.0:
        return ()
    blocks = np.arange(min(engine.storage.num_blocks, _MAX_BLOCKS))
    engine.storage.zero_blocks(blocks)
    visits = IterationTimer(engine, block_ids=blocks.tolist(), clock=clock)
    # Early on: what a hidden cache costs decides whether there is one.
    known = POINTS if engine.hidden_block_tokens is None else (*POINTS[:2], *HIDDEN_POINTS, *POINTS[2:])
    points = [point for point in visits.possible(known, max_context_len) if point.num_requests <= max_sequences]
    if not points:
        return ()
    ends_s = clock() + duration_s
    visits.visit(points[0], 1)
    samples: list[Sample] = []
    while True:
        for point in points:
            samples.append(Sample(point.work, visits.visit(point, 1)))
            if clock() > ends_s:
                return tuple(samples)
