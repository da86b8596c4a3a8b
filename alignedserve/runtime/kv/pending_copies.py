"""Which copies are still at work on which blocks of a storage, and who has to wait for them."""

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.runtime.device.streams import Event, Stream

IntArray = npt.NDArray[np.int64]


class _Copy(NamedTuple):
    queue: Stream
    event: Event


class PendingCopies:
    """The copies of one storage that may not be done. Queues are driven by one thread; others may `settle`.

    An engine's steps need not be noted: whoever may hear of a step's end hears of it when the device has done it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        # Of each block the last copy that was begun: that one has waited for those before it.
        self._last = np.zeros(num_blocks, np.int64)
        self._pending: dict[int, _Copy] = {}
        self._num_begun = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody has to wait for anything."""
        return not self._pending

    def begin(self, queue: Stream, block_ids: IntArray) -> None:
        """What is put on the queue from now on comes after what other queues do with these blocks."""
        for copy in self._on(block_ids):
            if copy.queue is not queue:
                queue.wait(copy.event)

    def end(self, queue: Stream, block_ids: IntArray) -> None:
        """A copy of these blocks is what the queue has at its end now."""
        event = queue.record()
        with self._lock:
            self._num_begun += 1
            self._pending[self._num_begun] = _Copy(queue, event)
            self._last[block_ids] = self._num_begun

    def settle(self, block_ids: IntArray) -> None:
        """Wait, on the host, until the blocks hold what they are to hold and nobody reads them any more."""
        for copy in self._on(block_ids):
            copy.event.wait_on_host()

    def _on(self, block_ids: IntArray) -> list[_Copy]:
        if not self._pending:
            return []
        with self._lock:
            self._pending = {number: copy for number, copy in self._pending.items() if not copy.event.is_done()}
            last = self._last[block_ids]
            return [copy for number, copy in self._pending.items() if (last == number).any()]
