"""Copies that are still in progress on blocks of a storage, and the waits for them."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.runtime.device.streams import Event, Stream

IntArray = npt.NDArray[np.int64]


class _Copy(NamedTuple):
    stream: Stream
    event: Event


class PendingCopies:
    """The copies of one storage that may not be done. One thread drives the streams; others may `synchronize`.

    An engine's steps need not be recorded: the end of a step is announced only when the device has done it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        # The number of each block's latest copy, which has itself waited for earlier ones.
        self._last = np.zeros(num_blocks, np.int64)
        self._pending: dict[int, _Copy] = {}
        self._num_begun = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no copy is pending."""
        return not self._pending

    def wait(self, stream: Stream, block_ids: IntArray | Callable[[], IntArray]) -> None:
        """Make later work on the stream wait for what other streams do with these blocks.

        `block_ids`: or what returns them, asked only where other streams do something.
        """
        if not self._has_other(stream):
            return
        for copy in self._on(block_ids() if callable(block_ids) else block_ids):
            if copy.stream is not stream:
                stream.wait(copy.event)

    def record(self, stream: Stream, block_ids: IntArray) -> None:
        """Record that the latest work on the stream is a copy of these blocks."""
        event = stream.record()
        with self._lock:
            self._forget_first()
            self._num_begun += 1
            self._pending[self._num_begun] = _Copy(stream, event)
            self._last[block_ids] = self._num_begun

    def synchronize(self, block_ids: IntArray) -> None:
        """Block the host until all copies to and from these blocks are done."""
        for copy in self._on(block_ids):
            copy.event.synchronize()

    def _forget_first(self) -> None:
        while self._pending:
            number, copy = next(iter(self._pending.items()))
            if not copy.event.is_done():
                return
            del self._pending[number]

    def _has_other(self, stream: Stream) -> bool:
        with self._lock:
            return any(copy.stream is not stream for copy in self._pending.values())

    def _on(self, block_ids: IntArray) -> list[_Copy]:
        if not self._pending:
            return []
        with self._lock:
            self._pending = {number: copy for number, copy in self._pending.items() if not copy.event.is_done()}
            last = self._last[block_ids]
            return [copy for number, copy in self._pending.items() if (last == number).any()]
