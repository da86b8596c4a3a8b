"""Calibration: measures iterations for a second or two before a worker serves, for its policy's initial costs."""

import time
from collections.abc import Callable

import numpy as np

from alignedserve.costmodel.iteration_points import calibration_points
from alignedserve.costmodel.linear import Sample
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.iteration_timing import IterationTimer

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
    known = calibration_points(has_hidden_cache=engine.hidden_block_tokens is not None)
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
