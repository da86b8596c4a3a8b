"""Searches of a long text in slices: a search holds the interpreter's lock, and other threads wait for its end."""

import re
from collections.abc import Callable, Iterator

_SLICE_LEN = 65_536


class SlicedPattern:
    """A pattern whose matches have at most `max_len` characters."""

    def __init__(self, pattern: str, max_len: int) -> None:
        self.pattern = pattern
        self._regex = re.compile(pattern)
        self.max_len = max_len

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        position = 0
        while position < len(text):
            end = position + _SLICE_LEN
            found = self._regex.search(text, position, end + self.max_len)
            if found is None or found.start() >= end:
                position = end
            else:
                yield found
                position = max(found.end(), position + 1)

    def split(self, text: str) -> list[str | None]:
        """Return what stands between matches, and between each two pieces the group of the match, None where unset."""
        pieces: list[str | None] = []
        start = 0
        for found in self.finditer(text):
            pieces += (text[start : found.start()], found[1])
            start = found.end()
        return [*pieces, text[start:]]

    def sub(self, replace: Callable[[re.Match[str]], str], text: str) -> str:
        pieces: list[str] = []
        start = 0
        for found in self.finditer(text):
            pieces += (text[start : found.start()], replace(found))
            start = found.end()
        return "".join((*pieces, text[start:])) if pieces else text
