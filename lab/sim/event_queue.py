"""The queue of future events, in order of time; the simulator's only clock."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_Entry = tuple[float, int, Callable[[Any], None], Any]


class EventQueue:
    """Actions by time; those at the same time run in the order in which they were added."""

    __slots__ = ("_entries", "_num_entries", "end_s", "now")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._num_entries = 0
        self.now = 0.0
        self.end_s = float("inf")  # later actions do not run

    def at(self, time_s: float, action: Callable[[Any], None], argument: object) -> None:
        self._num_entries += 1
        heappush(self._entries, (time_s, self._num_entries, action, argument))

    def after(self, delay_s: float, action: Callable[[Any], None], argument: object) -> None:
        self._num_entries += 1
        heappush(self._entries, (self.now + delay_s, self._num_entries, action, argument))

    def run(self) -> int:
        """Run all actions up to `end_s`, which may change meanwhile; return their number."""
        entries, num_before = self._entries, self._num_entries - len(self._entries)
        while entries and entries[0][0] <= self.end_s:
            self.now, _, action, argument = heappop(entries)
            action(argument)
        return self._num_entries - len(entries) - num_before
