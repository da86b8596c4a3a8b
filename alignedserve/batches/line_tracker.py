"""Which lines of one batch are untouched, leased, waiting to be tried again, or done. Nothing is taken out: a line that
was leased and never settled is simply not done."""

import heapq
from collections.abc import Iterable, Iterator, Mapping

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class LineTracker:
    """Lines by number from 0. A line is leased at most once at a time, and settled exactly once."""

    def __init__(
        self,
        num_lines: int,
        settled: Iterable[int] = (),
        num_tries: Mapping[int, int] | None = None,
        *,
        max_attempts: int,
    ) -> None:
        self._num_lines = num_lines
        self._is_settled = bytearray(num_lines)
        self.num_settled = 0
        for line in settled:
            self._mark(line)
        self._next = 0
        self._leases: set[int] = set()
        self._later: list[tuple[float, int]] = []  # (when, line) of lines that are to be tried again
        self._num_tries = dict(num_tries or {})  # of lines that broke before
        self._max_attempts = max_attempts

    @property
    def num_leased(self) -> int:
        """Lines in the cluster, or whose record is being written."""
        return len(self._leases)

    @property
    def num_left(self) -> int:
        """Lines without a record."""
        return self._num_lines - self.num_settled

    @property
    def is_done(self) -> bool:
        """Whether every line has its record."""
        return self.num_left == 0

    def lease(self, now: float) -> int | None:
        """The next line to run: one whose pause is over, else the first that nobody has touched; None: none now."""
        if self._later and self._later[0][0] <= now:
            line = heapq.heappop(self._later)[1]
        else:
            if not self._has_untouched():
                return None
            line, self._next = self._next, self._next + 1
        self._leases.add(line)
        return line

    def next_due_s(self, now: float) -> float | None:
        """Seconds until `lease` may have something; 0: now; None: not before something is given back."""
        if self._has_untouched():
            return 0.0
        return max(0.0, self._later[0][0] - now) if self._later else None

    def postpone(self, line: int, now: float, pause_s: float) -> None:
        """It was not taken: the same again later, as if it had never been leased."""
        self._leases.remove(line)
        heapq.heappush(self._later, (now + pause_s, line))

    def broke(self, line: int, now: float) -> bool:
        """It was taken and did not come to an end. True: it is tried again, after a pause that doubles; False: it was
        the last try, and the line stays leased until its record is written."""
        tries = self._num_tries[line] = self._num_tries.get(line, 0) + 1
        if tries >= self._max_attempts:
            return False
        self.postpone(line, now, min(_FIRST_PAUSE_S * 2 ** (tries - 1), _LONGEST_PAUSE_S))
        return True

    def settle(self, line: int) -> None:
        """Its record is durable."""
        assert not self._is_settled[line], "a line settled twice"
        self._mark(line)
        self._leases.discard(line)
        self._num_tries.pop(line, None)

    def is_settled(self, line: int) -> bool:
        """Whether the line has its record."""
        return bool(self._is_settled[line])

    def unsettled(self) -> Iterator[int]:
        """Lines without a record, in order."""
        return (line for line in range(self._num_lines) if not self._is_settled[line])

    def _has_untouched(self) -> bool:
        """Go to the first line from here that had no record when the book was made."""
        while self._next < self._num_lines and self._is_settled[self._next]:
            self._next += 1
        return self._next < self._num_lines

    def _mark(self, line: int) -> None:
        self.num_settled += not self._is_settled[line]
        self._is_settled[line] = 1
