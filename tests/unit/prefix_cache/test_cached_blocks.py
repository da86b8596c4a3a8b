"""Cached blocks: the longest verified run, users, and eviction from the ends of contexts."""

from collections.abc import Iterator, Sequence
from itertools import count, islice

import numpy as np
import pytest

from alignedserve.core.ids import BlockId
from alignedserve.prefix_cache.block_hashes import BlockHasher, NamedBlock, packed_tokens
from alignedserve.prefix_cache.cached_blocks import CachedBlock, CachedBlocks

SIZE = 2
ROOT = bytes(16)
HASHER = BlockHasher(SIZE)


def longest_run(cache: CachedBlocks, token_ids: Sequence[int]) -> list[CachedBlock]:
    return cache.run_of(HASHER.named(ROOT, token_ids))


def store_rest(cache: CachedBlocks, held: list[CachedBlock], token_ids: Sequence[int], free: Iterator[int]) -> None:
    """Store what follows the blocks that are held, and hold it."""
    for named in islice(HASHER.named(ROOT, token_ids), len(held), None):
        block = cache.store(held[-1] if held else None, *named, BlockId(next(free)))
        assert block is not None
        held.append(block)


def store(cache: CachedBlocks, token_ids: Sequence[int], first_block: int) -> list[CachedBlock]:
    """Store a context as one request that computes all of it, from the blocks that are there."""
    held = longest_run(cache, token_ids)
    cache.acquire(held)
    store_rest(cache, held, token_ids, count(first_block + len(held)))
    return held


def run_of(cache: CachedBlocks, token_ids: Sequence[int]) -> list[BlockId]:
    return [block.block_id for block in longest_run(cache, token_ids)]


def test_the_longest_run_is_that_of_the_common_beginning() -> None:
    cache = CachedBlocks(SIZE)
    store(cache, (1, 2, 3, 4, 5, 6), 10)
    assert run_of(cache, (1, 2, 3, 4, 5, 6, 7)) == [10, 11, 12]
    assert run_of(cache, (1, 2, 3, 4, 5)) == [10, 11]
    assert run_of(cache, (1, 2, 9, 9, 5, 6)) == [10]
    assert run_of(cache, (2, 1, 3, 4)) == []


def test_equal_hashes_of_other_tokens_are_no_hit_and_replace_nothing() -> None:
    cache = CachedBlocks(SIZE)
    collision = b"c" * 16
    first = cache.store(None, collision, packed_tokens((1, 2)), BlockId(0))
    assert first is not None
    assert cache.store(None, collision, packed_tokens((3, 4)), BlockId(1)) is None
    assert cache.run_of([NamedBlock(collision, packed_tokens((3, 4)))]) == []
    assert cache.run_of([NamedBlock(collision, packed_tokens((1, 2)))]) == [first]


def test_equal_hashes_after_another_block_are_no_hit() -> None:
    cache = CachedBlocks(SIZE)
    collision = b"c" * 16
    parent = cache.store(None, b"p" * 16, packed_tokens((1, 2)), BlockId(0))
    assert cache.store(parent, collision, packed_tokens((3, 4)), BlockId(1)) is not None
    assert cache.run_of([NamedBlock(collision, packed_tokens((3, 4)))]) == []


def test_a_block_that_is_there_is_returned_and_has_no_more_users() -> None:
    cache = CachedBlocks(SIZE)
    (block,) = store(cache, (1, 2), 0)
    assert cache.store(None, block.block_hash, packed_tokens((1, 2)), BlockId(7)) is block
    assert block.num_users == 1
    assert block.block_id == 0


def test_only_blocks_without_users_are_evicted_the_last_of_a_context_first() -> None:
    cache = CachedBlocks(SIZE)
    one, other = store(cache, (1, 2, 3, 4, 5, 6), 0), store(cache, (1, 2, 7, 8), 10)
    assert cache.num_unused == 0
    cache.release(one)
    assert cache.num_unused == 2
    assert cache.evict(2) == [2, 1]
    assert run_of(cache, (1, 2, 7, 8)) == [0, 11]
    with pytest.raises(AssertionError, match="more blocks evicted"):
        cache.evict(1)
    cache.release(other)
    assert cache.evict(2) == [11, 0]
    assert len(cache) == 0


def test_what_was_used_again_leaves_later() -> None:
    cache = CachedBlocks(SIZE)
    first, second = store(cache, (1, 2), 0), store(cache, (3, 4), 1)
    cache.release(first)
    cache.release(second)
    cache.acquire(first)
    cache.release(first)
    assert cache.evict(1) == [1]


def test_a_block_that_was_used_often_long_ago_leaves_too() -> None:
    cache = CachedBlocks(SIZE)
    often = store(cache, (1, 2), 0)
    for _ in range(5):
        cache.acquire(often)
        cache.release(often)
    cache.release(often)
    for token in range(100, 120):
        cache.release(store(cache, (token, token), token))
        cache.evict(len(cache) - 2)
    assert run_of(cache, (1, 2)) == []


def test_a_context_leaves_as_a_whole_before_the_next_one() -> None:
    cache = CachedBlocks(SIZE)
    first, second = store(cache, (1, 2, 3, 4, 5, 6), 0), store(cache, (7, 8, 9, 9), 10)
    cache.release(first)
    cache.release(second)
    assert cache.evict(4) == [2, 1, 0, 11]


def test_uses_are_remembered_when_a_block_has_left_for_a_while() -> None:
    cache = CachedBlocks(SIZE, remembered_share=1)
    for number in range(3):
        cache.release(store(cache, (1, 2), number))
        cache.release(store(cache, (50 + number, 0), 50 + number))
        cache.release(store(cache, (60 + number, 0), 60 + number))
        cache.evict(2)
    (again,) = store(cache, (1, 2), 9)
    assert again.num_uses > 1
    for token in range(100, 110):
        cache.release(store(cache, (token, token), token))
        cache.evict(1)
    assert store(cache, (100, 100), 200)[0].num_uses == 1  # only as many are remembered as were cached


def test_a_block_released_once_too_often_is_a_broken_invariant() -> None:
    cache = CachedBlocks(SIZE)
    held = store(cache, (1, 2), 0)
    cache.release(held)
    with pytest.raises(AssertionError, match="released more often"):
        cache.release(held)


def test_changes_are_told_once_and_those_that_cancel_out_never() -> None:
    cache = CachedBlocks(SIZE)
    held = store(cache, (1, 2, 3, 4), 0)
    first, second = (block.block_hash for block in held)
    assert cache.take_changes() == ((first, second), ())
    cache.release(held)
    cache.evict(1)
    assert cache.take_changes() == ((), (second,))
    cache.release(store(cache, (7, 8), 5))
    cache.evict(2)
    assert cache.take_changes() == ((), (first,))


def test_random_histories_keep_users_and_free_blocks_exact() -> None:
    rng = np.random.default_rng(1)
    cache, free = CachedBlocks(SIZE), list(range(40))
    held: list[list[CachedBlock]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            cache.release(held.pop(int(rng.integers(len(held)))))
        else:
            tokens = tuple(rng.integers(0, 2, 2 * int(rng.integers(1, 6))).tolist())
            run = longest_run(cache, tokens)
            cache.acquire(run)
            missing = len(tokens) // SIZE - len(run)
            if missing > len(free) + cache.num_unused:
                cache.release(run)
                continue
            free += cache.evict(max(missing - len(free), 0))
            store_rest(cache, run, tokens, iter(free.pop, None))
            held.append(run)
        assert len(free) + len(cache) == 40
        used = {id(block) for run in held for block in run}
        assert len(cache) - cache.num_unused == len(used)
        assert all(block.num_users == sum(block in run for run in held) for block in cache)
        assert all(block.parent is None or cache.get(block.parent.block_hash) is block.parent for block in cache)
