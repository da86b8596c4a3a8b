"""Finds markers and stop strings in text that comes in pieces, and holds back whatever may be the beginning of one."""

from collections.abc import Sequence
from typing import NamedTuple


class MarkerSplit(NamedTuple):
    """Text before a marker, the marker, and the text after it. Without a marker: the text that is surely none."""

    before: str
    marker: str | None = None
    after: str = ""


class MarkerFinder:
    """Finds the first of some markers, however the text is cut into pieces."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""

    def push(self, piece: str) -> MarkerSplit:
        text, self._held = self._held + piece, ""
        starts = [(start, marker) for marker in self._markers if (start := text.find(marker)) >= 0]
        if starts:
            start, marker = min(starts)
            return MarkerSplit(text[:start], marker, text[start + len(marker) :])
        cut = len(text) - max((overlap_len(text, marker) for marker in self._markers), default=0)
        self._held = text[cut:]
        return MarkerSplit(text[:cut])

    def flush(self) -> str:
        """Return the held text: at the end of the text it is no marker."""
        held, self._held = self._held, ""
        return held


def overlap_len(text: str, marker: str, at_most: int | None = None) -> int:
    """Return the length of the longest end of `text` that begins `marker` without being all of it.

    `at_most`: which it is known not to exceed; None: nothing is known."""
    for length in range(min(len(marker) - 1, len(text) if at_most is None else at_most), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class StopStringFinder:
    """Holds back text that could be the beginning of a stop string, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._overlaps = [0] * len(self._stops)  # of what is held with each
        self._is_shown = is_shown
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def push(self, piece: str) -> str:
        """Return text that may be shown now. Sets `found` at a complete stop string; the rest is dropped."""
        text = self._held + piece
        # The one that is complete first ends the answer, as it would if the text came character by character.
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.found = min(ends)
            self._held = ""
            return text[: end if self._is_shown else start]
        # An overlap grows by the piece at most: else all that is held for one would be compared with every other.
        known = zip(self._stops, self._overlaps, strict=True)
        self._overlaps = [overlap_len(text, stop, overlap + len(piece)) for stop, overlap in known]
        cut = len(text) - max(self._overlaps, default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the held text: at the end of the text it is no stop string."""
        held, self._held = self._held, ""
        self._overlaps = [0] * len(self._stops)
        return held
