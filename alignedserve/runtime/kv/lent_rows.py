"""Device memory that is lent buffer by buffer, and used again.

A process that maps memory of another counts as its user until it says otherwise, which a process that was lost never
does: what it had mapped would never be free. So memory is kept and lent again rather than freed.
"""

import weakref
from collections import deque

from torch import Tensor

from alignedserve.runtime.device.accelerator import Accelerator


class LentRows:
    """Rows uint8 [num_rows, row_bytes] of one device, in all no more than `max_rows` unless those in use are more."""

    def __init__(self, accelerator: Accelerator, max_rows: int, row_bytes: int) -> None:
        self._accelerator = accelerator
        self._max_rows = max_rows
        self._row_bytes = row_bytes
        self._num_used = 0
        self._spare: list[Tensor] = []
        self._returned: deque[Tensor] = deque()

    def take(self, num_rows: int) -> Tensor:
        """Return at least this many rows, with any content; from one thread. Raises NotEnoughMemory."""
        while self._returned:
            rows = self._returned.popleft()
            self._num_used -= len(rows)
            self._spare.append(rows)
        rows = self._fitting(num_rows)
        self._num_used += len(rows)
        return rows

    def give_back_after(self, user: object, rows: Tensor) -> None:
        """Take the rows back once nothing refers to their user: no copy can be under way then."""
        weakref.finalize(user, self._returned.append, rows).atexit = False

    def _fitting(self, num_rows: int) -> Tensor:
        self._spare.sort(key=len)
        for index, rows in enumerate(self._spare):
            if len(rows) >= num_rows:
                return self._spare.pop(index)
        if self._num_used + sum(map(len, self._spare)) + num_rows > self._max_rows:
            self._spare.clear()  # all too small
        return self._accelerator.lendable(num_rows, self._row_bytes)
