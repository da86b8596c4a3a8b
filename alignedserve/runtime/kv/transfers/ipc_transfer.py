"""KVTransfer to a buffer in device memory of this host, mapped by CUDA IPC (over NVLink where there is one).

The control socket agrees on what may be copied; this end copies on its own stream and reports when it is done.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.errors import PeerError
from alignedserve.messages.blocks import BlocksCopied, DeviceMemoryHandle, ReadBlocks, WriteBlocks
from alignedserve.runtime.kv.block_checksums import expand_runs
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.control_socket import dial
from alignedserve.runtime.kv.transfers.device_buffer import DeviceBlocks, map_device_memory
from alignedserve.runtime.kv.transfers.requests import (
    PlannedRequest,
    ServedTransfer,
    blocks_in_order,
    negotiate,
    runs_in_order,
)
from alignedserve.runtime.process.links import Identity

_CUDA: Any = torch.cuda
_PIECE_BYTES = 64 * 1024 * 1024

MapBlocks = Callable[[DeviceMemoryHandle | None, int, int], Tensor]


class IpcTransfer(ServedTransfer):
    """KVTransfer to a block server of this host whose buffer is mapped here. Connects on construction.

    Raises PeerLost or HandoffRejected as ChannelTransfer does, and HandoffRejected when the memory cannot be mapped.
    """

    def __init__(
        self, storage: BlockStorage, address: str, *, identity: Identity, map_blocks: MapBlocks = map_device_memory
    ) -> None:
        self._storage = storage
        self._layout = storage.layout
        self._own = DeviceBlocks(storage.bytes)
        self._piece_blocks = max(1, _PIECE_BYTES // storage.layout.block_bytes)
        self._stream: Any = _CUDA.Stream(storage.device) if storage.device.type == "cuda" else None
        self._control = dial(address, identity)
        try:
            opened = negotiate(self._control, "cuda_ipc", storage.layout)
            self._num_blocks = opened.num_blocks
            self._theirs = DeviceBlocks(map_blocks(opened.device_memory, opened.num_blocks, self._layout.block_bytes))
        except PeerError:
            self._control.close()
            raise

    def _offload(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._wait_for_copies(planned)
        self._control.send(WriteBlocks(tuple(one.named for one in planned)))
        granted = self._granted(planned)
        checksums = self._copy(self._own, blocks_in_order(granted), self._theirs, self._their_blocks(granted), granted)
        self._control.send(BlocksCopied())
        return self._settled(planned, granted, checksums)

    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        self._wait_for_copies(planned)
        self._control.send(ReadBlocks(tuple(one.named for one in planned)))
        granted = self._granted(planned)
        checksums = self._copy(self._theirs, self._their_blocks(granted), self._own, blocks_in_order(granted), granted)
        self._control.send(BlocksCopied())
        return self._settled(planned, granted, checksums)

    def _wait_for_copies(self, planned: Sequence[PlannedRequest]) -> None:
        self._storage.pending_copies.synchronize(np.array(blocks_in_order(planned), np.int64))

    def _their_blocks(self, planned: Sequence[PlannedRequest]) -> list[Any]:
        return [block_id for one in planned for block_id in expand_runs(one.named.runs, self._num_blocks)]

    def _copy(
        self,
        source: DeviceBlocks,
        source_ids: Sequence[Any],
        target: DeviceBlocks,
        target_ids: Sequence[Any],
        planned: Sequence[PlannedRequest],
    ) -> list[int]:
        """Copy, wait until it is done and return the checksums of all runs, computed in this end's own memory."""
        checksums = self._own.checksums(runs_in_order(planned))
        block_bytes = self._layout.block_bytes
        with self._on_own_stream():
            for first in range(0, len(source_ids), self._piece_blocks):
                part = source_ids[first : first + self._piece_blocks]
                rows = torch.empty((len(part), block_bytes), dtype=torch.uint8, device=source.device)
                source.gather(part, rows)
                own_rows = rows.to(self._own.device)
                checksums.update(own_rows)
                target.scatter(target_ids[first : first + len(part)], own_rows.to(target.device))
        return checksums.values

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Run the body on this transfer's stream and synchronize at its end.

        The engine's work needs no wait: results are announced only once computed.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
        if self._theirs.device != self._own.device:
            torch.cuda.synchronize(self._theirs.device)
