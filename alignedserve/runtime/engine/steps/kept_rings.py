"""Copies of rings behind edges that a step passed before anybody asked for them: one that was launched ahead.

What it wrote since the edge is in blocks to spare, so that the rings are still there to be copied.
"""

from functools import partial

from alignedserve.runtime.attention.ring_tables import KeptRings, RingTables
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.device_work import in_inference_mode
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.kv.block_storage import BlockStorage


class RingKeeper:
    """Leaves the copies that sequences of a step are to leave, behind it on the compute stream."""

    def __init__(self, rings: RingTables, storage: BlockStorage, compute: Stream) -> None:
        self._rings, self._storage, self._compute = rings, storage, compute

    def leave(self, rows: IntArray) -> None:
        kept = self._rings.kept_by(rows, is_computed=True)
        blocks, pending = kept.written_blocks, self._storage.pending_copies
        if not len(blocks):
            return
        pending.wait(self._compute, blocks)
        self._compute.run(partial(self._copy, kept))
        pending.record(self._compute, blocks)

    @in_inference_mode
    def _copy(self, kept: KeptRings) -> None:
        kept.leave(self._storage)
        kept.mark_missed(self._storage)
