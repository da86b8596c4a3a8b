"""KVTransfer of a lender to the buffer that it lends, both in the memory of its device."""

from typing_extensions import override

from alignedserve.runtime.kv.block_runs import BlockIds, Ints
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.copies.direct_copies import PeerSide
from alignedserve.runtime.kv.transfers.device_buffer import DeviceBuffer
from alignedserve.runtime.kv.transfers.local_transfer import LocalTransfer
from kernels.cpu.block_copies import Digests


class OwnBufferTransfer(LocalTransfer):
    """KVTransfer between a storage and a buffer of the same device."""

    def __init__(self, storage: BlockStorage, buffer: DeviceBuffer) -> None:
        super().__init__(buffer, stamps=True)
        self._storage = storage
        self._buffer = buffer

    @override
    def close(self) -> None: ...

    @override
    def _copy_out(self, block_ids: BlockIds, target: Ints) -> Digests:
        there = PeerSide(self._buffer.blocks, target)
        with self._buffer.lanes.direct() as copies:
            return copies.copy_out(self._storage.bytes, self._storage.settled(block_ids), there)

    @override
    def _copy_in(self, source: Ints, block_ids: BlockIds) -> Digests:
        there = PeerSide(self._buffer.blocks, source)
        with self._buffer.lanes.direct() as copies:
            return copies.copy_in(there, self._storage.bytes, self._storage.settled(block_ids))
