"""KVTransfer with a buffer that lies in a device's memory of this host, mapped by CUDA IPC (NVLink where there is one).

The control socket settles what may be copied; this end copies, on a stream of its own, and says when it is done.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.errors import PeerError
from alignedserve.messages.blocks import BlocksCopied, DeviceMemoryHandle, ReadBlocks, WriteBlocks
from alignedserve.messages.caches import BlockRun
from alignedserve.runtime.kv.block_checksums import spelt_out, summed_runs
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.control import dial
from alignedserve.runtime.kv.transfers.device_buffer import DevicePieces, map_device_memory
from alignedserve.runtime.kv.transfers.requests import (
    Planned,
    answers,
    blocks_in_order,
    closing_when_broken,
    open_with,
    plan_fetch,
    plan_offload,
    runs_in_order,
    verifies,
)
from alignedserve.runtime.kv.transfers.shm_transfer import Incoming, Outgoing
from alignedserve.runtime.process.links import Identity

_CUDA: Any = torch.cuda
_PIECE_BYTES = 64 * 1024 * 1024

MapBlocks = Callable[[DeviceMemoryHandle | None, int, int], Tensor]


class IpcTransfer:
    """KVTransfer with a block server of this host whose buffer is mapped here. Connects when it is made.

    Raises PeerLost or HandoffRejected as GroupTransfer does, and HandoffRejected when the memory cannot be mapped.
    """

    def __init__(
        self, storage: BlockStorage, address: str, *, identity: Identity, map_blocks: MapBlocks = map_device_memory
    ) -> None:
        self._storage = storage
        self._layout = storage.layout
        self._own = DevicePieces(storage.bytes)
        self._piece_blocks = max(1, _PIECE_BYTES // storage.layout.block_bytes)
        self._stream: Any = _CUDA.Stream(storage.device) if storage.device.type == "cuda" else None
        self._control = dial(address, identity)
        try:
            opened = open_with(self._control, "cuda_ipc", storage.layout)
            self._num_blocks = opened.num_blocks
            self._theirs = DevicePieces(map_blocks(opened.device_memory, opened.num_blocks, self._layout.block_bytes))
        except PeerError:
            self._control.close()
            raise

    def offload(self, outgoing: Sequence[Outgoing]) -> list[tuple[BlockRun, ...] | None]:
        """See KVTransfer."""
        planned = plan_offload(outgoing, self._num_blocks)
        done: list[tuple[BlockRun, ...] | None] = [None] * len(outgoing)
        if not planned:
            return done
        self._settle(planned)
        with closing_when_broken(self._control):
            self._control.send(WriteBlocks(tuple(one.named for one in planned)))
            granted = self._granted(planned)
            sums = self._copy(self._own, blocks_in_order(granted), self._theirs, self._their_blocks(granted), granted)
            is_still_held = self._copied(planned)
        for one in granted:
            runs = summed_runs(one.named.runs, list(islice(sums, len(one.named.runs))))
            done[one.index] = runs if is_still_held[one.index] else None
        return done

    def fetch(self, incoming: Sequence[Incoming]) -> list[bool]:
        """See KVTransfer."""
        planned = plan_fetch(incoming, self._layout.block_size, self._num_blocks)
        done = [False] * len(incoming)
        if not planned:
            return done
        self._settle(planned)
        with closing_when_broken(self._control):
            self._control.send(ReadBlocks(tuple(one.named for one in planned)))
            granted = self._granted(planned)
            sums = self._copy(self._theirs, self._their_blocks(granted), self._own, blocks_in_order(granted), granted)
            is_still_held = self._copied(planned)
        arrived = {one.index: list(islice(sums, len(one.named.runs))) for one in granted}
        for one in planned:
            sums_of_one = arrived.get(one.index) if is_still_held[one.index] else None
            done[one.index] = verifies(incoming[one.index].copy, sums_of_one)
        return done

    def close(self) -> None:
        """See KVTransfer."""
        self._control.close()

    def _settle(self, planned: Sequence[Planned]) -> None:
        self._storage.uses.settle(np.array(blocks_in_order(planned), np.int64))

    def _granted(self, planned: Sequence[Planned]) -> list[Planned]:
        return [one for one, held in zip(planned, answers(self._control, planned), strict=True) if held]

    def _copied(self, planned: Sequence[Planned]) -> dict[int, bool]:
        """Say that the bytes are copied; whether each request (by its index) held until then."""
        self._control.send(BlocksCopied())
        return {one.index: held for one, held in zip(planned, answers(self._control, planned), strict=True)}

    def _their_blocks(self, planned: Sequence[Planned]) -> list[Any]:
        return [block_id for one in planned for block_id in spelt_out(one.named.runs, self._num_blocks)]

    def _copy(
        self,
        source: DevicePieces,
        source_ids: Sequence[Any],
        target: DevicePieces,
        target_ids: Sequence[Any],
        planned: Sequence[Planned],
    ) -> Iterator[int]:
        """Copy, sum what passes through this end's own memory, and wait until it is done; the sums of all runs."""
        sums = self._own.sums(runs_in_order(planned))
        block_bytes = self._layout.block_bytes
        with self._on_own_stream():
            for first in range(0, len(source_ids), self._piece_blocks):
                part = source_ids[first : first + self._piece_blocks]
                rows = torch.empty((len(part), block_bytes), dtype=torch.uint8, device=source.device)
                source.gather(part, rows)
                own_rows = rows.to(self._own.device)
                sums.update(own_rows)
                target.scatter(target_ids[first : first + len(part)], own_rows.to(target.device))
        return iter(sums.sums)

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Nothing is left running when it ends. What the engine computed needs no waiting for: it was done before
        anybody heard of it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
        if self._theirs.device != self._own.device:
            torch.cuda.synchronize(self._theirs.device)
