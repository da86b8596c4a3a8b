"""Calls functions in the next turn of the event loop, all by one callback of the loop.

A token that wakes the task of its stream costs the loop a callback, a future and a step of the task, which together
cost as much as all that is done for the token.
"""

import asyncio
from collections.abc import Callable


class NextTurn:
    """The functions that are due, of one loop."""

    def __init__(self) -> None:
        self._due: dict[Callable[[], None], None] = {}

    def call(self, function: Callable[[], None]) -> None:
        """Call this in the next turn, once, in the order in which functions were first asked for.

        A stream of a thousand choices is asked for by each of them, and looks at all.
        """
        if not self._due:
            asyncio.get_running_loop().call_soon(self._call_all)
        self._due[function] = None

    def _call_all(self) -> None:
        due, self._due = iter(self._due), {}
        try:
            for function in due:
                function()
        finally:
            for function in due:  # else one that breaks its word would leave the others without what has come for them
                self.call(function)
