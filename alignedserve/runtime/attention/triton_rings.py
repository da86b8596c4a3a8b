"""Attention by the Triton kernels over rings of blocks: see `ring_tables`.

All rings of a step are alike but for their blocks, so that its work is partitioned once. Contexts of sequences that
decode are cut to what their windows touch, so that the arrays of so many rows have the same sizes whatever their
contexts: a recorded step has room for one array alone that grows, the block tables of layers without a window.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor
from typing_extensions import override

from alignedserve.core.block_allocator import blocks_for
from alignedserve.runtime.attention.backend import Contexts
from alignedserve.runtime.attention.ring_tables import RingTables
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.attention.triton_backend import GpuPlanner
from alignedserve.runtime.attention.whole_runs import Runs
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.attention import PLAIN_SCORES, ScoreForm
from kernels.gpu.attention.block_entries import BlockArrays, block_arrays
from kernels.gpu.attention.work_partition import first_read
from kernels.gpu.blocks import BlockTables

# Entries, of four bytes: arrays of blocks begin at addresses of 16, for which kernels are compiled.
_ALIGNMENT = 4


class GpuRingPlanner(GpuPlanner):
    """A GpuPlanner of the layers whose keys and values are in rings, ring by ring."""

    def __init__(
        self,
        table: Contexts,
        rings: RingTables,
        storage: BlockStorage,
        window: int,
        group: int,
        *,
        scores: ScoreForm = PLAIN_SCORES,
        is_chunked: bool = False,
        whole_runs: Mapping[int, Runs] | None = None,
        whole_in_windows: bool = False,
    ) -> None:
        """`scores`: of the rings' layers, those of the first ring first."""
        super().__init__(
            table,
            storage,
            window,
            group,
            scores=scores,
            is_chunked=is_chunked,
            whole_runs=whole_runs,
            whole_in_windows=whole_in_windows,
        )
        self._rings, self._window = rings, window
        touched = blocks_for(window + self.tile, table.block_size) + 1  # by a window, in whole tiles
        self._num_columns = -(-touched // _ALIGNMENT) * _ALIGNMENT
        self.windows = (window,)

    @override
    def place_of(self, layer: int) -> tuple[int, int]:
        return divmod(layer, self.storage.layout.num_layers)

    @override
    def decoded_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        num_rows = len(lengths)
        earliest = first_read(lengths, self._window, is_chunked=self.is_chunked)
        first = earliest // self.tile * self.tile // self.table.block_size  # as tiles are read from their start
        columns = first[: len(rows), None] + np.arange(self._num_columns)
        tables = self._rings.tables
        np.minimum(columns, tables.shape[2] - 1, out=columns)
        entries = np.full((len(tables), num_rows, self._num_columns), self._arrays.scratch_block, np.int32)
        entries[:, : len(rows)] = tables[:, rows[:, None], columns]
        starts = np.arange(num_rows) * self._num_columns - first
        flags = np.zeros(num_rows, np.int8)
        return BlockArrays(lengths.astype(np.int32), starts.astype(np.int32), flags, entries.reshape(-1))

    @override
    def block_arrays(self, rows: IntArray, lengths: IntArray) -> BlockArrays:
        of_rings = [block_arrays(self._arrays._replace(block_tables=own), rows, lengths) for own in self._rings.tables]
        padding = (0, -len(of_rings[0].entries) % _ALIGNMENT)
        return of_rings[0]._replace(entries=np.concatenate([np.pad(own.entries, padding) for own in of_rings]))

    @override
    def tables(self, entries: Tensor, starts: Tensor, is_reversed: Tensor) -> Sequence[BlockTables]:
        of_rings = entries.view(len(self._rings.tables), -1)
        return [BlockTables(own, starts, is_reversed) for own in of_rings]
