"""Ideal caches against brute force, and blocks cut from texts."""

import random
from functools import cache

from alignedserve.sim.ideal_caches import PromptBlocks, farthest_next_use, least_recently_used, unbounded
from alignedserve.workload.requests import TextRun
from tests.support.marks import each

A, B, C = (TextRun(text, 10) for text in "abc")


def test_blocks_are_equal_where_everything_up_to_their_end_is() -> None:
    blocks = PromptBlocks(8)
    assert blocks.of([A, B], 21) == [0, 1]  # the third would be its own
    assert blocks.of([A, C], 21) == [0, 2]
    assert blocks.of([B, A], 21) == [3, 4]
    assert blocks.of([A, B, C], 30) == [0, 1, 5]
    assert blocks.of([A, B], 16) == [0]  # the last token is computed anyway
    assert blocks.of([], 100) == []


def test_a_run_may_fill_many_blocks() -> None:
    blocks = PromptBlocks(4)
    assert blocks.of([TextRun("x", 13)], 100) == [0, 1, 2]
    assert blocks.of([TextRun("x", 9), TextRun("y", 9)], 100) == [0, 1, 3, 4]


def test_least_recently_used_drops_the_ends_of_prompts_first() -> None:
    prompts = [[0, 1, 2], [0, 3], [0, 1, 2]]
    assert unbounded(prompts) == (8, 4)
    assert least_recently_used(prompts, 4) == (8, 4)
    assert least_recently_used(prompts, 3) == (8, 3)  # 2 went


def _prompts(rng: random.Random) -> list[list[int]]:
    """Return prompts over a small tree: block n follows block (n - 1) // 2."""
    prompts = []
    for _ in range(7):
        block, path = rng.randrange(7), []
        while block >= 0:
            path.append(block)
            block = (block - 1) // 2 if block else -1
        prompts.append(path[::-1])
    return prompts


def _best(prompts: list[list[int]], capacity: int) -> int:
    """Return the most hits of any sequence of choices that keeps blocks with all those before them."""

    @cache
    def most(number: int, cached: frozenset[int]) -> int:
        if number == len(prompts):
            return 0
        prompt = prompts[number]
        hits = next((place for place, block in enumerate(prompt) if block not in cached), len(prompt))
        return hits + max(most(number + 1, kept) for kept in _kept(cached | set(prompt), capacity))

    return most(0, frozenset())


def _kept(cached: frozenset[int], capacity: int) -> set[frozenset[int]]:
    """Return every way to drop leaves until so many blocks are left."""
    if len(cached) <= capacity:
        return {cached}
    leaves = [block for block in cached if not {2 * block + 1, 2 * block + 2} & cached]
    return {kept for leaf in leaves for kept in _kept(cached - {leaf}, capacity)}


@each("seed", range(12))
def test_no_cache_hits_more_than_the_one_that_knows_the_future(seed: int) -> None:
    prompts = _prompts(random.Random(seed))
    for capacity in (1, 2, 3, 4):
        best = farthest_next_use(prompts, capacity).num_hits
        assert best == _best(prompts, capacity)
        assert least_recently_used(prompts, capacity).num_hits <= best <= unbounded(prompts).num_hits
