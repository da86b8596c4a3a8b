"""Iterations that are measured to learn what iterations cost: sizes that double, and others in between to check by."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from alignedserve.costmodel.iteration_points import Chunk, Point

_SHORTEST_SPREAD, _LEAST_CHECKED = 64, 16


@dataclass(frozen=True, slots=True)
class PointSizes:
    """The sizes of the iterations to measure, by what a device serves; what has no room there is left out later."""

    chunks: tuple[int, ...]
    cached: tuple[int, ...]  # before them
    joined_chunks: tuple[int, int]  # of which two and four share an iteration
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    mixed_batches: tuple[int, ...]  # of two lengths, like the next
    mixed_contexts: tuple[tuple[int, int], ...]
    spread_batches: tuple[int, int]  # of contexts up to `longest_spread`
    longest_spread: int
    beside_batches: tuple[int, int, int]  # decodes beside a chunk
    beside_chunks: tuple[int, ...]
    beside_contexts: tuple[int, int]
    max_checked_chunk: int
    checked_cached: tuple[int, ...]
    max_checked_batch: int
    max_checked_context: int
    max_checked_tokens: int  # of all contexts of a batch, on average

    @property
    def max_requests(self) -> int:
        return max(self.batches)


CPU_SIZES = PointSizes(
    chunks=(8, 16, 32, 64, 128, 256, 512, 1024),
    cached=(0, 128, 512, 1024),
    joined_chunks=(16, 64),
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(32, 128, 512, 1536),
    mixed_batches=(8, 16, 32),
    mixed_contexts=((32, 512), (128, 1536)),
    spread_batches=(8, 32),
    longest_spread=1024,
    beside_batches=(4, 16, 48),
    beside_chunks=(32, 128, 512),
    beside_contexts=(64, 512),
    max_checked_chunk=400,
    checked_cached=(0, 0, 200, 700),
    max_checked_batch=48,
    max_checked_context=1200,
    max_checked_tokens=48 * 1200,
)
GPU_SIZES = PointSizes(
    chunks=(16, 64, 256, 512, 1024, 2048, 4096, 8192),
    cached=(0, 1024, 4096),
    joined_chunks=(256, 1024),
    batches=(1, 4, 16, 64, 128, 256, 512),
    contexts=(128, 512, 2048, 8192),
    mixed_batches=(32, 128, 256),
    mixed_contexts=((128, 2048), (512, 8192)),
    spread_batches=(32, 128),
    longest_spread=4096,
    beside_batches=(16, 64, 256),
    beside_chunks=(256, 1024, 4096),
    beside_contexts=(256, 1024),
    max_checked_chunk=6000,
    checked_cached=(0, 0, 700, 3000),
    max_checked_batch=320,
    max_checked_context=8000,
    max_checked_tokens=150_000,
)


def fitted_points(sizes: PointSizes = CPU_SIZES) -> list[Point]:
    return [*_prefills(sizes), *_aligned_decodes(sizes), *_mixed_decodes(sizes), *_mixed_iterations(sizes)]


def held_out_points(seed: int, count: int, sizes: PointSizes = CPU_SIZES) -> list[Point]:
    """Return iterations of random sizes, as a scheduler would make them; no model is fitted to these."""
    generator = random.Random(seed)  # noqa: S311  (repeatable, no secret)
    return [_random_point(generator, sizes, has_chunk=index % 2 == 0) for index in range(count)]


def _prefills(sizes: PointSizes) -> Iterator[Point]:
    for index, (num_tokens, num_cached) in enumerate(product(sizes.chunks, sizes.cached)):
        yield Point("prefill", (Chunk(num_tokens, num_cached, is_last=index % 2 == 0),))
    for num_chunks, num_tokens in product((2, 4), sizes.joined_chunks):
        yield Point("prefill", (Chunk(num_tokens, 0, is_last=True),) * num_chunks)


def _aligned_decodes(sizes: PointSizes) -> Iterator[Point]:
    for batch_size, context_len in product(sizes.batches, sizes.contexts):
        yield Point("decode, equal lengths", contexts=(context_len,) * batch_size)


def _mixed_decodes(sizes: PointSizes) -> Iterator[Point]:
    for batch_size, (short, long) in product(sizes.mixed_batches, sizes.mixed_contexts):
        for num_long in (1, batch_size // 2):
            contexts = (short,) * (batch_size - num_long) + (long,) * num_long
            yield Point("decode, mixed lengths", contexts=contexts)
    for batch_size in sizes.spread_batches:
        more = sizes.longest_spread - _SHORTEST_SPREAD
        spread = tuple(_SHORTEST_SPREAD + more * index // (batch_size - 1) for index in range(batch_size))
        yield Point("decode, mixed lengths", contexts=spread)


def _mixed_iterations(sizes: PointSizes) -> Iterator[Point]:
    _, samples, _ = sizes.beside_batches  # beside which prompts end
    for batch_size, num_tokens, context_len in product(
        sizes.beside_batches, sizes.beside_chunks, sizes.beside_contexts
    ):
        yield Point("mixed", (Chunk(num_tokens, 0, is_last=batch_size == samples),), (context_len,) * batch_size)


def _random_point(generator: random.Random, sizes: PointSizes, *, has_chunk: bool) -> Point:
    contexts = _random_contexts(generator, sizes)
    if not has_chunk:
        return Point("held out, decode", contexts=contexts)
    chunk = Chunk(
        generator.randint(8, sizes.max_checked_chunk),
        generator.choice(sizes.checked_cached),
        generator.random() < 0.5,
    )
    return Point("held out, mixed", (chunk,), contexts[: generator.choice((0, 8, sizes.max_checked_batch))])


def _random_contexts(generator: random.Random, sizes: PointSizes) -> tuple[int, ...]:
    count = generator.randint(1, sizes.max_checked_batch)
    longest = min(sizes.max_checked_context, 2 * sizes.max_checked_tokens // count)
    return tuple(generator.randint(_LEAST_CHECKED, longest) for _ in range(count))
