"""Iterations that are measured to learn what iterations cost: sizes that double, and others in between to check by."""

import random
from collections.abc import Iterator
from itertools import product

from alignedserve.costmodel.iteration_points import Chunk, Point

_CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024)
_CACHED = (0, 128, 512, 1024)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (32, 128, 512, 1536)
_MAX_CHECKED_CHUNK, _MAX_CHECKED_BATCH = 400, 48


def fitted_points() -> list[Point]:
    """Return prefills, decodes of equal and of mixed lengths, and both in one iteration."""
    return [*_prefills(), *_aligned_decodes(), *_mixed_decodes(), *_mixed_iterations()]


def held_out_points(seed: int, count: int) -> list[Point]:
    """Return iterations of random sizes, as a scheduler would make them; no model is fitted to these."""
    generator = random.Random(seed)  # noqa: S311  (repeatable, no secret)
    return [_random_point(generator, has_chunk=index % 2 == 0) for index in range(count)]


def _prefills() -> Iterator[Point]:
    for index, (num_tokens, num_cached) in enumerate(product(_CHUNKS, _CACHED)):
        yield Point("prefill", (Chunk(num_tokens, num_cached, is_last=index % 2 == 0),))
    for num_chunks, num_tokens in product((2, 4), (16, 64)):
        yield Point("prefill", (Chunk(num_tokens, 0, is_last=True),) * num_chunks)


def _aligned_decodes() -> Iterator[Point]:
    for batch_size, context_len in product(_BATCHES, _CONTEXTS):
        yield Point("decode, equal lengths", contexts=(context_len,) * batch_size)


def _mixed_decodes() -> Iterator[Point]:
    for batch_size, (short, long) in product((8, 16, 32), ((32, 512), (128, 1536))):
        for num_long in (1, batch_size // 2):
            contexts = (short,) * (batch_size - num_long) + (long,) * num_long
            yield Point("decode, mixed lengths", contexts=contexts)
    for batch_size in (8, 32):
        spread = tuple(64 + 960 * index // (batch_size - 1) for index in range(batch_size))
        yield Point("decode, mixed lengths", contexts=spread)


def _mixed_iterations() -> Iterator[Point]:
    for batch_size, num_tokens, context_len in product((4, 16, 48), (32, 128, 512), (64, 512)):
        yield Point("mixed", (Chunk(num_tokens, 0, is_last=batch_size == 16),), (context_len,) * batch_size)


def _random_point(generator: random.Random, *, has_chunk: bool) -> Point:
    contexts = tuple(generator.randint(16, 1200) for _ in range(generator.randint(1, _MAX_CHECKED_BATCH)))
    if not has_chunk:
        return Point("held out, decode", contexts=contexts)
    chunk = Chunk(
        generator.randint(8, _MAX_CHECKED_CHUNK), generator.choice((0, 0, 200, 700)), generator.random() < 0.5
    )
    return Point("held out, mixed", (chunk,), contexts[: generator.choice((0, 8, 48))])
