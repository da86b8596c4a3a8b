"""Iterations to ask cost models about."""

import random

from alignedserve.costmodel.work import IterationWork


def prefill(num_tokens: int, num_cached: int = 0) -> IterationWork:
    """Return the work of one chunk, the last of its prompt."""
    work = IterationWork()
    work.add_chunk(num_tokens, num_cached, is_last=True)
    return work


def decodes(num: int, context_len: int) -> IterationWork:
    """Return the work of decodes of equal length."""
    work = IterationWork()
    work.add_decodes(num, num * context_len, context_len)
    return work


def random_work(generator: random.Random, *, has_chunks: bool = True) -> IterationWork:
    """Draw up to two chunks and 1 to 48 decodes of mixed lengths, some of them with a hidden cache."""
    work = IterationWork()
    for _ in range(generator.randint(0, 2) if has_chunks else 0):
        work.add_chunk(generator.randint(2, 500), generator.choice((0, 300)), is_last=generator.random() < 0.5)
    for _ in range(generator.randint(1, 48)):
        work.add_decode(generator.randint(1, 2000), is_hidden=has_chunks and generator.random() < 0.2)
    return work
