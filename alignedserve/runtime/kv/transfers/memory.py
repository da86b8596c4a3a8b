"""One end's blocks as a pair moves them: gathered into pieces, scattered out of them, summed in passing."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.core.ids import BlockId
from alignedserve.runtime.kv.block_checksums import PlacedRun, RunSums, copy_rows
from alignedserve.runtime.kv.shm_arena import Arena

Bytes = npt.NDArray[np.uint8]


class RowSource(Protocol):
    """Blocks that can be walked row by row: a BlockStorage, an Arena."""

    def rows_to_read(self, block_ids: Sequence[BlockId]) -> Iterator[Bytes]:
        """Their bytes, one block after the other."""

    def rows_to_write(self, block_ids: Sequence[BlockId]) -> Iterator[Bytes]:
        """Rows to fill, one for each block."""


class HostMemory:
    """Pieces in host memory; blocks wherever their rows can be had."""

    def __init__(self, blocks: RowSource, block_bytes: int) -> None:
        self.device = torch.device("cpu")
        self._blocks = blocks
        self._block_bytes = block_bytes

    def sums(self, runs: Sequence[PlacedRun]) -> RunSums:
        """Checksums to be fed by gather or scatter, over all the blocks in order."""
        return RunSums(runs, self._block_bytes)

    def gather(self, block_ids: Sequence[BlockId], rows: Tensor, *sums: RunSums) -> None:
        """Copy blocks into rows: uint8 [len(block_ids), block_bytes]."""
        copy_rows(self._blocks.rows_to_read(block_ids), rows.numpy(), *sums, from_target=True)

    def scatter(self, block_ids: Sequence[BlockId], rows: Tensor, *sums: RunSums) -> None:
        """Copy rows into blocks."""
        copy_rows(rows.numpy(), self._blocks.rows_to_write(block_ids), *sums, from_target=False)


class ArenaBuffer:
    """An arena as a block server's buffer. The arena stays its owner's."""

    def __init__(self, arena: Arena) -> None:
        self.layout = arena.layout
        self.num_blocks = arena.num_blocks
        self.device = torch.device("cpu")
        self._arena = arena
        self._memory = HostMemory(arena, arena.layout.block_bytes)
        self.gather = self._memory.gather
        self.scatter = self._memory.scatter

    def stamp(self, block_ids: Sequence[BlockId], generation: int) -> None:
        """See Arena."""
        self._arena.stamp(block_ids, generation)

    def is_stamped(self, block_ids: Sequence[BlockId], generation: int) -> bool:
        """See Arena."""
        return self._arena.is_stamped(block_ids, generation)

    def exported(self) -> None:
        """Nothing that a CUDA device could map."""
