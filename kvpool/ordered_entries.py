"""Requests in a fixed order, each with its size: finds the first that fit without looking at all of them.

A sorted list cut into chunks of a few dozen, each chunk with the size of its smallest entry. Adding and removing
searches two short lists; a search for what fits skips whole chunks.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

from alignedserve.core.ids import RequestId

# (time it is ordered by, arrival, id, blocks); the id is unique, so the blocks never decide the order.
Entry = tuple[float, float, RequestId, int]

NO_SIZE = 1 << 62  # smallest size of an empty list: fits no limit
_MAX_CHUNK = 64
_MIN_CHUNK = 8  # smaller ones are merged with their neighbour
_blocks_of = itemgetter(3)


@dataclass(frozen=True, slots=True)
class FitResult:
    """Entries that fit together, in order, and the size of the smallest one left."""

    entries: list[Entry]
    smallest_left: int  # NO_SIZE: none was left


class OrderedEntries:
    """Entries in ascending order. `smallest` is the size of the smallest, in blocks."""

    __slots__ = ("_chunks", "_lasts", "_smallest", "smallest")

    def __init__(self) -> None:
        self._chunks: list[list[Entry]] = []
        self._lasts: list[Entry] = []  # per chunk its last entry
        self._smallest: list[int] = []  # per chunk the size of its smallest entry
        self.smallest = NO_SIZE

    def __iter__(self) -> Iterator[Entry]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, entry: Entry) -> None:
        size = entry[3]
        if size < self.smallest:
            self.smallest = size
        if not self._chunks:
            self._chunks, self._lasts, self._smallest = [[entry]], [entry], [size]
            return
        place = min(bisect_left(self._lasts, entry), len(self._lasts) - 1)
        chunk = self._chunks[place]
        insort(chunk, entry)
        self._lasts[place] = chunk[-1]
        if size < self._smallest[place]:
            self._smallest[place] = size
        if len(chunk) > _MAX_CHUNK:
            half = len(chunk) // 2
            self._replace(place, 1, [chunk[:half], chunk[half:]])

    def remove(self, entry: Entry) -> None:
        place = bisect_left(self._lasts, entry)
        chunk = self._chunks[place]
        position = bisect_left(chunk, entry)
        del chunk[position]
        if not chunk or (len(chunk) < _MIN_CHUNK and len(self._chunks) > 1):
            self._shrink(place)
        else:
            self._lasts[place] = chunk[-1]
            if entry[3] == self._smallest[place] and entry[3] not in map(_blocks_of, chunk):
                self._smallest[place] = min(map(_blocks_of, chunk))
        if entry[3] == self.smallest and entry[3] not in self._smallest:
            self.smallest = min(self._smallest, default=NO_SIZE)

    def _shrink(self, place: int) -> None:
        first = max(0, min(place, len(self._chunks) - 2))
        merged = [entry for chunk in self._chunks[first : first + 2] for entry in chunk]
        if len(merged) > _MAX_CHUNK:
            self._replace(place, 1, [self._chunks[place]])
        else:
            self._replace(first, 2, [merged])

    def _replace(self, place: int, count: int, chunks: list[list[Entry]]) -> None:
        chunks = [chunk for chunk in chunks if chunk]
        self._chunks[place : place + count] = chunks
        self._lasts[place : place + count] = [chunk[-1] for chunk in chunks]
        self._smallest[place : place + count] = [min(map(_blocks_of, chunk)) for chunk in chunks]

    def up_to(self, max_blocks: int) -> Iterator[Entry]:
        for chunk, smallest in zip(self._chunks, self._smallest, strict=True):
            if smallest <= max_blocks:
                yield from (entry for entry in chunk if entry[3] <= max_blocks)

    def first_fit(self, max_blocks: int, max_requests: int) -> FitResult:
        entries: list[Entry] = []
        smallest_left = NO_SIZE
        for place, smallest in enumerate(self._smallest):
            if self.smallest > max_blocks:  # nothing that follows fits
                return FitResult(entries, min(smallest_left, *self._smallest[place:]))
            if smallest > max_blocks:
                smallest_left = min(smallest_left, smallest)
                continue
            for entry in self._chunks[place]:
                size = entry[3]
                if size > max_blocks:
                    smallest_left = min(smallest_left, size)
                elif len(entries) == max_requests:
                    return FitResult(entries, min(smallest_left, size))
                else:
                    entries.append(entry)
                    max_blocks -= size
        return FitResult(entries, smallest_left)
