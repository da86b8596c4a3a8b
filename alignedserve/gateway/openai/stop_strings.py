"""Finds stop strings in text that comes in pieces, and never lets a part of one through."""

from collections.abc import Sequence


class StopFinder:
    """Holds back whatever could be the beginning of a stop string. Where pieces are cut makes no difference."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def push(self, piece: str) -> str:
        """Text that may be shown now. Sets `is_found` when a stop string is complete; it and the rest are dropped."""
        text = self._held + piece
        # The one that is complete first ends the answer, as it would if the text came character by character.
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.is_found = True
            self._held = ""
            return text[: min(ends)[1]]
        num_held = max((_num_begun(text, stop) for stop in self._stops), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """The text has ended: what was held is no stop string."""
        held, self._held = self._held, ""
        return held


def _num_begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
