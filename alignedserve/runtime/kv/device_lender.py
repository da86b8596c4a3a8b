"""Makes the buffers that a rank lends out of its device's memory, of its part of each block."""

import threading

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.runtime.kv.copy_lanes import CopyLanes
from alignedserve.runtime.kv.lent_rows import LentRows
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.kv.transfers.device_buffer import DeviceBuffer

BUFFER_SETTING = "prefill.candidate_buffer_bytes"


class DeviceLender:
    """Lends blocks of one layout, in all no more than `max_blocks` unless those in use are more. From any thread."""

    def __init__(self, layout: BlockLayout, part: ArenaPart, lanes: CopyLanes, max_blocks: int) -> None:
        """`layout`: of this part of a block."""
        self._layout = layout
        self._part = part
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
        buffer = DeviceBuffer(self._layout, rows[:num_blocks], self._lanes, self._part)
        self._rows.give_back_after(buffer, rows)
        return buffer
