"""Iterations to measure, and the set by which a worker learns its costs before it serves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.block_allocator import blocks_for
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.work import IterationWork


class Chunk(NamedTuple):
    """A part of a prompt, computed after cached tokens."""

    num_tokens: int  # 2 or more: one token is a decode
    num_cached: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Point:
    """One iteration to measure."""

    kind: str
    chunks: tuple[Chunk, ...] = ()
    contexts: tuple[int, ...] = ()  # of the decodes, their new token included
    hidden_contexts: tuple[int, ...] = ()  # of decodes with a hidden cache, likewise
    num_swapped: int = 0  # full-width cache tokens copied to the host and back, beside nothing else

    @property
    def work(self) -> IterationWork:
        """Return the iteration's work as policies count it."""
        work = IterationWork(swap_in_tokens=self.num_swapped, swap_out_tokens=self.num_swapped)
        for chunk in self.chunks:
            work.add_chunk(chunk.num_tokens, chunk.num_cached, is_last=chunk.is_last)
        for context_len in self.contexts:
            work.add_decode(context_len)
        for context_len in self.hidden_contexts:
            work.add_decode(context_len, is_hidden=True)
        return work

    @property
    def num_requests(self) -> int:
        """Return the number of requests: one per chunk and decode."""
        return len(self.chunks) + len(self.contexts) + len(self.hidden_contexts)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are computed: all of the chunks, and one of each decode."""
        return sum(chunk.num_tokens for chunk in self.chunks) + self.num_requests - len(self.chunks)

    @property
    def max_context_len(self) -> int:
        """Return the longest context of all requests."""
        return max(self._lengths, default=1)

    def num_blocks(self, block_size: int, spare: int) -> int:
        """Return the blocks that the point needs at most, with every request growing by `spare` tokens."""
        swapped = blocks_for(self.num_swapped, block_size)
        return swapped + sum(blocks_for(length + spare, block_size) for length in self._lengths)

    @property
    def _lengths(self) -> list[int]:
        chunks = (chunk.num_tokens + chunk.num_cached for chunk in self.chunks)
        return [*self.contexts, *self.hidden_contexts, *chunks]


def feasible_points(
    points: Sequence[Point], *, max_context_len: int, num_blocks: int, block_size: int, spare: int, beside: int = 0
) -> list[Point]:
    """Return the points that fit a model's context and a storage. `beside`: blocks of a request beside its tokens'."""
    return [
        point
        for point in points
        if point.max_context_len + spare < max_context_len
        and point.num_blocks(block_size, spare) + beside * point.num_requests <= num_blocks
    ]


SWAPPED = Point("swap", num_swapped=256)
# Every part of the cost occurs in several points, so that it can be told from the others. Short ones come first, for
# slow models that do not get to all; long ones last: what a fast machine computes for nothing beside reading its
# weights, and what it does not, shows at a thousand tokens. Lengths are equal: straggler.py has what mixed ones cost.
_POINTS = (
    Point("prefill", (Chunk(16, 0, is_last=True),)),
    Point("decode", contexts=(64,)),
    Point("decode", contexts=(64,) * 8),
    Point("prefill", (Chunk(64, 0, is_last=True),)),
    Point("decode", contexts=(512,) * 8),
    SWAPPED,
    Point("mixed", (Chunk(64, 0, is_last=True),), (256,) * 8),
    Point("prefill", (Chunk(64, 512, is_last=False),)),
    Point("decode", contexts=(64,) * 32),
    Point("prefill", (Chunk(256, 0, is_last=True),)),
    Point("decode", contexts=(512,) * 32),
    Point("prefill", (Chunk(64, 0, is_last=True),) * 4),
    Point("prefill", (Chunk(512, 0, is_last=True),)),
    Point("prefill", (Chunk(1024, 0, is_last=True),)),
    Point("decode", contexts=(2048,) * 16),
    Point("prefill", (Chunk(2048, 0, is_last=True),)),
    Point("mixed", (Chunk(512, 2048, is_last=False),), (1024,) * 16),
)
# For engines with hidden caches. Early on: their cost decides whether they are used.
_HIDDEN_POINTS = (
    Point("hidden", hidden_contexts=(128,)),
    Point("hidden", (Chunk(64, 0, is_last=True),), (128,) * 4, (128,) * 4),
    Point("hidden", hidden_contexts=(512,) * 8),
)
_NUM_FIRST = 2  # points before those of hidden caches
_MAX_SAMPLES = 1024  # more would say nothing new


def calibration_points(*, max_requests: int, max_tokens: int, has_hidden_cache: bool) -> list[Point]:
    """Return the points within the limits of an iteration, in the order in which a worker measures them."""
    hidden = _HIDDEN_POINTS if has_hidden_cache else ()
    points = (*_POINTS[:_NUM_FIRST], *hidden, *_POINTS[_NUM_FIRST:])
    return [point for point in points if point.num_requests <= max_requests and point.num_tokens <= max_tokens]


def calibrate(
    points: Sequence[Point],
    measure: Callable[[Point], float],
    *,
    clock: Callable[[], float],
    duration_s: float,
    max_samples: int = _MAX_SAMPLES,
) -> tuple[Sample, ...]:
    """Measure point after point, round after round, for about `duration_s`.

    A prompt that would take longer than the time left, at the speed of the longest one so far, is left out.
    """
    left_s = duration_s
    ends_s = clock() + left_s
    longest, token_s = 0, 0.0
    samples: list[Sample] = []
    has_more = duration_s > 0.0
    while has_more:
        num_before = len(samples)
        for point in points:
            num_tokens = point.work.num_prompt_tokens
            if num_tokens * token_s > left_s:
                continue
            samples.append(Sample(point.work, measure(point)))
            if num_tokens >= max(longest, 1):
                longest, token_s = num_tokens, samples[-1].seconds / num_tokens
            left_s = ends_s - clock()
            if left_s <= 0.0 or len(samples) >= max_samples:
                return tuple(samples)
        has_more = len(samples) > num_before
    return tuple(samples)
