"""KVTransfer to a block server through a process group of two: gloo or nccl."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from alignedserve.core.errors import PeerError
from alignedserve.messages.blocks import ReadBlocks, WriteBlocks
from alignedserve.messages.caches import BlockRun
from alignedserve.runtime.kv.block_checksums import runs_with_checksums
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.control_socket import dial
from alignedserve.runtime.kv.transfers.device_buffer import DeviceBlocks
from alignedserve.runtime.kv.transfers.host_blocks import HostBlocks
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.process_pair import CLIENT_RANK, make_pair
from alignedserve.runtime.kv.transfers.requests import (
    PlannedRequest,
    blocks_in_order,
    closing_on_error,
    is_verified,
    negotiate,
    plan_fetch,
    plan_offload,
    receive_answers,
    runs_in_order,
)
from alignedserve.runtime.process.links import Identity


class GroupTransfer:
    """KVTransfer to a block server. Connects on construction.

    Raises PeerLost when the server is unreachable or has another secret, HandoffRejected when it does not serve this
    transport or this block layout. After PeerLost the object is unusable: make a new one.
    """

    def __init__(
        self,
        storage: BlockStorage,
        address: str,
        *,
        identity: Identity,
        transport: str = "gloo",
        memory: HostBlocks | DeviceBlocks | None = None,
    ) -> None:
        """`memory` moves this end's blocks; by default on their device for nccl, through the host for gloo."""
        self._storage = storage
        on_device = transport == "nccl"
        self._memory: Any = memory or (
            DeviceBlocks(storage.bytes) if on_device else HostBlocks(storage, storage.layout.block_bytes)
        )
        self._control = dial(address, identity)
        try:
            self._num_blocks = negotiate(self._control, transport, storage.layout).num_blocks
            self._pair = make_pair(
                self._control,
                CLIENT_RANK,
                transport=transport,
                block_bytes=storage.layout.block_bytes,
                timeout_s=identity.peer_timeout_s,
                device=self._memory.device,
            )
        except PeerError:
            self._control.close()
            raise

    def offload(self, requests: Sequence[OffloadRequest]) -> list[tuple[BlockRun, ...] | None]:
        """See KVTransfer."""
        planned = plan_offload(requests, self._num_blocks)
        done: list[tuple[BlockRun, ...] | None] = [None] * len(requests)
        if not planned:
            return done
        with closing_on_error(self._control):
            offloaded = self._offload(planned)
        for one, runs in zip(planned, offloaded, strict=True):
            done[one.index] = runs
        return done

    def fetch(self, requests: Sequence[FetchRequest]) -> list[bool]:
        """See KVTransfer."""
        planned = plan_fetch(requests, self._storage.layout.block_size, self._num_blocks)
        done = [False] * len(requests)
        if not planned:
            return done
        with closing_on_error(self._control):
            fetched = self._fetch(planned)
        for one, checksums in zip(planned, fetched, strict=True):
            done[one.index] = is_verified(requests[one.index].copy, checksums)
        return done

    def close(self) -> None:
        """See KVTransfer."""
        self._control.close()

    def _offload(self, planned: Sequence[PlannedRequest]) -> list[tuple[BlockRun, ...] | None]:
        sources = blocks_in_order(planned)
        self._storage.pending_copies.synchronize(np.array(sources, np.int64))
        checksums = self._memory.checksums(runs_in_order(planned))

        def fill(first: int, rows: Tensor) -> None:
            self._memory.gather(sources[first : first + len(rows)], rows, checksums)

        self._control.send(WriteBlocks(tuple(one.named for one in planned)))
        self._pair.send(len(sources), fill)
        in_order = iter(checksums.values)
        runs = [runs_with_checksums(one.named.runs, list(islice(in_order, len(one.named.runs)))) for one in planned]
        is_held = receive_answers(self._control, planned)
        return [one if held else None for one, held in zip(runs, is_held, strict=True)]

    def _fetch(self, planned: Sequence[PlannedRequest]) -> list[list[int] | None]:
        """Return the checksums of each request's received runs; None: the owner says that it no longer holds the
        blocks."""
        self._control.send(ReadBlocks(tuple(one.named for one in planned)))
        granted = [one for one, held in zip(planned, receive_answers(self._control, planned), strict=True) if held]
        targets = blocks_in_order(granted)
        self._storage.pending_copies.synchronize(np.array(targets, np.int64))
        checksums = self._memory.checksums(runs_in_order(granted))

        def take(first: int, rows: Tensor) -> None:
            self._memory.scatter(targets[first : first + len(rows)], rows, checksums)

        self._pair.receive(len(targets), take)
        in_order = iter(checksums.values)
        arrived = {one.index: list(islice(in_order, len(one.named.runs))) for one in granted}
        is_still_held = receive_answers(self._control, planned)
        return [arrived.get(one.index) if held else None for one, held in zip(planned, is_still_held, strict=True)]
