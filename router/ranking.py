"""Names in the order of a rank that changes: the index behind every choice of "the least loaded one"."""

import heapq
from collections.abc import Generator
from typing import Generic, NamedTuple, TypeVar

RankT = TypeVar("RankT", float, int, tuple[int, int], tuple[float, int], tuple[int, float, int], tuple[float, int, int])

_MIN_STALE = 32  # fewer stale entries are not worth a rebuild


class Ranked(NamedTuple, Generic[RankT]):
    """An entry of a ranking; entries compare by rank, then name."""

    rank: RankT
    name: str


class Ranking(Generic[RankT]):
    """Each name has at most one rank. The first is found at once, a rank is changed in logarithmic time.

    A binary heap: a rank that is replaced leaves a stale entry, which is dropped when it comes to the top, or with all
    others as soon as more than half of the heap is stale.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, RankT] = {}
        self._heap: list[Ranked[RankT]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, name: str, rank: RankT) -> None:
        if self._ranks.get(name) == rank:
            return
        self._ranks[name] = rank
        heapq.heappush(self._heap, Ranked(rank, name))
        if len(self._heap) > 2 * len(self._ranks) + _MIN_STALE:
            self._heap = [Ranked(rank, name) for name, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, name: str) -> None:
        self._ranks.pop(name, None)

    def first(self) -> Ranked[RankT] | None:
        """Return the entry with the smallest rank, ties by name; None if there is none."""
        heap, ranks = self._heap, self._ranks
        while heap and ranks.get(heap[0].name) != heap[0].rank:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def in_order(self) -> Generator[str, None, None]:
        passed = []
        try:
            while (first := self.first()) is not None:
                self.discard(first.name)
                passed.append(first)
                yield first.name
        finally:
            for rank, name in passed:
                self.put(name, rank)
