"""The asking end of block transfers without shared memory: KVTransfer through a process group of two."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from alignedserve.core.errors import PeerError
from alignedserve.messages.blocks import ReadBlocks, WriteBlocks
from alignedserve.messages.caches import BlockRun
from alignedserve.runtime.kv.block_checksums import summed_runs
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.control import dial
from alignedserve.runtime.kv.transfers.device_buffer import DevicePieces
from alignedserve.runtime.kv.transfers.memory import HostMemory
from alignedserve.runtime.kv.transfers.process_pair import ASKING_RANK, make_pair
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


class GroupTransfer:
    """KVTransfer with a block server. Connects when it is made.

    Raises PeerLost when nobody answers or the secret is another one, HandoffRejected when the owner does not serve this
    transport or this block layout. After PeerLost it is of no more use: make a new one.
    """

    def __init__(
        self,
        storage: BlockStorage,
        address: str,
        *,
        identity: Identity,
        transport: str = "gloo",
        memory: HostMemory | DevicePieces | None = None,
    ) -> None:
        """`memory` moves this end's blocks: on their device for nccl, over the host for gloo, when nothing is given."""
        self._storage = storage
        on_device = transport == "nccl"
        self._memory: Any = memory or (
            DevicePieces(storage.bytes) if on_device else HostMemory(storage, storage.layout.block_bytes)
        )
        self._control = dial(address, identity)
        try:
            self._num_blocks = open_with(self._control, transport, storage.layout).num_blocks
            self._pair = make_pair(
                self._control,
                ASKING_RANK,
                transport=transport,
                block_bytes=storage.layout.block_bytes,
                timeout_s=identity.peer_timeout_s,
                device=self._memory.device,
            )
        except PeerError:
            self._control.close()
            raise

    def offload(self, outgoing: Sequence[Outgoing]) -> list[tuple[BlockRun, ...] | None]:
        """See KVTransfer."""
        planned = plan_offload(outgoing, self._num_blocks)
        done: list[tuple[BlockRun, ...] | None] = [None] * len(outgoing)
        if not planned:
            return done
        with closing_when_broken(self._control):
            offloaded = self._offload(planned)
        for one, runs in zip(planned, offloaded, strict=True):
            done[one.index] = runs
        return done

    def fetch(self, incoming: Sequence[Incoming]) -> list[bool]:
        """See KVTransfer."""
        planned = plan_fetch(incoming, self._storage.layout.block_size, self._num_blocks)
        done = [False] * len(incoming)
        if not planned:
            return done
        with closing_when_broken(self._control):
            fetched = self._fetch(planned)
        for one, sums in zip(planned, fetched, strict=True):
            done[one.index] = verifies(incoming[one.index].copy, sums)
        return done

    def close(self) -> None:
        """See KVTransfer."""
        self._control.close()

    def _offload(self, planned: Sequence[Planned]) -> list[tuple[BlockRun, ...] | None]:
        sources = blocks_in_order(planned)
        self._storage.uses.settle(np.array(sources, np.int64))
        sums = self._memory.sums(runs_in_order(planned))

        def fill(first: int, rows: Tensor) -> None:
            self._memory.gather(sources[first : first + len(rows)], rows, sums)

        self._control.send(WriteBlocks(tuple(one.named for one in planned)))
        self._pair.send(len(sources), fill)
        in_order = iter(sums.sums)
        runs = [summed_runs(one.named.runs, list(islice(in_order, len(one.named.runs)))) for one in planned]
        is_held = answers(self._control, planned)
        return [one if held else None for one, held in zip(runs, is_held, strict=True)]

    def _fetch(self, planned: Sequence[Planned]) -> list[list[int] | None]:
        """The checksums of what has arrived of each; None: the owner says that these blocks are not that request's."""
        self._control.send(ReadBlocks(tuple(one.named for one in planned)))
        on_the_way = [one for one, held in zip(planned, answers(self._control, planned), strict=True) if held]
        targets = blocks_in_order(on_the_way)
        self._storage.uses.settle(np.array(targets, np.int64))
        sums = self._memory.sums(runs_in_order(on_the_way))

        def take(first: int, rows: Tensor) -> None:
            self._memory.scatter(targets[first : first + len(rows)], rows, sums)

        self._pair.receive(len(targets), take)
        in_order = iter(sums.sums)
        arrived = {one.index: list(islice(in_order, len(one.named.runs))) for one in on_the_way}
        is_still_held = answers(self._control, planned)
        return [arrived.get(one.index) if held else None for one, held in zip(planned, is_still_held, strict=True)]
