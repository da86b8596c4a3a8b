"""Timing of single iterations of an engine, on caches that need not have been computed."""

import statistics
from collections.abc import Callable, Sequence

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.costmodel.iteration_points import Chunk, Point, feasible_points
from alignedserve.runtime.engine.engine import Engine, NewSequence

_NUM_STEPS = 3  # consecutive iterations of one measurement
_LONG_MEASUREMENT_S = 0.3  # after which there is no further iteration


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
        """Return the points that fit the model and the blocks."""
        return feasible_points(
            points,
            max_context_len=max_context_len,
            num_blocks=len(self._block_ids),
            block_size=self._layout.block_size,
            spare=_NUM_STEPS + 1,
            beside=self._layout.state_blocks,
        )

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
            seconds.append(self._execute(slices))
            for request_id, _ in chunks:
                self._engine.remove_sequence(request_id)
            self._num_assigned = num_assigned
        for request_id in decodes:
            self._engine.remove_sequence(request_id)
        self._engine.settle()  # else the next measurement waits for a step that was launched behind the last one
        return statistics.median(seconds)

    def _execute(self, slices: Sequence[tuple[RequestId, int]]) -> float:
        started = self._clock()
        self._engine.execute(slices)
        return self._clock() - started

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
        own = (request_id, tokens, len(tokens), num_cached, blocks, sampling, is_hidden)
        self._engine.add_sequence(NewSequence(*own, is_trial=True))
        return request_id
