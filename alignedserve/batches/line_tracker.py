"""State of every line of one batch: untouched, leased, waiting for a retry or for its model, or settled. A lease is no
removal: a line that was leased and never settled is simply not done."""

import heapq
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MAX_DOUBLINGS = 3  # of the pause of a line that is rejected each time
_MAX_RETRY_DOUBLINGS = 6  # beyond `_LONGEST_PAUSE_S`
_GOLDEN_RATIO = 0.6180339887498949  # multiples of it lie far apart, modulo 1


class LineTracker:
    """Lines by number from 0. A line has at most one lease at a time, and is settled exactly once."""

    def __init__(
        self,
        num_lines: int,
        settled: Iterable[int] = (),
        num_attempts: Mapping[int, int] | None = None,
        *,
        max_attempts: int,
        order: Sequence[int] | None = None,
    ) -> None:
        self._order = range(num_lines) if order is None else order
        assert len(self._order) == num_lines, "an order of other lines"
        self._num_lines = num_lines
        self._is_settled = bytearray(num_lines)
        self.num_settled = 0
        for line in settled:
            self._mark(line)
        self._next = 0
        self._leases: set[int] = set()
        self._retries: list[tuple[float, int]] = []  # heap of (due time, line)
        self._parked: dict[str, deque[int]] = {}  # lines by their model, which was paused when their turn came
        self._num_attempts = dict(num_attempts or {})  # failed ones, by line
        self._num_rejections: dict[int, int] = {}  # by line
        self._max_attempts = max_attempts

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def num_left(self) -> int:
        return self._num_lines - self.num_settled

    @property
    def is_done(self) -> bool:
        return self.num_left == 0

    def lease(self, now: float, paused: Container[str] = ()) -> int | None:
        """Lease the next line: a due retry, else one that waited for its model, else the first untouched line in order;
        None: nothing is due. `paused`: models whose lines go on waiting."""
        awake = next((model for model in self._parked if model not in paused), None)
        if self._retries and self._retries[0][0] <= now:
            line = heapq.heappop(self._retries)[1]
        elif awake is not None:
            line = self._parked[awake].popleft()
            if not self._parked[awake]:
                del self._parked[awake]
        else:
            if not self._has_untouched():
                return None
            line, self._next = self._order[self._next], self._next + 1
        self._leases.add(line)
        return line

    def reject(self, line: int, now: float, pause_s: float) -> None:
        """Return a line that the cluster rejected. This is no attempt. The pause doubles each time, up to eightfold: a
        line that is never taken does not come before all others whenever its model may be asked again."""
        doublings = self._num_rejections.get(line, 0)
        self._num_rejections[line] = min(doublings + 1, _MAX_DOUBLINGS)
        self.postpone(line, now, pause_s * 2**doublings)

    def postpone(self, line: int, now: float, pause_s: float) -> None:
        """Return a line that did not end; it is due again after the pause. This is no attempt."""
        self._leases.remove(line)
        heapq.heappush(self._retries, (now + pause_s, line))

    def park(self, line: int, model: str) -> None:
        """Return a line whose model is paused; it is due again when that is not."""
        self._leases.remove(line)
        self._parked.setdefault(model, deque()).append(line)

    def retry(self, line: int, now: float) -> bool:
        """Count a failed attempt. True: the line is due again after a pause that doubles each time; False: no attempt
        is left, and the line stays leased until its record is written. Lines that failed together get pauses of
        different lengths, up to twice as long: one that breaks its worker each time would otherwise take the same
        others along until no attempt is left to them."""
        num_attempts = self._num_attempts[line] = self._num_attempts.get(line, 0) + 1
        if num_attempts >= self._max_attempts:
            return False
        spread = line * num_attempts * _GOLDEN_RATIO % 1.0
        doublings = min(num_attempts - 1, _MAX_RETRY_DOUBLINGS)
        self.postpone(line, now, min(_FIRST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S) * (1.0 + spread))
        return True

    def settle(self, line: int) -> None:
        assert not self._is_settled[line], "a line settled twice"
        self._mark(line)
        self._leases.discard(line)
        self._num_attempts.pop(line, None)
        self._num_rejections.pop(line, None)

    def unsettled(self) -> Iterator[int]:
        return (line for line in range(self._num_lines) if not self._is_settled[line])

    def _has_untouched(self) -> bool:
        while self._next < self._num_lines and self._is_settled[self._order[self._next]]:
            self._next += 1
        return self._next < self._num_lines

    def _mark(self, line: int) -> None:
        self.num_settled += not self._is_settled[line]
        self._is_settled[line] = 1
