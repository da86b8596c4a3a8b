"""Finds stop strings in text that comes in pieces, and holds back every part of one."""

from collections.abc import Sequence

from alignedserve.api.text_markers import overlap_len


class StopStringFinder:
    """Holds back text that could be the beginning of a stop string, however the text is cut into pieces."""

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: the text ends behind the stop string, not before it."""
        self._stops = tuple(stops)
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
        num_held = max((overlap_len(text, stop) for stop in self._stops), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the held text: at the end of the text it is no stop string."""
        held, self._held = self._held, ""
        return held
