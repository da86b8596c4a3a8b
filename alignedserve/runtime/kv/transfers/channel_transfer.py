"""KVTransfer to a block server: over its connection (tcp), or through a process group of two (gloo)."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import PeerError
from alignedserve.messages.blocks import ReadBlocks, WriteBlocks
from alignedserve.process.links import Identity
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.channels.block_channel import CLIENT_RANK, BlockStream, open_channel
from alignedserve.runtime.kv.transfers.channels.control_socket import dial
from alignedserve.runtime.kv.transfers.host_blocks import HostBlocks
from alignedserve.runtime.kv.transfers.requests import (
    PlannedRequest,
    ServedTransfer,
    blocks_in_order,
    negotiate,
    runs_in_order,
)


class ChannelTransfer(ServedTransfer):
    """KVTransfer to a block server. Connects on construction.

    Raises PeerLost when the server is unreachable or has another secret, HandoffRejected when it does not serve this
    transport or this block layout.
    """

    def __init__(
        self,
        storage: BlockStorage,
        address: str,
        *,
        identity: Identity,
        transport: str = "gloo",
    ) -> None:
        self._storage = storage
        self._memory = HostBlocks(storage)
        self._control = dial(address, identity)
        try:
            self._num_blocks = negotiate(self._control, transport, storage).num_blocks
            self._channel = open_channel(
                self._control,
                CLIENT_RANK,
                transport=transport,
                block_bytes=storage.layout.block_bytes,
                timeout_s=identity.peer_timeout_s,
            )
        except PeerError:
            self._control.close()
            raise

    @override
    def close(self) -> None:
        super().close()
        self._channel.close()

    @override
    def _offload(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        sources = blocks_in_order(planned)
        self._storage.pending_copies.synchronize(np.array(sources, np.int64))
        checksums = self._memory.checksums(runs_in_order(planned))

        def fill(first: int, rows: Tensor) -> None:
            self._memory.gather(sources[first : first + len(rows)], rows, checksums)

        self._control.send(WriteBlocks(tuple(one.named for one in planned)))
        if isinstance(self._channel, BlockStream):
            self._channel.send_lists(self._memory.lists_to_send(sources, checksums))
        else:
            self._channel.send(len(sources), fill)
        return self._settled(planned, planned, checksums.values)

    @override
    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._control.send(ReadBlocks(tuple(one.named for one in planned)))
        granted = self._granted(planned)
        targets = blocks_in_order(granted)
        self._storage.pending_copies.synchronize(np.array(targets, np.int64))
        checksums = self._memory.checksums(runs_in_order(granted))

        def take(first: int, rows: Tensor) -> None:
            self._memory.scatter(targets[first : first + len(rows)], rows, checksums)

        if isinstance(self._channel, BlockStream):
            self._channel.receive_lists(self._memory.lists_to_fill(targets, checksums))
        else:
            self._channel.receive(len(targets), take)
        return self._settled(planned, granted, checksums.values)
