"""Copies of whole blocks within a storage, in the order of the work on a stream."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from alignedserve.core.ids import BlockId
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.kv.block_storage import BlockStorage


def read_whole(storage: BlockStorage, compute: Stream, block_ids: Sequence[BlockId]) -> Tensor:
    numbers, read = np.array(block_ids, np.int64), []
    storage.pending_copies.wait(compute, numbers)
    (rows,) = to_device([numbers], storage.device)
    compute.run(lambda: read.append(storage.bytes[rows]))
    storage.pending_copies.record(compute, numbers)
    return read[0]


def write_whole(storage: BlockStorage, compute: Stream, block_ids: Sequence[BlockId], content: Tensor) -> None:
    numbers = np.array(block_ids, np.int64)
    storage.pending_copies.wait(compute, numbers)
    (rows,) = to_device([numbers], storage.device)
    compute.run(lambda: storage.bytes.index_copy_(0, rows, content))
    storage.pending_copies.record(compute, numbers)
