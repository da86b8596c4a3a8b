"""Calibration: measures iterations for a second or two before a worker serves, for its policy's initial costs."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from alignedserve.core.ids import BlockId
from alignedserve.costmodel.iteration_points import Point, calibrate, calibration_points
from alignedserve.costmodel.linear import Sample
from alignedserve.runtime.engine.calibration.iteration_timing import IterationTimer
from alignedserve.runtime.engine.calibration.kept_calibration import KeptCalibration
from alignedserve.runtime.engine.engine import Engine
from alignedserve.runtime.engine.swap_space import HostCaches

_MAX_BLOCKS = 4096  # that are used; zeroed first, as attention reads them
_LEAST_S = 1e-3  # enough for one point
_MOST_ROUNDS = 4  # over all points: a small model is through with them long before its time is over


def measure_iterations(
    engine: Engine,
    swap_space: HostCaches | None = None,
    *,
    max_sequences: int,
    max_context_len: int,
    max_tokens: int,
    duration_s: float,
    clock: Callable[[], float] = time.perf_counter,
    kept: KeptCalibration | None = None,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Sample, ...]:
    """Measure iterations of an empty engine, of at most `max_tokens`, and copies to its swap space.

    `turn`: entered for each, on a device that others use. `kept`: from an earlier start, and for the next one.

    For about `duration_s`, or four rounds over all points; 0: none. At least two are run, the first of which is slow
    and not counted. The content of the blocks is lost.
    """
    if duration_s <= 0.0:
        return ()
    blocks = np.arange(min(engine.storage.num_blocks, _MAX_BLOCKS))
    engine.storage.zero_blocks(blocks)
    timer = IterationTimer(engine, block_ids=blocks.tolist(), clock=clock)
    has_hidden_cache = engine.hidden_block_tokens is not None
    known = calibration_points(max_requests=max_sequences, max_tokens=max_tokens, has_hidden_cache=has_hidden_cache)
    points = [point for point in timer.feasible(known, max_context_len) if swap_space or not point.num_swapped]
    if not points:
        return ()

    def measure(point: Point) -> float:
        if swap_space is not None and point.num_swapped:
            return _swap_s(swap_space, point.num_swapped, engine.storage.layout.block_size, blocks, clock)
        return timer.measure(point, 1)

    def measure_in_turn(point: Point) -> float:
        with turn():
            return measure(point)

    started_s = clock()
    measure_in_turn(points[0])
    known_before = kept.believed(points, measure_in_turn) if kept is not None else ()
    if known_before:
        engine.storage.give_back()
        return known_before
    left_s = max(duration_s - (clock() - started_s), _LEAST_S)
    most = _MOST_ROUNDS * len(points)
    samples = calibrate(points, measure_in_turn, clock=clock, duration_s=left_s, max_samples=most)
    engine.storage.give_back()
    if kept is not None:
        kept.keep(points, samples)
    return samples


def _swap_s(
    swap_space: HostCaches,
    num_tokens: int,
    block_size: int,
    blocks: np.typing.NDArray[np.int64],
    clock: Callable[[], float],
) -> float:
    counted = block_size * swap_space.width  # full-width tokens that a block counts for
    chosen = blocks[: max(round(num_tokens / counted), 1)].tolist()
    seconds = swap_space.time_copies([BlockId(block) for block in chosen], clock)
    return seconds * num_tokens / (len(chosen) * counted)
