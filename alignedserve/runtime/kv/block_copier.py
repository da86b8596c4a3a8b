"""A worker's copies between its storage, the pool's arena and candidate buffers, in parallel with its computing.

Every peer has its own copying thread, so that a slow or lost peer delays no other, and copies with one peer happen in
the order in which they were requested.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from alignedserve.core.errors import PeerError, TransportUnavailable
from alignedserve.messages.caches import ArenaOffered
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    LoadBlocks,
    OffloadBlocks,
    RelayBlocks,
)
from alignedserve.process.links import Identity
from alignedserve.process.worker_threads import WorkerThreads
from alignedserve.runtime.device.cores import threads_per_copy
from alignedserve.runtime.device.device_work import copying, working
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.transfers.device_buffer import DeviceBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import AUTO, SHM, FetchRequest, KVTransfer, OffloadRequest
from alignedserve.runtime.kv.transfers.local_transfer import LocalMemory, LocalTransfer, OwnBufferTransfer, relay
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsOffer, RankCopies, RankedTransfer
from alignedserve.runtime.kv.transfers.registry import open_transfer
from alignedserve.runtime.kv.transfers.shm_transfer import ShmTransfer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BlockCopier:
    """Performs LoadBlocks, OffloadBlocks and RelayBlocks. Methods return at once; results go to callbacks on the loop.

    When a transfer cannot be opened, or its other end is gone, every copy of that call is refused; the next call opens
    a new one.
    """

    def __init__(
        self,
        storage: BlockStorage,
        threads: WorkerThreads,
        identity: Identity,
        *,
        transport: str = AUTO,
        ranks: RankCopies | None = None,
    ) -> None:
        """`ranks`: those beside this one, where the storage has only its parts of the blocks."""
        self._storage = storage
        self._threads = threads
        self._identity = identity
        self._transport = transport
        self._ranks = ranks
        self._offers: dict[str, tuple[ArenaOffered, bool]] = {}
        self._transfers: dict[str, KVTransfer] = {}
        self._num_submitted: dict[str, int] = {}  # by peer that has a thread

    # --- called on the loop

    def map_arena(self, peer: str, offered: ArenaOffered, *, stamps: bool) -> None:
        """Use this arena of the peer from now on. `stamps`: it is a candidate buffer (see ShmTransfer)."""
        self._offers[peer] = (offered, stamps)
        self._submit(peer, lambda: self._open(peer), _ignore)

    def use_buffer(
        self, peer: str, memory: LocalMemory, offered: ArenaOffered, on_used: Callable[[bool], None]
    ) -> None:
        """Use this buffer of this process, made for the peer and offered so. Its creator removes it.

        `on_used` takes whether every rank can use it.
        """
        self._offers.pop(peer, None)
        self._submit(peer, lambda: self._replace(peer, memory, offered), on_used)

    def unmap_arena(self, peer: str) -> None:
        """Stop using the arena of a peer that is gone. Its thread ends, unless it is back by then."""
        self._offers.pop(peer, None)
        self._submit(peer, lambda: self._release(peer), lambda _: self._end_thread(peer, num_submitted))
        num_submitted = self._num_submitted[peer]

    def start_load(self, command: LoadBlocks, on_done: Callable[[BlocksLoaded], None]) -> None:
        """Copy in, all in one transfer, and verify."""
        self._submit(command.source, lambda: self._load(command), on_done)

    def start_offload(self, command: OffloadBlocks, on_done: Callable[[BlocksOffloaded], None]) -> None:
        """Copy out."""
        self._submit(command.target, lambda: self._offload(command), on_done)

    def start_relay(self, command: RelayBlocks, peer: str, on_done: Callable[[BlocksRelayed], None]) -> None:
        """Copy from arena to arena, on the thread of this one of the two peers."""
        self._submit(peer, lambda: self._relay(command, peer), on_done)

    def close(self) -> None:
        """Close the connections to other processes, once the threads have ended."""
        for peer in list(self._transfers):
            self._release(peer)

    def _submit(self, peer: str, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
        def working_on_device() -> T:
            with working(self._storage.device):
                return work()

        self._num_submitted[peer] = self._num_submitted.get(peer, 0) + 1
        self._threads.submit(_thread_of(peer), working_on_device, on_done)

    def _end_thread(self, peer: str, num_submitted: int) -> None:
        if self._num_submitted.get(peer) == num_submitted:
            del self._num_submitted[peer]
            self._threads.end(_thread_of(peer))

    # --- on the threads

    def _load(self, command: LoadBlocks) -> BlocksLoaded:
        transfer = self._transfer(command.source)
        requests = [FetchRequest(part.copy, part.block_ids) for part in command.loads]
        held: list[bool] | None = None
        began_s = time.monotonic()
        if transfer is not None:
            try:
                with copying(self._storage.device):
                    held = transfer.fetch(requests)
            except PeerError as error:
                self._fail(command.source, error)
        duration_s = time.monotonic() - began_s
        if held is None:
            every = frozenset(part.request_id for part in command.loads)
            return BlocksLoaded(command.source, command.loads, every, duration_s, is_reached=False)
        refused = [part.request_id for part, is_held in zip(command.loads, held, strict=True) if not is_held]
        for request_id in refused:
            logger.warning("request %s: its copy at %s does not verify", request_id, command.source)
        return BlocksLoaded(command.source, command.loads, frozenset(refused), duration_s)

    def _offload(self, command: OffloadBlocks) -> BlocksOffloaded:
        transfer = self._transfer(command.target)
        if transfer is None:
            return BlocksOffloaded(command, None)
        request = OffloadRequest(command.block_ids, command.target_block_ids, command.generation, command.num_before)
        try:
            with copying(self._storage.device):
                return BlocksOffloaded(command, transfer.offload([request])[0])
        except PeerError as error:
            self._fail(command.target, error)
            return BlocksOffloaded(command, None)

    def _relay(self, command: RelayBlocks, peer: str) -> BlocksRelayed:
        source, target = self._transfer(command.source), self._transfer(command.target)
        ids, generation = command.target_block_ids, command.generation
        runs, is_reached = None, source is not None and target is not None
        try:
            with copying(self._storage.device):
                if isinstance(source, RankedTransfer) and isinstance(target, RankedTransfer):
                    runs = source.relay_to(target, command.copy, ids, generation)
                elif isinstance(source, LocalTransfer) and isinstance(target, LocalTransfer):
                    runs = relay(source, command.copy, target, ids, generation)
        except PeerError as error:
            self._fail(peer, error)
            is_reached = False
        return BlocksRelayed(command, runs, is_reached)

    def _transfer(self, peer: str) -> KVTransfer | None:
        known, entry = self._transfers.get(peer), self._offers.get(peer)
        if known is not None or entry is None:
            return known
        offered, stamps = entry
        # Pools offer no choice: memory of this host is mapped, that of another is read by tcp.
        transport = self._transport if stamps else AUTO
        try:
            opened = self._opened(peer, PartsOffer(offered, self._identity, stamps, transport))
        except (PeerError, TransportUnavailable) as error:
            logger.error("the blocks of %s cannot be reached: %s", peer, error)
            return None
        self._transfers[peer] = opened
        return opened

    def _opened(self, peer: str, offer: PartsOffer) -> KVTransfer:
        transfer = open_transfer(
            offer.offered, self._storage, identity=offer.identity, stamps=offer.stamps, transport=offer.transport
        )
        if self._ranks is None:
            return transfer
        opened = RankedTransfer(transfer, self._ranks, peer)
        try:
            self._ranks.open(peer, offer)
        except (PeerError, TransportUnavailable):
            opened.close()
            raise
        return opened

    def _open(self, peer: str) -> None:
        self._release(peer)
        self._transfer(peer)

    def _fail(self, peer: str, error: PeerError) -> None:
        logger.warning("the transfer with %s broke: %s", peer, error)
        self._release(peer)

    def _release(self, peer: str) -> None:
        transfer = self._transfers.pop(peer, None)
        # A relay on another thread may still use a mapping: it is unmapped when its last user drops it.
        if transfer is not None and not isinstance(transfer, ShmTransfer):
            transfer.close()

    def _replace(self, peer: str, memory: LocalMemory, offered: ArenaOffered) -> bool:
        self._release(peer)
        if self._ranks is not None:
            try:
                self._transfers[peer] = self._opened(peer, PartsOffer(offered, self._identity, True, SHM))
            except (PeerError, TransportUnavailable) as error:
                self._ranks.close(peer)
                logger.warning("no candidate buffer for %s: %s", peer, error)
                return False
            return True
        if isinstance(memory, DeviceBuffer):
            self._transfers[peer] = OwnBufferTransfer(self._storage, memory)
            return True
        lanes, num_threads = self._storage.lanes, threads_per_copy()
        self._transfers[peer] = ShmTransfer(self._storage, memory, stamps=True, num_threads=num_threads, lanes=lanes)
        return True


def _thread_of(peer: str) -> str:
    return f"copy {peer}"


def _ignore(nothing: None) -> None:
    """Ignore a work item without a result; its exceptions are raised before."""
