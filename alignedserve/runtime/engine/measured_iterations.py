"""Calibration: measures iterations for a second or two before a worker serves, for its policy's initial costs.

Measurements are kept on disk for the next start. They are believed where two iterations, measured again, take about as
long; otherwise all is measured anew. A process that was lost believes them at once: chats wait for it."""

import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.costmodel.iteration_points import Chunk, Point, calibrate, calibration_points, feasible_points
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.straggler import straggler_in, straggler_points
from alignedserve.runtime.device.cores import processor_name
from alignedserve.runtime.device.devices import keep, read_kept, verdict_path
from alignedserve.runtime.engine.engine import Engine, NewSequence
from kernels.cpu.native import built_at

if TYPE_CHECKING:  # loads msgspec, which a machine that measures an engine alone may lack
    from alignedserve.runtime.engine.swap_space import HostCaches

logger = logging.getLogger(__name__)

_NUM_STEPS = 3  # consecutive iterations of one measurement
_LONG_MEASUREMENT_S = 0.3  # a measurement this long ends


class IterationTimer:
    """Times points on an engine, assigning its blocks anew for each. Leaves no sequence behind."""

    def __init__(self, engine: Engine, *, block_ids: Sequence[int], clock: Callable[[], float]) -> None:
        """`block_ids`: all usable blocks, in any order; attention reads their present content. `clock`: in seconds."""
        self._engine = engine
        self._block_ids = block_ids
        self._clock = clock
        self._layout = engine.storage.layout
        self._num_assigned = 0
        self._num_made = 0

    def feasible(self, points: Sequence[Point], max_context_len: int) -> list[Point]:
        return feasible_points(
            points,
            max_context_len=max_context_len,
            num_blocks=len(self._block_ids),
            block_size=self._layout.block_size,
            spare=_NUM_STEPS + 1,
            beside=self._layout.state_blocks,
        )

    def straggler_points(self, max_requests: int, max_context_len: int) -> list[Point]:
        num_tokens = len(self._block_ids) * self._layout.block_size
        points = straggler_points(max_requests=max_requests, max_context_len=max_context_len, num_tokens=num_tokens)
        return self.feasible(points, max_context_len)

    def measure(self, point: Point, num_steps: int = _NUM_STEPS) -> float:
        """Return the seconds of one iteration: the median of `num_steps`, through which the decodes continue."""
        assert 0 < num_steps <= _NUM_STEPS, "more steps than the blocks allow"
        self._num_assigned = 0
        decodes = [self._add(context_len, context_len - 1, 0) for context_len in point.contexts]
        decodes += [self._add(length, length - 1, 0, is_hidden=True) for length in point.hidden_contexts]
        seconds: list[float] = []
        while len(seconds) < num_steps and sum(seconds) < _LONG_MEASUREMENT_S:
            num_assigned = self._num_assigned
            chunks = [self._add_chunk(chunk) for chunk in point.chunks]
            slices = [*((request_id, 1) for request_id in decodes), *chunks]
            started = self._clock()
            self._engine.execute(slices)
            seconds.append(self._clock() - started)
            for request_id, _ in chunks:
                self._engine.remove_sequence(request_id)
            self._num_assigned = num_assigned
        for request_id in decodes:
            self._engine.remove_sequence(request_id)
        self._engine.settle()  # else the next measurement waits for a step that was launched behind the last one
        return statistics.median(seconds)

    def _add_chunk(self, chunk: Chunk) -> tuple[RequestId, int]:
        known = chunk.num_cached + chunk.num_tokens
        return self._add(known, chunk.num_cached, 0 if chunk.is_last else 1), chunk.num_tokens

    def _add(self, context_len: int, num_cached: int, num_more: int, *, is_hidden: bool = False) -> RequestId:
        request_id = RequestId(f"profile-{self._num_made}")
        self._num_made += 1
        tokens = (1,) * (context_len + num_more)
        count = self._layout.blocks_for(context_len + _NUM_STEPS)
        blocks = tuple(BlockId(block) for block in self._block_ids[self._num_assigned : self._num_assigned + count])
        self._num_assigned += count
        sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_STEPS + 1, ignore_eos=True)
        args = (request_id, tokens, len(tokens), num_cached, blocks, sampling, is_hidden)
        self._engine.add_sequence(NewSequence(*args, is_trial=True))
        return request_id


_KIND = "calibration"
_TRIED_AGAIN = 2  # points, which are short
_MOST_TRIES = 10  # of each: whatever else this machine does, as it starts, only makes an iteration longer
_MAX_RATIO = 1.4  # between what is kept and what is measured again


@dataclass(frozen=True, slots=True)
class KeptCalibration:
    """The place of one model's measurements."""

    folder: Path
    described: tuple[str, ...]  # the model and the engine, as far as an iteration's length depends on them
    is_again: bool = False  # the process has started before in this cluster

    def believed(self, points: Sequence[Point], measure: Callable[[Point], float]) -> tuple[Sample, ...]:
        seconds = self._seconds(points)
        tried = zip(points[:_TRIED_AGAIN], seconds, strict=False)
        is_same = all(_agrees(min(durations), partial(measure, point)) for point, durations in tried)
        return self.samples(points) if is_same else ()

    def samples(self, points: Sequence[Point]) -> tuple[Sample, ...]:
        measured = zip(points, self._seconds(points), strict=False)
        return tuple(Sample(point.work, duration_s) for point, all_s in measured for duration_s in all_s)

    def _seconds(self, points: Sequence[Point]) -> list[list[float]]:
        return _checked(read_kept(self._path(points)), len(points))

    def keep(self, points: Sequence[Point], samples: Sequence[Sample]) -> None:
        seconds = [[sample.seconds for sample in samples if sample.work == point.work] for point in points]
        if seconds[0]:
            keep(self._path(points), seconds)

    def _path(self, points: Sequence[Point]) -> Path:
        machine = (processor_name(), platform.node(), f"torch {torch.__version__}", f"kernels {built_at()}")
        return verdict_path(self.folder, _KIND, (*self.described, *machine, repr(points)))


def _agrees(kept_s: float, measure: Callable[[], float]) -> bool:
    for _ in range(_MOST_TRIES):
        again_s = measure()
        if again_s < kept_s * _MAX_RATIO:
            return again_s > kept_s / _MAX_RATIO
    return False


def _checked(stored: Any, num_points: int) -> list[list[float]]:
    if not isinstance(stored, list) or len(stored) != num_points:
        return []
    for seconds in stored:
        if not isinstance(seconds, list) or not all(
            isinstance(value, float) and 0.0 < value < 1e6 for value in seconds
        ):
            return []
    return stored if all(stored[:_TRIED_AGAIN]) else []


_MAX_BLOCKS = 4096  # that are used; zeroed first, as attention reads them
_LEAST_S = 1e-3  # enough for one point
_MOST_SLOWED = 5.0  # times as long as it computes: a start beside busy processes
_MOST_ROUNDS = 2  # over all points and over the short ones again: a small model has time for more


def measure_iterations(
    engine: Engine,
    swap_space: "HostCaches | None" = None,
    *,
    max_sequences: int,
    max_context_len: int,
    max_tokens: int,
    duration_s: float,
    clock: Callable[[], float] = time.perf_counter,
    computing_clock: Callable[[], float] | None = None,
    kept: KeptCalibration | None = None,
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[Sample, ...]:
    """Measure iterations of an empty engine, of at most `max_tokens`, and copies to its swap space.

    `computing_clock`: of iterations, and of `duration_s` unless that takes much longer; None: `clock`. `turn`: entered
    for each, on a device that others use. `kept`: from an earlier start, and for the next one.

    For about `duration_s`, or four rounds over most points; 0: none. At least two are run, the first of which is slow
    and not counted. The content of the blocks is lost."""
    if duration_s <= 0.0:
        return ()
    blocks = np.arange(min(engine.storage.num_blocks, _MAX_BLOCKS))
    computing_clock = computing_clock or clock
    timer = IterationTimer(engine, block_ids=blocks.tolist(), clock=computing_clock)
    has_hidden_cache = engine.hidden_block_tokens is not None
    known = calibration_points(max_requests=max_sequences, max_tokens=max_tokens, has_hidden_cache=has_hidden_cache)
    again = [point for point in timer.feasible(known, max_context_len) if swap_space or not point.num_swapped]
    if not again:
        return ()
    points = [*again, *timer.straggler_points(min(max_sequences, max_tokens), max_context_len)]
    if kept is not None and kept.is_again and (known_before := kept.samples(points)):
        return known_before
    engine.storage.zero_blocks(blocks)

    def measure(point: Point) -> float:
        if swap_space is not None and point.num_swapped:
            counted = engine.storage.layout.block_size * swap_space.width  # full-width tokens that a block counts for
            chosen = blocks[: max(round(point.num_swapped / counted), 1)].tolist()
            seconds = swap_space.time_copies([BlockId(block) for block in chosen], clock)
            return seconds * point.num_swapped / (len(chosen) * counted)
        return timer.measure(point, 1)

    def measure_in_turn(point: Point) -> float:
        with turn():
            return measure(point)

    started_s, computing_s = clock(), computing_clock()

    def spent_s() -> float:
        return max(computing_clock() - computing_s, (clock() - started_s) / _MOST_SLOWED)

    measure_in_turn(points[0])
    known_before = kept.believed(points, measure_in_turn) if kept is not None else ()
    if known_before:
        engine.storage.give_back()
        return known_before
    left_s = max(duration_s - spent_s(), _LEAST_S)
    most = _MOST_ROUNDS * (len(points) + len(again))
    samples = calibrate([*points, *again], measure_in_turn, clock=spent_s, duration_s=left_s, max_samples=most)
    engine.storage.give_back()
    if doubt := straggler_in(samples).doubt:
        logger.warning("long contexts are taken to delay no others: %s", doubt)
    if kept is not None:
        kept.keep(points, samples)
    return samples
