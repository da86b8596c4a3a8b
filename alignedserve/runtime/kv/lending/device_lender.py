"""Makes the buffers that a worker lends out of its device's memory."""

import threading
import weakref
from collections import deque

from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.kv.copies.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.device_buffer import DeviceBuffer

BUFFER_SETTING = "prefill.candidate_buffer_bytes"


class LentRows:
    """Rows uint8 [num_rows, row_bytes] of one device, in all no more than `max_rows` unless those in use are more.

    A process that maps memory counts as its user until it unmaps. A lost process never unmaps, so its memory would
    never be freed. So memory is kept and lent again rather than freed.
    """

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


class DeviceLender:
    """Lends blocks of one layout, in all no more than `max_blocks` unless those in use are more. From any thread."""

    def __init__(self, layout: BlockLayout, lanes: CopyLanes, max_blocks: int) -> None:
        self._layout = layout
        self._lanes = lanes
        self._lock = threading.Lock()
        self._rows = LentRows(lanes.accelerator, max_blocks, layout.block_bytes)

    def lend(self, num_blocks: int) -> DeviceBuffer:
        """Return a buffer whose memory is lent again once nothing refers to it. Raises NotEnoughMemory."""
        try:
            with self._lock:
                rows = self._rows.take(num_blocks)
        except NotEnoughMemory as error:
            raise NotEnoughMemory(f"{error}; set {BUFFER_SETTING} lower") from error
        buffer = DeviceBuffer(self._layout, rows[:num_blocks], self._lanes)
        self._rows.give_back_after(buffer, rows)
        return buffer
