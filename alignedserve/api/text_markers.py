"""Finds markers in text that comes in pieces, and holds back whatever may be the beginning of one."""

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """Text before a marker, the marker, and the text after it. Without a marker: the text that is surely none."""

    before: str
    marker: str | None = None
    after: str = ""


class MarkerFinder:
    """Finds the first of some markers, however the text is cut into pieces."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""

    def push(self, piece: str) -> Found:
        """Return what the piece makes certain. After a marker the finder begins anew with the next piece."""
        text, self._held = self._held + piece, ""
        starts = [(start, marker) for marker in self._markers if (start := text.find(marker)) >= 0]
        if starts:
            start, marker = min(starts)
            return Found(text[:start], marker, text[start + len(marker) :])
        cut = len(text) - max((overlap_len(text, marker) for marker in self._markers), default=0)
        self._held = text[cut:]
        return Found(text[:cut])

    def flush(self) -> str:
        """Return the held text: at the end of the text it is no marker."""
        held, self._held = self._held, ""
        return held


def overlap_len(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker` without being all of it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
