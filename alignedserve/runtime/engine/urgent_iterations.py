"""Iterations that run within another one: its pass stands still between two layers meanwhile, and loses nothing."""

import time
from collections import deque
from collections.abc import Callable


class UrgentIterations:
    """Those that wait for the pass in progress to come to the end of a layer. For its thread, except `add`.

    What a pass has computed so far is on the stack of its thread, so another one simply runs on top of it. Sequences,
    blocks and results are its own: nothing of the other changes, to the last bit.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_performing = False
        self._stopped_s = 0.0
        self.is_within = False  # what is performed now, in another pass

    def add(self, perform: Callable[[], object]) -> None:
        """Add one, which reports by itself. From any thread."""
        self._waiting.append(perform)

    def between_layers(self) -> None:
        """Perform those that wait, while the pass in progress stands still."""
        if not self._waiting or self._is_performing:
            return
        began = time.monotonic()
        self.is_within = True
        try:
            self.perform_left()
        finally:
            self.is_within = False
        self._stopped_s += time.monotonic() - began

    def perform_left(self) -> None:
        """Perform those that still wait: their pass had ended before they came."""
        self._is_performing = True
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._is_performing = False

    def take_stopped_s(self) -> float:
        """Return how long the pass that has ended stood still."""
        stopped_s, self._stopped_s = self._stopped_s, 0.0
        return stopped_s
