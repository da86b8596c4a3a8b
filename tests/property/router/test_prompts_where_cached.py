"""Random histories of cached blocks: the index tells of each worker what a plain look at its blocks tells.

Contexts are paths in a small tree of blocks, so that they share beginnings; workers tell of blocks that come and go,
with lies and gaps, compute, are lost and come back.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.messages.prefixes import PrefixBlocksChanged, is_told
from router.prefix_index import PrefixIndex

WORKERS = st.sampled_from(("a", "b", "c"))
LONGEST = ((0, 1, 1, 0, 1, 0), (0, 1, 1, 1, 0, 0), (0, 2, 0, 0, 1, 1), (2, 0, 0, 0, 0, 1))
PATHS = st.builds(lambda path, length: path[:length], st.sampled_from(LONGEST), st.integers(1, 6))


def names_of(path: Sequence[int]) -> list[bytes]:
    """Return the names of a path's blocks; of two in three the router is told."""
    begins = [path[: length + 1] for length in range(len(path))]
    return [bytes(begin).ljust(7, b"\xff") + bytes([sum(begin) % 3 * 32]) for begin in begins]


def run_of(names: list[bytes], cached: set[bytes], given: list[list[bytes]]) -> int:
    """Return how many of these blocks a worker has cached or is about to compute, as far as the router is told."""
    told = [place for place, block in enumerate(names) if is_told(block)]
    held = [place for place in told if all(names[other] in cached for other in told if other <= place)]
    reach = told[len(held)] if len(held) < len(told) else len(names)  # nothing before it is known not to be there
    ends = 0
    for first in range(len(names)):
        for expected in given:
            if expected[0] == names[first] and first <= max(reach, ends):
                same = [one == other for one, other in zip(names[first:], expected, strict=False)]
                ends = max(ends, first + (same.index(False) if False in same else len(same)))
    return max(ends, held[-1] + 1 if held else 0)


REPORTS = st.tuples(WORKERS, st.lists(PATHS, max_size=3), st.lists(PATHS, max_size=3), st.sampled_from((0, 0, 0, 1)))
GIVEN = st.tuples(WORKERS, PATHS, st.integers(0, 5))
STEPS = st.one_of(REPORTS, GIVEN, GIVEN, st.tuples(WORKERS), st.integers(0, 100))


@settings(max_examples=40)
@given(steps=st.lists(STEPS, min_size=20, max_size=40))
def test_runs_are_those_of_a_plain_look(steps: list[Any]) -> None:
    index = PrefixIndex()
    cached: dict[str, set[bytes]] = defaultdict(set)
    expected: list[tuple[str, list[bytes]]] = []

    def settle(place: int) -> None:
        worker, names = expected.pop(place)
        index.settle(worker, b"".join(names))

    def lose(worker: str) -> None:
        for place in reversed(range(len(expected))):
            if expected[place][0] == worker:
                settle(place)
        index.forget(worker)
        cached.pop(worker, None)

    for step in steps:
        match step:
            case (worker, stored, removed, is_complete):
                held, gone = (
                    [block for path in paths for block in names_of(path) if is_told(block)]
                    for paths in (stored, removed)
                )
                index.update(worker, PrefixBlocksChanged(tuple(held), tuple(gone), is_complete=bool(is_complete)))
                cached[worker] = (set() if is_complete else cached[worker] - set(gone)) | set(held)
            case (worker, path, first) if first < len(path):
                index.expect(worker, b"".join(names_of(path)[first:]))
                expected.append((worker, names_of(path)[first:]))
            case (worker,):
                lose(worker)
            case int(number) if expected:
                settle(number % len(expected))
        assert len(index) == sum(map(len, cached.values()))
        for path in LONGEST:
            names = names_of(path)
            runs = {
                worker: run_of(names, cached[worker], [given for holder, given in expected if holder == worker])
                for worker in "abc"
            }
            assert index.runs(b"".join(names)) == {worker: run for worker, run in runs.items() if run}
    for worker in "abc":
        lose(worker)
    assert not any((len(index), index._expected, index._holders, index._bits, index._workers))
