"""Whole blocks of a storage as rows of bytes, read and written through its pieces."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import BlockId
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.list_copies import copy_from_pieces, copy_to_pieces
from kernels.cpu.block_copies import all_rows

Rows = npt.NDArray[np.uint8]


def read_blocks(storage: BlockStorage, block_ids: Sequence[BlockId]) -> Rows:
    """Return uint8 [len(block_ids), block_bytes]."""
    rows = np.zeros((len(block_ids), storage.layout.block_bytes), np.uint8)
    copy_from_pieces(storage.pieces_to_read(block_ids), all_rows(rows))
    return rows


def write_blocks(storage: BlockStorage, block_ids: Sequence[BlockId], rows: Rows) -> None:
    """Overwrite blocks, one per row of uint8 [len(block_ids), block_bytes]."""
    copy_to_pieces(all_rows(np.ascontiguousarray(rows)), storage.pieces_to_write(block_ids))
