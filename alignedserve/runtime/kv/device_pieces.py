"""Blocks of a device as pieces in host memory, for transports that read and write the host."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from alignedserve.runtime.device.accelerator import Accelerator
from alignedserve.runtime.kv.block_codecs import exact_codec
from alignedserve.runtime.kv.block_runs import BlockIds
from alignedserve.runtime.kv.staged_copies import CopyLanes, Lanes, StagedCopies
from kernels.cpu.block_copies import BlockList

Ints = npt.NDArray[np.int64]
Walk = Callable[[StagedCopies, Ints], Iterator[BlockList]]


class DevicePieces:
    """Walks through blocks of a device in pieces of page-locked memory. From any thread."""

    def __init__(self, blocks: Tensor, lanes: CopyLanes) -> None:
        self._accelerator = lanes.accelerator
        make = partial(_new_copies, blocks, lanes.accelerator)
        self._reading, self._writing = Lanes(make), Lanes(make)

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over copies of the blocks; one is valid until the iterator is advanced."""
        yield from self._walk(self._reading, StagedCopies.pieces_to_read, np.asarray(block_ids, np.int64))

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over rows to fill, which are copied when the iterator is advanced, past its end as well."""
        yield from self._walk(self._writing, StagedCopies.pieces_to_write, np.asarray(block_ids, np.int64))

    def _walk(self, lanes: Lanes[StagedCopies], walk: Walk, block_ids: Ints) -> Iterator[BlockList]:
        self._accelerator.use()
        with lanes.taken() as copies:
            try:
                yield from walk(copies, block_ids)
            finally:
                copies.finish()


def _new_copies(blocks: Tensor, accelerator: Accelerator) -> StagedCopies:
    return StagedCopies(exact_codec(blocks), accelerator.streams().stream("staged"), accelerator)
