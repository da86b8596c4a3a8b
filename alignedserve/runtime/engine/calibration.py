"""Calibration: measures iterations for a second or two before a worker serves, for its policy's initial costs."""

import time
from collections.abc import Callable

import numpy as np

from alignedserve.costmodel.iteration_points import calibrate, calibration_points
from alignedserve.costmodel.linear import Sample
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.iteration_timing import IterationTimer

_MAX_BLOCKS = 4096  # that are used; zeroed first, as attention reads them
_LEAST_S = 1e-3  # enough for one point


def measure_iterations(
    engine: Engine,
    *,
    max_sequences: int,
    max_context_len: int,
    max_tokens: int,
    duration_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Sample, ...]:
    """Measure iterations of an empty engine, of at most so many tokens, for about `duration_s`; 0: none.

    Runs at least two, the first of which is slow and not counted. The content of the blocks is lost.
    """
    if duration_s <= 0.0:
        return ()
    blocks = np.arange(min(engine.storage.num_blocks, _MAX_BLOCKS))
    engine.storage.zero_blocks(blocks)
    timer = IterationTimer(engine, block_ids=blocks.tolist(), clock=clock)
    has_hidden_cache = engine.hidden_block_tokens is not None
    known = calibration_points(max_requests=max_sequences, max_tokens=max_tokens, has_hidden_cache=has_hidden_cache)
    points = timer.feasible(known, max_context_len)
    if not points:
        return ()
    started_s = clock()
    timer.measure(points[0], 1)
    left_s = max(duration_s - (clock() - started_s), _LEAST_S)
    return calibrate(points, lambda point: timer.measure(point, 1), clock=clock, duration_s=left_s)
