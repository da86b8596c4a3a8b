"""KVTransfer to a buffer in device memory of this host, mapped by CUDA IPC (over NVLink where there is one).

The control socket agrees on what may be copied; this end copies on a stream of its own device and reports when it is
done. Checksums are computed there, of the bytes in its own memory.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import HandoffRejected, PeerError
from alignedserve.messages.blocks import BlocksCopied, ReadBlocks, TransferOpened, WriteBlocks
from alignedserve.process.links import Identity
from alignedserve.runtime.device.accelerator import SharedRows
from alignedserve.runtime.kv.block_checksums import expand_runs, run_checksums
from alignedserve.runtime.kv.block_runs import Ints
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.copies.direct_copies import PeerSide
from alignedserve.runtime.kv.copies.staged_copies import CopyLanes
from alignedserve.runtime.kv.transfers.channels.control_socket import dial
from alignedserve.runtime.kv.transfers.requests import (
    PlannedRequest,
    ServedTransfer,
    blocks_in_order,
    negotiate,
    runs_in_order,
)


class IpcTransfer(ServedTransfer):
    """KVTransfer to a block server of this host whose buffer is mapped here. Connects on construction.

    Raises PeerLost or HandoffRejected as ChannelTransfer does, and HandoffRejected when the memory cannot be mapped.
    """

    def __init__(self, storage: BlockStorage, address: str, *, identity: Identity, lanes: CopyLanes) -> None:
        """`lanes`: of the storage's device."""
        self._storage = storage
        self._lanes = lanes
        self._control = dial(address, identity)
        try:
            opened = negotiate(self._control, "cuda_ipc", storage)
            self._num_blocks = opened.num_blocks
            self._theirs: Tensor | None = _mapped(opened, lanes, storage.layout.block_bytes)
        except PeerError:
            self._control.close()
            raise

    @override
    def close(self) -> None:
        """Unmaps the memory before the owner of it learns that it may be given away."""
        self._theirs = None
        super().close()

    @override
    def _offload(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._control.send(WriteBlocks(tuple(one.named for one in planned)))
        granted = self._granted(planned)
        with self._lanes.direct() as copies:
            digests = copies.copy_out(self._storage.bytes, self._own_blocks(granted), self._their_side(granted))
        self._control.send(BlocksCopied())
        return self._settled(planned, granted, run_checksums(digests, runs_in_order(granted)))

    @override
    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._control.send(ReadBlocks(tuple(one.named for one in planned)))
        granted = self._granted(planned)
        with self._lanes.direct() as copies:
            digests = copies.copy_in(self._their_side(granted), self._storage.bytes, self._own_blocks(granted))
        self._control.send(BlocksCopied())
        return self._settled(planned, granted, run_checksums(digests, runs_in_order(granted)))

    def _own_blocks(self, planned: Sequence[PlannedRequest]) -> Ints:
        return self._storage.settled(np.array(blocks_in_order(planned), np.int64))

    def _their_side(self, planned: Sequence[PlannedRequest]) -> PeerSide:
        assert self._theirs is not None, "a transfer after it was closed"
        parts = [expand_runs(one.named.runs, self._num_blocks) for one in planned]
        return PeerSide(self._theirs, np.concatenate([np.empty(0, np.int64), *parts]))


def _mapped(opened: TransferOpened, lanes: CopyLanes, block_bytes: int) -> Tensor:
    if opened.device_memory is None:
        raise HandoffRejected("the blocks are not in a device's memory")
    lanes.accelerator.use()
    handle = SharedRows(*msgspec.structs.astuple(opened.device_memory))
    return lanes.accelerator.mapped(handle, opened.num_blocks, block_bytes)
