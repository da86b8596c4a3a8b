"""Whole blocks of a storage as rows of bytes, read and written through its iterators."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import BlockId
from alignedserve.runtime.kv.block_storage import BlockStorage

Rows = npt.NDArray[np.uint8]


def read_blocks(storage: BlockStorage, block_ids: Sequence[BlockId]) -> Rows:
    """Return uint8 [len(block_ids), block_bytes]."""
    rows = np.zeros((len(block_ids), storage.layout.block_bytes), np.uint8)
    for row, source in zip(rows, storage.rows_to_read(block_ids), strict=True):
        row[:] = source
    return rows


def write_blocks(storage: BlockStorage, block_ids: Sequence[BlockId], rows: Rows) -> None:
    """Overwrite blocks, one per row of uint8 [len(block_ids), block_bytes]."""
    # Targets first: their iterator, advanced past its end, copies the last staged rows.
    for target, row in zip(storage.rows_to_write(block_ids), rows, strict=True):
        target[:] = row
